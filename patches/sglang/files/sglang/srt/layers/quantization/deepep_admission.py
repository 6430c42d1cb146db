"""What ``--moe-a2a-backend deepep`` needs of flags, GPU and topology, before anything is allocated.

DeepEP hands tokens to the experts in FP8 with one FP32 scale per 128 values, and of all runners only DeepGEMM takes
them: every other choice fails in the first forward pass, or computes with scales that nobody wrote. The library's own
limits are those of the pinned ``sgl-deep-ep`` 0.1.2.post1: the ranks of its tables of configurations
(``deep_ep/buffers/legacy.py``), and the widths for which its low-latency kernels are compiled.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.layers.moe.token_dispatcher import deepep
from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_runner_backend
from sglang.srt.layers.quantization import block_fp8_deep_gemm
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
LOW_LATENCY_WIDTHS = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)


def check(format_name: str, hidden_size: int) -> None:
    """Refuse what DeepEP cannot serve of a model with FP8 experts, ``hidden_size`` wide. Raises ``ValueError``."""
    if (fault := _fault(hidden_size)) is not None:
        raise ValueError(f"{format_name} experts are not served with --moe-a2a-backend deepep: {fault}.")


def _fault(hidden_size: int) -> str | None:
    if (runner := get_moe_runner_backend()).value not in ("auto", "deep_gemm"):
        return f"--moe-runner-backend {runner.value} takes no tokens from DeepEP: use auto or deep_gemm"
    if fault := block_fp8_deep_gemm.unavailable():
        return fault
    if not deepep.use_deepep:
        return f"the library does not import ({_one_line(deepep._deepep_import_error)}): remove the flag"
    if (dtype := get_exec().moe.deepep_dispatcher_output_dtype) not in ("auto", "fp8"):
        return f"--deepep-dispatcher-output-dtype {dtype} brings tokens that DeepGEMM cannot multiply with FP8: use fp8"
    if envs.SGLANG_DEEPEP_BF16_DISPATCH.get():
        return "SGLANG_DEEPEP_BF16_DISPATCH brings tokens that DeepGEMM cannot multiply with FP8: unset it"
    parallel = get_parallel()
    if (tp := parallel.tp_size) != (ep := parallel.moe_ep_size):
        return f"it spans all {tp} tensor-parallel ranks and whole experts, --ep-size is {ep}: use --ep-size {tp}"
    if ep not in RANKS:
        return f"the library has no configuration for {ep} rank(s), only for {', '.join(map(str, RANKS))}: use one"
    mode = get_deepep_mode()
    if mode.enable_low_latency() and hidden_size not in LOW_LATENCY_WIDTHS:
        return (
            f"its low-latency kernels are not compiled for a hidden size of {hidden_size}, and --deepep-mode "
            f"{mode.value} uses them: use --deepep-mode normal"
        )
    chunk, room = get_schedule().chunked_prefill_size, _room()
    if mode.is_low_latency() and chunk is not None and not 0 < chunk <= room:
        return (
            f"--deepep-mode low_latency has room for {room} tokens at once, --chunked-prefill-size is {chunk}: set it "
            f"between 1 and {room}, or use --deepep-mode auto"
        )
    return None


def _room() -> int:
    """Tokens of a batch that low latency takes: the ranks of attention share it, but for one that is not padded."""
    parallel = get_parallel()
    ranks = 1 if parallel.disable_attn_tp_gather else parallel.attn_tp_size
    return envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get() * ranks


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
