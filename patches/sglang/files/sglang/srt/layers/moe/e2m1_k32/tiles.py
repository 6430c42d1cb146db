"""Tile shapes by path and load.  Measured on one H200 (benchmarks/results/e2m1-k32-h200.json); see docs/e2m1-k32.md."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM: weight rows, K step, warps, pipeline stages, register cap (0: none)."""

    n: int
    k: int
    warps: int
    stages: int
    regs: int = 0


@dataclass(frozen=True)
class DecodeTile:
    """Tile of the decode kernel: weight rows and warps."""

    n: int
    warps: int
    cache: str = ""


@dataclass(frozen=True)
class MoeTiles:
    """Routes per block, and the tiles of the gate-up and the down GEMM (both of one kind)."""

    m: int
    up: Tile | DecodeTile
    down: Tile | DecodeTile

    @property
    def decode(self) -> bool:
        return isinstance(self.up, DecodeTile)

    def as_dict(self) -> dict:
        return asdict(self)


# (largest mean number of routes per expert, tiles), first match wins.
DECODE_TILES = (
    (0.05, MoeTiles(8, DecodeTile(64, 4), DecodeTile(64, 4))),
    (3, MoeTiles(8, DecodeTile(64, 4), DecodeTile(64, 4))),
)
W4A16_TILES = (
    (10, MoeTiles(16, Tile(64, 256, 4, 3), Tile(128, 128, 4, 3))),
    (32, MoeTiles(32, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
    (64, MoeTiles(64, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3, 168))),
    (128, MoeTiles(128, Tile(128, 128, 8, 3, 128), Tile(256, 128, 8, 4))),
    (float("inf"), MoeTiles(256, Tile(128, 128, 8, 3), Tile(128, 128, 8, 3))),
)
FP8_TILES = (
    (16, MoeTiles(16, Tile(128, 128, 4, 4), Tile(128, 128, 4, 4))),
    (64, MoeTiles(64, Tile(64, 128, 4, 3, 128), Tile(64, 128, 4, 3, 128))),
    (float("inf"), MoeTiles(128, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3, 168))),
)


def pick_tiles(num_routes: int, num_experts: int, fp8: bool, decode: bool = False) -> MoeTiles:
    """Tiles for ``num_routes`` token-expert rows over ``num_experts`` local experts.

    ``decode``: the decode kernel may be used (sizes are multiples of its K step).
    """
    mean = num_routes / num_experts
    table = FP8_TILES if fp8 else (DECODE_TILES if decode else ()) + W4A16_TILES
    return next(tiles for limit, tiles in table if mean <= limit)
