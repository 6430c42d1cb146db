"""Routes grouped by expert, and the final sum over a token's routes (Triton).

A route is one (token, slot) pair, numbered ``token * top_k + slot``.  Routes whose expert id is outside
[0, E) are masked: they get no row and add nothing.  The output follows SGLang's moe_align_block_size
convention, so either producer can feed the GEMMs.  Two routes of one expert may swap places between runs
(atomics); each row's arithmetic is independent of its place, so the results do not change.
"""

import torch
import triton
import triton.language as tl

from .layout import K_ALIGN

SMALL_ROUTES = 1024


@triton.jit
def _permute_row(x_ptr, out_ptr, row, col, K, stride_x, BLOCK: tl.constexpr, DECODE: tl.constexpr):
    offs = col * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < K, other=0.0)
    if DECODE:
        # element bits, high to low: half, pair (2)  ->  position bits: pair (2), half
        x = x.reshape(BLOCK // 8, 2, 4).permute(0, 2, 1).reshape(BLOCK)
    else:
        # element bits, high to low: t (2), w (2), half, pair (2)  ->  position bits: w (2), pair (2), t (2), half
        x = x.reshape(BLOCK // 128, 4, 4, 2, 4).permute(0, 2, 4, 1, 3).reshape(BLOCK)
    tl.store(out_ptr + row * K + offs, x, mask=offs < K)


@triton.jit
def permute_kernel(x_ptr, out_ptr, K, stride_x, BLOCK: tl.constexpr, DECODE: tl.constexpr):
    _permute_row(x_ptr, out_ptr, tl.program_id(0).to(tl.int64), tl.program_id(1), K, stride_x, BLOCK, DECODE)


@triton.jit
def _block_table(counts, experts, expert_ids_ptr, cursor_ptr, num_post_pad_ptr, num_experts, BLOCK_M: tl.constexpr):
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    starts = ends - blocks
    tl.store(num_post_pad_ptr, tl.sum(blocks, 0) * BLOCK_M)
    tl.store(cursor_ptr + experts, starts * BLOCK_M, mask=experts < num_experts)
    for j in range(0, tl.max(blocks, 0)):
        tl.store(expert_ids_ptr + starts + j, experts, mask=j < blocks)


@triton.jit
def _scatter(ids, valid, routes, sorted_ids_ptr, cursor_ptr):
    slot = tl.atomic_add(cursor_ptr + ids, 1, mask=valid, sem="relaxed")
    tl.store(sorted_ids_ptr + slot, routes, mask=valid)


@triton.jit(do_not_specialize=["num_routes", "capacity"])
def prepare_small_kernel(
    topk_ids_ptr, num_routes, num_experts, sorted_ids_ptr, capacity, expert_ids_ptr, num_post_pad_ptr, cursor_ptr,
    x_ptr, xp_ptr, K, stride_x, num_cols,
    ROUTES: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PERMUTE: tl.constexpr,
    DECODE: tl.constexpr,
):  # fmt: skip
    """Program 0 groups the routes (one thread block is enough for decode), the others reorder x: one launch."""
    pid = tl.program_id(0)
    if pid == 0:
        fill = tl.arange(0, 1024)
        for i in range(0, capacity, 1024):
            tl.store(sorted_ids_ptr + i + fill, tl.zeros((1024,), tl.int32) + num_routes, mask=i + fill < capacity)
        routes = tl.arange(0, ROUTES)
        ids = tl.load(topk_ids_ptr + routes, mask=routes < num_routes, other=-1)
        valid = (ids >= 0) & (ids < num_experts)
        ids = tl.where(valid, ids, 0).to(tl.int32)
        counts = tl.histogram(ids, EXPERTS, mask=valid)
        experts = tl.arange(0, EXPERTS)
        _block_table(counts, experts, expert_ids_ptr, cursor_ptr, num_post_pad_ptr, num_experts, BLOCK_M)
        tl.debug_barrier()
        _scatter(ids, valid, routes, sorted_ids_ptr, cursor_ptr)
    elif PERMUTE:
        row = (pid - 1) // num_cols
        _permute_row(x_ptr, xp_ptr, row.to(tl.int64), (pid - 1) % num_cols, K, stride_x, BLOCK, DECODE)


@triton.jit(do_not_specialize=["num_routes", "capacity"])
def count_kernel(
    topk_ids_ptr, num_routes, num_experts, sorted_ids_ptr, capacity, counts_ptr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    for i in range(pid * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        place = i + tl.arange(0, BLOCK)
        tl.store(sorted_ids_ptr + place, tl.zeros((BLOCK,), tl.int32) + num_routes, mask=place < capacity)
    ids = tl.load(topk_ids_ptr + offs, mask=offs < num_routes, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    counts = tl.histogram(tl.where(valid, ids, 0).to(tl.int32), EXPERTS, mask=valid)
    tl.atomic_add(counts_ptr + tl.arange(0, EXPERTS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def offsets_kernel(
    counts_ptr, num_experts, expert_ids_ptr, num_post_pad_ptr, cursor_ptr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts)
    _block_table(counts, experts, expert_ids_ptr, cursor_ptr, num_post_pad_ptr, num_experts, BLOCK_M)


@triton.jit(do_not_specialize=["num_routes"])
def scatter_kernel(topk_ids_ptr, num_routes, num_experts, sorted_ids_ptr, cursor_ptr, BLOCK: tl.constexpr):
    routes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(topk_ids_ptr + routes, mask=routes < num_routes, other=-1)
    valid = (ids >= 0) & (ids < num_experts)
    _scatter(tl.where(valid, ids, 0).to(tl.int32), valid, routes, sorted_ids_ptr, cursor_ptr)


@triton.jit
def sum_routes_kernel(
    y_ptr, topk_ids_ptr, out_ptr, num_experts, H, stride_out, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = sum over valid routes of y[t * TOP_K + k], FP32, in slot order (deterministic)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < H
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        e = tl.load(topk_ids_ptr + row * TOP_K + k)
        live = (e >= 0) & (e < num_experts)
        acc += tl.load(y_ptr + (row * TOP_K + k) * H + cols, mask=mask & live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, acc.to(tl.bfloat16), mask=mask)


class Routing:
    """Buffers of one grouping: ``sorted_ids`` int32 [capacity], ``expert_ids`` int32 [num_blocks],
    ``num_post_pad`` int32 [1]; ``num_blocks`` bounds the blocks of any routing of this size."""

    def __init__(self, num_routes: int, num_experts: int, block_m: int, device: torch.device):
        self.block_m = block_m
        occupied = min(num_routes, num_experts)
        self.num_blocks = occupied + max(0, num_routes - occupied) // block_m
        self.capacity = self.num_blocks * block_m
        # Every part starts at 16 bytes: a pointer of another alignment would compile every kernel once more.
        sizes = [-(-n // 4) * 4 for n in (self.capacity, self.num_blocks, num_experts, 1)]
        parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        self.sorted_ids, self.cursor = parts[0], parts[2]
        self.expert_ids, self.num_post_pad = parts[1][: self.num_blocks], parts[3][:1]


def _columns(k: int) -> int:
    """Largest power of two up to 1024 that divides ``k`` (a multiple of 128): no block is partly idle."""
    return min(1024, k & -k)


def permute_activations(x: torch.Tensor, decode: bool = False) -> torch.Tensor:
    """BF16 ``x`` [T, K] in ``W4A16_ORDER``, or for the decode kernel in ``DECODE_ORDER``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        k = x.shape[1]
        block = _columns(k)
        permute_kernel[(x.shape[0], triton.cdiv(k, block))](
            x, out, k, x.stride(0), BLOCK=block, DECODE=decode, num_warps=4
        )
    return out


def group_routes(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_m: int,
    x: torch.Tensor | None = None,
    decode: bool = False,
) -> tuple[Routing, torch.Tensor | None]:
    """Group the routes of ``topk_ids`` (int32 or int64 [T, top_k]) into blocks of ``block_m`` rows of one expert.

    With ``x`` (BF16 [T, K]) also returns it permuted (``permute_activations``); small batches do both in one launch.
    """
    routes = topk_ids.numel()
    r = Routing(routes, num_experts, block_m, topk_ids.device)
    experts = max(32, triton.next_power_of_2(num_experts))
    if routes <= SMALL_ROUTES:
        if x is None:
            xp, k, stride, cols, block, programs = topk_ids, 0, 0, 1, K_ALIGN, 1
            src = topk_ids
        else:
            k, stride = x.shape[1], x.stride(0)
            block = _columns(k)
            cols = triton.cdiv(k, block)
            src, xp, programs = x, torch.empty(x.shape, dtype=x.dtype, device=x.device), 1 + x.shape[0] * cols
        prepare_small_kernel[(programs,)](
            topk_ids, routes, num_experts, r.sorted_ids, r.capacity, r.expert_ids, r.num_post_pad, r.cursor,
            src, xp, k, stride, cols,
            ROUTES=max(32, triton.next_power_of_2(routes)), EXPERTS=experts, BLOCK_M=block_m, BLOCK=block,
            PERMUTE=x is not None, DECODE=decode, num_warps=4,
        )  # fmt: skip
        return r, (xp if x is not None else None)
    counts = torch.zeros(experts, dtype=torch.int32, device=topk_ids.device)
    grid = (triton.cdiv(routes, 1024),)
    count_kernel[grid](
        topk_ids,
        routes,
        num_experts,
        r.sorted_ids,
        r.capacity,
        counts,
        EXPERTS=experts,
        BLOCK=1024,
        num_warps=4,
    )
    offsets_kernel[(1,)](
        counts,
        num_experts,
        r.expert_ids,
        r.num_post_pad,
        r.cursor,
        EXPERTS=experts,
        BLOCK_M=block_m,
        num_warps=4,
    )
    scatter_kernel[grid](topk_ids, routes, num_experts, r.sorted_ids, r.cursor, BLOCK=1024, num_warps=4)
    return r, (permute_activations(x, decode) if x is not None else None)


def sum_routes(y: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, out: torch.Tensor) -> None:
    """``out`` [T, H] = sum over the valid routes of ``y`` [T * top_k, H] (already weighted)."""
    tokens, h = out.shape
    block = _columns(h)
    sum_routes_kernel[(tokens, triton.cdiv(h, block))](
        y, topk_ids, out, num_experts, h, out.stride(0), TOP_K=topk_ids.shape[1], BLOCK=block, num_warps=4
    )
