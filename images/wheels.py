#!/usr/bin/env python3
"""The engine's wheels: resolve them to a lock, fetch them into a cache, hash-check them.

    wheels.py fetch --cache DIR [--only NAME]    every wheel of engine.lock below DIR/wheels, verified
    wheels.py lock                  resolve engine.in again and rewrite engine.lock (needs uv and packaging)

engine.lock is a PEP 751 lock file with exactly one wheel per package. Downloads are curl's: they resume, retry,
and read no configuration of this machine (neither pip's nor ~/.curlrc).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from images.cache import exclusive
from qualify.errors import CannotRun, Parser, Rejected, exit_code

HERE = Path(__file__).resolve().parent
LOCK = HERE / "engine.lock"
PARALLEL_DOWNLOADS = 4
CURL = ["curl", "-q", "--fail", "--location", "--silent", "--show-error", "--retry", "5", "--retry-connrefused"]
# curl itself waits for ever on a connection that has gone silent.
CURL += ["--connect-timeout", "20", "--speed-time", "60", "--speed-limit", "1000"]
CURLE_RANGE_ERROR = 33  # the server (a plain mirror, a proxy) cannot resume


@dataclass(frozen=True)
class Wheel:
    """One locked wheel: normalised project name, file name, URL, size in bytes, SHA-256 in hex."""

    name: str
    version: str
    filename: str
    url: str
    size: int
    sha256: str


def read_lock(path: Path = LOCK) -> list[Wheel]:
    """Read a PEP 751 lock file that names exactly one wheel for each package.

    Raises Rejected where a package has no wheel, more than one, or no SHA-256.
    """
    wheels = []
    for package in tomllib.loads(path.read_text())["packages"]:
        candidates = package.get("wheels", [])
        if len(candidates) != 1 or "sha256" not in candidates[0].get("hashes", {}):
            raise Rejected(
                f"{path.name}: {package['name']} must have exactly one wheel with a SHA-256; run `make lock`"
            )
        wheel = candidates[0]
        filename = wheel["url"].rsplit("/", 1)[1]
        wheels.append(
            Wheel(package["name"], package["version"], filename, wheel["url"], wheel["size"], wheel["hashes"]["sha256"])
        )
    return wheels


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Progress:
    """Bytes done of all bytes, on one line of a terminal or every ten seconds in a log."""

    def __init__(self, label: str, total: int):
        self.label, self.total, self.done = label, total, 0
        self.lock, self.shown = threading.Lock(), 0.0
        self.live = sys.stderr.isatty()

    def show(self, done: int, last: bool = False) -> None:
        with self.lock:
            now = time.monotonic()
            if not last and now - self.shown < (0.2 if self.live else 10):
                return
            self.shown = now
            line = f"{self.label}: {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
            print(f"\r{line}" if self.live else line, end="\n" if last or not self.live else "", file=sys.stderr)
            sys.stderr.flush()


def download(wheel: Wheel, target: Path) -> None:
    """Fetch one wheel to ``target``; an interrupted download is continued, a wrong one is thrown away.

    Raises CannotRun where the network or the disk fails, Rejected where the bytes are not the locked ones.
    """
    part = target.with_name(target.name + ".part")
    if part.exists() and part.stat().st_size > wheel.size:
        part.unlink()
    resumed = part.exists()
    if not resumed or part.stat().st_size < wheel.size:
        command = [*CURL, "--continue-at", "-", "--output", str(part), wheel.url]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode == CURLE_RANGE_ERROR:
            part.unlink()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"curl exit {done.returncode}"]
            raise CannotRun(
                f"download of {wheel.filename} failed: {reason[0]}; check network and disk, then run again (it resumes)"
            )
    if (actual := sha256_of(part)) != wheel.sha256:
        part.unlink()
        if resumed:  # the part may have been at fault: once from the beginning
            return download(wheel, target)
        raise Rejected(
            f"{wheel.filename}: the index serves SHA-256 {actual}, engine.lock says {wheel.sha256}; nothing was kept"
        )
    part.rename(target)
    return None


def fetch(wheels: list[Wheel], directory: Path) -> None:
    """Bring every wheel into ``directory`` and verify each against the lock.

    Raises Rejected naming every cached wheel whose bytes are wrong, CannotRun on a full disk or no network.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotRun(f"{directory} cannot be made: {error.strerror}; set HORIZON_CACHE") from None
    present = [w for w in wheels if (directory / w.filename).exists()]
    progress = Progress("verifying cached wheels", sum(w.size for w in present))

    def verify(wheel: Wheel) -> str | None:
        path = directory / wheel.filename
        actual = sha256_of(path)
        progress.done += wheel.size
        progress.show(progress.done)
        if actual == wheel.sha256:
            return None
        return f"cached {path} has SHA-256 {actual}, engine.lock says {wheel.sha256}"

    with ThreadPoolExecutor(2) as pool:
        bad = [message for message in pool.map(verify, present) if message]
    if bad:
        raise Rejected("; ".join(bad) + "; delete the file and run again")
    if present:
        progress.show(progress.done, last=True)

    missing = [w for w in wheels if not (directory / w.filename).exists()]
    if not missing:
        return
    if not shutil.which("curl"):
        raise CannotRun("curl is missing: install it (Debian, Ubuntu: apt-get install curl)")
    partial = {w: directory / (w.filename + ".part") for w in missing}
    total = sum(w.size for w in missing)

    def received() -> int:
        size = 0
        for wheel, part in partial.items():
            try:
                size += part.stat().st_size
            except FileNotFoundError:  # finished, or not begun
                size += wheel.size if (directory / wheel.filename).exists() else 0
        return size

    needed, free = total - received(), shutil.disk_usage(directory).free
    if needed > free:
        raise CannotRun(
            f"disk full: {len(missing)} wheels need {needed / 1e9:.1f} GB in {directory}, {free / 1e9:.1f} GB are free;"
            " free some or set HORIZON_CACHE"
        )
    progress = Progress(f"downloading {len(missing)} wheels", total)
    # Large wheels first: the last one to end is then a small one.
    missing.sort(key=lambda wheel: -wheel.size)
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        jobs = [pool.submit(download, wheel, directory / wheel.filename) for wheel in missing]
        while not all(job.done() for job in jobs):
            if any(job.done() and job.exception() for job in jobs):
                pool.shutdown(wait=True, cancel_futures=True)
                break
            progress.show(received())
            time.sleep(0.2)
        for job in jobs:
            if not job.cancelled():
                job.result()
    progress.show(received(), last=True)


def lock(path: Path = LOCK) -> None:
    """Resolve engine.in for Python 3.11 on x86-64 Debian 12 (glibc 2.36) and write one wheel per package."""
    try:
        from packaging.tags import compatible_tags, cpython_tags
        from packaging.utils import parse_wheel_filename
    except ImportError:
        raise CannotRun("`wheels.py lock` needs the Python package `packaging`") from None
    if not shutil.which("uv"):
        raise CannotRun("`wheels.py lock` needs uv (pip install uv)")
    glibc = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    platforms = [*glibc, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    ranked = list(cpython_tags((3, 11), platforms=platforms)) + list(compatible_tags((3, 11), "cp311", platforms))
    rank = {tag: position for position, tag in enumerate(ranked)}
    resolved = path.with_name("pylock.resolved.toml")
    try:
        subprocess.run(
            ["uv", "--no-config", "pip", "compile", "--quiet", "--format", "pylock.toml", "--only-binary", ":all:",
             "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36", "--no-header",
             str(HERE / "engine.in"), "--output-file", str(resolved)],
            check=True,
        )  # fmt: skip
        packages = tomllib.loads(resolved.read_text())["packages"]
    except subprocess.CalledProcessError:
        raise CannotRun("uv could not resolve images/engine.in; its message is above") from None
    finally:
        resolved.unlink(missing_ok=True)
    image = tomllib.loads((HERE / "image.toml").read_text())
    left_out = {entry["distribution"] for entry in image["leave_out"]}
    lines = [
        "# Generated by `make lock` from images/engine.in: do not edit. PEP 751, exactly one wheel per package,",
        f"# without the distributions that images/image.toml leaves out: {', '.join(sorted(left_out))}.",
        'lock-version = "1.0"',
        'created-by = "images/wheels.py"',
        'requires-python = "==3.11.*"',
    ]
    for package in packages:
        if package["name"] in left_out:
            continue

        def best(wheel: dict) -> int:
            tags = parse_wheel_filename(wheel["url"].rsplit("/", 1)[1])[3]
            return min((rank[tag] for tag in tags if tag in rank), default=len(rank))

        wheel = min(package["wheels"], key=best)
        if best(wheel) == len(rank):
            raise Rejected(f"{package['name']} {package['version']} has no wheel for CPython 3.11 on Debian 12")
        lines += [
            "",
            "[[packages]]",
            f'name = "{package["name"]}"',
            f'version = "{package["version"]}"',
            f'wheels = [{{ url = "{wheel["url"]}", size = {wheel["size"]}, '
            f'hashes = {{ sha256 = "{wheel["hashes"]["sha256"]}" }} }}]',
        ]
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.rename(path)
    print(f"{path.name}: {len(read_lock(path))} wheels, {sum(w.size for w in read_lock(path)) / 1e9:.2f} GB")


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch")
    fetching.add_argument("--cache", type=Path, required=True)
    fetching.add_argument("--only", metavar="NAME", help="one package instead of all")
    commands.add_parser("lock")
    args = parser.parse_args()
    if args.command == "lock":
        lock()
    else:
        wheels = [w for w in read_lock() if args.only in (None, w.name)]
        if not wheels:
            raise Rejected(f"--only {args.only}: engine.lock has no such package")
        with exclusive(args.cache):
            fetch(wheels, args.cache / "wheels")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
