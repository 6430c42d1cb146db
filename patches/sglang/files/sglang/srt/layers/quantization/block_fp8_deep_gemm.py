"""The DeepGEMM runner for compressed-tensors experts in 128x128 blocks of FP8, chosen and fed as for ``fp8``.

``Fp8MoEMethod`` runs its experts through ``DeepGemmRunnerCore``, which takes tokens as DeepEP dispatches them:
contiguous (normal mode) or masked (low latency). A compressed-tensors block-FP8 layer has the same tensors under other
names (E4M3 codes, FP32 scales of shape (experts, rows / 128, columns / 128), gate above up), so it needs that runner
chosen, its tensors named, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe import MoeRunner, MoeRunnerBackend, MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmMoeQuantInfo

#: What DeepGEMM without UE8M0 scales multiplies.
BLOCK_SHAPE = [128, 128]


def chosen(scheme: Any) -> bool:
    """Whether a ``CompressedTensorsW8A8Fp8MoE`` runs on DeepGEMM: where ``Fp8MoEMethod`` would, by the same rule.

    That is ``--moe-runner-backend deep_gemm``, or ``auto`` with an all-to-all backend that dispatches into its layouts.
    Static activation scales and other block shapes keep what the engine gives them.
    """
    # Imported late: the module of Fp8MoEMethod imports half of the engine, this one is imported by a scheme.
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

    return (
        list(scheme.weight_block_size or ()) == BLOCK_SHAPE
        and not scheme.static_input_scales
        and Fp8MoEMethod.is_deepgemm_moe_runner_backend_enabled()
    )


def build_runner(moe_runner_config: MoeRunnerConfig) -> MoeRunner:
    """The runner of one layer. Raises ``ValueError`` where DeepGEMM cannot take the scales as they are."""
    if fault := unavailable():
        raise ValueError(f"Compressed-tensors block-FP8 experts cannot run on DeepGEMM here: {fault}.")
    return MoeRunner(MoeRunnerBackend.DEEP_GEMM, moe_runner_config)


def unavailable() -> str | None:
    """Why DeepGEMM cannot run FP32 block scales in this process, with what to do; None when it can."""
    if not deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        return (
            "DeepGEMM is off, which needs compute capability 9.0 and SGLANG_ENABLE_JIT_DEEPGEMM not 0: use such a GPU "
            "and unset the variable"
        )
    if deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0:
        # fp8 checkpoints are requantised for it, codes and all; a strict format never is.
        return (
            "on this GPU DeepGEMM takes scales that are powers of two only, and the weights would have to be rounded "
            "again: use a GPU of compute capability 9.0"
        )
    return None


def quant_info(scheme: Any, layer: torch.nn.Module) -> DeepGemmMoeQuantInfo:
    """What the runner takes, of the tensors as they were loaded; nothing is copied.

    Codes are (experts of this rank, 2 x intermediate, hidden) with gate above up, and (experts, hidden, intermediate).
    """
    return DeepGemmMoeQuantInfo(
        w13_weight=layer.w13_weight,
        w2_weight=layer.w2_weight,
        use_fp8=True,
        w13_scale=layer.w13_weight_scale,
        w2_scale=layer.w2_weight_scale,
        block_shape=list(scheme.weight_block_size),
    )


def keeps_runner(layer: torch.nn.Module) -> bool:
    """Whether a ``DeepEPMoE`` layer forwards through its scheme's runner: true of every scheme that was given this one.

    Otherwise the class falls into forward functions of its own that only raise.
    """
    runner = getattr(getattr(layer, "scheme", None), "runner", None)
    return runner is not None and runner.runner_backend.is_deep_gemm()
