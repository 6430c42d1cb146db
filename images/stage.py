"""The build context: a tree of exactly the files that make the image, and the identity that follows from it.

Nothing here asks git: labels, identity and image follow from the staged bytes alone, so a commit that touches only
documentation, tests, benchmarks or evidence gives the same image.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from images.wheels import Wheel, read_lock
from qualify.errors import CannotRun, Rejected

ROOT = Path(__file__).resolve().parent.parent


def artifacts() -> list[str]:
    """Artifacts whose image is built and checked: those of recipes/*.toml that say `image = true`."""
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    return [path.stem for path in recipes if tomllib.loads(path.read_text()).get("image") is True]


def assign(wheels: list[Wheel], layers: list[dict]) -> dict[str, list[Wheel]]:
    """Layer name -> its wheels. A wheel belongs to the first layer with a pattern for its name."""
    placed: dict[str, list[Wheel]] = {layer["name"]: [] for layer in layers}
    for wheel in wheels:
        for layer in layers:
            if any(fnmatch.fnmatch(wheel.name, p) for p in layer["wheels"]) and wheel.name not in layer.get("but", []):
                placed[layer["name"]].append(wheel)
                break
        else:
            raise Rejected(f"images/image.toml: no layer takes the wheel {wheel.filename}")
    return placed


def exclusions(rules: list[dict], layers: list[str]) -> dict[str, list[str]]:
    """Layer name -> the paths that are removed in it."""
    excluded: dict[str, list[str]] = {layer: [] for layer in layers}
    for rule in rules:
        if rule["layer"] not in excluded:
            raise Rejected(f"images/image.toml: {rule['path']} is excluded from an unknown layer, {rule['layer']}")
        excluded[rule["layer"]].append(rule["path"])
    return excluded


def sources(folder: Path, *patterns: str) -> list[Path]:
    """Regular files below ``folder`` that match, without caches and what editors and merges leave behind."""
    found = {path.relative_to(folder) for pattern in patterns for path in folder.glob(pattern)}
    return [
        folder / path
        for path in sorted(found)
        if (folder / path).is_file()
        and not any(part == "__pycache__" or part.startswith(".") for part in path.parts)
        and not path.name.endswith(("~", ".orig", ".rej", ".swp", ".pyc"))
    ]


def digest_of(folder: Path, without: str | None = None) -> str:
    """SHA-256 over path, content and executable bit of every file below ``folder``, but those of one suffix."""
    listing = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != without):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        listing.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o100:o}\0{content}\n".encode())
    return listing.hexdigest()


def series(*arguments: str) -> str:
    """The stdout of patches/series.py. Raises Rejected with its own words where it refuses."""
    done = subprocess.run(
        [sys.executable, "-B", str(ROOT / "patches/series.py"), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip()
        raise Rejected(f"patch series: {reason.removeprefix('rejected: ')}")
    return done.stdout.strip()


def place(source: Path, target: Path) -> None:
    """Copy a small file; its mode comes along, its time does not (see :func:`settle`)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def settle(folder: Path) -> None:
    """Give the tree modes that do not depend on the umask: the image keeps them.

    Times stay as they are. BuildKit reads a context file again only when its size or time has changed, so one fixed
    time would let an edit of equal length go unseen; install.py sets the times inside the image.
    """
    for path in [folder, *folder.rglob("*")]:
        status = path.stat()
        mode = 0o755 if path.is_dir() or status.st_mode & 0o100 else 0o644
        if status.st_mode & 0o7777 != mode:
            path.chmod(mode)


def stage(artifact: str, cache: Path, base: dict) -> tuple[Path, dict]:
    """Write the build context of one artifact below ``cache`` and return it with its identity.

    ``base`` says what the image stands on: {"rootfs": folder of images/base.py} or {"image": "name@sha256:..."}.
    Raises Rejected where a source is unsound, CannotRun where the disk fails.
    """
    image = tomllib.loads((ROOT / "images/image.toml").read_text())
    epoch = image["source_date_epoch"]
    locked = read_lock()
    home = cache / "stage"
    home.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=home, prefix="new."))
    try:
        place(ROOT / "images/Dockerfile", new / "Dockerfile")
        place(ROOT / "images/install.py", new / "build/install.py")
        for wheel in locked:
            if wheel.name in image["build_tools"]:
                os.link(cache / "wheels" / wheel.filename, new / "build" / wheel.filename)
        installed = [wheel for wheel in locked if wheel.name not in image["build_tools"]]
        layers = assign(installed, image["layers"])
        excluded = exclusions(image.get("exclude", []), list(layers))
        for layer, wheels in layers.items():
            folder = new / "wheels" / layer
            folder.mkdir(parents=True)
            for wheel in wheels:
                os.link(cache / "wheels" / wheel.filename, folder / wheel.filename)
            (folder / "requirements.txt").write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels))
            (folder / "exclude.json").write_text(json.dumps(excluded[layer]))
        (new / "base").mkdir()
        if "rootfs" in base:
            os.link(base["rootfs"] / "rootfs.tar", new / "base/rootfs.tar")
        for path in sources(ROOT / "patches", "*.py", "sglang/**/*"):
            place(path, new / "patches" / path.relative_to(ROOT / "patches"))
        for path in [
            *sources(ROOT / "recipes", f"{artifact}.*", "lib.sh"),
            *sources(ROOT / "qualify", "**/*"),
            *sources(ROOT / "launch", "**/*"),
            ROOT / "images/engine.lock",
            ROOT / "images/base.lock",
        ]:
            place(path, new / "artifact" / path.relative_to(ROOT))
        engine = next(wheel for wheel in locked if wheel.name == "sglang")
        # Here and not in the build: a hook that does not apply is refused in a second, in the tool's own words.
        series("check", "--wheel", str(cache / "wheels" / engine.filename))
        identity = {
            "artifact": artifact,
            "engine": {"name": "sglang", "version": engine.version, "wheel_sha256": engine.sha256},
            "base": base_identity(base),
            "series_sha256": series("digest"),
            "source_date_epoch": epoch,
            "wheels": {wheel.filename: wheel.sha256 for wheel in installed},
            "excluded": [rule["path"] for rule in image.get("exclude", [])],
            "inputs_sha256": {
                name: digest_of(new / name) for name in ("build", "patches", "artifact")
            } | {
                "Dockerfile": hashlib.sha256((new / "Dockerfile").read_bytes()).hexdigest(),
                # Which wheel is in which layer and what is excluded there; the wheels' own digests are above.
                "layers": digest_of(new / "wheels", without=".whl"),
            },
        }  # fmt: skip
        text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
        identity["source_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
        (new / "artifact/identity.json").write_text(text)
        settle(new)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise CannotRun(f"staging the build context failed: {error}") from None
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    target = home / artifact
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
    return target, identity


def base_identity(base: dict) -> dict:
    if "image" in base:
        return {"image": base["image"]}
    folder = base["rootfs"]
    return {
        "rootfs_sha256": (folder / "rootfs.sha256").read_text().strip(),
        "lock_sha256": hashlib.sha256((ROOT / "images/base.lock").read_bytes()).hexdigest(),
        "drift": (folder / "drift.txt").read_text().splitlines(),
    }
