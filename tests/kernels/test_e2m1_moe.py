"""The E2M1-K32 kernels in Triton's interpreter (no GPU) against float64 references.

TRITON_INTERPRET is read when kernels are defined, so the cases run in one child process: this file as a
script.  The interpreter stores BF16 by truncation, so the reference truncates too; tests/gpu runs the same
cases on a device with nearest rounding and the real quantiser.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "patches/sglang/files/sglang/srt/layers/moe"

# name: tokens, experts, top_k, hidden, intermediate, id dtype, and what is special
CASES = {
    "plain": {"tokens": 9},
    "one_token": {"tokens": 1},
    "int64_ids": {"tokens": 5, "ids": "int64"},
    "masked_routes": {"tokens": 9, "masked": True},
    "all_masked": {"tokens": 3, "masked": "all"},
    "uneven_routing": {"tokens": 40, "experts": 4, "skew": True},
    "partial_blocks": {"tokens": 37, "experts": 2, "top_k": 1, "block": 32},
    "narrow_tail": {"tokens": 70, "experts": 2, "top_k": 1, "block": 64},
    "three_quarters": {"tokens": 210, "experts": 1, "top_k": 1, "block": 128},
    "ahead": {"tokens": 406, "experts": 1, "top_k": 1, "block": 256, "ahead": True},
    "zero_scales": {"tokens": 5, "zero_scales": 0.3},
    "zero_activations": {"tokens": 5, "zero_x": True},
    "zero_tokens": {"tokens": 0},
    "many_routes": {"tokens": 300, "experts": 8, "top_k": 4, "hidden": 128, "intermediate": 128},
    "strided_x": {"tokens": 5, "strided": True},
}

# Same roundings on both sides: what is left is FP32 accumulation, and elements that it tips over a BF16 step.
BOUND = 1e-3


def make_case(case: dict, generator, device: str = "cpu"):
    """(x, experts, topk_weights, topk_ids) of one case, drawn from the CPU ``generator``."""
    import torch
    from e2m1_k32.reference import random_experts

    g = generator
    tokens, experts, top_k = case["tokens"], case.get("experts", 6), case.get("top_k", 2)
    hidden, inter = case.get("hidden", 256), case.get("intermediate", 128)
    w = random_experts(experts, hidden, inter, device, g, case.get("zero_scales", 0.0))
    x = torch.randn(tokens, hidden * 2, generator=g).bfloat16()
    x = x[:, :hidden] if case.get("strided") else x[:, :hidden].contiguous()
    if case.get("zero_x"):
        x[1] = 0
    ids = torch.rand(tokens, experts, generator=g).topk(top_k, -1).indices
    ids = ids.to(getattr(torch, case.get("ids", "int32")))
    if case.get("skew"):
        ids[:, 0], ids[:, 1] = 0, 3
        ids[0, 1] = 2
    if case.get("masked") == "all":
        ids[:] = -1
    elif case.get("masked"):
        ids[::2, 0], ids[1::3, 1], ids[4] = -1, experts + 3, -1
    weights = torch.rand(tokens, top_k, generator=g)
    if device != "cpu":
        x = x.to(device) if not case.get("strided") else torch.cat((x, x), -1).to(device)[:, :hidden]
    return x, w, weights.to(device), ids.to(device)


def run_cases() -> dict:
    import torch
    from e2m1_k32 import fused_experts, moe
    from e2m1_k32.layout import FP8_ORDER, reorder
    from e2m1_k32.reference import moe_reference, relative_error
    from e2m1_k32.tiles import MoeTiles, Tile

    def quantize_rows(t):
        """The interpreter truncates FP32 to E4M3, so quantise in PyTorch here; tests/gpu runs the kernel."""
        amax = t.float().abs().amax(-1)
        scale = torch.where(amax > 0, amax / 448.0, torch.ones_like(amax))
        q = (t.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return reorder(q, FP8_ORDER), scale

    def truncate_bf16(t):
        return (t.float().view(torch.int32) & -65536).view(torch.float32).double()

    moe.quantize_rows = quantize_rows
    torch.set_num_threads(1)
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        x, w, weights, ids = make_case(case, torch.Generator().manual_seed(number))
        for fp8 in (False, True):
            tile = Tile(64, 128, 4, 2, ahead=case.get("ahead", False) and not fp8)
            tiles = MoeTiles(case.get("block", 16), tile, tile)
            out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
            fused_experts(x, w, weights, ids, fp8=fp8, out=out, tiles=tiles)
            ref = moe_reference(x, w, weights, ids, fp8=fp8, rounded=truncate_bf16)
            results[f"{name}-{'fp8' if fp8 else 'w4a16'}"] = {
                "error": relative_error(out, ref),
                "finite": bool(out.isfinite().all()),
                "norm": float(ref.norm()),
            }
    return results


@pytest.fixture(scope="module")
def results():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PACKAGE_DIR)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("path", ["w4a16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(results, name, path):
    result = results[f"{name}-{path}"]
    assert result["finite"], "an output element was never written or is not finite"
    assert result["error"] <= BOUND, result
    if name not in ("all_masked", "zero_tokens"):
        assert result["norm"] > 0


if __name__ == "__main__":
    json.dump(run_cases(), sys.stdout)
