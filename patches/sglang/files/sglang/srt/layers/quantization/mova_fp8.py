"""Admission of K2-Horizon MoVA block-FP8 checkpoints, before anything is allocated.

The published format (IFM/K2-Horizon-MoVA-36B-A4B-FP8) is ``quant_method: fp8`` with serialized E4M3 weights,
one FP32 scale per 128x128 block and dynamic activation scales. It covers the routed feed-forward experts and
nothing else: ``ignored_layers`` names every other module. The engine reads that list for the dense MLPs and
the shared experts only and builds the attention unquantised whatever it says, so a config that says
otherwise would load as wrong numbers; here it is refused. Every refusal is a ``ValueError`` with one
sentence that names the config key and says what to do.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.quantization import deepep_admission
from sglang.srt.layers.quantization.mova_fp8_format import (
    BLOCK,
    MovaFp8Format,
    bf16_modules,
    routed_expert_modules,
)
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.model_loader import checkpoint_ledger
from sglang.srt.runtime_context import get_exec, get_model, get_parallel
from transformers import PretrainedConfig

_POSITIVE_INTEGERS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layernorm_num_groups",
    "max_position_embeddings",
    "moe_intermediate_size",
    "mova_num_experts",
    "mova_num_experts_per_tok",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_shared_experts",
    "vocab_size",
)
_BOOLEANS = (
    "attention_bias",
    "moe_gate_bias",
    "norm_topk_prob",
    "query_key_norm",
    "tie_word_embeddings",
    "use_sliding_window",
)
_POSITIVE_NUMBERS = ("rms_norm_eps", "router_scaling_factor")
CHOICES = {
    "attention_gate_func": ("softplus", "silu"),
    "hidden_act": ("silu",),
    "router_score_func": ("sigmoid", "softmax"),
    "dtype": (torch.bfloat16, "bfloat16"),
}

# With the checked ones above, the keys of the published config.json. Any other could change what the model computes
# without the engine looking at it (a grouped router, a softcap, a draft layer), so it is refused.
_CONFIG_KEYS = {
    *_POSITIVE_INTEGERS,
    *_BOOLEANS,
    *_POSITIVE_NUMBERS,
    *CHOICES,
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "decoder_sparse_step",
    "eos_token_id",
    "initializer_range",
    "mlp_only_layers",
    "model_type",
    "output_router_logits",
    "pad_token_id",
    "quantization_config",
    "rope_head_dim",
    "rope_parameters",
    "router_aux_loss_coef",
    "sliding_window",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}

# What the engine itself, the router's declaration and the mark of a synthetic checkpoint add to them.
ADDED_KEYS = {
    "apply_attn_gate",
    "attn_gate_func",
    "context_len",
    "encoder_only",
    "horizon_images_synthetic",
    "language_model_only",
    "language_only",
    "num_dense_layers",
    "num_values",
    "num_values_per_tok",
    "rope_scaling",
    "rope_theta",
    "xllm_source_router_gemm_partitions",
    "_attn_implementation_autoset",
    "_sglang_xllm_checkpoint_format",
}

# The engine sizes the cache by them, the model computes with head_dim; it adds those that are not there.
_HEAD_WIDTHS = ("v_head_dim", "swa_head_dim", "swa_v_head_dim")

_ARCHITECTURES = ["K2HorizonForCausalLM"]
_ROPE_KEYS = {"rope_theta", "rope_type"}

# More layers or experts than any model has; what follows lists every module of them.
_MOST = 1 << 20

# (namespace, leaf, values that are served, flag): what would place, replace or share weights behind the
# ledger's back, or needs experts to be remapped, which this model does not do.
_RUNTIME = (
    ("overlap", "enable_two_batch_overlap", (False,), "--enable-two-batch-overlap"),
    ("moe", "enable_eplb", (False,), "--enable-eplb"),
    ("moe", "init_expert_location", ("trivial",), "--init-expert-location"),
    ("moe", "ep_num_redundant_experts", (0,), "--ep-num-redundant-experts"),
    ("moe", "elastic_ep_backend", (None,), "--elastic-ep-backend"),
    ("moe", "ep_join_mode", (None,), "--elastic-ep-join-mode"),
    ("moe", "enable_elastic_expert_backup", (False,), "--enable-elastic-expert-backup"),
    ("moe", "enable_paged_experts", (False,), "--enable-paged-experts"),
    ("moe", "kt_weight_path", (None,), "--kt-weight-path"),
    ("features", "enable_memory_saver", (False,), "--enable-memory-saver"),
    ("model", "load_format", checkpoint_ledger.LOAD_FORMATS, "--load-format"),
    (
        "model",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        (False,),
        "--remote-instance-weight-loader-start-seed-via-transfer-engine",
    ),
    ("model", "startup_weight_load_mode", ("serial",), "--startup-weight-load-mode"),
    ("model", "weight_cache_mode", ("off",), "--weight-cache-mode"),
    ("model", "quantize_and_serve", (False,), "--quantize-and-serve"),
    ("model", "rl_quant_profile", (None,), "--rl-quant-profile"),
)

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
    quantisation config for it. On return the latter carries the format as ``checkpoint_format``, which
    :func:`require_bf16_attention` and the checkpoint ledger ask for. Raises ``ValueError``.
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
    check_runtime()
    check_router_provenance(config)
    check_config(config)
    declared = check_format(getattr(config, "quantization_config", None))
    check_effective_format(quant_config)
    check_scope(config, declared)
    check_effective_scope(quant_config, declared)
    if get_moe_a2a_backend().is_deepep():
        deepep_admission.check("MoVA FP8", config.hidden_size)
    parallel = get_parallel()
    check_topology(
        config,
        tp=parallel.tp_size,
        ep=parallel.moe_ep_size,
        moe_tp=parallel.moe_tp_size,
        attn_tp=parallel.attn_tp_size,
    )
    quant_config.checkpoint_format = MovaFp8Format(frozenset(declared))
    # The engine goes through the list for every module that it asks about, 0.5 s of a load. Most entries are value
    # experts; the attention is built without the config, so nothing in it is ever asked about.
    quant_config.ignored_layers = [entry for entry in quant_config.ignored_layers if ".self_attn." not in entry]


def require_bf16_attention(quant_config: Any, prefix: str) -> None:
    """Refuse to build the attention ``prefix`` unless admission has shown its projections to be BF16.

    The attention passes no quantisation config to its projections, so it may only be built where the
    checkpoint declares the same. Raises ``ValueError``.
    """
    checkpoint_format = getattr(quant_config, "checkpoint_format", None)
    admitted = getattr(checkpoint_format, "bf16_modules", frozenset())
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


def check_runtime(format_name: str = "MoVA FP8") -> None:
    """Refuse server flags under which weights would not stay what the loader checked. Raises ``ValueError``."""
    execution = get_exec()
    namespaces = {"overlap": execution.overlap, "moe": execution.moe, "features": execution.features}
    namespaces["model"] = get_model()
    for namespace, leaf, served, flag in _RUNTIME:
        value = getattr(namespaces[namespace], leaf)
        if value not in served:
            raise ValueError(
                f"{format_name} is not served with {flag} {value}, under which weights do not stay where the strict "
                f"loader checked them: remove the flag (served: {', '.join(map(str, served))})."
            )


def check_config(
    config: Any,
    counts: tuple[str, ...] = (),
    choices: dict = CHOICES,
    added: set = ADDED_KEYS,
    rope_types: tuple[str, ...] = ("default",),
) -> None:
    """Refuse keys that the published config.json does not have, and values that can only be a mistake.

    ``counts`` are the keys that may also be 0 or absent, ``choices`` the values that some keys may have, ``added``
    the keys that the engine itself adds. What the model computes (gate function, scaling factor, norm groups, ...)
    is the checkpoint's own statement: any value that makes sense is taken as it stands. Raises ``ValueError``.
    """
    if (architectures := getattr(config, "architectures", None)) != _ARCHITECTURES:
        # XllmForCausalLM takes the same names and computes other norms, gates and rotary embeddings with them.
        raise bad_value("architectures", architectures, str(_ARCHITECTURES))
    known = _CONFIG_KEYS | added | set(_HEAD_WIDTHS) | vars(PretrainedConfig()).keys()
    unknown = sorted(vars(config).keys() - known)
    if unknown:
        raise ValueError(
            f"config.json has the key {unknown[0]!r}{_more(unknown)}, which no published config has and the "
            "engine would not honour: use the config.json that was published with the weights."
        )
    for key in _POSITIVE_INTEGERS:
        value, least = (getattr(config, key, 0), 0) if key in counts else (getattr(config, key, None), 1)
        if type(value) is not int or not least <= value <= _MOST:
            raise bad_value(key, value, f"an integer from {least} to {_MOST:,}")
    for key in _HEAD_WIDTHS:
        if (value := getattr(config, key, config.head_dim)) != config.head_dim:
            raise bad_value(key, value, f"head_dim, {config.head_dim}")
    for key in _BOOLEANS:
        if type(value := getattr(config, key, None)) is not bool:
            raise bad_value(key, value, "true or false")
    for key in _POSITIVE_NUMBERS:
        value = getattr(config, key, None)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise bad_value(key, value, "a positive number")
    for key, values in choices.items():
        if (value := getattr(config, key, None)) not in values:
            raise bad_value(key, value, " or ".join(map(str, values)))
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in rope_types:
        raise bad_value("rope_parameters", rope, f"a mapping with a rope_type of {' or '.join(rope_types)}")
    # The engine checks every key of the others itself.
    if rope["rope_type"] == "default" and rope.keys() != _ROPE_KEYS:
        raise bad_value("rope_parameters", rope, "the default rope_type and a rope_theta, and nothing else")
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise bad_value("rope_parameters.rope_theta", theta, "a positive number")
    dense, layers = getattr(config, "mlp_only_layers", None), config.num_hidden_layers
    prefix = isinstance(dense, list) and dense == list(range(len(dense))) and len(dense) <= layers
    if not prefix or (len(dense) < layers) != (config.num_experts > 0):
        raise bad_value(
            "mlp_only_layers", dense, "the list of the first layers, 0, 1, ..., all of them without experts"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise bad_value("num_experts_per_tok", config.num_experts_per_tok, f"at most {config.num_experts} experts")


def bad_value(key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(
        f"{key} in config.json is {value!r} and must be {wanted}: use the config.json that was published with the "
        "weights."
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
        # As JSON: 128.0 equals 128, and cannot build a shape.
        if json.dumps(declared.get(key), default=repr) != json.dumps(wanted):
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
            "quantization_config.ignored_layers must be the list of the names of all modules outside the routed "
            "experts: use the config.json that was published with the weights."
        )
    seen: set[str] = set()
    for entry in ignored:
        if entry in seen:
            raise ValueError(
                f"quantization_config.ignored_layers names {entry!r} twice: use the config.json that was published "
                "with the weights."
            )
        seen.add(entry)
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
        for experts in routed_expert_modules(config):
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
