"""Grouped GEMMs over E2M1 weights with E4M3 scales per 32 (Triton, sm_90 and sm_120).

Weights are the left matrix operand: the accumulator is ``[BLOCK_N, BLOCK_M]``.  wgmma then takes the
dequantised weights from registers, so nothing is written back to shared memory, and the token side
may be as narrow as 16 columns.  Both kernels read the checkpoint's own bytes:

    w   uint8 [E, N, K/2]    low nibble = even k, high nibble = odd k
    ws  uint8 [E, N, K/32]   raw E4M3 bits
    wg  float32 [E]          global scale of the expert

The matrix instructions want each thread's weights as whole 32-bit words.  Instead of moving weights,
the *activations* are stored in the matching K order (see ``layout.py``): ``W4A16_ORDER`` inside every
128 for BF16, evens-first inside every 32 for FP8.  K is summed over, so the result is the same sum.

Routing follows SGLang's convention: ``sorted_ids`` holds token-expert rows grouped by expert and padded
with ``num_valid`` to whole blocks, ``expert_ids`` names the expert of each block (-1: none).
"""

import triton
import triton.language as tl

# One 32-bit word of packed weights (8 codes n0..n7 along K) and a BF16x2 scale -> 4 BF16x2 registers
# (n0,n4) (n1,n5) (n2,n6) (n3,n7).  An E2M1 code s|ee|m at s|000000ee|m000000 reads as BF16 value * 2^-126,
# the subnormal 0.5 included.  x * 0x1040 == x << 12 | x << 6 for a 4-bit field: one multiply on the FMA
# pipe places sign and magnitude at once, because shifts and LOP3 share the narrower ALU pipe.
DEQUANT_BF16 = tl.constexpr("""
{
.reg .b32 a, b, c, d, h;
shr.u32 h, $8, 8;
and.b32 a, $8, 0x000F000F;
and.b32 b, $8, 0x00F000F0;
and.b32 c, h, 0x000F000F;
and.b32 d, h, 0x00F000F0;
mul.lo.u32 a, a, 0x1040;
mul.lo.u32 b, b, 0x104;
mul.lo.u32 c, c, 0x1040;
mul.lo.u32 d, d, 0x104;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 a, a, $9;
mul.rn.bf16x2 b, b, $9;
mul.rn.bf16x2 c, c, $9;
mul.rn.bf16x2 d, d, $9;
mov.b32 {$0, $4}, a;
mov.b32 {$1, $5}, b;
mov.b32 {$2, $6}, c;
mov.b32 {$3, $7}, d;
}
""")

# E4M3 byte (sign 0) -> scale * 2^117 as BF16x2.  byte << 4 read as BF16 is scale * 2^-120, subnormals
# included; two exact power-of-two multiplies lift it, so that weight * scale lands at value * 2^-9, clear
# of BF16's subnormals.
SCALE_BF16 = tl.constexpr("""
{
.reg .b32 a, k, l;
mul.lo.u32 a, $1, 0x00100010;
mov.b32 k, 0x7F007F00;
mov.b32 l, 0x76807680;
mul.rn.bf16x2 a, a, k;
mul.rn.bf16x2 $0, a, l;
}
""")

# 4 packed bytes -> 4 + 4 E4M3 bytes (low, high nibbles).  s|ee|m at s|00ee|m00 reads as E4M3 value * 2^-6
# exactly, the subnormal 0.5 included.  lop3 0xEA is (x & y) | z.
_UNPACK_E4M3 = tl.constexpr("""
{
.reg .b32 h, a, b;
shr.u32 h, $2, 4;
shl.b32 a, $2, 4;
shl.b32 b, $2, 2;
and.b32 a, a, 0x80808080;
lop3.b32 $0, b, 0x1C1C1C1C, a, 0xEA;
shl.b32 b, h, 2;
and.b32 a, $2, 0x80808080;
lop3.b32 $1, b, 0x1C1C1C1C, a, 0xEA;
}
""")


@triton.jit
def _code_value(code):
    """E2M1 code (int32 0..15) -> FP32, plain operations (the interpreter has no inline PTX)."""
    m = code & 7
    x = tl.where(m < 4, m.to(tl.float32) * 0.5, tl.where(m < 6, m.to(tl.float32) - 2.0, m.to(tl.float32) * 2.0 - 8.0))
    return tl.where(code >= 8, -x, x)


@triton.jit
def _dequant_bf16(q, s8, GROUPS: tl.constexpr, ROWS: tl.constexpr, USE_ASM: tl.constexpr):
    """int32 words [ROWS, 4 * GROUPS], E4M3 bytes [ROWS, GROUPS] -> BF16 codes n0..n7 of each word, value * 2^-9."""
    if USE_ASM:
        s = tl.inline_asm_elementwise(SCALE_BF16, "=r,r", [s8.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        s = s[:, :, None].broadcast_to(ROWS, GROUPS, 4).reshape(ROWS, 4 * GROUPS)
        n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
            DEQUANT_BF16,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [q, s],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        s = s8.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 0.001953125
        s = s[:, :, None].broadcast_to(ROWS, GROUPS, 4).reshape(ROWS, 4 * GROUPS)
        n0 = (_code_value(q & 15) * s).to(tl.bfloat16)
        n1 = (_code_value((q >> 4) & 15) * s).to(tl.bfloat16)
        n2 = (_code_value((q >> 8) & 15) * s).to(tl.bfloat16)
        n3 = (_code_value((q >> 12) & 15) * s).to(tl.bfloat16)
        n4 = (_code_value((q >> 16) & 15) * s).to(tl.bfloat16)
        n5 = (_code_value((q >> 20) & 15) * s).to(tl.bfloat16)
        n6 = (_code_value((q >> 24) & 15) * s).to(tl.bfloat16)
        n7 = (_code_value((q >> 28) & 15) * s).to(tl.bfloat16)
    return n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _unpack_e4m3(w, USE_ASM: tl.constexpr):
    """uint8 [..] -> two E4M3 tensors (low, high nibbles), value * 2^-6."""
    if USE_ASM:
        lo, hi = tl.inline_asm_elementwise(
            _UNPACK_E4M3, "=r,=r,r", [w], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        lo = ((w & 0x08) << 4) | ((w & 0x07) << 2)
        hi = (w & 0x80) | ((w & 0x70) >> 2)
    return lo.to(tl.float8e4nv, bitcast=True), hi.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _w4a16_weights(q, s8, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr):
    """One K step of weights, [BLOCK_N, BLOCK_K], in the order of the stored activations, value * 2^-9."""
    G: tl.constexpr = BLOCK_K // 128
    n0, n1, n2, n3, n4, n5, n6, n7 = _dequant_bf16(q, s8, 4 * G, BLOCK_N, USE_ASM)
    lo = tl.join(tl.join(n0, n4), tl.join(n1, n5))
    hi = tl.join(tl.join(n2, n6), tl.join(n3, n7))
    # dims [rows, block, t, w, half, pair & 1, pair >> 1] -> K position bits w, pair, t, half (layout.py)
    x = tl.join(lo, hi).reshape(BLOCK_N, G, 4, 4, 2, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    return x.reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _dot(x, a, acc, USE_ASM: tl.constexpr):
    if not USE_ASM:  # the interpreter multiplies BF16 as integers
        x = x.to(tl.float32)
        a = a.to(tl.float32)
    return tl.dot(x, a, acc=acc)


@triton.jit
def _w4a16_loop(
    a_ptrs, amask, w_ptrs, s_ptrs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=amask, other=0.0)
        acc = _dot(_w4a16_weights(tl.load(w_ptrs), tl.load(s_ptrs), BLOCK_N, BLOCK_K, USE_ASM), a, acc, USE_ASM)
        w_ptrs += BLOCK_K // 8
        s_ptrs += BLOCK_K // 32
        a_ptrs += BLOCK_K
    return acc * 512.0  # 2^9, exact


@triton.jit
def _w4a16_pair_loop(
    a_ptrs, amask, b_ptrs, bmask, w_ptrs, s_ptrs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (a) and BLOCK_M / 2 more (b): three quarters of a block with the weights unpacked once."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    bcc = tl.zeros((BLOCK_N, BLOCK_M // 2), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=amask, other=0.0)
        b = tl.load(b_ptrs, mask=bmask, other=0.0)
        x = _w4a16_weights(tl.load(w_ptrs), tl.load(s_ptrs), BLOCK_N, BLOCK_K, USE_ASM)
        acc = _dot(x, a, acc, USE_ASM)
        bcc = _dot(x, b, bcc, USE_ASM)
        w_ptrs += BLOCK_K // 8
        s_ptrs += BLOCK_K // 32
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    return acc * 512.0, bcc * 512.0  # 2^9, exact


@triton.jit
def _w4a16_ahead_loop(
    a_ptrs, amask, b_ptrs, bmask, w_ptrs, s_ptrs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, EXTRA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_ASM: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (a) and EXTRA more (b; 0: none) with the weights unpacked once.

    Scales are too narrow for asynchronous copies: a load at its use costs its whole latency in every step, unless
    another block on the same SM fills the gap.  So they are read a step ahead, for registers that tiles with two
    blocks per SM (capped registers) do not have.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    bcc = tl.zeros((BLOCK_N, EXTRA if EXTRA else 16), dtype=tl.float32)
    s8 = tl.load(s_ptrs)
    for k in range(BLOCK_K, K + BLOCK_K, BLOCK_K):
        q = tl.load(w_ptrs)
        a = tl.load(a_ptrs, mask=amask, other=0.0)
        s_ptrs += BLOCK_K // 32
        ahead = tl.load(s_ptrs, mask=k < K, other=0)
        x = _w4a16_weights(q, s8, BLOCK_N, BLOCK_K, USE_ASM)
        acc = _dot(x, a, acc, USE_ASM)
        if EXTRA > 0:
            b = tl.load(b_ptrs, mask=bmask, other=0.0)
            bcc = _dot(x, b, bcc, USE_ASM)
            b_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 8
        a_ptrs += BLOCK_K
        s8 = ahead
    return acc * 512.0, bcc * 512.0  # 2^9, exact


@triton.jit
def _k32_step(acc, w, a, s, BLOCK_N: tl.constexpr, USE_ASM: tl.constexpr):
    lo, hi = _unpack_e4m3(w, USE_ASM)
    x = tl.join(lo, hi).permute(0, 2, 1).reshape(BLOCK_N, 32)
    return acc + tl.dot(x, a) * s.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _fp8_loop(
    a_ptrs, amask, w_ptrs, s_ptrs,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_K == 128, "one 32-bit load holds the four scales of 128 columns")
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in range(0, K, 128):
        w = tl.load(w_ptrs)
        s4 = tl.load(s_ptrs)
        a0 = tl.load(a_ptrs, mask=amask, other=0.0)
        a1 = tl.load(a_ptrs + 32, mask=amask, other=0.0)
        a2 = tl.load(a_ptrs + 64, mask=amask, other=0.0)
        a3 = tl.load(a_ptrs + 96, mask=amask, other=0.0)
        w01, w23 = tl.split(w.reshape(BLOCK_N, 2, 32).permute(0, 2, 1))
        w0, w1 = tl.split(w01.reshape(BLOCK_N, 2, 16).permute(0, 2, 1))
        w2, w3 = tl.split(w23.reshape(BLOCK_N, 2, 16).permute(0, 2, 1))
        acc = _k32_step(acc, w0, a0, s4 & 0xFF, BLOCK_N, USE_ASM)
        acc = _k32_step(acc, w1, a1, (s4 >> 8) & 0xFF, BLOCK_N, USE_ASM)
        acc = _k32_step(acc, w2, a2, (s4 >> 16) & 0xFF, BLOCK_N, USE_ASM)
        acc = _k32_step(acc, w3, a3, (s4 >> 24) & 0xFF, BLOCK_N, USE_ASM)
        w_ptrs += 64
        s_ptrs += 1
        a_ptrs += 128
    return acc * 64.0  # 2^6, exact


@triton.jit
def _weight_rows(pid_n, N: tl.constexpr, GATED: tl.constexpr, PERMUTED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Weight row of each tile row.

    GATED: N = 2 * I weight rows give I outputs silu(gate) * up.  Tile row 16 j + 8 h + g is gate (h = 0) or up
    (h = 1) of output 8 j + g, which is how the matrix instructions deal rows to a thread: the product needs
    no exchange.  PERMUTED: output position p holds element W4A16_ORDER[p], ready for the next GEMM.
    """
    rows = tl.arange(0, BLOCK_N)
    if GATED:
        out = pid_n * (BLOCK_N // 2) + rows // 16 * 8 + rows % 8
        if PERMUTED:
            p = out % 128
            out = out - p + (p // 2 % 4) * 32 + p // 32 * 8 + p // 8 % 4 + p % 2 * 4
        offs_n = out + rows // 8 % 2 * (N // 2)
    else:
        offs_n = pid_n * BLOCK_N + rows
    return offs_n


@triton.jit
def _rows_of(sorted_ids_ptr, first, num_valid, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """Routes ``first..first + BLOCK_M``, which of them are valid, and their activation rows."""
    offs_t = tl.load(sorted_ids_ptr + first + tl.arange(0, BLOCK_M))
    return offs_t, offs_t < num_valid, (offs_t // TOP_K).to(tl.int64)


@triton.jit
def _finish(
    acc, offs_t, tmask, global_scale, c_ptr, topk_w_ptr, pid_n, stride_cm,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Global scale, SiLU or route weight, store."""
    acc = acc * global_scale
    if GATED:
        acc = acc.reshape(BLOCK_N // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).reshape(BLOCK_N // 2, BLOCK_M, 2)
        gate, up = tl.split(acc)
        acc = gate / (1.0 + tl.exp(-gate)) * up
        offs_c = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        acc = acc * tl.load(topk_w_ptr + offs_t, mask=tmask, other=0.0).to(tl.float32)[None, :]
        offs_c = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + offs_c[:, None] + (offs_t.to(tl.int64) * stride_cm)[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=tmask[None, :])


@triton.jit
def _tile(
    a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
    e, first, pid_n, num_valid, stride_am, stride_cm,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr,
    PERMUTED: tl.constexpr, EXTRA: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_N weight rows and BLOCK_M + EXTRA sorted routes of expert ``e``.

    EXTRA: 0, or with AHEAD a smaller power of two, else BLOCK_M / 2.
    """
    offs_t, tmask, row_a = _rows_of(sorted_ids_ptr, first, num_valid, TOP_K, BLOCK_M)
    offs_n = _weight_rows(pid_n, N, GATED, PERMUTED, BLOCK_N)
    offs_k = tl.arange(0, 32 if FP8 else BLOCK_K)[:, None]
    a_ptrs = a_ptr + offs_k + (row_a * stride_am)[None, :]
    w_ptr += e * N * (K // 2)
    ws_ptr += e * N * (K // 32)
    global_scale = tl.load(wg_ptr + e)
    if FP8:
        w_ptrs = w_ptr + offs_n[:, None] * (K // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
        s_ptrs = ws_ptr.to(tl.pointer_type(tl.int32)) + offs_n * (K // 128)
        acc = _fp8_loop(a_ptrs, tmask[None, :], w_ptrs, s_ptrs, K, BLOCK_M, BLOCK_N, BLOCK_K, USE_ASM)
        acc = acc * tl.load(a_scale_ptr + row_a, mask=tmask, other=0.0)[None, :]
    else:
        w_ptrs = w_ptr.to(tl.pointer_type(tl.int32)) + offs_n[:, None] * (K // 8) + tl.arange(0, BLOCK_K // 8)[None, :]
        s_ptrs = ws_ptr + offs_n[:, None] * (K // 32) + tl.arange(0, BLOCK_K // 32)[None, :]
        if EXTRA > 0:
            offs_u, umask, row_b = _rows_of(sorted_ids_ptr, first + BLOCK_M, num_valid, TOP_K, EXTRA)
            b_ptrs = a_ptr + offs_k + (row_b * stride_am)[None, :]
        else:
            umask, b_ptrs = tmask, a_ptrs
        if AHEAD:
            acc, bcc = _w4a16_ahead_loop(
                a_ptrs, tmask[None, :], b_ptrs, umask[None, :], w_ptrs, s_ptrs,
                K, BLOCK_M, EXTRA, BLOCK_N, BLOCK_K, USE_ASM,
            )  # fmt: skip
        elif EXTRA > 0:
            acc, bcc = _w4a16_pair_loop(
                a_ptrs, tmask[None, :], b_ptrs, umask[None, :], w_ptrs, s_ptrs, K, BLOCK_M, BLOCK_N, BLOCK_K, USE_ASM
            )
        else:
            acc = _w4a16_loop(a_ptrs, tmask[None, :], w_ptrs, s_ptrs, K, BLOCK_M, BLOCK_N, BLOCK_K, USE_ASM)
        if EXTRA > 0:
            _finish(bcc, offs_u, umask, global_scale, c_ptr, topk_w_ptr, pid_n, stride_cm, GATED, EXTRA, BLOCK_N)
    _finish(acc, offs_t, tmask, global_scale, c_ptr, topk_w_ptr, pid_n, stride_cm, GATED, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["num_valid"])
def grouped_gemm_kernel(
    a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr,
    sorted_ids_ptr, expert_ids_ptr, num_post_pad_ptr,
    num_valid, stride_am, stride_cm,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of BLOCK_M rows) x (N / BLOCK_N).  A block computes only as many columns as it has rows,
    rounded up to a quarter (at least 16), half, from BLOCK_M = 128 on three quarters (W4A16), or all of BLOCK_M:
    padding launches no matrix instruction."""
    tl.static_assert(N % BLOCK_N == 0 and K % BLOCK_K == 0)
    pid = tl.program_id(0)
    num_n = N // BLOCK_N
    pid_m = pid // num_n
    pid_n = pid % num_n
    first = pid_m * BLOCK_M
    if first >= tl.load(num_post_pad_ptr):
        return
    e = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    if e < 0:
        return
    M2: tl.constexpr = BLOCK_M // 2 if BLOCK_M >= 32 else BLOCK_M
    M4: tl.constexpr = BLOCK_M // 4 if BLOCK_M >= 64 else M2
    M34: tl.constexpr = M2 + M4 if BLOCK_M >= 128 and not FP8 else M2
    if BLOCK_M <= 16:
        _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
              e, first, pid_n, num_valid, stride_am, stride_cm,
              N, K, TOP_K, FP8, GATED, PERMUTED, 0, False, BLOCK_M, BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip
    else:
        # Routes fill a block from its start, so single ids tell which parts are empty.
        if tl.load(sorted_ids_ptr + first + M34) < num_valid:
            _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
                  e, first, pid_n, num_valid, stride_am, stride_cm,
                  N, K, TOP_K, FP8, GATED, PERMUTED, 0, False, BLOCK_M, BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip
        elif M34 > M2 and tl.load(sorted_ids_ptr + first + M2) < num_valid:
            _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
                  e, first, pid_n, num_valid, stride_am, stride_cm,
                  N, K, TOP_K, FP8, GATED, PERMUTED, M34 - M2, False, M2, BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip
        elif M4 < M2 and tl.load(sorted_ids_ptr + first + M4) >= num_valid:
            _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
                  e, first, pid_n, num_valid, stride_am, stride_cm,
                  N, K, TOP_K, FP8, GATED, PERMUTED, 0, False, M4, BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip
        else:
            _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
                  e, first, pid_n, num_valid, stride_am, stride_cm,
                  N, K, TOP_K, FP8, GATED, PERMUTED, 0, False, M2, BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip


@triton.constexpr_function
def _ahead_width(i, part):
    """Width ``i`` that a block of 256 rows may be computed with (-1: their number), in rising order.

    wgmma takes any multiple of 8 columns, Triton's tensors only powers of two: the widths between are two
    accumulators (parts 0 and 1) over the same weights.  Part 2: the rows that the next smaller width still holds.
    """
    widths = ((64, 0), (64, 32), (128, 0), (128, 64), (256, 0))
    if i < 0:
        return len(widths)
    return widths[i][part] if part < 2 else (sum(widths[i - 1]) if i else 0)


@triton.jit(do_not_specialize=["num_valid"])
def grouped_gemm_ahead_kernel(
    a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr,
    sorted_ids_ptr, expert_ids_ptr, num_post_pad_ptr,
    num_valid, stride_am, stride_cm,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr,
    PERMUTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_ASM: tl.constexpr,
):  # fmt: skip
    """``grouped_gemm_kernel`` for many rows per expert: W4A16, BLOCK_M = 256, one block per SM.

    With nothing beside it on its SM a block has to hide its own latencies: scales are read a step ahead, and the
    loads at its start do not wait for each other.  It computes the narrowest ``_ahead_width`` that holds its rows.
    """
    tl.static_assert(BLOCK_M == 256 and not FP8)
    tl.static_assert(N % BLOCK_N == 0 and K % BLOCK_K == 0)
    pid = tl.program_id(0)
    num_n = N // BLOCK_N
    pid_m = pid // num_n
    pid_n = pid % num_n
    first = pid_m * BLOCK_M
    total = tl.load(num_post_pad_ptr)
    e = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    # Routes fill a block from its start, so every 16th id tells how many rows there are.
    probe = tl.load(sorted_ids_ptr + first + tl.arange(0, 16) * 16)
    rows = tl.sum((probe < num_valid).to(tl.int32), 0) * 16
    if first >= total:
        return
    if e < 0:
        return
    for i in tl.static_range(_ahead_width(-1, 0)):
        if (rows > _ahead_width(i, 2)) & (rows <= _ahead_width(i, 0) + _ahead_width(i, 1)):
            _tile(a_ptr, a_scale_ptr, w_ptr, ws_ptr, wg_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr,
                  e, first, pid_n, num_valid, stride_am, stride_cm,
                  N, K, TOP_K, False, GATED, PERMUTED, _ahead_width(i, 1), True, _ahead_width(i, 0),
                  BLOCK_N, BLOCK_K, USE_ASM)  # fmt: skip
