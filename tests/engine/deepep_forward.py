"""Forward passes of routed experts through the engine's DeepEP path on CPU ranks, against the checkpoint's tensors.

Real are the layer, its choice of runner, the dispatcher with its metadata, both permutations and the order of tensors
that the runner multiplies. Stand-ins in PyTorch are what needs a GPU: the transport (``tests.deep_ep_stand_in``), the
kernels that quantise, scatter and gather rows, SiLU, and the two grouped GEMMs of DeepGEMM by their documented
contract: FP32 scales per 128 columns of a row and per 128x128 block of a weight, ``m_indices`` or ``masked_m``.
"""

from __future__ import annotations

import types

import torch

from tests.deep_ep_stand_in import quantise

#: Tokens of ranks 0 to 3 in the passes of one case: more than one, none on some ranks, none anywhere.
TOKENS = ((7, 5, 3, 2), (9, 0, 0, 2), (0, 0, 0, 0))
LAYER = 4
TOP_K = 2


def enable() -> None:
    """Let the engine believe that DeepGEMM is there, and give it the kernels of this module."""
    from sglang.kernels.ops.moe import ep_moe_kernels
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.moe_runner import deep_gemm
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.quantization import deepep_admission

    deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    # The tiny checkpoints are narrower than anything that DeepEP's kernels are compiled for.
    deepep_admission.LOW_LATENCY_WIDTHS += (384,)
    deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_contig = grouped_gemm_contiguous
    deep_gemm_wrapper.grouped_gemm_nt_f8f8bf16_masked = grouped_gemm_masked
    deep_gemm_wrapper.get_mn_major_tma_aligned_tensor = lambda scales: scales
    ep_moe_kernels.tma_align_input_scale = lambda scales: scales
    ep_moe_kernels.ep_scatter, ep_moe_kernels.ep_gather = scatter, gather
    fp8_kernel.sglang_per_token_group_quant_fp8 = quantise_rows
    deepep.sglang_per_token_group_quant_fp8 = quantise_rows
    deep_gemm.per_token_group_quant = silu_and_quantise
    deep_gemm._legacy_silu_and_mul = lambda rows, out: out.copy_(silu_and_mul(rows))
    deep_gemm.get_offloader = lambda: types.SimpleNamespace(forbid_copy_engine_usage=True)
    deep_gemm.copy_list_to_gpu_no_ce = lambda counts: torch.tensor(counts, dtype=torch.int32)


def slices() -> list[str]:
    """Over what the engine cuts a batch before routed experts read it, in this process's world."""
    from sglang.srt.layers.layer_boundary import factories
    from sglang.srt.layers.layer_boundary.contracts import BatchVariant

    assert list(factories._active_variants()) == [BatchVariant.ORDINARY]
    contract, *_ = factories._resolve_ffn(BatchVariant.ORDINARY, sparse=True)
    return sorted(axis.name for axis in contract.input.layout.sharded)


def errors(model, source: dict[str, torch.Tensor], rank: int) -> list[float]:
    """Relative error (Frobenius) of the experts of layer ``LAYER`` on this rank, one per entry of ``TOKENS``.

    ``source`` is the whole checkpoint. A rank without tokens reports the size of what it got, which must be 0.
    """
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    experts = model.model.layers[LAYER].mlp.experts
    found = []
    for number, tokens in enumerate(TOKENS):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(tokens[rank], experts.hidden_size, generator=generator).bfloat16()
        logits = torch.randn(tokens[rank], experts.num_experts, generator=generator)
        weights, ids = logits.softmax(1).topk(TOP_K)
        if tokens[rank]:
            ids[-1, -1] = -1  # the engine's mark of a row that is padding
        with torch.no_grad():
            out = experts(hidden_states=x.clone(), topk_output=StandardTopKOutput(weights, ids.int(), logits))
        assert out.shape == x.shape and out.dtype == torch.bfloat16, (out.shape, out.dtype)
        if not tokens[rank]:
            found.append(float(out.numel()))
            continue
        wanted = reference(x, weights, ids, source)
        found.append(float((out.double() - wanted).norm() / wanted.norm()))
    return found


def reference(x, weights, ids, source) -> torch.Tensor:
    """What the experts compute, token by token in float64, from tensors of the checkpoint by their names."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    codes, scales = quantise(x)
    rows = codes.double() * scales.double().repeat_interleave(128, -1)
    for token, slot in (ids >= 0).nonzero().tolist():
        name = f"model.layers.{LAYER}.mlp.experts.{int(ids[token, slot])}"
        gate, up, down = (dequantised(source, f"{name}.{leaf}_proj") for leaf in ("gate", "up", "down"))
        inner, scale = quantise(silu_and_mul(torch.cat((gate @ rows[token], up @ rows[token])).bfloat16()))
        inner = inner.double() * scale.double().repeat_interleave(128, -1)
        out[token] += weights[token, slot].double() * (down @ inner).bfloat16().double()
    return out


def dequantised(source, name: str) -> torch.Tensor:
    """A block-FP8 weight of the checkpoint as float64."""
    leaf = "weight_scale" if f"{name}.weight_scale" in source else "weight_scale_inv"
    scale = source[f"{name}.{leaf}"]
    return source[f"{name}.weight"].double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


# --- kernels ----------------------------------------------------------------------------------------------------


def grouped_gemm_contiguous(lhs, rhs, out, m_indices, **_) -> None:
    """Row r of ``out`` is row r of ``lhs`` times the transposed weight of expert ``m_indices[r]``."""
    assert len(m_indices) % 128 == 0
    for block in range(0, len(m_indices), 128):
        # DeepGEMM reads one index for a block of rows.
        assert m_indices[block : block + 128].unique().numel() == 1
        _multiply(lhs, rhs, out, slice(block, block + 128), int(m_indices[block]))


def grouped_gemm_masked(lhs, rhs, out, masked_m, expected_m, **_) -> None:
    """The first ``masked_m[e]`` rows of group e times the transposed weight of expert e."""
    assert expected_m > 0
    for expert, count in enumerate(masked_m.tolist()):
        _multiply(lhs, rhs, out, (expert, slice(0, count)), expert)


def _multiply(lhs, rhs, out, rows, expert) -> None:
    codes, scales = lhs
    weight, blocks = rhs
    assert (codes.dtype, weight.dtype, scales.dtype, blocks.dtype) == (
        torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, torch.float32,
    )  # fmt: skip
    assert blocks.shape == (weight.shape[0], weight.shape[1] // 128, weight.shape[2] // 128)
    assert scales.shape == (*codes.shape[:-1], codes.shape[-1] // 128)
    whole = weight[expert].double() * blocks[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    out[rows] = (codes[rows].double() * scales[rows].double().repeat_interleave(128, -1) @ whole.T).bfloat16()


def scatter(x, scale, topk, counts, _counts, start, out, out_scale, m_indices, output_index, **_) -> None:
    """Copy every row of ``x`` to the segment of each of its experts; ``output_index`` says where, -1 is nowhere."""
    start.copy_(counts.cumsum(0) - counts)
    m_indices.copy_(torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts))
    free = start.tolist()
    output_index.fill_(-1)
    for token, slot in (topk >= 0).nonzero().tolist():
        expert = int(topk[token, slot])
        output_index[token, slot] = free[expert]
        out.view(torch.uint8)[free[expert]], out_scale[free[expert]] = x.view(torch.uint8)[token], scale[token]
        free[expert] += 1


def gather(rows, topk, weights, index, out) -> None:
    """Weigh and add up, in FP32, the rows of each token."""
    total = torch.zeros(out.shape)
    for token, slot in (topk >= 0).nonzero().tolist():
        total[token] += rows[index[token, slot]].float() * weights[token, slot]
    out.copy_(total)


def silu_and_mul(rows: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of the last dimension times the second, in FP32, rounded to BF16 once."""
    gate, up = rows.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def quantise_rows(x, group_size, **_):
    assert group_size == 128
    return quantise(x)


def silu_and_quantise(rows, *, group_size, fuse_silu_and_mul, masked_m, **_):
    assert group_size == 128 and fuse_silu_and_mul and masked_m is not None
    return quantise(silu_and_mul(rows))
