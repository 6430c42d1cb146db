"""Does a plan fit into the GPUs' memory? Arithmetic alone, before anything is read or allocated.

The engine gives ``--mem-fraction-static`` of the memory that is free at its start to weights and KV cache; the rest
is for activations and CUDA graphs. A context that the KV cache cannot hold once would be refused request by request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launch.machine import GIB, Gpu
from qualify.errors import CannotRun, Rejected

KV_BYTES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
#: CUDA context, libraries and the allocator's slack of one process
OVERHEAD = 1 * GIB
#: free memory below this share of the total means that somebody else holds the GPU
FREE_SHARE = 0.97


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes of one GPU, and the tokens that its KV cache will hold."""

    weights: int
    static: int
    kv_per_token: int
    tokens: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def kv_bytes_per_token(config: Mapping[str, Any], tp: int, dtype: str = "auto") -> int:
    """Bytes of one token in one rank's KV cache: K and V of every layer; beyond their number heads are replicated.

    ``config`` is a K2-Horizon ``config.json``. Raises Rejected for a dtype of unknown size.
    """
    heads = max(1, config["num_key_value_heads"] // tp)
    if dtype not in KV_BYTES:
        raise Rejected(f"--kv-cache-dtype {dtype}: its size per token is not known here; one of {', '.join(KV_BYTES)}")
    return 2 * config["num_hidden_layers"] * heads * config["head_dim"] * KV_BYTES[dtype]


def fit(weight_bytes: int, kv_per_token: int, tp: int, gpu: Gpu, fraction: float, whole: int = 0) -> Fit:
    """What fits into one of ``tp`` GPUs: every rank holds ``whole`` of the weights' bytes, and its share of the rest.

    Some small weights are on every rank as well, and not counted so.
    """
    static = int((gpu.free - OVERHEAD) * fraction)
    weights = whole + -(-(weight_bytes - whole) // tp)
    return Fit(weights, static, kv_per_token, max(0, static - weights) // kv_per_token)


def check(found: Fit, context: int, gpu: Gpu, tp: int) -> None:
    """Raises CannotRun where the GPU is held or too small, Rejected where only the context is too long."""
    if gpu.free < FREE_SHARE * gpu.total - OVERHEAD:
        raise CannotRun(
            f"{gpu.name} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free: another process holds the rest; "
            "end it, or select another GPU with CUDA_VISIBLE_DEVICES"
        )
    if found.weights >= found.static:
        raise CannotRun(
            f"the weights take {found.weights / GIB:.1f} GiB per GPU at TP={tp}, and {gpu.name} has "
            f"{found.static / GIB:.1f} GiB for weights and KV cache: raise TP, or take larger GPUs"
        )
    if found.tokens < context:
        raise Rejected(
            f"a context of {context:,} tokens does not fit: beside {found.weights / GIB:.1f} GiB of weights {gpu.name} "
            f"holds {found.tokens:,} tokens of {found.kv_per_token:,} bytes at TP={tp}: lower CONTEXT_LENGTH"
        )
