"""What fused_experts is told of wrong tensors, before any kernel runs."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches/sglang/files/sglang/srt/layers/moe"))

from e2m1_k32 import fused_experts  # noqa: E402
from e2m1_k32.reference import random_experts  # noqa: E402

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
