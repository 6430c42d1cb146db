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
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "patches/sglang/files/sglang/srt/layers/moe"

# name: tokens, experts, top_k, hidden, intermediate, id dtype, and what is special
CASES = {
    "plain": {"tokens": 9},
    "one_token": {"tokens": 1},
    "int64_ids": {"tokens": 5, "ids": "int64"},
    "wide_ids": {"tokens": 9, "ids": "int64", "masked": "wide"},
    "masked_routes": {"tokens": 9, "masked": True},
    "all_masked": {"tokens": 3, "masked": "all"},
    "uneven_routing": {"tokens": 40, "experts": 4, "skew": True},
    "partial_blocks": {"tokens": 37, "experts": 2, "top_k": 1, "block": 32},
    "narrow_tail": {"rows": (16, 17, 33), "top_k": 1, "block": 64},
    "three_quarters": {"tokens": 210, "experts": 1, "top_k": 1, "block": 128},
    "ahead": {
        "rows": (64, 65, 96, 97, 128, 129, 192, 193, 256),
        "top_k": 1,
        "hidden": 128,
        "intermediate": 128,
        "block": 256,
        "ahead": True,
    },
    "zero_scales": {"tokens": 5, "zero_scales": 0.3},
    "zero_activations": {"tokens": 5, "zero_x": True},
    "zero_tokens": {"tokens": 0},
    "many_routes": {
        "tokens": 300,
        "experts": 8,
        "top_k": 4,
        "hidden": 128,
        "intermediate": 128,
        "ids": "int64",
        "masked": "wide",
    },
    "strided_x": {"tokens": 5, "strided": True},
}

# Same roundings on both sides: what is left is FP32 accumulation, and elements that it tips over a BF16 step.
BOUND = 1e-3


def make_case(case: dict, generator, device: str = "cpu"):
    """(x, experts, topk_weights, topk_ids) of one case, drawn from the CPU ``generator``."""
    import torch
    from e2m1_k32.reference import random_experts

    g = generator
    rows = case.get("rows")  # routes of every expert
    tokens, experts = (sum(rows), len(rows)) if rows else (case["tokens"], case.get("experts", 6))
    top_k = case.get("top_k", 2)
    hidden, inter = case.get("hidden", 256), case.get("intermediate", 128)
    w = random_experts(experts, hidden, inter, device, g, case.get("zero_scales", 0.0))
    x = torch.randn(tokens, hidden * 2, generator=g).bfloat16()
    x = x[:, :hidden] if case.get("strided") else x[:, :hidden].contiguous()
    if case.get("zero_x"):
        x[1] = 0
    ids = torch.rand(tokens, experts, generator=g).topk(top_k, -1).indices
    if rows:
        ids = torch.repeat_interleave(torch.arange(experts), torch.tensor(rows))[:, None]
    ids = ids.to(getattr(torch, case.get("ids", "int32")))
    if case.get("skew"):
        ids[:, 0], ids[:, 1] = 0, 3
        ids[0, 1] = 2
    if case.get("masked") == "all":
        ids[:] = -1
    elif case.get("masked") == "wide":  # experts of the layer in their low 32 bits
        ids[::2, 0], ids[1::3, 1] = 2**32 + 1, -(2**32)
    elif case.get("masked"):
        ids[::2, 0], ids[1::3, 1], ids[4] = -1, experts + 3, -1
    weights = torch.rand(tokens, top_k, generator=g)
    if device != "cpu":
        x = x.to(device) if not case.get("strided") else torch.cat((x, x), -1).to(device)[:, :hidden]
    return x, w, weights.to(device), ids.to(device)


def run_cases() -> dict:
    import torch
    from e2m1_k32 import fused_experts, gemm, moe
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

    class Widths:
        """``_tile``, and the columns that each block of rows was computed with."""

        tile, seen = gemm._tile, {}

        def __call__(self, *args):
            given = dict(zip(self.tile.arg_names, args, strict=True))
            extra, block_m = (getattr(given[name], "value", given[name]) for name in ("EXTRA", "BLOCK_M"))
            self.seen[int(given["first"].handle.data[0])] = block_m + extra
            return self.tile(*args)

    moe.quantize_rows = quantize_rows
    gemm._tile = Widths()
    torch.set_num_threads(1)
    results = {}
    for number, (name, case) in enumerate(CASES.items()):
        x, w, weights, ids = make_case(case, torch.Generator().manual_seed(number))
        for fp8 in (False,) if case.get("ahead") else (False, True):
            tile = Tile(64, 128, 4, 2, ahead=case.get("ahead", False))
            tiles = MoeTiles(case.get("block", 16), tile, tile)
            Widths.seen.clear()
            out = torch.full(x.shape, float("nan"), dtype=torch.bfloat16)
            fused_experts(x, w, weights, ids, fp8=fp8, out=out, tiles=tiles)
            ref = moe_reference(x, w, weights, ids, fp8=fp8, rounded=truncate_bf16)
            results[f"{name}-{'fp8' if fp8 else 'w4a16'}"] = {
                "error": relative_error(out, ref),
                "finite": bool(out.isfinite().all()),
                "norm": float(ref.norm()),
                "widths": [width for _, width in sorted(Widths.seen.items())],
            }
    return results


def run_far() -> dict:
    """Offsets beyond 2^31, in memory that is never touched elsewhere: what far operands give against near ones."""
    import numpy as np
    import torch
    from e2m1_k32 import quantize, routing
    from e2m1_k32.moe import _gemm
    from e2m1_k32.reference import random_experts
    from e2m1_k32.tiles import Tile

    def zeros(*shape, dtype=torch.uint8):
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * size), np.uint8)).view(dtype)

    def apart(x):
        """``x`` [3, K] with 2^30 elements from row to row."""
        rows = zeros(2**31 + x.shape[1], dtype=x.dtype).as_strided(x.shape, (2**30, 1))
        return rows.copy_(x)

    g = torch.Generator().manual_seed(7)
    near = random_experts(2, 128, 128, "cpu", g)
    weights = (near.w2, near.w2_scale, near.w2_global)
    experts = 2**31 // near.w2[0].nbytes + 2
    far = [zeros(experts, *t.shape[1:], dtype=t.dtype) for t in weights]
    for a, b in zip(far, weights, strict=True):
        a[-2:] = b
    x = torch.randn(3, 128, generator=g).bfloat16()
    x_far, ones, result = apart(x), torch.ones(3), {}
    ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    for m, ahead, fp8 in ((16, False, False), (16, False, True), (256, True, False)):
        near_routes, _ = routing.group_routes(ids, 2, m)
        far_routes = SimpleNamespace(**vars(near_routes))
        far_routes.expert_ids = near_routes.expert_ids + (experts - 2)
        a, scale = (x.to(torch.float8_e4m3fn), ones) if fp8 else (x, None)
        a_far = apart(a.view(torch.uint8)).view(a.dtype) if fp8 else x_far
        out, out_far = torch.zeros(3, 128, dtype=x.dtype), apart(torch.zeros(3, 128, dtype=x.dtype))
        tile = Tile(64, 128, 4, 2, ahead=ahead)
        _gemm(a, scale, *weights, out, ones, near_routes, 3, 1, False, tile)
        _gemm(a_far, scale, *far, out_far, ones, far_routes, 3, 1, False, tile)
        result[f"gemm m{m} fp8 {fp8}"] = bool(torch.equal(out, out_far) and out.any(-1).all())
    result["permute"] = bool(torch.equal(routing.permute_activations(x), routing.permute_activations(x_far)))
    small, _ = (routing.group_routes(ids, 2, 16, t)[1] for t in (x_far, x))
    result["prepare"] = bool(torch.equal(small, routing.permute_activations(x)))
    result["quantize"] = all(map(torch.equal, quantize.quantize_rows(x)[1:], quantize.quantize_rows(x_far)[1:]))
    rows = zeros(2**31 + 128, dtype=x.dtype)
    wide = rows.as_strided((3, 128), (2**30, 1))
    routing.permute_kernel[(3, 1)](x_far, rows, 2**30, 2**30, BLOCK=128, DECODE=False)
    result["permute out"] = bool(torch.equal(wide, routing.permute_activations(x)))
    total = zeros(2**31 + 128, dtype=x.dtype)
    routing.sum_routes_kernel[(3, 1)](x_far, ids, total, 2, 2**30, 2**30, TOP_K=1, BLOCK=128)
    result["sum"] = bool(torch.equal(total.as_strided((3, 128), (2**30, 1)), x))
    return result


def run_quantizer() -> dict:
    """Scales of a plain, a zero and a NaN row (the interpreter stores E4M3 by truncation: scales only)."""
    import torch
    from e2m1_k32.quantize import quantize_rows

    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(8)).bfloat16()
    x[1] = 0
    x[2, 200] = float("nan")
    scale = quantize_rows(x)[1].tolist()
    return {
        "plain": scale[0] == float(x[0].abs().max().float() / 448.0),
        "zero": scale[1] == 1.0,
        "nan": scale[2] != scale[2],
    }


@pytest.fixture(scope="module")
def results():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PACKAGE_DIR)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name, case in CASES.items() for path in ("w4a16", "fp8")[: 1 if case.get("ahead") else 2]],
)
def test_matches_float64(results, name, path):
    result = results[f"{name}-{path}"]
    assert result["finite"], "an output element was never written or is not finite"
    assert result["error"] <= BOUND, result
    if name not in ("all_masked", "zero_tokens"):
        assert result["norm"] > 0


def test_blocks_compute_the_narrowest_width_that_holds_their_rows(results):
    for path in ("w4a16", "fp8"):
        assert results[f"narrow_tail-{path}"]["widths"] == [16, 32, 64]
    assert results["three_quarters-w4a16"]["widths"] == [128, 96]
    assert results["three_quarters-fp8"]["widths"] == [128, 128]
    assert results["ahead-w4a16"]["widths"] == [64, 96, 96, 128, 128, 192, 192, 256, 256]


@pytest.mark.parametrize("what", ["far", "quantizer"])
def test_far_offsets_and_the_quantiser(results, what):
    assert not [name for name, good in results[what].items() if not good]


if __name__ == "__main__":
    quantizer, far = run_quantizer(), run_far()  # before run_cases replaces the quantiser
    json.dump(run_cases() | {"far": far, "quantizer": quantizer}, sys.stdout)
