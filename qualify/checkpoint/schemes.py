"""How one module is stored: the weight's dtype and the companions (scales) that belong to it."""

from __future__ import annotations

from dataclasses import dataclass

FP8 = "F8_E4M3"
#: dtypes that only a quantised weight has
NARROW = frozenset({FP8, "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module is stored.

    ``kind`` is ``fp8-block``, ``fp8-tensor``, ``fp8-channel``, ``fp4`` or ``mxfp8``.

    ``block`` is (rows, columns) per scale of fp8-block; ``group`` the columns per scale of fp4 and mxfp8.
    ``scalars`` are companions with one F32 value: (leaf, whether it must be there).
    """

    name: str
    kind: str
    weight: str = "weight"
    dtype: str = FP8
    scale: str = "weight_scale"
    scale_dtypes: tuple[str, ...] = ("F32",)
    block: tuple[int, int] | None = None
    group: int | None = None
    scalars: tuple[tuple[str, bool], ...] = ()
    #: other leaf a scale may legally have
    scale_alias: str | None = None

    def __hash__(self) -> int:
        # Asked once a module, tens of thousands of times; the name tells nearly all schemes apart.
        return hash(self.name)


def mxfp4(name: str, weight: str = "weight") -> Scheme:
    return Scheme(name, "fp4", weight=weight, dtype="U8", scale_dtypes=("U8", "F8_E8M0"), group=32)


def mxfp8(name: str) -> Scheme:
    return Scheme(name, "mxfp8", scale_dtypes=("U8", "F8_E8M0"), group=32)
