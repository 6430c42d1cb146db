"""The least time that the hardware needs for a round of requests: memory traffic while decoding, arithmetic in prefill.

A decode step reads every weight that its tokens need once, and the KV cache of its requests. Of E experts of which a
token chooses k, B tokens need E (1 - (1 - k/E)^B), if they choose evenly; where a router prefers some experts the
true floor is lower. Activations, launches and the sampler cost nothing here. Rates: report/rates.toml.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import models
from report.models import Model

RATES = Path(__file__).resolve().parent / "rates.toml"


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of one GPU, with their sources."""

    bytes_per_second: float
    bytes_source: str
    bf16_flops: float
    fp8_flops: float
    flops_source: str


@functools.cache
def rates() -> dict[str, Rates]:
    """GPU name -> its rates."""
    return {name: Rates(**values) for name, values in tomllib.loads(RATES.read_text()).items()}


@functools.cache
def _weights(model: Model) -> dict[str, float]:
    """Bytes and flops per token by what they depend on, of a model or a cut of it; the embedding is a look-up.

    ``always``, ``routed``, ``values``: bytes of all such weights. ``bf16``, ``fp8``: flops of one token in the layers;
    ``head``: of lm_head, for one token a request.
    """
    config = models.config(model.artifact, model.name)
    routed_share, value_share = (share for _, share in _choices(config))
    sums = dict.fromkeys(("always", "routed", "values", "bf16", "fp8", "head"), 0.0)
    for name, tensor in models.tensors(model.artifact, model.name).items():
        index = models.layer(name)
        if name.startswith("model.embed_tokens.") or (index is not None and index >= model.layers):
            continue
        kind = "routed" if ".mlp.experts." in name else "values" if ".v_experts." in name else "always"
        sums[kind] += tensor.nbytes
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            flops = 2.0 * tensor.shape[0] * tensor.shape[1]
            if index is None:
                sums["head"] += flops
            else:
                share = {"routed": routed_share, "values": value_share, "always": 1.0}[kind]
                sums["fp8" if tensor.dtype == "F8_E4M3" else "bf16"] += flops * share
    return sums


def _choices(config: Mapping[str, Any]) -> list[tuple[float, float]]:
    """((experts, share of them that a token chooses)) of the routed and of the value experts."""
    pairs = [("num_experts", "num_experts_per_tok"), ("mova_num_experts", "mova_num_experts_per_tok")]
    return [(config[all_], config[chosen] / config[all_]) if config.get(all_) else (0, 0.0) for all_, chosen in pairs]


def step_bytes(model: Model, batch: int, context: float) -> float:
    """Bytes that one decode step of ``batch`` requests with ``context`` tokens each must read."""
    config, sums = models.config(model.artifact, model.name), _weights(model)
    needed = [1 - (1 - share) ** batch for _, share in _choices(config)]
    kv = 2 * config["num_key_value_heads"] * config["head_dim"] * 2 * model.layers  # keys and values, BF16
    return sums["always"] + needed[0] * sums["routed"] + needed[1] * sums["values"] + batch * context * kv


def prefill_seconds(model: Model, gpu: str, requests: int, tokens: int, ranks: int = 1) -> float:
    """Arithmetic of prefilling ``requests`` prompts of ``tokens`` tokens, causal attention included."""
    config, sums, rate = models.config(model.artifact, model.name), _weights(model), rates()[gpu]
    width = config["num_attention_heads"] * config["head_dim"]
    attention = 2.0 * width * tokens * tokens * model.layers  # 4 width (n^2 / 2) for scores and their use
    bf16 = requests * (tokens * sums["bf16"] + attention + sums["head"])
    return (bf16 / rate.bf16_flops + requests * tokens * sums["fp8"] / rate.fp8_flops) / ranks


def step_seconds(model: Model, gpu: str, batch: int, context: float, ranks: int = 1) -> float:
    """The least time of one decode step."""
    return step_bytes(model, batch, context) / rates()[gpu].bytes_per_second / ranks


def round_seconds(model: Model, gpu: str, requests: int, inputs: int, outputs: int, ranks: int = 1) -> float:
    """Prefill and then ``outputs`` - 1 steps, all requests at once. Communication between ranks costs nothing here."""
    context = inputs + outputs / 2  # on average; step_bytes is linear in it
    steps = (outputs - 1) * step_seconds(model, gpu, requests, context, ranks)
    return prefill_seconds(model, gpu, requests, inputs, ranks) + steps
