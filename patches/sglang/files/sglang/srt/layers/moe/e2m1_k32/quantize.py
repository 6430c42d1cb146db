"""Row quantiser for the FP8 path (Triton): BF16 rows -> E4M3 with one FP32 scale per row."""

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_rows_kernel(x_ptr, q_ptr, scale_ptr, K, stride_x, BLOCK: tl.constexpr):
    """One row per program: scale = amax / 448 (1 for a zero row, NaN if an element is), stored evens-first inside
    every 32 (layout.py)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < K, other=0.0).to(tl.float32)
    amax = tl.reduce(tl.abs(x), 0, _max_or_nan)
    scale = tl.where(amax == 0.0, 1.0, amax / 448.0)
    # The clamp absorbs the rounding of amax / scale; E4M3 has no infinity to overflow to.
    q = tl.minimum(tl.maximum(x / scale, -448.0), 448.0).to(tl.float8e4nv)
    q = q.reshape(BLOCK // 32, 16, 2).permute(0, 2, 1).reshape(BLOCK)
    tl.store(q_ptr + row * K + offs, q, mask=offs < K)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 ``x`` [T, K] -> (float8_e4m3fn [T, K] in ``FP8_ORDER``, float32 [T]); value = q * scale[row].

    A NaN makes its whole row NaN, as every output of the GEMM that reads the row would be."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        k = x.shape[1]
        block = triton.next_power_of_2(k)
        quantize_rows_kernel[(x.shape[0],)](
            x, q, scale, k, x.stride(0), BLOCK=block, num_warps=max(1, min(8, block // 512))
        )
    return q, scale
