"""Admission of K2-Horizon compressed-tensors block-FP8 checkpoints, before anything is allocated.

The published format (IFM/K2-Horizon-7B-FP8) has serialized E4M3 weights, one scale per 128x128 block and dynamic
activation scales; ``targets`` and ``ignore`` say which linear modules it covers. The engine keeps what it does not
understand of such a declaration in silence, looks at expert 0 for all experts, reads the block size from the target
"Linear" alone and fails on modules that no target names. Here the declaration is resolved module by module; what
cannot be served as declared is refused, and the engine gets an equivalent one that it reads without doubt: the
target "Linear", and every other linear module under ``ignore`` by its full name. Every refusal is a ``ValueError``
with one sentence that names the config key and says what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.layer_boundary import is_dense_ffn_fully_dp
from sglang.srt.layers.moe import get_moe_a2a_backend
from sglang.srt.layers.quantization import deepep_admission, mova_fp8
from sglang.srt.layers.quantization.k2_horizon_fp8_format import K2HorizonFp8Format, Module, fused_sets, modules
from sglang.srt.layers.quantization.mova_fp8 import bad_value, check_config, check_runtime
from sglang.srt.layers.quantization.mova_fp8_format import BLOCK
from sglang.srt.runtime_context import get_parallel

#: The name of the format in messages.
FORMAT = "K2-Horizon compressed-tensors FP8"

# What the engine reads of the keys that a dense model has no use for, and may leave out.
_COUNTS = (
    "moe_intermediate_size",
    "mova_num_experts",
    "mova_num_experts_per_tok",
    "num_experts",
    "num_experts_per_tok",
    "num_shared_experts",
)

_CHOICES = {key: values for key, values in mova_fp8.CHOICES.items() if key != "attention_gate_func"}
# The published dense 0.9B has YaRN; a MoVA never does.
_ROPE_TYPES = ("default", "yarn")
_ADDED_KEYS = mova_fp8.ADDED_KEYS | {"original_max_position_embeddings"}

# Key of quantization_config -> the values that mean this format; anything else could change what the numbers mean.
# Null and absent are the same there.
_FORMAT = {
    "quant_method": ("compressed-tensors",),
    "format": ("float-quantized",),
    "quantization_status": (None, "compressed"),
    "kv_cache_scheme": (None, {}),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_GROUP = {"format": (None, "float-quantized"), "output_activations": (None,)}
_WEIGHTS = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("block",),
    "block_structure": ([BLOCK, BLOCK],),
    "group_size": (None,),
    "dynamic": (None, False),
    "symmetric": (None, True),
    "actorder": (None,),
    "scale_dtype": (None,),
    "zp_dtype": (None,),
}
_ACTIVATIONS = _WEIGHTS | {
    "strategy": ("group",),
    "block_structure": (None,),
    "group_size": (BLOCK,),
    "dynamic": (True,),
}
# Statements about how the checkpoint was made, not about what its numbers mean.
_FREE = {"version", "global_compression_ratio"}
_FREE_ARGUMENTS = {"observer", "observer_kwargs"}


def admit(config: Any, quant_config: Any) -> None:
    """Refuse every compressed-tensors K2-Horizon model but one in blocks of FP8, on a topology that can serve it.

    ``config`` is the Hugging Face config after the engine's overrides, ``quant_config`` the engine's quantisation
    config for it. On return the latter carries the format as ``checkpoint_format`` for the checkpoint ledger, and
    its scope spelt out. Raises ``ValueError``.
    """
    if getattr(config, "model_type", None) != "k2_horizon":
        raise ValueError(
            f"compressed-tensors weights are served for model_type 'k2_horizon' only, not "
            f"{getattr(config, 'model_type', None)!r}: use the checkpoint in the Hugging Face layout of K2-Horizon."
        )
    if getattr(config, "mova_num_experts", 0):
        raise ValueError(
            "K2-Horizon MoVA is served from quant_method 'fp8' (MoVA FP8) or BF16 weights, and compressed-tensors "
            "is not admitted for it: use the checkpoint that was published."
        )
    if torch.get_default_dtype() != torch.bfloat16:
        raise ValueError(
            f"{FORMAT} runs in bfloat16, not {torch.get_default_dtype()}: start the server with --dtype bfloat16."
        )
    check_runtime(FORMAT)
    check_config(config, _COUNTS, _CHOICES, _ADDED_KEYS, _ROPE_TYPES)
    check_architecture(config)
    targets, ignore = check_format(getattr(config, "quantization_config", None))
    check_effective_format(quant_config, targets, ignore)
    quantised = check_scope(list(modules(config)), targets, ignore)
    parallel = get_parallel()
    check_topology(
        config,
        quantised,
        tp=parallel.tp_size,
        ep=parallel.moe_ep_size,
        moe_tp=parallel.moe_tp_size,
        attn_tp=parallel.attn_tp_size,
        mlp_tp=1 if is_dense_ffn_fully_dp() else parallel.tp_size,
        deepep=get_moe_a2a_backend().is_deepep(),
    )
    spell_out(config, quant_config, quantised)
    quant_config.checkpoint_format = K2HorizonFp8Format(quantised)


def check_architecture(config: Any) -> None:
    """Refuse sizes that contradict each other, and layers or backends that the engine would run otherwise."""
    for key in ("num_experts_per_tok", "moe_intermediate_size"):
        if (getattr(config, key, 0) > 0) != (config.num_experts > 0):
            raise bad_value(
                key, getattr(config, key, 0), f"positive if num_experts, {config.num_experts}, is, or else 0"
            )
    for key, served in (("decoder_sparse_step", (1, None)), ("attention_bias", (False,))):
        if (value := getattr(config, key, None)) not in served:
            raise bad_value(key, value, repr(served[0]))
    rotated = getattr(config, "rope_head_dim", config.head_dim)
    if type(rotated) is not int or not 0 < rotated <= config.head_dim or rotated % 2:
        raise bad_value("rope_head_dim", rotated, f"an even number of at most head_dim, {config.head_dim}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise bad_value("num_key_value_heads", config.num_key_value_heads, "a divisor of num_attention_heads")
    backend = get_moe_a2a_backend()
    if config.num_experts and backend.is_deepep():
        deepep_admission.check(FORMAT, config.hidden_size)
    elif config.num_experts and not backend.is_none():
        raise ValueError(
            f"{FORMAT} experts are not served with --moe-a2a-backend {backend.value}, for which the engine has no "
            "compressed-tensors kernel: use deepep, or remove the flag."
        )


def check_format(declared: Any) -> tuple[list[str], list[str]]:
    """Check ``quantization_config`` of ``config.json`` key by key; return its targets and its ``ignore`` list.

    Raises ``ValueError`` for anything but serialized 128x128 E4M3 with dynamic activation scales.
    """
    if not isinstance(declared, dict):
        raise ValueError(
            f"config.json has no quantization_config, and {FORMAT} is served from serialized weights only: drop "
            "--quantization, or use a checkpoint that was quantised off-line."
        )
    _check_keys("quantization_config", declared, _FORMAT, _FREE | {"config_groups", "ignore"})
    groups = declared.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _another("quantization_config.config_groups", groups, "a mapping of groups")
    targets: list[str] = []
    for name, group in groups.items():
        where = f"quantization_config.config_groups.{name}"
        if not isinstance(group, dict):
            raise _another(where, group, "a mapping")
        _check_keys(where, group, _GROUP, {"targets", "weights", "input_activations"})
        for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
            if not isinstance(group.get(part), dict):
                raise _another(f"{where}.{part}", group.get(part), "a mapping")
            _check_keys(f"{where}.{part}", group[part], wanted, _FREE_ARGUMENTS)
        targets += _names(f"{where}.targets", group.get("targets"))
    for target in targets:
        if targets.count(target) > 1:
            raise ValueError(
                f"quantization_config.config_groups has the target {target!r} twice, of which the engine takes the "
                "last: use the config.json that was published with the weights."
            )
    return targets, _names("quantization_config.ignore", declared.get("ignore", []))


def check_effective_format(quant_config: Any, targets: list[str], ignore: list[str]) -> None:
    """Refuse when the engine's own quantisation config is not what ``config.json`` declares."""
    same = (
        quant_config.get_name() == "compressed_tensors"
        and quant_config.quant_format == "float-quantized"
        and quant_config.ignore == ignore
        and list(quant_config.target_scheme_map) == targets
        and not quant_config.sparsity_scheme_map
        and quant_config.linear_fp8_config is None
        and quant_config.kv_cache_quant_algo is None
        and all(_means_blocks(scheme) for scheme in quant_config.target_scheme_map.values())
    )
    if not same:
        raise ValueError(
            "The engine's quantisation differs from quantization_config in config.json: remove the flag, environment "
            "variable or override that changes it."
        )


def check_scope(every: list[Module], targets: Iterable[str], ignore: Iterable[str]) -> frozenset[str]:
    """Resolve ``targets`` and ``ignore`` over the modules of the checkpoint; return the quantised ones.

    An entry is a full name, a dotted suffix of names, or ``re:`` and a regular expression matched at the start; the
    target "Linear" is every linear module. Raises ``ValueError`` for an entry that names nothing, a scope that
    would reach what the engine keeps in BF16, and fused modules or experts that are quantised in part.
    """
    names = [module.name for module in every]
    ignored = matches("quantization_config.ignore", ignore, names)
    named = matches("targets of quantization_config.config_groups", [t for t in targets if t != "Linear"], names)
    by_class = "Linear" in targets
    quantised = set()
    for module in every:
        if module.name in ignored:
            continue
        if module.linear and (by_class or module.name in named):
            quantised.add(module.name)
        # Whether an exporter saw a router as a Linear cannot be told from outside; its head is one.
        elif (module.name in named and "norm" not in module.name) or (by_class and module.name == "lm_head"):
            raise ValueError(
                f"quantization_config would quantise {module.name!r}, which the engine keeps in BF16: name it in "
                "ignore if the files hold it so, or use the checkpoint that was published."
            )
    for engine_name, parts in fused_sets(module for module in every if module.linear).items():
        inside = [part.name for part in parts if part.name in quantised]
        if inside and len(inside) < len(parts):
            outside = next(part.name for part in parts if part.name not in quantised)
            raise ValueError(
                f"quantization_config quantises {inside[0]!r} and not {outside!r}, which the engine runs as one "
                f"module ({engine_name}): quantise all {len(parts)} of its parts, or none."
            )
    if not quantised:
        raise ValueError(
            "quantization_config quantises no module of this model: use the config.json that was published with the "
            "weights."
        )
    return frozenset(quantised)


def matches(where: str, entries: Iterable[str], names: list[str]) -> set[str]:
    """The names that any of ``entries`` names. Raises ``ValueError`` for an entry that names none."""
    suffixes: dict[str, list[str]] = {}
    for name in names:
        start = 0
        while start >= 0:
            suffixes.setdefault(name[start:], []).append(name)
            start = name.find(".", start) + 1 or -1
    found: set[str] = set()
    for entry in entries:
        if entry.startswith("re:"):
            try:
                pattern = re.compile(entry[3:])
            except re.error as error:
                raise ValueError(
                    f"{where} has the entry {entry!r}, which is no regular expression ({error}): correct it."
                ) from None
            hit = [name for name in names if pattern.match(name)]
        else:
            hit = suffixes.get(entry, [])
        # The head of a tied model is in no file, and exporters name it all the same.
        if not hit and entry != "lm_head":
            parent = next((name for name in names if name.startswith(f"{entry}.")), None)
            why = f"a parent ({parent} is below it), and parents name nothing here" if parent else "no module's name"
            raise ValueError(
                f"{where} has the entry {entry!r}, which is {why}: use the config.json that was published with the "
                "weights."
            )
        found.update(hit)
    return found


def check_topology(
    config: Any,
    quantised: frozenset[str],
    *,
    tp: int,
    ep: int,
    moe_tp: int,
    attn_tp: int,
    mlp_tp: int,
    deepep: bool = False,
) -> None:
    """Check heads, experts and 128-blocks against the parallel sizes; the message shows the arithmetic.

    ``tp`` and ``ep`` are the sizes asked for; ``moe_tp`` ranks share one expert, ``attn_tp`` one attention and
    ``mlp_tp`` one dense MLP. Under ``deepep`` every rank has the whole shared expert. Raises ``ValueError``.
    """
    kinds = _kinds(config, quantised)
    shared = 1 if deepep else tp
    fault = _topology_fault(config, kinds, tp=tp, ep=ep, moe_tp=moe_tp, attn_tp=attn_tp, mlp_tp=mlp_tp, shared=shared)
    if fault is None:
        return
    sizes = (1, 2, 4, 8, 16)
    pairs = [
        (t, e)
        for t in sizes
        for e in sizes
        if (t == e > 1 if deepep else t % e == 0)
        and not _topology_fault(
            config, kinds, tp=t, ep=e, moe_tp=t // e, attn_tp=t, mlp_tp=t, shared=1 if deepep else t
        )
    ]
    raise ValueError(
        f"--tp-size {tp} with --ep-size {ep} cannot serve this model: {fault}; (TP, EP) pairs that work: "
        f"{', '.join(map(str, pairs)) or 'none'}."
    )


def spell_out(config: Any, quant_config: Any, quantised: frozenset[str]) -> None:
    """Rewrite the engine's config as the target "Linear" and every unquantised linear module by its full name.

    That is the one spelling in which the engine finds the block size, leaves everything else in BF16 and takes all
    experts of a layer alike.
    """
    scheme = next(iter(quant_config.target_scheme_map.values()))
    quant_config.target_scheme_map = {"Linear": scheme}
    quant_config.ignore = [m.name for m in modules(config) if m.linear and m.name not in quantised]


def _kinds(config: Any, quantised: frozenset[str]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(part of the model, projection, shape, rows and columns that must stay together), one for all that are alike."""
    found = {}
    for module in modules(config):
        if module.linear:
            parent, _, leaf = module.name.rpartition(".")
            part = "expert" if module.expert is not None else parent.split(".", 3)[3]
            found[part, leaf, module.shape, BLOCK if module.name in quantised else 1] = None
    return list(found)


def _topology_fault(
    config: Any, kinds: list, *, tp: int, ep: int, moe_tp: int, attn_tp: int, mlp_tp: int, shared: int
) -> str | None:
    heads, kv_heads, experts = config.num_attention_heads, config.num_key_value_heads, config.num_experts
    if heads % attn_tp:
        return f"{heads} attention heads % {attn_tp} ranks = {heads % attn_tp}"
    if kv_heads % attn_tp and attn_tp % kv_heads:
        return f"{kv_heads} KV heads and {attn_tp} attention ranks, neither divides the other"
    if ep > 1 and not experts:
        return "the model has no routed experts"
    if experts % ep:
        return f"{experts} experts % {ep} expert-parallel ranks = {experts % ep}"
    ranks = {"self_attn": attn_tp, "expert": moe_tp, "mlp": mlp_tp, "mlp.shared_experts": shared}
    for part, leaf, shape, block in kinds:
        ways = min(attn_tp, kv_heads) if leaf in ("k_proj", "v_proj") else ranks[part]
        by_columns = leaf in ("o_proj", "down_proj")
        for axis, extent in enumerate(shape):
            shares = ways if axis == by_columns else 1
            share, rest = divmod(extent, shares)
            if rest or share % block:
                return (
                    f"{part} {leaf} has {extent} {('rows', 'columns')[axis]} in blocks of {block}, "
                    f"{extent} / {shares} = {extent / shares:g}, {extent / shares:g} % {block} = "
                    f"{extent / shares % block:g}"
                )
    return None


def _means_blocks(scheme: dict[str, Any]) -> bool:
    weights, inputs = scheme.get("weights"), scheme.get("input_activations")
    return (
        weights is not None
        and inputs is not None
        and list(weights.block_structure or ()) == [BLOCK, BLOCK]
        and (weights.num_bits, weights.type, weights.strategy) == (8, "float", "block")
        and (inputs.num_bits, inputs.type, inputs.strategy, inputs.group_size) == (8, "float", "group", BLOCK)
        and weights.symmetric is inputs.symmetric is inputs.dynamic is True
        and weights.dynamic is False
    )


def _check_keys(where: str, declared: dict[str, Any], wanted: dict[str, tuple], free: set[str]) -> None:
    for key, choices in wanted.items():
        if not any(_same(declared.get(key), choice) for choice in choices):
            raise _another(f"{where}.{key}", declared.get(key), " or ".join(map(repr, choices)))
    for key, value in declared.items():
        if key not in wanted and key not in free:
            raise ValueError(
                f"{where}.{key} is {value!r}, which the published {FORMAT} format does not have and which could "
                "change what the weights mean: use the config.json that was published with the weights."
            )


def _same(value: Any, choice: Any) -> bool:
    """Equal as JSON: 1 is not true, and [128.0, 128] builds no shape."""
    return json.dumps(value, default=repr) == json.dumps(choice)


def _names(where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise _another(where, value, "a list of names")
    return value


def _another(where: str, value: Any, wanted: str) -> ValueError:
    return ValueError(
        f"{where} is {value!r} and must be {wanted} for {FORMAT}: use a checkpoint in the published format."
    )
