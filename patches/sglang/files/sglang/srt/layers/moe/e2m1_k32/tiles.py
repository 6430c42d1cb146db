"""Tile shapes by path, load and architecture.

The sm_90 tables come from ``benchmarks/e2m1_k32.py tune`` on one H200
(benchmarks/results/e2m1-k32-tuning.json), the tile with ``ahead`` from ``run``.  The sm_120 tables only
respect its 99 KB of shared memory per block: nobody has timed them yet.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM: weight rows, K step, warps, pipeline stages, register cap (0: none).

    ``ahead``: the kernel for 256 routes per block that reads scales a step ahead (W4A16).
    """

    n: int
    k: int
    warps: int
    stages: int
    regs: int = 0
    ahead: bool = False


@dataclass(frozen=True)
class DecodeTile:
    """Tile of the decode kernel: weight rows and warps."""

    n: int
    warps: int


@dataclass(frozen=True)
class MoeTiles:
    """Routes per block, and the tiles of the gate-up and the down GEMM (both of one kind)."""

    m: int
    up: Tile | DecodeTile
    down: Tile | DecodeTile

    def __post_init__(self):
        if type(self.up) is not type(self.down):
            raise ValueError("up and down must both be Tile or both DecodeTile: they read activations in one order.")
        least = 8 if self.decode else 16
        if self.m < least or self.m & (self.m - 1):
            raise ValueError(f"m is {self.m}: a block must have a power of two of rows, at least {least}.")
        if not self.decode and (self.up.ahead or self.down.ahead) and self.m != 256:
            raise ValueError(f"m is {self.m}: tiles with ahead need blocks of 256 rows.")

    @property
    def decode(self) -> bool:
        return isinstance(self.up, DecodeTile)

    def as_dict(self) -> dict:
        return asdict(self)


# (largest mean number of routes per expert, tiles): the first match wins.
DECODE_TILES = {
    90: (
        (0.1, MoeTiles(8, DecodeTile(64, 4), DecodeTile(64, 4))),
        (5.5, MoeTiles(8, DecodeTile(128, 4), DecodeTile(128, 4))),
    ),
    120: (
        (5.5, MoeTiles(8, DecodeTile(128, 4), DecodeTile(128, 4))),
        (16, MoeTiles(16, DecodeTile(64, 4), DecodeTile(64, 4))),
    ),
}
W4A16_TILES = {
    90: (
        (10, MoeTiles(16, Tile(64, 256, 4, 3), Tile(128, 128, 4, 3))),
        (20, MoeTiles(32, Tile(64, 256, 4, 3), Tile(128, 128, 4, 3, 128))),
        (40, MoeTiles(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3, 128))),
        (75, MoeTiles(64, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3, 168))),
        (170, MoeTiles(128, Tile(128, 128, 8, 3, 128), Tile(256, 128, 8, 4))),
        # From here on most rows of an expert fill blocks of 256, and a weight is unpacked once for all of them.
        (float("inf"), MoeTiles(256, Tile(128, 128, 8, 3, ahead=True), Tile(128, 128, 8, 3, ahead=True))),
    ),
    120: (
        (16, MoeTiles(16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3))),
        (48, MoeTiles(32, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
        (float("inf"), MoeTiles(64, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
    ),
}
FP8_TILES = {
    90: (
        (16, MoeTiles(16, Tile(128, 128, 4, 4), Tile(128, 128, 4, 3))),
        (24, MoeTiles(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (80, MoeTiles(64, Tile(64, 128, 4, 3, 128), Tile(64, 128, 4, 3, 128))),
        (float("inf"), MoeTiles(128, Tile(64, 128, 4, 4), Tile(64, 128, 4, 3, 168))),
    ),
    120: (
        (16, MoeTiles(16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3))),
        (48, MoeTiles(32, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3))),
        (float("inf"), MoeTiles(64, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
    ),
}


def tile_table(fp8: bool, decode: bool, arch: int = 90) -> tuple[tuple[float, MoeTiles], ...]:
    """(largest mean number of routes per expert, tiles) in rising order.

    ``decode``: the W4A16 decode kernel may be used (both K are multiples of its step of 256).
    ``arch``: 90 or 120; anything from 100 up uses the sm_120 tables.
    """
    arch = 90 if arch < 100 else 120
    return FP8_TILES[arch] if fp8 else (DECODE_TILES[arch] if decode else ()) + W4A16_TILES[arch]


def pick_tiles(num_routes: int, num_experts: int, fp8: bool, decode: bool, arch: int = 90) -> MoeTiles:
    """Tiles for ``num_routes`` token-expert rows over ``num_experts`` experts of all ranks (see ``tile_table``)."""
    mean = num_routes / num_experts
    return next(tiles for limit, tiles in tile_table(fp8, decode, arch) if mean <= limit)
