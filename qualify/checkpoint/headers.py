"""safetensors headers, read as hostile input.

A file is: 8 bytes little-endian header length N, N bytes of JSON (a mapping from tensor name to dtype, shape
and
``data_offsets`` relative to the end of the header, ``__metadata__`` with strings), then the tensors, without
gaps. Source: the format's description in the safetensors repository; the checks are those of its reference
reader and a few more (duplicate keys, trailing bytes, absurd shapes).
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from typing import NamedTuple

from qualify.checkpoint import strictjson
from qualify.checkpoint.problems import Findings, show

#: dtype -> bits of one element, as the safetensors library 0.8 knows them
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

#: The format allows 100 MB. 150,000 tensors, the most known in one checkpoint, take 20 MB; twice that costs a
#: gigabyte of memory, and no more is granted to a stranger.
MAX_HEADER = 40_000_000
MAX_RANK = 8
MAX_NAME = 512
_KEYS = {"dtype", "shape", "data_offsets"}
_PICKLE_PROTOCOLS = (b"\x02", b"\x03", b"\x04", b"\x05")
_LFS = b"version https://git-lfs"


class Tensor(NamedTuple):
    """One tensor of a shard. ``start`` and ``end`` are byte offsets from the start of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    shard: str


@dataclass(slots=True)
class Header:
    """What one shard says of itself. ``readable`` is false when its tensors could not be listed."""

    shard: str
    size: int
    readable: bool = False
    raw: bytes = b""
    tensors: list[Tensor] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Digest of the raw header with its 8-byte length prefix."""
        return hashlib.sha256(self.raw).hexdigest()


def read(path: str, shard: str, findings: Findings) -> Header:
    """Read the header of the file at ``path``, called ``shard`` in messages. Raises ``OSError`` only.

    At most ``MAX_HEADER`` bytes are read, however large a length the file claims.
    """
    # Not blocking: a FIFO of that name must not hang the inspection.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        header = Header(shard, status.st_size)
        if not stat.S_ISREG(status.st_mode):
            findings.problem("not-a-regular-file", shard, f"{show(shard)} is not a regular file")
            return header
        prefix = os.pread(descriptor, 64, 0)
        length = int.from_bytes(prefix[:8], "little")
        if not _plausible(prefix, length, header, findings):
            return header
        raw = prefix[:8]
        while len(raw) < 8 + length:
            chunk = os.pread(descriptor, 8 + length - len(raw), len(raw))
            if not chunk:
                break
            raw += chunk
    finally:
        os.close(descriptor)
    if len(raw) < 8 + length:
        findings.problem("header-truncated", shard, f"{show(shard)} shrank while its header was read")
        return header
    parse(raw, header, findings)
    return header


def looks_like(prefix: bytes) -> str | None:
    """``lfs-pointer`` or ``html-page`` when the first bytes of a file are one of those, else None."""
    if prefix.startswith(_LFS):
        return "lfs-pointer"
    if prefix.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "html-page"
    return None


def _plausible(prefix: bytes, length: int, header: Header, findings: Findings) -> bool:
    shard, size = header.shard, header.size
    name = show(shard)
    if size == 0:
        findings.problem("shard-empty", shard, f"{name} is empty")
        return False
    mistaken = looks_like(prefix)
    # '<' may also be the first byte of a legal length (60 + n * 256): a page has '<' and no '{' after it.
    if mistaken == "lfs-pointer" or (mistaken == "html-page" and prefix[8:9] != b"{"):
        what = "a Git LFS pointer" if mistaken == "lfs-pointer" else "a web page"
        findings.problem(mistaken, shard, f"{name} ({size:,} bytes) is {what}, not a safetensors file")
        return False
    archive = prefix.startswith(b"PK\x03\x04") or (prefix[:1] == b"\x80" and prefix[1:2] in _PICKLE_PROTOCOLS)
    if archive and prefix[8:9] != b"{":
        findings.problem("pickle-weights", shard, f"{name} is a pickle checkpoint under another name")
        return False
    if size < 8:
        findings.problem("header-truncated", shard, f"{name} has {size} bytes, less than a header length")
        return False
    if length > MAX_HEADER:
        start = prefix[:40].decode("latin-1")
        readable = start.isascii() and start.replace("\n", " ").isprintable()
        text = f"; it is a text that begins {show(start)!r}" if readable else ""
        findings.problem(
            "header-oversized",
            shard,
            f"{name} claims a header of {length:,} bytes, above the limit of {MAX_HEADER:,}{text}",
        )
        return False
    if 8 + length > size:
        findings.problem(
            "header-truncated",
            shard,
            f"{name} ends inside its header: {length:,} bytes are claimed, {size - 8:,} are there",
        )
        return False
    return True


def parse(raw: bytes, header: Header, findings: Findings) -> None:
    """Fill ``header`` from ``raw``, the length prefix and the JSON; report every defect of it."""
    shard, name = header.shard, show(header.shard)
    body = raw[8:]
    if body[:1] != b"{":
        findings.problem("header-malformed", shard, f"the header of {name} does not begin with '{{'")
        return
    try:
        document, duplicates = strictjson.parse(body)
    except strictjson.JsonDefect as defect:
        findings.problem("header-malformed", shard, f"the header of {name} is {defect}")
        return
    for key in duplicates:
        findings.problem("header-duplicate-key", shard, f"the header of {name} has the key {show(key)!r} twice")
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        findings.problem("header-malformed", shard, f"__metadata__ in the header of {name} is not a mapping of strings")
    else:
        header.metadata = metadata
    # Kept for the digest, and only now: sparse files that claim 40 MB each would fill the memory.
    header.raw, header.readable = raw, True
    base = len(raw)
    tensors = header.tensors
    for key, entry in document.items():
        tensor = _tensor(key, entry, base, shard, findings)
        if tensor is not None:
            tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _layout(header, base, findings, complete=len(tensors) == len(document))


def _tensor(key: str, entry: object, base: int, shard: str, findings: Findings) -> Tensor | None:
    """One header entry as a :class:`Tensor`, or None with the defect reported."""
    if type(entry) is not dict or entry.keys() != _KEYS or not key or len(key) > MAX_NAME:
        findings.problem(
            "tensor-entry",
            key[:MAX_NAME],
            f"{show(key)!r} in {show(shard)} has a name of {len(key)} characters and the entry {show(entry)}; "
            "expected dtype, shape and data_offsets",
        )
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        findings.problem("tensor-dtype-unknown", key, f"{show(key)} has the unknown dtype {show(dtype)}")
        return None
    if type(shape) is not list or len(shape) > MAX_RANK:
        findings.problem("tensor-shape-absurd", key, f"{show(key)} has the shape {show(shape)}")
        return None
    for extent in shape:
        if type(extent) is not int or not 0 <= extent < 1 << 48:
            findings.problem("tensor-shape-absurd", key, f"{show(key)} has the shape {show(shape)}")
            return None
        bits *= extent
    if (
        type(offsets) is not list
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
        or not 0 <= offsets[0] <= offsets[1] < 1 << 63
    ):
        findings.problem("tensor-entry", key, f"{show(key)} has the data_offsets {show(offsets)}")
        return None
    start, end = offsets
    if (end - start) * 8 != bits:
        code = "tensor-shape-absurd" if bits >= 1 << 63 else "tensor-size"
        findings.problem(
            code,
            key,
            f"{show(key)} {dtype} {show(shape)} needs {-(-bits // 8):,} bytes; its offsets span {end - start:,}",
        )
        return None
    return Tensor(key, dtype, tuple(shape), base + start, base + end, shard)


def _layout(header: Header, base: int, findings: Findings, complete: bool) -> None:
    """Tensors must tile the data part exactly: no overlap, no gap, no byte missing or left over."""
    shard, name, position = header.shard, show(header.shard), base
    previous = None
    for tensor in header.tensors:
        if tensor.start < position:  # an empty tensor inside another too: the reference reader refuses both
            findings.problem(
                "tensor-overlap",
                tensor.name,
                f"{show(tensor.name)} shares {position - tensor.start:,} bytes with "
                f"{show(previous) if previous else 'the header'} in {name}",
            )
        elif tensor.start > position and complete:
            findings.problem(
                "tensor-gap",
                tensor.name,
                f"{tensor.start - position:,} bytes before {show(tensor.name)} in {name} belong to no tensor",
            )
        if tensor.end >= position:
            position, previous = tensor.end, tensor.name
    if position > header.size:
        findings.problem(
            "shard-truncated",
            shard,
            f"{name} has {header.size:,} bytes; its header describes {position:,}: "
            f"{position - header.size:,} are missing",
        )
    elif position < header.size and complete:
        findings.problem(
            "shard-trailing",
            shard,
            f"{name} has {header.size:,} bytes; its header describes {position:,}: "
            f"{header.size - position:,} are left over",
        )
