"""One MoE layer on E2M1-K32 weights: route, gate-up GEMM + SiLU, down GEMM, sum over routes.

Two paths over the same weights:

* W4A16: BF16 activations; every weight is exact in BF16 (an E2M1 value times an E4M3 scale has at most
  six significant bits), products accumulate in FP32.  Decode, CUDA graphs, the default.
* FP8: activations quantised to E4M3 with one scale per row, FP8 tensor-core operands on both sides, the
  K32 scales applied in FP32 to each partial sum.  For large eager batches, where it wins.

No split-K and no floating-point atomics: the same input gives the same bits on every run.
"""

import functools
import os

import torch

from .gemm import grouped_gemm_ahead_kernel, grouped_gemm_kernel
from .layout import K_ALIGN, E2M1Experts
from .quantize import quantize_rows
from .routing import Routing, group_routes, sum_routes
from .tiles import DecodeTile, MoeTiles, Tile, pick_tiles

# K step of the decode kernel, imported late: Triton's interpreter has no Gluon (and no inline PTX).
DECODE_K = 256
USE_ASM = os.environ.get("TRITON_INTERPRET", "0") != "1"


@functools.cache
def _arch(device: torch.device) -> int:
    """Compute capability as 10 * major + minor (90 on a CPU, under the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    out: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    num_routes: int,
    top_k: int,
    gated: bool,
    tile: Tile | DecodeTile,
) -> None:
    fp8 = a_scale is not None
    n, k = weight.shape[1], weight.shape[2] * 2
    if isinstance(tile, DecodeTile):
        from .decode import decode_gemm_kernel

        decode_gemm_kernel[(routing.num_blocks * (n // tile.n),)](
            a, weight, scale.view(torch.uint8), global_scale, out, topk_weights,
            routing.sorted_ids, routing.expert_ids, routing.num_post_pad,
            num_routes, a.stride(0), out.stride(0),
            N=n, K=k, TOP_K=top_k, GATED=gated, BLOCK_M=routing.block_m, BLOCK_N=tile.n,
            num_warps=tile.warps,
        )  # fmt: skip
        return
    block_n = tile.n if n % tile.n == 0 else K_ALIGN
    block_k = tile.k if k % tile.k == 0 else K_ALIGN
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.regs:
        options["maxnreg"] = tile.regs
    kernel = grouped_gemm_ahead_kernel if tile.ahead else grouped_gemm_kernel
    kernel[(routing.num_blocks * (n // block_n),)](
        a, a_scale if fp8 else global_scale, weight, scale.view(torch.uint8), global_scale, out, topk_weights,
        routing.sorted_ids, routing.expert_ids, routing.num_post_pad,
        num_routes, a.stride(0), out.stride(0),
        N=n, K=k, TOP_K=top_k, FP8=fp8, GATED=gated, PERMUTED=gated and not fp8,
        BLOCK_M=routing.block_m, BLOCK_N=block_n, BLOCK_K=block_k, USE_ASM=USE_ASM, **options,
    )  # fmt: skip


def _check(
    x: torch.Tensor,
    experts: E2M1Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != experts.hidden_size or x.stride(1) != 1:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)}, expected torch.bfloat16 [tokens, {experts.hidden_size}] with unit "
            "column stride."
        )
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2 or not topk_ids.is_contiguous():
        raise ValueError(
            f"topk_ids is {topk_ids.dtype} {tuple(topk_ids.shape)}, expected contiguous int32 or int64 [tokens, top_k]."
        )
    if topk_ids.shape[0] != x.shape[0] or topk_weights.shape != topk_ids.shape or not topk_weights.is_contiguous():
        raise ValueError(
            f"topk_weights {tuple(topk_weights.shape)} and topk_ids {tuple(topk_ids.shape)} must both be contiguous "
            f"[{x.shape[0]}, top_k]."
        )
    if topk_weights.dtype != torch.float32:
        raise ValueError(f"topk_weights is {topk_weights.dtype}, expected torch.float32.")
    # The kernels write whole rows of it without looking at strides.
    if out is not None and (out.dtype != torch.bfloat16 or out.shape != x.shape or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, expected contiguous torch.bfloat16 {tuple(x.shape)}.")
    for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids), ("out", out), ("w13", experts.w13)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, and x on {x.device}.")


def fused_experts(
    x: torch.Tensor,
    experts: E2M1Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    fp8: bool = False,
    out: torch.Tensor | None = None,
    tiles: MoeTiles | None = None,
) -> torch.Tensor:
    """``out[t] = sum_k topk_weights[t, k] * down_e(silu(gate_e(x[t])) * up_e(x[t]))``, e = topk_ids[t, k].

    x             bfloat16 [T, H]
    topk_weights  float32  [T, top_k]
    topk_ids      int32 or int64 [T, top_k]; ids outside [0, E) are masked routes and add nothing
    fp8           quantise the activations of both GEMMs to E4M3 per row
    tiles         instead of ``pick_tiles``' choice
    returns       bfloat16 [T, H] (``out`` if given)

    Roundings: SiLU(gate) * up once to BF16, each weighted route once to BF16, the sum once to BF16; FP32 between.
    ``out`` is contiguous. Raises ValueError, naming the tensor, for a wrong dtype, shape, layout or device.
    """
    _check(x, experts, topk_weights, topk_ids, out)
    tokens, top_k = topk_ids.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if tokens == 0:
        return out
    routes = tokens * top_k
    if routes == 0:
        return out.zero_()
    decode = USE_ASM and not (fp8 or experts.hidden_size % DECODE_K or experts.intermediate_size % DECODE_K)
    if tiles is None:
        tiles = pick_tiles(routes, experts.global_experts or experts.num_experts, fp8, decode, _arch(x.device))
    elif tiles.decode and not decode:
        raise ValueError(
            f"tiles are the decode kernel's: it is W4A16, for hidden and intermediate sizes in multiples of {DECODE_K}."
        )
    routing, xp = group_routes(topk_ids, experts.num_experts, tiles.m, None if fp8 else x, tiles.decode)
    h = torch.empty((routes, experts.intermediate_size), dtype=torch.bfloat16, device=x.device)
    y = torch.empty((routes, experts.hidden_size), dtype=torch.bfloat16, device=x.device)
    w = experts
    a, a_scale = quantize_rows(x) if fp8 else (xp, None)
    _gemm(
        a, a_scale, w.w13, w.w13_scale, w.w13_global, h, topk_weights, routing, routes, top_k, True, tiles.up
    )  # fmt: skip
    b, b_scale = quantize_rows(h) if fp8 else (h, None)
    _gemm(b, b_scale, w.w2, w.w2_scale, w.w2_global, y, topk_weights, routing, routes, 1, False, tiles.down)
    sum_routes(y, topk_ids, experts.num_experts, out)
    return out
