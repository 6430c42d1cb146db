"""What fused_experts is told of wrong tensors, before any kernel runs."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang/files/sglang/srt/layers/moe"))

from e2m1_k32 import E2M1Experts, fused_experts, moe  # noqa: E402
from e2m1_k32.reference import random_experts  # noqa: E402
from e2m1_k32.tiles import DecodeTile, MoeTiles  # noqa: E402

TOKENS, HIDDEN, TOP_K = 2, 128, 2


@pytest.fixture(scope="module")
def experts():
    return random_experts(4, HIDDEN, 128, "cpu", torch.Generator().manual_seed(0))


def arguments() -> dict:
    return {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "topk_weights": torch.ones(TOKENS, TOP_K),
        "topk_ids": torch.zeros(TOKENS, TOP_K, dtype=torch.int32),
        "out": torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("x", lambda x: x.float(), "x is torch.float32"),
        ("x", lambda x: x[:, :64], "x is torch.bfloat16 (2, 64)"),
        ("x", lambda x: x.repeat_interleave(2, 1)[:, ::2], "unit column stride"),
        ("topk_ids", lambda ids: ids.short(), "topk_ids is torch.int16"),
        ("topk_ids", lambda ids: ids[0], "topk_ids is torch.int32 (2,)"),
        ("topk_ids", lambda ids: ids.repeat(1, 2)[:, ::2], "contiguous int32 or int64"),
        ("topk_ids", lambda ids: ids[:1], "must both be contiguous [2, top_k]"),
        ("topk_weights", lambda w: w[:, :1], "must both be contiguous"),
        ("topk_weights", lambda w: w.bfloat16(), "topk_weights is torch.bfloat16, expected torch.float32"),
        ("out", lambda out: out.float(), "out is torch.float32"),
        ("out", lambda out: out.repeat(2, 1)[:3], "out is torch.bfloat16 (3, 128)"),
        ("out", lambda out: out[:, :64], "out is torch.bfloat16 (2, 64)"),
        ("out", lambda out: out.repeat_interleave(2, 1)[:, ::2], "expected contiguous"),
        ("out", lambda out: out.to("meta"), "out is on meta, and x on cpu"),
        ("topk_ids", lambda ids: ids.to("meta"), "topk_ids is on meta"),
    ],
)
def test_a_wrong_tensor_is_named(experts, name, wrong, says):
    given = arguments()
    given[name] = wrong(given[name])
    with pytest.raises(ValueError) as caught:
        fused_experts(given.pop("x"), experts, **given)
    assert says in str(caught.value)


@pytest.mark.parametrize(("hidden", "intermediate", "fp8"), [(256, 128, False), (128, 256, False), (256, 256, True)])
def test_decode_tiles_are_refused_where_their_kernel_would_miscompute(hidden, intermediate, fp8):
    experts = random_experts(4, hidden, intermediate, "cpu", torch.Generator().manual_seed(0))
    given = arguments() | {"x": torch.zeros(TOKENS, hidden, dtype=torch.bfloat16), "out": None}
    with pytest.raises(ValueError, match="tiles are the decode kernel's"):
        fused_experts(experts=experts, fp8=fp8, tiles=MoeTiles(8, DecodeTile(64, 4), DecodeTile(64, 4)), **given)


@pytest.mark.parametrize(("global_experts", "counted"), [(None, 4), (4, 4), (32, 32)])
def test_tiles_follow_the_experts_of_all_ranks(experts, monkeypatch, global_experts, counted):
    asked = []

    def pick(num_routes, num_experts, *rest):
        asked.append((num_routes, num_experts, *rest))
        raise InterruptedError

    monkeypatch.setattr(moe, "pick_tiles", pick)
    weights = (experts.w13, experts.w13_scale, experts.w13_global, experts.w2, experts.w2_scale, experts.w2_global)
    given = arguments()
    with pytest.raises(InterruptedError):
        fused_experts(given.pop("x"), E2M1Experts(*weights, global_experts), **given)
    assert asked == [(TOKENS * TOP_K, counted, False, False, 90)]


def test_no_routes_per_token_give_zeros(experts):
    given = arguments() | {"topk_ids": torch.zeros(TOKENS, 0, dtype=torch.int32), "topk_weights": torch.ones(TOKENS, 0)}
    assert not fused_experts(given.pop("x"), experts, **given).any()
