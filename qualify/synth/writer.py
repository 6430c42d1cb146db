"""Writes a checkpoint directory: shards, index, config and the manifest that says what it is.

Standard library only; the payloads come from a source of chunks (see :mod:`qualify.synth.values`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected
from qualify.models.k2_horizon import Tensor

#: name, tensor -> the payload as consecutive buffers
Chunks = Callable[[str, Tensor], Iterable[Any]]


def write_checkpoint(
    out: Path,
    *,
    config: Mapping[str, Any],
    inventory: Mapping[str, Tensor],
    shards: Mapping[str, list[str]],
    metadata: Mapping[str, str],
    manifest: Mapping[str, Any],
    chunks: Chunks,
) -> None:
    """Write the checkpoint to ``out``, which must not exist or be an empty directory.

    Everything is written to a temporary directory beside ``out`` and renamed at the end, so that ``out`` is
    either absent (or empty) or complete. Raises ``Rejected`` when ``out`` is in use, ``CannotRun`` when the
    disk refuses.
    """
    refuse_existing(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        needed = sum(tensor.nbytes for tensor in inventory.values())
        free = shutil.disk_usage(out.parent).free
        if free < needed:
            raise CannotRun(f"{out.parent} has {free:,} bytes free, the checkpoint needs {needed:,}")
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise CannotRun(f"{out.parent} cannot be written to: {error.strerror}") from error
    try:
        for filename, names in shards.items():
            _write_shard(temporary / filename, names, inventory, metadata, chunks)
        index = {
            "metadata": {"total_size": needed, **metadata},
            "weight_map": {name: file for file, names in sorted(shards.items()) for name in sorted(names)},
        }
        _write_json(temporary / "model.safetensors.index.json", index)
        _write_json(temporary / "config.json", config)
        _write_json(temporary / "synthetic.json", manifest)
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
    """Raise ``Rejected`` when ``out`` is a file or a directory with anything in it."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise Rejected(f"--out {out} is not a directory; name one that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise Rejected(f"--out {out} is not empty; name a directory that does not exist yet")


def _write_shard(
    path: Path,
    names: list[str],
    inventory: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    chunks: Chunks,
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
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in names:
            written = sum(file.write(chunk) for chunk in chunks(name, inventory[name]))
            assert written == inventory[name].nbytes, name
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
