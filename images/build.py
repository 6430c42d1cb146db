#!/usr/bin/env python3
"""Build, check and tag the image of one artifact.

    build.py ARTIFACT --cache DIR

Base, wheels and staged context first (all hash-checked), then `docker build` without network, then the CPU tier of
the qualification inside a locked-down container (of layers that passed it with another artifact, the last layer's
share); only an image that passed gets the tag :candidate.
BASE_IMAGE=name@sha256:... replaces the Debian base; STRICT=1 refuses a base that differs from base.lock.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from images import base, wheels
from images.cache import exclusive
from images.docker import Docker, find, last_line
from images.stage import artifacts, digest_of, stage
from qualify.errors import CannotRun, Parser, Rejected, exit_code

REPOSITORY = "horizon-images"
LABELS = "org.opencontainers.image"
OWN_LABELS = "io.horizon-images"

#: How a container of the image runs while it is checked: the same locks as in production, no network at all.
LOCKED_DOWN = [
    "--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges",
    "--tmpfs=/tmp:exec,mode=1777", "--tmpfs=/var/cache/horizon:exec,mode=777",
]  # fmt: skip

DOCKER_RUN_FAILED = 125  # `docker run` itself, as opposed to the command in the container


def labels(identity: dict) -> dict[str, str]:
    """OCI and own labels, all of them functions of the staged inputs."""
    engine, ground = identity["engine"], identity["base"]
    created = datetime.fromtimestamp(identity["source_date_epoch"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        f"{LABELS}.title": f"{REPOSITORY}/{identity['artifact']}",
        f"{LABELS}.description": f"SGLang {engine['version']}, patched to serve {identity['artifact']} checkpoints",
        f"{LABELS}.version": f"{engine['version']}-{identity['source_sha256'][:12]}",
        f"{LABELS}.revision": identity["source_sha256"],
        f"{LABELS}.created": created,
        f"{LABELS}.licenses": "Apache-2.0",
        f"{LABELS}.base.name": ground.get("image", "debian bookworm by mmdebstrap").split("@")[0],
        f"{LABELS}.base.digest": ground["image"].split("@")[1]
        if "image" in ground
        else f"sha256:{ground['rootfs_sha256']}",
        f"{OWN_LABELS}.artifact": identity["artifact"],
        f"{OWN_LABELS}.engine.wheel": f"sha256:{engine['wheel_sha256']}",
        f"{OWN_LABELS}.series": f"sha256:{identity['series_sha256']}",
        f"{OWN_LABELS}.base.drift": "; ".join(ground.get("drift", [])) or "none",
    }


def base_image() -> str | None:
    reference = os.environ.get("BASE_IMAGE")
    if reference and not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", reference):
        raise Rejected(f"BASE_IMAGE={reference}: give it by digest, name@sha256:<64 hex digits>")
    return reference


def strict() -> bool:
    """Whether STRICT=1 was given. Raises Rejected for a value that is neither yes nor no."""
    value = os.environ.get("STRICT", "")
    if value not in ("", "0", "1"):
        raise Rejected(f"STRICT={value}: give 1 to refuse a base that differs from images/base.lock, or leave it out")
    return value == "1"


def docker_build(docker: Docker, context: Path, identity: dict, *options: str) -> str:
    """Build the staged context and return the image ID. Raises CannotRun with the build's own last error."""
    with tempfile.TemporaryDirectory() as scratch:
        iidfile = Path(scratch, "iid")
        arguments = [*docker.build, "--network=none", "--progress=plain", f"--iidfile={iidfile}", *options]
        arguments += [f"--build-arg=SOURCE_DATE_EPOCH={identity['source_date_epoch']}"]
        arguments += [f"--label={key}={value}" for key, value in labels(identity).items()]
        if "image" in identity["base"]:
            arguments += [f"--build-arg=BASE={identity['base']['image']}"]
        process = subprocess.Popen(
            [docker.path, *arguments, str(context)], env={**os.environ, **docker.environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        tail: list[str] = []
        try:
            for line in process.stdout:
                sys.stderr.write(line)
                tail = [*tail[-40:], line]
            code = process.wait()
        finally:
            process.terminate()
        if code:
            raise CannotRun(build_error("".join(tail)))
        return iidfile.read_text().strip()


def build_error(text: str) -> str:
    """One sentence from the last lines of a failed build."""
    if "no space left on device" in text.lower():
        return "disk full while building: free about 25 GB where Docker keeps its data, then run again"
    told = re.findall(r"(?:rejected|cannot run): (.*)", text)
    return f"docker build failed: {told[-1] if told else last_line(text)}"


def shared_layers(docker: Docker, image: str, checks: Path) -> str:
    """SHA-256 of what another artifact's image has in common with this one: all layers but the last, and ``checks``."""
    layers = docker.inspect(image)["RootFS"]["Layers"][:-1]
    return hashlib.sha256("\n".join([digest_of(checks), *layers]).encode()).hexdigest()


def check(docker: Docker, image: str, source: str, tier: str) -> None:
    """A tier of the qualification that needs no GPU, inside a locked-down container.

    ``source`` is the identity's source_sha256 of what was staged: the container must hold just that.
    Raises Rejected where it does not pass, CannotRun where the container does not start.
    """
    name = f"horizon-check-{os.getpid()}"
    try:
        done = docker.run(
            "run", *LOCKED_DOWN, f"--name={name}", "--no-healthcheck", f"--env=HORIZON_SOURCE={source}", image,
            "python3", "-m", "qualify", "run", "--tier", tier, check=False,
        )  # fmt: skip
    finally:  # a killed client leaves its container running
        docker.run("rm", "--force", name, capture_output=True, check=False)
    if done.returncode == DOCKER_RUN_FAILED:
        raise CannotRun("the container for the check did not start (above); nothing was tagged")
    if done.returncode:
        raise Rejected(
            f"the image failed its check in the container (above, exit {done.returncode}); nothing was tagged"
        )


def prepare(artifact: str, cache: Path) -> tuple[Path, dict]:
    """Fetch and verify everything, and stage the build context."""
    wheels.fetch(wheels.read_lock(), cache / "wheels")
    if image := base_image():
        return stage(artifact, cache, {"image": image})
    return stage(artifact, cache, {"rootfs": base.build(cache, strict())})


def build(artifact: str, cache: Path) -> None:
    began = time.monotonic()
    if artifact not in artifacts():
        raise Rejected(f"ARTIFACT={artifact}: unknown; there are {', '.join(artifacts())} (recipes/*.toml)")
    base_image(), strict()  # a wrong value is refused before gigabytes are fetched
    docker = find()
    with exclusive(cache):
        context, identity = prepare(artifact, cache)
        if time.time() < identity["source_date_epoch"]:
            raise CannotRun("this machine's clock is before the image's SOURCE_DATE_EPOCH: set it, then run again")
        image = docker_build(docker, context, identity)
    print(f"built {image} after {time.monotonic() - began:.0f} s; checking it in a container", file=sys.stderr)
    # What passed below another artifact, by the same checks, is not hashed and compiled again.
    passed = cache / "checked" / shared_layers(docker, image, context / "artifact/qualify")
    other = passed.read_text() if passed.exists() else image
    if other != image:
        print(f"all layers but the last have passed the CPU tier, in {other}", file=sys.stderr)
    check(docker, image, identity["source_sha256"], "cpu" if other == image else "artifact")
    if other == image:
        passed.parent.mkdir(exist_ok=True)
        passed.with_suffix(".new").write_text(image)
        passed.with_suffix(".new").rename(passed)
    tag = f"{REPOSITORY}/{artifact}:candidate"
    docker.output("tag", image, tag)
    size = docker.inspect(image)["Size"]
    print(f"{tag} is {image}, {size / 1e9:.2f} GB, after {time.monotonic() - began:.0f} s")


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--cache", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the client under us ends too
    build(args.artifact, args.cache.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
