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
class MoeTiles:
    """Routes per block, and the tiles of the gate-up and the down GEMM."""

    m: int
    up: Tile
    down: Tile

    def as_dict(self) -> dict:
        return asdict(self)


# (largest mean number of routes per expert, tiles), first match wins.
W4A16_TILES = (
    (6, MoeTiles(16, Tile(64, 256, 4, 4), Tile(64, 256, 4, 3))),
    (12, MoeTiles(32, Tile(128, 128, 4, 4), Tile(128, 128, 4, 3))),
    (48, MoeTiles(64, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3))),
    (float("inf"), MoeTiles(128, Tile(128, 128, 8, 3, 128), Tile(128, 128, 8, 3, 128))),
)
FP8_TILES = (
    (6, MoeTiles(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4))),
    (48, MoeTiles(64, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3))),
    (float("inf"), MoeTiles(128, Tile(64, 128, 4, 3, 168), Tile(64, 128, 4, 3, 168))),
)


def pick_tiles(num_routes: int, num_experts: int, fp8: bool) -> MoeTiles:
    """Tiles for ``num_routes`` token-expert rows over ``num_experts`` local experts."""
    mean = num_routes / num_experts
    return next(tiles for limit, tiles in (FP8_TILES if fp8 else W4A16_TILES) if mean <= limit)
