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
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))


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


def sources(folder: Path, *patterns: str) -> list[Path]:
    """Regular files below ``folder`` that match, caches and editor leavings aside."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts and not p.name.startswith("."))


def digest_of(folder: Path) -> str:
    """SHA-256 over path, mode and content of every file below ``folder``."""
    listing = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        listing.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o777:o}\0{content}\n".encode())
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


def place(source: Path, target: Path, epoch: int) -> None:
    """Copy a small file with a normal mode and the epoch as its time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
    os.utime(target, (epoch, epoch))


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
        place(ROOT / "images/Dockerfile", new / "Dockerfile", epoch)
        place(ROOT / "images/install.py", new / "build/install.py", epoch)
        for wheel in locked:
            if wheel.name in image["build_tools"]:
                os.link(cache / "wheels" / wheel.filename, new / "build" / wheel.filename)
        installed = [wheel for wheel in locked if wheel.name not in image["build_tools"]]
        for layer, wheels in assign(installed, image["layers"]).items():
            folder = new / "wheels" / layer
            folder.mkdir(parents=True)
            for wheel in wheels:
                os.link(cache / "wheels" / wheel.filename, folder / wheel.filename)
            (folder / "requirements.txt").write_text("".join(f"{wheel.name}=={wheel.version}\n" for wheel in wheels))
            excluded = [rule["path"] for rule in image.get("exclude", []) if rule["layer"] == layer]
            (folder / "exclude.json").write_text(json.dumps(excluded))
        (new / "base").mkdir()
        if "rootfs" in base:
            os.link(base["rootfs"] / "rootfs.tar", new / "base/rootfs.tar")
        for path in sources(ROOT / "patches", "*.py", "sglang/**/*"):
            place(path, new / "patches" / path.relative_to(ROOT / "patches"), epoch)
        for path in [
            *sources(ROOT / "recipes", f"{artifact}.*", "lib.sh"),
            *sources(ROOT / "qualify", "**/*"),
            ROOT / "images/engine.lock",
            ROOT / "images/base.lock",
        ]:
            place(path, new / "artifact" / path.relative_to(ROOT), epoch)
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
            } | {"Dockerfile": hashlib.sha256((new / "Dockerfile").read_bytes()).hexdigest()},
        }  # fmt: skip
        text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
        identity["source_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        text = json.dumps(identity, indent=1, sort_keys=True) + "\n"
        (new / "artifact/identity.json").write_text(text)
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
