"""Values of synthetic tensors, on a CPU with numpy.

Every tensor is a function of (seed, its name, its shape, the knobs) alone: shards can be written in any
order, and a tensor keeps its values when the number of layers or shards changes. Block scales and FP8 codes
are drawn independently: the codes as normal numbers with a standard deviation of ``CODE_DEVIATION``, the
scales so that code times scale has the wanted deviation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from qualify.models.k2_horizon import ITEMSIZE, Tensor

#: Recorded in the manifest; change it whenever the same seed would give other values.
GENERATOR = "philox-normal-1"

#: Standard deviation of the FP8 codes of a block: the largest of 16,384 normal draws then lies near 448.
CODE_DEVIATION = 110.0

#: Elements drawn at once; bounds the memory for the largest tensors.
CHUNK = 1 << 24


@dataclass(frozen=True)
class Knobs:
    """What shapes the random values.

    ``gain``: standard deviation of a matrix times the square root of its columns. ``norm_spread``: deviation
    of norm weights around one. ``bias_spread``: deviation of router biases. ``scale_octaves``: block scales
    lie within plus and minus this many powers of two, so that no two blocks are interchangeable.
    """

    gain: float = 1.0
    norm_spread: float = 0.1
    bias_spread: float = 0.1
    scale_octaves: float = 1.0


class NumpyValues:
    """Draws the values of one tensor at a time."""

    def __init__(self, seed: int, knobs: Knobs):
        self.seed = seed
        self.knobs = knobs

    def chunks(self, name: str, tensor: Tensor, columns: int) -> Iterator[numpy.ndarray]:
        """Yield the payload of ``name`` as consecutive ``uint8`` arrays, little endian, row-major.

        ``columns`` is the number of input columns of the weight: the tensor's own, or for a block scale those
        of the weight it belongs to.
        """
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest[:16], "little")))
        deviation = self.knobs.gain / columns**0.5
        left = tensor.nbytes // ITEMSIZE[tensor.dtype]
        while left:
            count = min(left, CHUNK)
            left -= count
            if ".weight_scale" in name:
                octaves = generator.random(count, dtype=numpy.float32) * 2 - 1
                scale = deviation / CODE_DEVIATION
                values = numpy.float32(scale) * numpy.exp2(octaves * numpy.float32(self.knobs.scale_octaves))
            else:
                values = generator.standard_normal(count, dtype=numpy.float32)
                if tensor.dtype == "F8_E4M3":
                    values *= numpy.float32(CODE_DEVIATION)
                elif name.endswith(".bias"):
                    values *= numpy.float32(self.knobs.bias_spread)
                elif len(tensor.shape) == 1:
                    values = 1 + values * numpy.float32(self.knobs.norm_spread)
                else:
                    values *= numpy.float32(deviation)
            yield ENCODE[tensor.dtype](values)


def encode_f32(values: numpy.ndarray) -> numpy.ndarray:
    """float32 -> its four little-endian bytes."""
    return values.astype("<f4").view(numpy.uint8)


def encode_bf16(values: numpy.ndarray) -> numpy.ndarray:
    """float32 -> BF16, rounded to the nearest, ties to even; finite input only."""
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").view(numpy.uint8)


def encode_e4m3(values: numpy.ndarray) -> numpy.ndarray:
    """float32 -> E4M3 codes (the ``fn`` variant: no infinity), nearest value, saturating at 448; never
    NaN."""
    # Ties go to the smaller magnitude: the draws are continuous, a tie has no weight.
    magnitude = numpy.searchsorted(_E4M3_MIDPOINTS, numpy.abs(values)).astype(numpy.uint8)
    return magnitude | (numpy.signbit(values).astype(numpy.uint8) << 7)


def decode_e4m3(codes: numpy.ndarray) -> numpy.ndarray:
    """E4M3 codes (``uint8``) -> float32; 0x7f and 0xff are NaN. 4 exponent bits, bias 7, 3 mantissa bits."""
    exponent = ((codes >> 3) & 0xF).astype(numpy.int32)
    mantissa = (codes & 7).astype(numpy.float32)
    normal = numpy.ldexp(1 + mantissa / 8, exponent - 7)
    value = numpy.where(exponent == 0, mantissa * numpy.float32(2.0**-9), normal).astype(numpy.float32)
    value = numpy.where((codes & 0x7F) == 0x7F, numpy.float32("nan"), value)
    return numpy.where(codes & 0x80, -value, value)


_E4M3 = decode_e4m3(numpy.arange(0x7F, dtype=numpy.uint8))
_E4M3_MIDPOINTS = (_E4M3[:-1] + _E4M3[1:]) / 2

ENCODE = {"F32": encode_f32, "BF16": encode_bf16, "F8_E4M3": encode_e4m3}
