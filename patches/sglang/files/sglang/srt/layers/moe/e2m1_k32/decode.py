"""W4A16 grouped GEMM for few rows per expert (Gluon, sm_90 and sm_120): weights go from memory to registers.

With one or two rows per expert the layer is a stream of weights, and the limit is how many instructions a
byte costs.  Here every lane loads whole 16-byte scale groups straight into the register order of
mma.m16n8k16: no shared memory, no barrier, no descriptor arithmetic.  A row's quad of lanes covers 64 bytes,
twice per step; reading 64 of every 128 bytes at a time reaches only two thirds of the memory bandwidth, so the
loads ask the L2 for the whole 128 bytes.

Activations are stored in ``DECODE_ORDER`` (layout.py): inside every 8 elements 0 4 1 5 2 6 3 7, so that a
lane's pairs (n, n + 4) of one weight word meet adjacent activations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .gemm import DEQUANT_BF16, SCALE_BF16

# Weights are read once: keep them out of the L1, which holds the activations.
_LOAD_GROUP = gl.constexpr("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];")


@gluon.constexpr_function
def _row_bases(block_n, warps):
    """How mma.m16n8k16 deals ``block_n`` rows: register bases (beside row 8), lane bases, warp bases."""
    row, warp, regs = 16, [], [8]
    for _ in range(warps.bit_length() - 1):
        warp.append(row)
        row *= 2
    while row < block_n:
        regs.append(row)
        row *= 2
    return regs, [1, 2, 4], warp


@gluon.constexpr_function
def _rows(block_n, warps, column_regs, column_lanes, width):
    """Layout [block_n, width]: rows as the matrix instruction deals them, columns as given."""
    regs, lanes, warp = _row_bases(block_n, warps)
    return gl.DistributedLinearLayout(
        [[0, c] for c in column_regs] + [[r, 0] for r in regs],
        [[0, c] for c in column_lanes] + [[r, 0] for r in lanes],
        [[r, 0] for r in warp],
        [],
        [block_n, width],
    )


@gluon.constexpr_function
def _scales(block_n, warps):
    """Layout [block_n, 2, 4] (rows, blocks of 128, scale in the block): a quad shares a word, lane t its byte t."""
    regs, lanes, warp = _row_bases(block_n, warps)
    return gl.DistributedLinearLayout(
        [[0, 1, 0]] + [[r, 0, 0] for r in regs],
        [[0, 0, 1], [0, 0, 2]] + [[r, 0, 0] for r in lanes],
        [[r, 0, 0] for r in warp],
        [],
        [block_n, 2, 4],
    )


@gluon.constexpr_function
def _tokens(warps, block_m):
    """Layout [block_m, 256] of the activations: a lane owns 32 contiguous elements of a 128 block, every warp all."""
    regs = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 128]]
    row = 8
    while row < block_m:
        regs.append([row, 0])
        row *= 2
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 0]] * (warps.bit_length() - 1), [], [block_m, 256])


@gluon.jit
def _load_words(ptrs, BLOCK_N: gl.constexpr, Q: gl.constexpr):
    """int64 addresses [BLOCK_N, 8] of 16-byte scale groups -> int32 words [BLOCK_N, 32] in layout Q."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _LOAD_GROUP, "=r,=r,=r,=r,l", [ptrs], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape(BLOCK_N, 32)
    return gl.convert_layout(words, Q, assert_trivial=True)


@gluon.jit
def _weights(q, s, BLOCK_N: gl.constexpr, Q: gl.constexpr, A: gl.constexpr):
    """Words [BLOCK_N, 32] and E4M3 bytes [BLOCK_N, 8] -> BF16 [BLOCK_N, 256] as left operand, value * 2^-9."""
    s = gl.inline_asm_elementwise(SCALE_BF16, "=r,r", [s], dtype=gl.int32, is_pure=True, pack=1)
    s = gl.join(s, s)  # one scale serves the four words of its group
    s = gl.join(s, s).reshape(BLOCK_N, 32)
    s = gl.convert_layout(s, Q, assert_trivial=True)
    n0, n1, n2, n3, n4, n5, n6, n7 = gl.inline_asm_elementwise(
        DEQUANT_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [q, s], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=1
    )
    lo = gl.join(gl.join(n0, n4), gl.join(n1, n5))
    hi = gl.join(gl.join(n2, n6), gl.join(n3, n7))
    # dims [rows, block, t, w, half, pair & 1, pair >> 1] -> K position bits block, w, pair, t, half
    x = gl.join(lo, hi).reshape(BLOCK_N, 2, 4, 4, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4).reshape(BLOCK_N, 256)
    return gl.convert_layout(x, A, assert_trivial=True)


@gluon.jit
def _weight_rows(rows, pid_n, N: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weight row of each tile row.  GATED: 16 j + 8 h + g is gate (h = 0) or up (h = 1) of stored position 8 j + g,
    which holds element 8 j + (g >> 1) + 4 (g & 1) of the intermediate row (DECODE_ORDER)."""
    if GATED:
        element = pid_n * (BLOCK_N // 2) + rows // 16 * 8 + rows % 8 // 2 + rows % 2 * 4
        result = element + rows // 8 % 2 * (N // 2)
    else:
        result = pid_n * BLOCK_N + rows
    return result


@gluon.jit(do_not_specialize=["num_valid"])
def decode_gemm_kernel(
    a_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr, expert_ids_ptr, num_post_pad_ptr,
    num_valid, stride_am, stride_cm,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, GATED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """As ``grouped_gemm_kernel`` (W4A16), K a multiple of 256; GATED stores its outputs in ``DECODE_ORDER``."""
    gl.static_assert(N % BLOCK_N == 0 and K % 256 == 0)
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    Q: gl.constexpr = _rows(BLOCK_N, WARPS, [1, 2, 16], [4, 8], 32)
    GROUPS: gl.constexpr = _rows(BLOCK_N, WARPS, [4], [1, 2], 8)
    S: gl.constexpr = _scales(BLOCK_N, WARPS)
    X: gl.constexpr = _tokens(WARPS, BLOCK_M)

    pid = gl.program_id(0)
    num_n: gl.constexpr = N // BLOCK_N
    pid_m = pid // num_n
    pid_n = pid % num_n
    if pid_m * BLOCK_M >= gl.load(num_post_pad_ptr):
        return
    e = gl.load(expert_ids_ptr + pid_m).to(gl.int64)
    if e < 0:
        return

    rows = _weight_rows(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, GROUPS)), pid_n, N, GATED, BLOCK_N)
    groups = gl.arange(0, 8, layout=gl.SliceLayout(0, GROUPS))
    w_ptrs = w_ptr + e * N * (K // 2) + gl.expand_dims(rows, 1) * (K // 2) + gl.expand_dims(groups, 0) * 16
    w_ptrs = w_ptrs.to(gl.int64, bitcast=True)

    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, gl.SliceLayout(2, S)))
    rows = _weight_rows(rows, pid_n, N, GATED, BLOCK_N)
    blocks = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))
    s_ptrs = (ws_ptr + e * N * (K // 32)).to(gl.pointer_type(gl.int32), bitcast=True)
    s_ptrs = s_ptrs + gl.expand_dims(rows, 1) * (K // 128) + gl.expand_dims(blocks, 0)
    shift = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, S))) * 8
    shift = gl.expand_dims(gl.expand_dims(shift, 0), 1)

    ids = gl.load(sorted_ids_ptr + pid_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, X)))
    # Padding columns repeat the block's first row, which is always valid: their results are not stored, and
    # equal addresses cost less than zeroing registers.
    ids = gl.where(ids < num_valid, ids, gl.load(sorted_ids_ptr + pid_m * BLOCK_M))
    columns = gl.arange(0, 256, layout=gl.SliceLayout(0, X))
    a_ptrs = a_ptr + gl.expand_dims((ids // TOP_K).to(gl.int64) * stride_am, 1) + gl.expand_dims(columns, 0)

    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    q = _load_words(w_ptrs, BLOCK_N, Q)
    s = gl.load(s_ptrs)
    for k in range(0, K // 256):
        x = gl.load(a_ptrs + k * 256)
        # The next step's weights are in flight while this one is unpacked; the last step loads itself again.
        ahead = gl.minimum(k + 1, K // 256 - 1)
        q_next = _load_words(w_ptrs + ahead * 128, BLOCK_N, Q)
        s_next = gl.load(s_ptrs + ahead * 2)
        # element bits block, t, w, pair, half -> position bits block, w, pair, t, half
        b = x.reshape(BLOCK_M, 2, 4, 4, 4, 2).permute(1, 3, 4, 2, 5, 0).reshape(256, BLOCK_M)
        b = gl.convert_layout(b, B, assert_trivial=True)
        scale = (gl.expand_dims(s, 2).broadcast_to(BLOCK_N, 2, 4) >> shift) & 0xFF
        acc = mma_v2(_weights(q, scale.reshape(BLOCK_N, 8), BLOCK_N, Q, A), b, acc)
        q = q_next
        s = s_next

    acc = acc * (gl.load(wg_ptr + e) * 512.0)  # 2^9 of the dequantisation, exact
    if GATED:
        acc = acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).reshape(BLOCK_N // 2, BLOCK_M, 2)
        gate, up = gl.split(acc)
        acc = gate / (1.0 + gl.exp(-gate)) * up
        OUT: gl.constexpr = acc.type.layout
        cols = pid_n * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(1, OUT))
        ids = gl.load(sorted_ids_ptr + pid_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT)))
    else:
        cols = pid_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MMA))
        ids = gl.load(sorted_ids_ptr + pid_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA)))
        weight = gl.load(topk_w_ptr + ids, mask=ids < num_valid, other=0.0).to(gl.float32)
        acc = acc * gl.expand_dims(weight, 0)
    c_ptrs = c_ptr + gl.expand_dims(cols, 1) + gl.expand_dims(ids.to(gl.int64) * stride_cm, 0)
    gl.store(c_ptrs, acc.to(gl.bfloat16), mask=gl.expand_dims(ids < num_valid, 0))
