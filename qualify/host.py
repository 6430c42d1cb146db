"""``make qualify``: the GPU tier inside a locked-down container on a host with Docker and the NVIDIA toolkit.

    python3 -m qualify.host --artifact A --model-dir DIR --target h200|sm120 [--tp N] [--ep N] [--out OUT] [--full]

Runs from a checkout, on the host. Declarations and settings are variables, as for serving, and are handed on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from images.build import DOCKER_RUN_FAILED, LABELS, LOCKED_DOWN, REPOSITORY
from images.docker import Docker, candidates, last_line
from images.stage import artifacts
from launch import recipe
from qualify.checkpoint.files import CONFIG
from qualify.errors import CannotRun, Parser, Rejected, exit_code
from qualify.suite import targets

ROOT = Path(__file__).resolve().parents[1]
#: How a container gets the GPUs: the toolkit's hook, or its Container Device Interface.
GPUS = (["--gpus=all"], ["--device=nvidia.com/gpu=all"])
#: NCCL's buffers of the ranks
SHARED_MEMORY = "--shm-size=16g"
MODEL, OUT, KEY = "/models", "/out", "/run/secrets/api-key"
#: Where compiled kernels stay between sittings.
CACHE_VOLUME = "horizon-cache"
#: variables of the launcher beside those of the recipe's flags
OTHERS = ("UNCATALOGUED", "REVISION", "DRAIN_SECONDS", "START_SECONDS")


def main() -> int:
    """The exit code of the suite: 0 every stage passed, 1 not so or wrong input, 2 cannot run."""
    parser = Parser(prog="python3 -m qualify.host", description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--out", default="")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    model, out = check(args.artifact, args.model_dir, args.target, args.out)
    suite = [
        "python3", "-m", "qualify", "run", "--tier", "gpu", "--artifact", args.artifact, "--target", args.target,
        "--tp", str(args.tp), "--ep", str(args.ep), *(["--full"] if args.full else []),
    ]  # fmt: skip
    docker = client(suite, model, out)
    image = f"{REPOSITORY}/{args.artifact}:candidate"
    built = docker.run("image", "inspect", "--format", "{{.Id}}", image, capture_output=True, text=True, check=False)
    if built.returncode:
        raise CannotRun(f"there is no image {image} here: sudo make image ARTIFACT={args.artifact}")
    # By its ID: a new :candidate must not slip in between.
    image = built.stdout.strip()
    revision = docker.output("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABELS}.revision"}}}}', image)
    devices = gpus(docker, image)
    prepare(out)
    name = f"horizon-qualify-{os.getpid()}"
    try:
        done = docker.run(
            "run", *container(devices, model, out), *environment(args.artifact, os.environ), f"--name={name}",
            f"--env=HORIZON_SOURCE={revision}", image, *suite, "--model-dir", MODEL, "--out", OUT, check=False,
        )  # fmt: skip
    finally:  # a killed client leaves its container running
        docker.run("rm", "--force", name, capture_output=True, check=False)
    if done.returncode == DOCKER_RUN_FAILED:
        raise CannotRun("the container did not start (above)")
    if (out / "run.json").is_file():
        seen = out / "image-inspect.json"
        seen.write_text(docker.output("image", "inspect", image) + "\n")
        print(f"next: python3 -m qualify seal --run {out} --image-inspect {seen} --out RECEIPT")
    return done.returncode


def check(artifact: str, model_dir: str, target: str, out: str) -> tuple[Path, Path]:
    """The checkpoint's and the run's folder. Raises Rejected for what is wrong, before anything starts."""
    if artifact not in artifacts():
        raise Rejected(f"ARTIFACT={artifact}: unknown or without an image; there are {', '.join(artifacts())}")
    arch = targets.get(target).arch
    if arch not in recipe.load(artifact).targets:
        raise Rejected(f"TARGET={target}: {artifact} does not list {arch}")
    if not model_dir:
        raise Rejected("MODEL_DIR is not set: say which checkpoint to qualify (the folder with config.json)")
    model = Path(model_dir).absolute()
    if not (model / CONFIG).is_file():
        raise Rejected(f"MODEL_DIR={model_dir}: there is no {CONFIG}")
    folder = Path(out).absolute() if out else ROOT / "build" / "qualify" / f"{artifact}-{target}"
    for path in (model, folder):
        if ":" in str(path):
            raise Rejected(f"{path}: Docker cannot mount a path with a colon")
    real = Path(os.path.realpath(folder))
    if Path(os.path.realpath(model)) in (real, *real.parents):
        raise Rejected(f"OUT={out}: lies inside the checkpoint, which is never written to")
    return model, folder


def client(suite: list[str], model: Path, out: Path) -> Docker:
    """A client that reaches an engine. Raises CannotRun that says how to go on without one."""
    for path in candidates():
        docker = Docker(path, [])
        try:
            done = docker.run("version", "--format", "{{.Server.Version}}", capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return docker
    raise CannotRun(
        "no container engine answers here; without one, the same suite runs inside a running container or an unpacked "
        f"root of the image: {' '.join(suite)} --model-dir {model} --out {out}"
    )


def gpus(docker: Docker, image: str) -> list[str]:
    """The options with which a container of the image sees a GPU. Raises CannotRun with each way's reason."""
    reasons = []
    for options in GPUS:
        done = docker.run(
            "run", *LOCKED_DOWN, "--no-healthcheck", *options, image,
            "python3", "-c", "from launch import machine; machine.query()", capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return list(options)
        reasons.append(f"{options[0]}: {last_line(done.stderr)}")
    raise CannotRun(f"no container gets a GPU here, is the NVIDIA container toolkit installed? {'; '.join(reasons)}")


def container(devices: list[str], model: Path, out: Path) -> list[str]:
    """Options of the container that the suite runs in: locked down as in production, the checkpoint read-only."""
    locks = [option for option in LOCKED_DOWN if not option.startswith("--tmpfs=/var/cache/horizon")]
    return [
        *locks, *devices, SHARED_MEMORY, "--no-healthcheck", f"--volume={model}:{MODEL}:ro", f"--volume={out}:{OUT}",
        f"--volume={CACHE_VOLUME}:/var/cache/horizon",
    ]  # fmt: skip


def environment(artifact: str, variables: Mapping[str, str]) -> list[str]:
    """Options that hand on what the operator has declared and set; the API key as a file."""
    settings = recipe.load(artifact)
    names = {setting.variable for setting in settings.settings if setting.variable}
    for declaration in settings.declarations:
        names |= {declaration.variable, f"{declaration.variable}_SAID_BY"}
    # Places are the container's own; TP and EP are arguments; a refused variable must reach who refuses it.
    names = (names | set(OTHERS) | {"SERVED_MODEL_NAME"} | set(settings.refused)) - {"TP", "EP"}
    options = [f"--env={name}={variables[name]}" for name in sorted(names) if variables.get(name, "").strip()]
    if key := variables.get("API_KEY_FILE", "").strip():
        options += [f"--volume={Path(key).absolute()}:{KEY}:ro", f"--env=API_KEY_FILE={KEY}"]
    return options


def prepare(out: Path) -> None:
    """Make the run directory writable for the image's user (uid 10001, gid 0). Raises CannotRun."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            os.chown(out, -1, 0)
            out.chmod(0o770)
        elif out.stat().st_uid == os.getuid():
            out.chmod(0o777)
    except OSError as error:
        raise CannotRun(f"OUT={out}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(exit_code(main))
