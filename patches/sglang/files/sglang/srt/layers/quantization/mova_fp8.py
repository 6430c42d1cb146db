"""Admission of K2-Horizon MoVA block-FP8 checkpoints, before anything is allocated.

The published format (IFM/K2-Horizon-MoVA-36B-A4B-FP8) is ``quant_method: fp8`` with serialized E4M3 weights,
one FP32 scale per 128x128 block and dynamic activation scales. It covers the routed feed-forward experts and
nothing else: ``ignored_layers`` names every other module. The engine reads that list for the dense MLPs and
the shared experts only and builds the attention unquantised whatever it says, so a config that says
otherwise would load as wrong numbers; here it is refused. Every refusal is a ``ValueError`` with one
sentence that names the config key and says what to do.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.runtime_context import get_parallel

BLOCK = 128

# The attribute through which an admitted quantisation config carries the modules it promised to be BF16.
_ADMITTED = "mova_bf16_modules"

_REQUIRED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

# A key that merely repeats the format is harmless; any other key could change what the numbers mean.
_TOLERATED = {"fmt": "e4m3"}

# What the engine must have made of that config, whichever flag, environment variable or override came
# between.
_EFFECTIVE = {
    "is_checkpoint_fp8_serialized": True,
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "use_mxfp8": False,
    "is_fp4_experts": False,
    "scale_fmt": None,
    "kv_cache_quant_algo": None,
}


def admit(config: Any, quant_config: Any) -> None:
    """Refuse every K2-Horizon FP8 model but the published MoVA format, on a topology that can serve it.

    ``config`` is the Hugging Face config after the engine's overrides, ``quant_config`` the engine's
    quantisation config for it. On return the latter is marked as admitted, which
    :func:`require_bf16_attention` asks for. Raises ``ValueError``.
    """
    if (
        quant_config.get_name() != "fp8"
        or getattr(config, "model_type", None) != "k2_horizon"
        or not getattr(config, "mova_num_experts", 0)
    ):
        raise ValueError(
            "Native xLLM/K2 Horizon serving supports compressed-tensors weights, and quant_method 'fp8' for "
            f"K2-Horizon MoVA only; model_type {getattr(config, 'model_type', None)!r} with quantization "
            f"{quant_config.get_name()!r} has to be exported as compressed-tensors."
        )
    if torch.get_default_dtype() != torch.bfloat16:
        raise ValueError(
            f"MoVA FP8 runs in bfloat16, not {torch.get_default_dtype()}: start the server with --dtype bfloat16."
        )
    check_router_provenance(config)
    declared = check_format(getattr(config, "quantization_config", None))
    check_effective_format(quant_config)
    check_scope(config, declared)
    check_effective_scope(quant_config, declared)
    parallel = get_parallel()
    check_topology(
        config,
        tp=parallel.tp_size,
        ep=parallel.moe_ep_size,
        moe_tp=parallel.moe_tp_size,
        attn_tp=parallel.attn_tp_size,
    )
    setattr(quant_config, _ADMITTED, frozenset(declared))


def require_bf16_attention(quant_config: Any, prefix: str) -> None:
    """Refuse to build the attention ``prefix`` unless admission has shown its projections to be BF16.

    The attention passes no quantisation config to its projections, so it may only be built where the
    checkpoint declares the same. Raises ``ValueError``.
    """
    admitted = getattr(quant_config, _ADMITTED, frozenset())
    for leaf in ("q_proj", "k_proj", "gate_proj", "o_proj"):
        if f"{prefix}.{leaf}" not in admitted:
            raise ValueError(
                f"K2 Horizon MoVA attention is BF16 and {prefix}.{leaf} is not admitted as such under "
                f"quantization {quant_config.get_name()!r}: serve a BF16 checkpoint, or a MoVA FP8 one whose "
                "quantization_config.ignored_layers names it."
            )


def check_router_provenance(config: Any) -> None:
    """Refuse a MoVA config that does not declare how its training router summed partial products."""
    partitions = getattr(config, "xllm_source_router_gemm_partitions", None)
    if type(partitions) is not int or partitions not in (1, 2):
        raise ValueError(
            f"xllm_source_router_gemm_partitions is {partitions!r} and must be the integer 1 or 2: declare "
            "what the checkpoint was trained with, e.g. --json-model-override-args "
            "'{\"xllm_source_router_gemm_partitions\": 2}'."
        )


def check_format(declared: Any) -> list[str]:
    """Check ``quantization_config`` of ``config.json`` key by key and return its ``ignored_layers``.

    Raises ``ValueError`` for anything but serialized, dynamic, 128x128 E4M3.
    """
    if not isinstance(declared, dict):
        raise ValueError(
            "config.json has no quantization_config, and MoVA FP8 is served from serialized FP8 weights "
            "only: drop --quantization, or use a checkpoint that was quantised off-line."
        )
    for key, wanted in _REQUIRED.items():
        if declared.get(key) != wanted:
            raise ValueError(
                f"quantization_config.{key} is {declared.get(key)!r} and must be {wanted!r} for MoVA FP8: "
                "use a checkpoint in the published format."
            )
    for key, value in declared.items():
        if key in _REQUIRED or key == "ignored_layers" or (key in _TOLERATED and value == _TOLERATED[key]):
            continue
        raise ValueError(
            f"quantization_config.{key} is {value!r}, which the published MoVA FP8 format does not have and "
            "which could change what the weights mean: use the config.json that was published with the "
            "weights."
        )
    ignored = declared.get("ignored_layers")
    if not isinstance(ignored, list) or not all(isinstance(entry, str) for entry in ignored):
        raise ValueError(
            "quantization_config.ignored_layers must be the list of all modules outside the routed experts, "
            f"got {type(ignored).__name__}: use the config.json that was published with the weights."
        )
    return ignored


def check_effective_format(quant_config: Any) -> None:
    """Refuse when the engine's own quantisation config is not the format that ``config.json`` declares."""
    for attribute, wanted in _EFFECTIVE.items():
        value = getattr(quant_config, attribute)
        if value != wanted:
            raise ValueError(
                f"The engine runs MoVA FP8 with {attribute} {value!r} where the checkpoint means {wanted!r}: "
                "remove the flag or environment variable that overrides quantization_config."
            )


def check_scope(config: Any, ignored: list[str]) -> None:
    """Check that ``ignored_layers`` names every module outside the routed experts, exactly, and no other.

    The engine also matches prefixes and infixes of module names, so that one short or misplaced entry can
    take whole layers of experts out of quantisation; only full names are admitted. Raises ``ValueError``.
    """
    modules = bf16_modules(config)
    unknown = sorted(set(ignored) - modules)
    for entry in unknown:
        base = entry.removeprefix("model.")
        for experts in _routed_expert_modules(config):
            if is_layer_skipped(experts, [base, f"model.{base}"]):
                raise ValueError(
                    f"quantization_config.ignored_layers entry {entry!r} excludes routed experts "
                    f"({experts}), which a MoVA FP8 checkpoint stores as FP8: remove the entry."
                )
    if unknown:
        raise ValueError(
            f"quantization_config.ignored_layers entry {unknown[0]!r}{_more(unknown)} is not the full name "
            "of a BF16 module of this model: use the config.json that was published with the weights."
        )
    missing = sorted(modules - set(ignored))
    if missing:
        raise ValueError(
            f"quantization_config.ignored_layers does not name {missing[0]!r}{_more(missing)}, which a MoVA "
            "FP8 checkpoint stores as BF16: use the config.json that was published with the weights."
        )


def check_effective_scope(quant_config: Any, ignored: list[str]) -> None:
    """Refuse when the engine skips other modules than ``ignored_layers`` names. Raises ``ValueError``."""
    if names := envs.SGLANG_FP8_IGNORED_LAYERS.get():
        raise ValueError(
            f"SGLANG_FP8_IGNORED_LAYERS is {names!r}, but a MoVA FP8 checkpoint names its BF16 modules "
            "itself: unset the variable."
        )
    # The engine keeps every entry twice, with and without the leading "model.".
    effective = {entry.removeprefix("model.") for entry in quant_config.ignored_layers}
    if effective != {entry.removeprefix("model.") for entry in ignored}:
        raise ValueError(
            "The engine's list of unquantised modules differs from quantization_config.ignored_layers: "
            "remove the override of quantization_config."
        )


def check_topology(config: Any, *, tp: int, ep: int, moe_tp: int, attn_tp: int) -> None:
    """Check heads, experts and 128-blocks against the parallel sizes; the message shows the arithmetic.

    ``tp`` and ``ep`` are the sizes asked for, ``moe_tp`` the ranks that share one expert (TP / EP),
    ``attn_tp`` the ranks that share one attention. Raises ``ValueError``.
    """
    fault = _topology_fault(config, tp=tp, ep=ep, moe_tp=moe_tp, attn_tp=attn_tp)
    if fault is None:
        return
    pairs = [
        (tp, ep)
        for tp in (1, 2, 4, 8, 16)
        for ep in (1, 2, 4, 8, 16)
        if tp % ep == 0 and _topology_fault(config, tp=tp, ep=ep, moe_tp=tp // ep, attn_tp=tp) is None
    ]
    raise ValueError(
        f"--tp-size {tp} with --ep-size {ep} cannot serve this model: {fault}; (TP, EP) pairs that work: "
        f"{', '.join(map(str, pairs)) or 'none'}."
    )


def bf16_modules(config: Any) -> set[str]:
    """Names of all modules outside the routed experts, in the checkpoint's own spelling."""
    names = {"model.embed_tokens", "model.norm"}
    if not config.tie_word_embeddings:
        names.add("lm_head")
    dense = len(config.mlp_only_layers)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        leaves = ["input_layernorm", "post_attention_layernorm"]
        leaves += [f"self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "gate_proj", "o_proj")]
        if index < dense:
            leaves += ["self_attn.v_proj", *_mlp("mlp")]
        else:
            leaves += ["self_attn.v_router", "mlp.gate"]
            leaves += [f"self_attn.v_experts.{expert}" for expert in range(config.mova_num_experts)]
            if getattr(config, "num_shared_experts", 0):
                leaves += _mlp("mlp.shared_experts")
        names.update(f"{layer}.{leaf}" for leaf in leaves)
    return names


def _routed_expert_modules(config: Any) -> list[str]:
    """The engine's names of the fused routed experts, one per sparse layer."""
    layers = range(len(config.mlp_only_layers), config.num_hidden_layers)
    return [f"model.layers.{index}.mlp.experts" for index in layers]


def _mlp(name: str) -> list[str]:
    return [f"{name}.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]


def _topology_fault(config: Any, *, tp: int, ep: int, moe_tp: int, attn_tp: int) -> str | None:
    for key, ranks, over in (
        ("num_attention_heads", attn_tp, "attention ranks"),
        ("num_key_value_heads", attn_tp, "attention ranks"),
        ("num_experts", ep, "expert-parallel ranks"),
    ):
        count = getattr(config, key)
        if count % ranks:
            return f"{key} {count} cannot be split over {ranks} {over}, {count} % {ranks} = {count % ranks}"
    for key, ranks in (("hidden_size", 1), ("moe_intermediate_size", moe_tp)):
        extent = getattr(config, key)
        share, rest = divmod(extent, ranks)
        if rest or share % BLOCK:
            split = f"{extent} / {ranks} = {extent / ranks:g}"
            return (
                f"{key} {extent} = {extent / BLOCK:g} x {BLOCK} cannot be split into whole blocks over "
                f"{ranks} rank(s) per expert (TP {tp} / EP {ep}), {split}, {extent / ranks:g} % {BLOCK} = "
                f"{extent / ranks % BLOCK:g}"
            )
    return None


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
