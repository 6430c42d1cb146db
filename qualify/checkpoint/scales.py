"""Values of scale tensors: decoding tables, and the check that every scale is finite and positive.

Only scales are read, never weights: 6.5 MB of MoVA's 48 GB. The check works on bit patterns, because a
comparison with NaN is false whichever way it is asked, and because it is the only fast way in the standard
library: read as signed integers, exactly the patterns between 0 and infinity are positive finite numbers.
"""

from __future__ import annotations

import array
import math
import os
import struct
import sys
from collections.abc import Iterator
from itertools import product

from qualify.checkpoint.contents import SCALE_LEAVES, Contents
from qualify.checkpoint.declared import Declared
from qualify.checkpoint.headers import BITS, Tensor
from qualify.checkpoint.problems import Findings, show


def _e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


#: value of every code of F8_E4M3 (no infinities, NaN at 0x7f and 0xff, subnormals in steps of 2^-9)
E4M3 = tuple(_e4m3(code) for code in range(256))
#: value of every code of F8_E8M0: powers of two around 127, NaN at 0xff
E8M0 = tuple(2.0 ** (code - 127) if code != 255 else math.nan for code in range(256))
#: value of every code of E2M1; bit 3 is the sign
E2M1 = tuple(sign * value for sign, value in product((1.0, -1.0), (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)))

#: dtype -> (array type code, bit pattern of infinity)
_FLOATS = {"F32": ("i", 0x7F800000), "BF16": ("h", 0x7F80), "F16": ("h", 0x7C00), "F64": ("q", 0x7FF0 << 48)}
_GOOD_E4M3 = bytes(code for code in range(1, 0x7F))
_GOOD_E8M0 = bytes(range(255))
_CHUNK = 4 << 20
#: scalars of stacked experts, one each: more is no scalar, and its shape is reported
_MAX_STACK = 4096
#: positions that one problem names
_FIRST = 3


def decode(raw: bytes, dtype: str, exponent_only: bool = False) -> list[float]:
    """The values of a scale tensor's bytes.

    ``exponent_only`` reads U8 as E8M0, as MXFP4 stores its scales: the layout decides that (columns = 32 x
    scale columns), not the dtype and not the name.
    """
    if dtype == "F8_E8M0" or (dtype == "U8" and exponent_only):
        return [E8M0[code] for code in raw]
    if dtype == "F8_E4M3":
        return [E4M3[code] for code in raw]
    if dtype == "U8":
        return [float(code) for code in raw]
    if dtype == "BF16":
        patterns = struct.unpack(f"<{len(raw) // 2}H", raw)
        return list(
            struct.unpack(f"<{len(patterns)}f", struct.pack(f"<{len(patterns)}I", *(p << 16 for p in patterns)))
        )
    code = {"F32": "f", "F16": "e", "F64": "d"}[dtype]
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


class Reader:
    """Reads byte ranges of the shards; keeps one file open at a time."""

    def __init__(self, paths: dict[str, str]):
        self._paths, self._shard, self._descriptor = paths, None, -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, shard: str, start: int, count: int) -> bytes:
        """``count`` bytes at ``start`` of ``shard``, fewer at its end. Raises ``OSError``."""
        if shard != self._shard:
            self._close()
            self._descriptor = os.open(self._paths[shard], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._shard = shard
        return os.pread(self._descriptor, count, start)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._shard = -1, None


def check(contents: Contents, declared: Declared, paths: dict[str, str], findings: Findings) -> int:
    """Check the values of all scales; return the number of bytes read. Raises ``OSError``."""
    jobs: list[tuple[Tensor, bool]] = []
    for name, leaves in contents.modules.items():
        for leaf in leaves.keys() & SCALE_LEAVES:
            scheme = contents.schemes.get(name)
            exponents = scheme is not None and "F8_E8M0" in scheme.scale_dtypes
            jobs.append((leaves[leaf], exponents))
    jobs += [(tensor, False) for tensor in contents.kv_scales]
    jobs.sort(key=lambda job: (job[0].shard, job[0].start))
    globals_: dict[str, float] = {}
    bad: set[str] = set()
    total = 0
    with Reader(paths) as reader:
        for tensor, exponents, raw, first in _fetch(jobs, reader):
            total += len(raw)
            if len(raw) < tensor.end - tensor.start:
                continue  # a truncated shard, reported as such
            # A sparse file makes gigabytes of bad values for nothing: the first bad piece of a tensor is told.
            if tensor.name not in bad and _values(tensor, exponents, raw, first, findings):
                bad.add(tensor.name)
            leaf = tensor.name.rpartition(".")[2]
            if tensor.dtype not in ("F32", "BF16"):
                continue
            if leaf in ("weight_scale_2", "weight_global_scale") and math.prod(tensor.shape) == 1:
                globals_[tensor.name] = decode(raw, tensor.dtype)[0]
            elif leaf == "input_scale" and declared.format == "e2m1-k32" and math.prod(tensor.shape) <= _MAX_STACK:
                _is_one(tensor, decode(raw, tensor.dtype), findings)
    for tensor in contents.kv_scales:
        _kv_shape(tensor, findings)
    _pairs(globals_, findings)
    return total


def _fetch(jobs: list[tuple[Tensor, bool]], reader: Reader) -> Iterator[tuple[Tensor, bool, bytes, int]]:
    """Yield every job with its bytes and the number of the first element they hold.

    Neighbours in a file (scales usually are) come from one read; a large tensor comes in pieces.
    """
    position = 0
    while position < len(jobs):
        first = jobs[position][0]
        end, last = first.end, position + 1
        while last < len(jobs):
            tensor = jobs[last][0]
            if tensor.shard != first.shard or tensor.start != end or tensor.end - first.start > _CHUNK:
                break
            end, last = tensor.end, last + 1
        if last == position + 1 and first.end - first.start > _CHUNK:
            width = BITS[first.dtype] // 8 or 1
            for start in range(first.start, first.end, _CHUNK):
                piece = first._replace(start=start, end=min(start + _CHUNK, first.end))
                raw = reader.read(first.shard, piece.start, piece.end - piece.start)
                yield piece, jobs[position][1], raw, (start - first.start) // width
        else:
            raw = reader.read(first.shard, first.start, end - first.start)
            for tensor, exponents in jobs[position:last]:
                yield tensor, exponents, raw[tensor.start - first.start : tensor.end - first.start], 0
        position = last


def _values(tensor: Tensor, exponents: bool, raw: bytes, first: int, findings: Findings) -> bool:
    """Report NaN, infinite, zero and negative values of (a piece of) one scale tensor; True when there are any."""
    if tensor.dtype in _FLOATS:
        code, infinity = _FLOATS[tensor.dtype]
        patterns = array.array(code)
        patterns.frombytes(raw)
        if sys.byteorder == "big":
            patterns.byteswap()
        if not patterns or (min(patterns) > 0 and max(patterns) < infinity):
            return False
        magnitude = (1 << (8 * patterns.itemsize - 1)) - 1
        bad: dict[str, list[int]] = {}
        for position, pattern in enumerate(patterns):
            if 0 < pattern < infinity:
                continue
            absolute = pattern & magnitude
            if absolute > infinity:
                kind = "nan"
            elif absolute == infinity:
                kind = "infinite"
            else:
                kind = "zero" if absolute == 0 else "negative"
            bad.setdefault(kind, []).append(position)
    elif tensor.dtype == "F8_E4M3":
        if not raw.translate(None, _GOOD_E4M3):
            return False
        bad = {}
        for position, code in enumerate(raw):
            if 0 < code < 0x7F:
                continue
            kind = "nan" if code & 0x7F == 0x7F else "negative" if code & 0x7F else "zero"
            bad.setdefault(kind, []).append(position)
    elif tensor.dtype == "F8_E8M0" or (tensor.dtype == "U8" and exponents):
        if not raw.translate(None, _GOOD_E8M0):
            return False
        bad = {"nan": [position for position, code in enumerate(raw) if code == 255]}
    else:
        return False
    at_least = "" if math.prod(tensor.shape) * BITS[tensor.dtype] == 8 * len(raw) else "at least "
    for kind, positions in sorted(bad.items()):
        where = ", ".join(_position(first + position, tensor.shape) for position in positions[:_FIRST])
        word = {"nan": "NaN", "infinite": "infinite"}.get(kind, kind)
        findings.problem(
            f"scale-{kind}",
            tensor.name,
            f"{show(tensor.name)} has {at_least}{len(positions):,} {word} value{'s' if len(positions) > 1 else ''}, "
            f"at {where}" + (", ..." if len(positions) > _FIRST else ""),
        )
    return any(bad.values())


def _position(position: int, shape: tuple[int, ...]) -> str:
    indices = []
    for extent in reversed(shape):
        position, index = divmod(position, extent)
        indices.append(index)
    return str(list(reversed(indices)))


def _is_one(tensor: Tensor, values: list[float], findings: Findings) -> None:
    if any(value != 1.0 for value in values):
        findings.problem(
            "scale-not-one",
            tensor.name,
            f"{show(tensor.name)} is {values[0]:g}; weight-only E2M1 has exactly 1.0",
        )


def _kv_shape(tensor: Tensor, findings: Findings) -> None:
    count = math.prod(tensor.shape)
    if count != 1:
        findings.problem(
            "kv-scale-shape",
            tensor.name,
            f"{show(tensor.name)} has shape {list(tensor.shape)}, not one value",
        )


def check_kv(contents: Contents, paths: dict[str, str], findings: Findings) -> None:
    """K/V scales must stay finite when doubled, as the fnuz conversion of some GPUs does.

    Raises ``OSError``.
    """
    with Reader(paths) as reader:
        for tensor in contents.kv_scales:
            size = tensor.end - tensor.start
            if tensor.dtype not in ("F32", "BF16") or size > 4096:
                continue
            raw = reader.read(tensor.shard, tensor.start, size)
            for value in decode(raw, tensor.dtype) if len(raw) == size else ():
                if math.isfinite(value) and value * 2 > 3.4028234663852886e38:
                    findings.problem(
                        "kv-scale-overflow",
                        tensor.name,
                        f"{show(tensor.name)} is {value:g}: twice that overflows F32",
                    )
                    break


def _pairs(values: dict[str, float], findings: Findings) -> None:
    """The global scales of gate and up of one expert (or MLP) must be equal."""
    for name, gate in values.items():
        module, _, leaf = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        partner = {"gate_proj": "up_proj", "w1": "w3"}.get(last)
        if partner is None:
            continue
        other = f"{parent}.{partner}.{leaf}"
        up = values.get(other)
        if up is None or up == gate or not (gate > 0 and up > 0):
            continue
        ratio = max(gate, up) / min(gate, up)
        findings.problem(
            "scale-pair",
            name,
            f"{show(name)} is {gate:.6g} and {show(other.rpartition('.')[0].rpartition('.')[2])}'s is {up:.6g}, "
            f"a factor of {ratio:.4f}: a fused kernel takes one of them for both",
        )


def scan_weights(contents: Contents, paths: dict[str, str], findings: Findings) -> int:
    """Look for NaN codes in all F8_E4M3 weights; return the bytes read.

    Reads the weights: minutes, not seconds.
    """
    weights = [
        leaves["weight"]
        for leaves in contents.modules.values()
        if "weight" in leaves and leaves["weight"].dtype == "F8_E4M3"
    ]
    weights.sort(key=lambda tensor: (tensor.shard, tensor.start))
    total = 0
    with Reader(paths) as reader:
        for tensor in weights:
            for start in range(tensor.start, tensor.end, _CHUNK):
                raw = reader.read(tensor.shard, start, min(_CHUNK, tensor.end - start))
                total += len(raw)
                hits = [hit for hit in (raw.find(b"\x7f"), raw.find(b"\xff")) if hit >= 0]
                if hits:
                    position = start - tensor.start + min(hits)
                    findings.problem(
                        "weight-nan",
                        tensor.name,
                        f"{show(tensor.name)} holds NaN codes, the first at {_position(position, tensor.shape)}",
                    )
                    break
    return total
