"""SHA-256 of large files: one thread a file, resumable between runs.

``hashlib`` releases the interpreter lock for large buffers, so threads use all cores. A file whose digest is
known from an earlier run is not read again while device, inode, size and both times are what they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BUFFER = 4 << 20
#: seconds between two writes of the journal, and between two progress lines
_PERIOD = 1.0


class Journal:
    """Digests of earlier runs, in one small JSON file outside the checkpoint; useless entries are ignored."""

    def __init__(self, path: Path | None):
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        if path is not None:
            try:
                known = json.loads(path.read_text())
                if isinstance(known, dict):
                    self._known = {k: v for k, v in known.items() if isinstance(v, str) and len(v) == 64}
            except (OSError, ValueError):
                pass

    def get(self, path: str) -> str | None:
        """The digest of the file at ``path`` as it is now, if an earlier run computed it."""
        return self._known.get(self._key(path))

    def put(self, key: str, digest: str) -> None:
        """Remember a digest, at once on disk: a killed run loses only the files it was reading."""
        with self._lock:
            self._known[key] = digest
            if self._path is None:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
                temporary.write_text(json.dumps(self._known))
                temporary.replace(self._path)
            except OSError:
                self._path = None  # resuming is a convenience; a full disk must not fail the check

    @staticmethod
    def _key(path: str) -> str:
        status = Path(path).stat()
        return ":".join(
            str(part) for part in (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        )


def digests(
    paths: dict[str, str],
    journal: Journal,
    progress: Callable[[int, int], None] = lambda done, total: None,
    workers: int | None = None,
) -> dict[str, str]:
    """SHA-256 of every file, name -> digest. ``progress(done, total)`` gets bytes. Raises ``OSError``."""
    total = sum(Path(path).stat().st_size for path in paths.values())
    result: dict[str, str] = {}
    left: dict[str, str] = {}
    done = [0]
    for name, path in paths.items():
        known = journal.get(path)
        if known is None:
            left[name] = path
        else:
            result[name] = known
            done[0] += Path(path).stat().st_size
    stop = threading.Event()

    def one(path: str) -> str:
        key = Journal._key(path)
        digest = _sha256(path, done, stop)
        if Journal._key(path) != key:
            raise OSError(0, "the file changed while it was read", path)
        journal.put(key, digest)
        return digest

    # The largest first: the last file to finish decides how long it takes.
    order = sorted(left, key=lambda name: -Path(left[name]).stat().st_size)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        futures = {name: pool.submit(one, left[name]) for name in order}
        try:
            while not all(future.done() for future in futures.values()):
                progress(done[0], total)
                _first_error(futures.values())
                time.sleep(0.05 if total < 1 << 30 else _PERIOD / 5)
            for name, future in futures.items():
                result[name] = future.result()
        except BaseException:
            stop.set()
            for future in futures.values():
                future.cancel()
            raise
    progress(total, total)
    return result


def _first_error(futures: Iterable) -> None:
    for future in futures:
        if future.done() and (error := future.exception()) is not None:
            raise error


def _sha256(path: str, done: list[int], stop: threading.Event) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_BUFFER)
    view = memoryview(buffer)
    with Path(path).open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            if stop.is_set():
                break
            digest.update(view[:count])
            done[0] += count
    return digest.hexdigest()


def progress() -> Callable[[int, int], None]:
    """A progress line on a terminal, a line every ten seconds elsewhere."""
    terminal, last = sys.stderr.isatty(), [time.monotonic(), -1]

    def show_progress(done: int, total: int) -> None:
        now, percent = time.monotonic(), 100 * done // total if total else 100
        if terminal:
            end = "\n" if done == total else ""
            print(f"\r{percent:3d}% of {total / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)
        elif now - last[0] > 10 and percent != last[1]:
            last[:] = [now, percent]
            print(f"{percent:3d}% of {total / 1e9:.2f} GB", file=sys.stderr, flush=True)

    return show_progress
