"""The steps of the image build; runs inside it, as root, without network, on the base's own Python.

    install.py wheels LAYER    the staged wheels of one layer into the virtual environment, hash-based .pyc included
    install.py runtime         user, writable folders, CUDA home
    install.py patches         the patch series onto the installed engine
    install.py artifact        recipes, qualification package, identity.json

Each step ends by writing /opt/horizon/manifests/STEP.sha256 (sha256sum format, every regular file it added or
changed) and by setting all new timestamps to SOURCE_DATE_EPOCH, so that equal inputs give equal layers.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

# Mounted over empty folders of the base, so that no mount point is left in a layer.
BUILD, INPUT = Path("/mnt"), Path("/media")
HOME = Path("/opt/horizon")
VENV = HOME / "venv"
SITE = VENV / "lib/python3.11/site-packages"
CUDA_HOME = HOME / "cuda"
CACHE = Path("/var/cache/horizon")
MANIFESTS = HOME / "manifests"
EPOCH = int(os.environ["SOURCE_DATE_EPOCH"])
WORKERS = 2  # fixed: what a worker compiled before can show in a .pyc


def compile_sources(sources: list[str]) -> None:
    import py_compile

    for source in sources:
        # Templates and samples of other Python versions, which nothing imports, do not compile.
        with contextlib.suppress(py_compile.PyCompileError, UnicodeDecodeError):
            py_compile.compile(source, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


def compile_all(sources: list[Path]) -> None:
    """Write hash-based .pyc files, the same bytes every time.

    Each worker gets a fixed share in a fixed order and starts afresh with a fixed seed for string hashes.
    """
    ordered = sorted(map(str, sources))
    os.environ["PYTHONHASHSEED"] = "0"
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_sources, [ordered[n::WORKERS] for n in range(WORKERS)]))


def new_paths(*roots: Path) -> list[Path]:
    """Everything at or below ``roots`` that this step made or changed: what does not carry the epoch yet."""
    found = set()
    for root in roots:
        if not root.exists():
            continue
        found.add(root)
        for folder, folders, files in os.walk(root):
            found.update(Path(folder, name) for name in folders + files)
    return sorted(path for path in found if path.lstat().st_mtime_ns != EPOCH * 10**9)


def exclude(patterns: list[str]) -> None:
    """Remove what image.toml excludes, and its lines in RECORD."""
    for pattern in patterns:
        for path in list(SITE.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    for record in SITE.glob("*.dist-info/RECORD"):
        with record.open(newline="") as file:
            rows = list(csv.reader(file))
        kept = [row for row in rows if (SITE / row[0]).exists()]
        if len(kept) != len(rows):
            with record.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(kept)


def unpack_uv(folder: Path) -> Path:
    """The installer out of its own wheel; it is not part of the image."""
    with zipfile.ZipFile(next(BUILD.glob("uv-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        path = Path(wheel.extract(name, folder))
    path.chmod(0o755)
    return path.rename(folder / "uv")


def wheels(layer: str) -> None:
    if not VENV.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], check=True)
    present = set(SITE.rglob("*.py"))
    uv = unpack_uv(Path("/tmp/uv"))
    cache = HOME / ".uv"
    subprocess.run(
        [str(uv), "pip", "install", "--python", str(VENV / "bin/python"), "--offline", "--no-config", "--no-index",
         "--no-deps", "--no-progress", "--quiet", "--link-mode=hardlink", "--cache-dir", str(cache),
         "--find-links", str(INPUT), "--requirement", str(INPUT / "requirements.txt")],
        check=True,
    )  # fmt: skip
    shutil.rmtree(cache)
    (VENV / ".lock").unlink(missing_ok=True)  # uv's, writable for everybody
    shutil.rmtree(uv.parent)
    # uv notes the times of the wheel files: not the same in two builds.
    exclude([*json.loads((INPUT / "exclude.json").read_text()), "*.dist-info/uv_cache.json"])
    compile_all([path for path in SITE.rglob("*.py") if path not in present])


def runtime(uid: str, gid: str) -> None:
    """User and group entries, folders that any uid of group 0 can write, and a CUDA home for run-time compilation."""
    with Path("/etc/passwd").open("a") as file:
        file.write(f"horizon:x:{uid}:{gid}:horizon:{CACHE}:/bin/bash\n")
    CACHE.mkdir(parents=True)
    os.chown(CACHE, int(uid), int(gid))
    CACHE.chmod(0o775)
    toolkit = SITE / "nvidia/cu13"
    CUDA_HOME.mkdir()
    for name in ("bin", "include", "nvvm"):
        (CUDA_HOME / name).symlink_to(os.path.relpath(toolkit / name, CUDA_HOME))
    # The wheels carry only versioned libraries; a linker looks for the plain names.
    lib64 = CUDA_HOME / "lib64"
    lib64.mkdir()
    for library in sorted((toolkit / "lib").iterdir()):
        target = os.path.relpath(library, lib64)
        (lib64 / library.name).symlink_to(target)
        plain = library.name.split(".so")[0] + ".so"
        if ".so." in library.name and ".alt." not in library.name and not (toolkit / "lib" / plain).exists():
            (lib64 / plain).unlink(missing_ok=True)
            (lib64 / plain).symlink_to(target)
    # The driver brings libcuda.so.1 at run time; an empty library of that soname satisfies `-lcuda` before.
    stubs = lib64 / "stubs"
    stubs.mkdir()
    subprocess.run(
        ["gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-Wl,--build-id=none", "-x", "c", "/dev/null",
         "-o", str(stubs / "libcuda.so")],
        check=True,
    )  # fmt: skip
    (lib64 / "libcuda.so").symlink_to("stubs/libcuda.so")


def patches() -> None:
    # The series stays in the image: the qualification asks it whether the tree is still the patched one.
    shutil.copytree(INPUT, HOME / "patches", copy_function=shutil.copy)
    series = HOME / "patches/series.py"
    subprocess.run([sys.executable, "-B", str(series), "apply", "--tree", str(SITE)], check=True)
    compile_all([path for path in new_paths(SITE / "sglang") if path.suffix == ".py"])


def artifact() -> None:
    for source in sorted(INPUT.iterdir()):
        target = HOME / source.name
        shutil.copytree(source, target, copy_function=shutil.copy) if source.is_dir() else shutil.copy(source, target)
    compile_all([path for name in ("launch", "qualify") for path in (HOME / name).rglob("*.py")])


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content; of a link, that of "-> " and its target."""
    if path.is_symlink():
        return hashlib.sha256(f"-> {path.readlink()}".encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(step: str) -> None:
    """Write the step's manifest, add all manifests to identity.json, and set every new timestamp to the epoch."""
    MANIFESTS.mkdir(parents=True, exist_ok=True)
    files = [
        path
        for path in new_paths(HOME)
        if (path.is_file() or path.is_symlink()) and path.parent != MANIFESTS and path != HOME / "identity.json"
    ]
    with ThreadPoolExecutor(WORKERS) as pool:
        lines = [f"{digest}  {path}\n" for path, digest in zip(files, pool.map(sha256_of, files), strict=True)]
    (MANIFESTS / f"{step}.sha256").write_text("".join(lines))
    identity = HOME / "identity.json"
    if identity.exists():
        facts = json.loads(identity.read_text())
        facts["manifests"] = {
            manifest.stem: hashlib.sha256(manifest.read_bytes()).hexdigest() for manifest in sorted(MANIFESTS.iterdir())
        }
        identity.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    # Outside our own folders a step touches only these; older ones are the base's.
    system = [Path(name) for name in ("/", "/etc", "/etc/passwd", "/opt", "/root", "/run", "/tmp", "/var/cache")]
    for path in [*new_paths(HOME, CACHE), *(path for path in system if path.stat().st_mtime > EPOCH)]:
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)


def main() -> None:
    os.umask(0o022)
    step, *arguments = sys.argv[1:]
    try:
        {"wheels": wheels, "runtime": runtime, "patches": patches, "artifact": artifact}[step](*arguments)
        seal(arguments[0] if step == "wheels" else step)
    except subprocess.CalledProcessError as error:  # the tool has said why
        sys.exit(f"step {step} ended with {error.returncode}: {error.cmd[0]}")


if __name__ == "__main__":
    main()
