"""Writes a checkpoint directory at once or not at all: shards, index and the JSON documents beside them.

Standard library only; the payloads come from elsewhere (see :mod:`qualify.synth.values`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected
from qualify.models.k2_horizon import Tensor

#: Names of tensors -> their payloads one after the other, as consecutive buffers; a buffer is written before the
#: next one is asked for.
Payload = Callable[[list[str]], Iterable[Any]]

#: Seconds between two lines of progress.
PROGRESS_SECONDS = 5.0


def write_checkpoint(
    out: Path,
    *,
    documents: Mapping[str, Any],
    inventory: Mapping[str, Tensor],
    shards: Mapping[str, list[str]],
    metadata: Mapping[str, str],
    payload: Payload,
    jobs: int = 1,
) -> None:
    """Write the checkpoint to ``out``, which must not exist or be an empty directory.

    Everything is written to a temporary directory beside ``out`` and renamed at the end, so that ``out`` is
    either absent (or empty) or complete; the caller gives the JSON ``documents`` that belong beside shards and index,
    and what goes into the ``metadata`` of both. ``jobs`` shards are written at a time, each by a thread that calls
    ``payload``: a kernel serialises the writes to one file, and lets go of the interpreter lock meanwhile.
    Raises ``Rejected`` when ``out`` is in use, ``CannotRun`` when the disk refuses.
    """
    needed = sum(tensor.nbytes for tensor in inventory.values())
    refuse_existing(out)
    refuse_full(out, needed)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise CannotRun(f"{out.parent} cannot be written to: {error.strerror}") from error
    try:
        progress = _Progress(needed)

        def write(filename: str) -> None:
            _write_shard(temporary / filename, shards[filename], inventory, metadata, payload, progress)

        _in_parallel(write, list(shards), jobs, progress)
        index = {
            "metadata": {"total_size": needed, **metadata},
            "weight_map": {name: file for file, names in sorted(shards.items()) for name in sorted(names)},
        }
        _write_json(temporary / "model.safetensors.index.json", index)
        for filename, document in documents.items():
            _write_json(temporary / filename, document)
        temporary.chmod(0o755)
        # Renaming onto an empty directory replaces it; onto one that has been filled meanwhile it fails.
        temporary.rename(out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise Rejected(f"--out {out} is not empty; name a directory that does not exist yet") from error
        raise CannotRun(f"writing {out} failed: {error.strerror}; nothing was left behind") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raise ``Rejected`` when ``out`` is a file or a directory with anything in it, or no path at all."""
    try:
        out.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise Rejected(f"--out {out}: {error.strerror}") from None
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise Rejected(f"--out {out} is not a directory; name one that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise Rejected(f"--out {out} is not empty; name a directory that does not exist yet")
    if out.is_mount():
        raise Rejected(f"--out {out} is a mount point, which cannot be put in place at once; name a directory below it")


def refuse_full(out: Path, needed: int) -> None:
    """Raise ``CannotRun`` when the file system that ``out`` will lie on has fewer than ``needed`` bytes free."""
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        raise CannotRun(f"{place} cannot be read: {error.strerror}") from error
    if free < needed:
        raise CannotRun(
            f"{place} has {free:,} bytes free, the checkpoint needs {needed:,}; "
            "free some, name another --out, or ask for fewer --layers"
        )


class _Stopped(Exception):
    """Another shard has failed; what this one holds will be removed."""


class _Progress:
    """Counts written bytes over all threads, says so on stderr now and then, and carries the word to stop."""

    def __init__(self, total: int):
        self.total, self.written, self.stop = total, 0, threading.Event()
        self.lock = threading.Lock()
        self.started = self.said = time.monotonic()

    def add(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self.lock:
            self.written += count
            now = time.monotonic()
            if now - self.said < PROGRESS_SECONDS:
                return
            self.said = now
            rate = self.written / (now - self.started) / 1e9
            done = f"{self.written / 1e9:.1f} of {self.total / 1e9:.1f} GB"
            print(f"synth: {done}, {now - self.started:.0f} s, {rate:.2f} GB/s", file=sys.stderr, flush=True)


def _in_parallel(write: Callable[[str], None], filenames: list[str], jobs: int, progress: _Progress) -> None:
    """Write all files; after the first failure (or an interrupt) stop the others, wait for them, and raise it."""
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(write, filename) for filename in filenames]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() and future.exception() is None for future in futures):
                progress.stop.set()
                for future in futures:
                    future.cancel()
    failures = [future.exception() for future in done if future.exception()]
    # A shard that was told to stop may be seen beside the one that failed.
    for failure in sorted(failures, key=lambda failure: isinstance(failure, _Stopped)):
        raise failure


def _write_shard(
    path: Path,
    names: list[str],
    inventory: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    payload: Payload,
    progress: _Progress,
) -> None:
    """Write one safetensors file: 8 bytes of header length, the JSON header, the payloads without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name in names:
        tensor = inventory[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, struct.pack("<Q", len(encoded)) + encoded)
        written = 0
        for buffer in payload(names):
            _write_all(file, buffer)
            written += len(buffer)
            progress.add(len(buffer))
        assert written == offset, f"{path.name}: {written} bytes of values, {offset} in the header"
        os.fsync(file.fileno())


def _write_all(file: Any, buffer: Any) -> None:
    """Write the whole of a buffer of bytes: an unbuffered file may take a part of it (2 GiB at most)."""
    view = memoryview(buffer)
    while len(view):
        view = view[file.write(view) :]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
