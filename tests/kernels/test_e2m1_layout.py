"""The E2M1-K32 format facts the kernels rest on, checked exhaustively, and what a wrong tensor is told."""

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
PACKAGE = Path(__file__).resolve().parents[2] / "patches/sglang/files/sglang/srt/layers/moe/e2m1_k32"


def load(name: str):
    """One module of the package by file, because the package itself imports triton."""
    spec = importlib.util.spec_from_file_location(f"e2m1_k32_{name}", PACKAGE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layout, tiles = load("layout"), load("tiles")

E2M1 = torch.tensor(layout.E2M1_VALUES, dtype=torch.float64)
CODES = torch.arange(16, dtype=torch.int32)
SCALES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double()
FINITE = SCALES[~SCALES.isnan()]


def test_codes_move_to_e4m3_exactly():
    moved = ((CODES & 8) << 4 | (CODES & 7) << 2).to(torch.uint8).view(torch.float8_e4m3fn)
    assert torch.equal(moved.double() * 2.0**6, E2M1)


def test_codes_move_to_bf16_exactly():
    moved = ((CODES & 8) << 12 | (CODES & 7) << 6).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(moved.double() * 2.0**126, E2M1)


def test_scale_times_code_is_exact_in_bf16():
    exact = E2M1[:, None] * FINITE[None, :]
    assert torch.equal(exact.to(torch.bfloat16).double(), exact)


def test_scale_bytes_lift_out_of_the_subnormals():
    """byte << 4 as BF16 times 2^127 times 2^110 is scale * 2^117, exactly, for every non-negative scale."""
    bits = torch.arange(0x7F, dtype=torch.int32)
    start = (bits << 4).to(torch.int16).view(torch.bfloat16)
    factors = torch.tensor([0x7F00, 0x7680], dtype=torch.int16).view(torch.bfloat16)
    assert factors.double().tolist() == [2.0**127, 2.0**110]
    lifted = (start.double() * factors[0].double()).to(torch.bfloat16).double() * factors[1].double()
    assert torch.equal(lifted.to(torch.bfloat16).double(), SCALES[:0x7F] * 2.0**117)


@pytest.mark.parametrize("name, size", [("W4A16_ORDER", 128), ("DECODE_ORDER", 8), ("FP8_ORDER", 32)])
def test_orders_are_permutations(name, size):
    assert sorted(getattr(layout, name)) == list(range(size))


def test_a_thread_owns_whole_scale_groups_in_the_w4a16_order():
    """Positions whose bits 1-2 are t are the elements of group t: one scale per thread and 128 columns."""
    for position, element in enumerate(layout.W4A16_ORDER):
        assert element // 32 == position >> 1 & 3


def test_dequantize_reads_the_low_nibble_first():
    weight = torch.tensor([[0x21, 0xF7] + [0] * 14], dtype=torch.uint8)
    scale = torch.tensor([[0x40]], dtype=torch.uint8)  # 2.0
    values = layout.dequantize(weight, scale, torch.tensor(0.5))
    assert values[0, :4].tolist() == [0.5, 1.0, 6.0, -6.0]


def tensors(experts=2, hidden=256, intermediate=128):
    e, h, i = experts, hidden, intermediate
    return {
        "w13": torch.zeros(e, 2 * i, h // 2, dtype=torch.uint8),
        "w13_scale": torch.zeros(e, 2 * i, h // 32, dtype=torch.uint8),
        "w13_global": torch.ones(e),
        "w2": torch.zeros(e, h, i // 2, dtype=torch.uint8),
        "w2_scale": torch.zeros(e, h, i // 32, dtype=torch.uint8),
        "w2_global": torch.ones(e),
    }


def test_well_formed_experts_are_accepted():
    experts = layout.E2M1Experts(**tensors())
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (2, 256, 128)


@pytest.mark.parametrize(
    "name, replacement, message",
    [
        ("w13_scale", torch.zeros(2, 256, 16, dtype=torch.uint8), "w13_scale is (2, 256, 16), expected (2, 256, 8)"),
        ("w2_scale", torch.zeros(2, 256, 8, dtype=torch.uint8), "w2_scale is (2, 256, 8), expected (2, 256, 4)"),
        ("w13_global", torch.ones(2, 2), "w13_global is (2, 2), expected (2,)"),
        ("w2_global", torch.ones(2, dtype=torch.float64), "w2_global is torch.float64, expected torch.float32"),
        ("w13", torch.zeros(2, 256, 128, dtype=torch.int8), "w13 is torch.int8, expected torch.uint8"),
        ("w2", torch.zeros(2, 64, 256, dtype=torch.uint8).transpose(1, 2), "w2 must be contiguous"),
        ("w13", torch.zeros(2, 256, 32, dtype=torch.uint8), "must be multiples of 128"),
        ("w2", torch.zeros(2, 256), "must have three dimensions"),
        ("w13", torch.zeros(0, 256, 128, dtype=torch.uint8), "there must be an expert"),
        ("w13", torch.zeros(2, 256, 0, dtype=torch.uint8), "hidden size 0"),
        ("w13", torch.zeros(2, 0, 128, dtype=torch.uint8), "intermediate size 0"),
        ("w13", torch.zeros(2, 257, 128, dtype=torch.uint8), "intermediate size 128.5"),
        ("global_experts", 1, "global_experts is 1, and w13 alone holds 2"),
    ],
)
def test_a_wrong_tensor_is_named(name, replacement, message):
    with pytest.raises(ValueError) as caught:
        layout.E2M1Experts(**tensors() | {name: replacement})
    assert message in str(caught.value)


def shifted(t):
    """``t`` at an address 4 bytes beyond an aligned one."""
    raw = torch.zeros(t.nbytes + 4, dtype=torch.uint8)
    return raw[4:].view(t.dtype).view(t.shape)


@pytest.mark.parametrize("name", tensors())
def test_alignment_and_device_of_every_tensor_are_checked(name):
    given = tensors()
    with pytest.raises(ValueError, match=f"^{name} must be contiguous and 16-byte aligned"):
        layout.E2M1Experts(**given | {name: shifted(given[name])})
    with pytest.raises(ValueError, match=r"^w\w+ is on \w+, w13 on \w+"):
        layout.E2M1Experts(**given | {name: given[name].to("meta")})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_signed_and_nan_scales_are_refused(name, dtype):
    for code in (0x7E, 0x7F, 0x80, 0xFE):
        given = tensors()
        given[name][-1, -1, -1] = code
        given[name] = given[name].view(dtype)
        if code == 0x7E:
            layout.E2M1Experts(**given)
            continue
        with pytest.raises(ValueError, match=f"^{name} has a negative or NaN E4M3 scale"):
            layout.E2M1Experts(**given)


@pytest.mark.parametrize("arch", [90, 120])
@pytest.mark.parametrize("fp8", [False, True])
def test_tile_tables_rise_and_cover_every_load(arch, fp8):
    limits = [limit for limit, _ in tiles.tile_table(fp8, True, arch)]
    assert limits == sorted(limits) and limits[-1] == float("inf")
    for routes in (1, 8, 1000, 10**7):
        assert tiles.pick_tiles(routes, 288, fp8, True, arch).m >= 8


def test_only_decode_tables_hold_decode_tiles():
    for table in (tiles.W4A16_TILES, tiles.FP8_TILES):
        assert not any(moe.decode for rows in table.values() for _, moe in rows)
    assert all(moe.decode for rows in tiles.DECODE_TILES.values() for _, moe in rows)


@pytest.mark.parametrize(
    ("m", "up", "down", "says"),
    [
        (8, tiles.DecodeTile(64, 4), tiles.Tile(64, 128, 4, 3), "must both be Tile or both DecodeTile"),
        (8, tiles.Tile(64, 128, 4, 3), tiles.Tile(64, 128, 4, 3), "m is 8: .* at least 16"),
        (4, tiles.DecodeTile(64, 4), tiles.DecodeTile(64, 4), "m is 4: .* at least 8"),
        (48, tiles.Tile(64, 128, 4, 3), tiles.Tile(64, 128, 4, 3), "m is 48: .* power of two"),
        (128, tiles.Tile(64, 128, 4, 3), tiles.Tile(64, 128, 4, 3, ahead=True), "m is 128: .* 256"),
    ],
)
def test_tiles_that_no_kernel_runs_are_refused(m, up, down, says):
    with pytest.raises(ValueError, match=says):
        tiles.MoeTiles(m, up, down)
