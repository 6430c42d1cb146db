"""What a config promises, in one shape for every architecture: classes, names and shapes of all modules.

The per-architecture modules (``k2_horizon``, ``qwen3_5_moe``) say which modules exist; this one gives each
its class and bounds the sizes, because a config is hostile input too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qualify.errors import Rejected
from qualify.models import k2_horizon, qwen3_5_moe

CLASSES = (
    "dense_linear",
    "routed_expert",
    "shared_expert",
    "value_expert",
    "router",
    "norm",
    "embedding",
    "lm_head",
    "vision",
    "mtp",
    "other",
)
#: Modules that any real model stays below by an order of magnitude.
MAX_MODULES = 400_000
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Promised(NamedTuple):
    """One module: its class, whether it is linear, the shape ``(out, in)`` of its weight, and more."""

    klass: str
    linear: bool
    shape: tuple[int, ...]
    bias: bool
    #: tensor leaf below the module; None when the module is the tensor (``A_log``)
    leaf: str = "weight"
    dtypes: tuple[str, ...] = ("BF16",)


@dataclass(slots=True)
class Inventory:
    """The modules of a checkpoint by name, in the order of the forward pass."""

    architecture: str
    modules: dict[str, list[Promised]]
    layers: int
    experts: int
    #: names below these are counted and not checked, by class
    skipped: dict[str, str] = field(default_factory=dict)
    #: keys that the config lacks and the tensor names supplied: key -> value
    defaulted: dict[str, Any] = field(default_factory=dict)


def module_class(name: str) -> str:
    """The class of a module by its name, for every architecture known here."""
    if ".mlp.experts." in name and "mtp." not in name and "nextn." not in name:
        return "routed_expert"  # nearly all modules of a large checkpoint
    parts = name.split(".")
    last = parts[-1]
    if "mtp" in parts or "nextn" in parts:
        return "mtp"
    if "visual" in parts or "vision_tower" in parts or "vision_model" in parts:
        return "vision"
    if last == "lm_head":
        return "lm_head"
    if last in ("embed_tokens", "wte", "word_embeddings"):
        return "embedding"
    if "shared_experts" in parts or "shared_expert" in parts:
        return "shared_expert"
    if "v_experts" in parts:
        return "value_expert"
    if "experts" in parts:
        return "routed_expert"
    if last in ("v_router", "router", "shared_expert_gate") or (last == "gate" and len(parts) > 1):
        return "router"
    if "norm" in last:
        return "norm"
    return "dense_linear"


def layer_of(name: str) -> int | None:
    """The layer number in a tensor or module name, or None."""
    match = _LAYER.search(name)
    return int(match[1][:9]) if match else None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: the config itself, or its ``text_config``."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def expert_count(config: Mapping[str, Any]) -> int:
    """The number of routed experts a layer that any config states; 0 when it states none."""
    text = text_config(config)
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        value = text.get(key)
        if type(value) is int and value > 0:
            return value
    return 0


def derive(config: Mapping[str, Any], tensors: Callable[[], Mapping[str, tuple[int, ...]]]) -> Inventory | None:
    """The inventory that ``config`` promises; None for an architecture without one here.

    ``tensors`` gives name -> shape of what is stored. It decides only what the config leaves open, and is not
    called otherwise. Raises ``Rejected`` for a config that lacks a size or holds an impossible one.
    """
    if config.get("model_type") == "k2_horizon":
        return _k2_horizon(config, tensors)
    if config.get("model_type") in qwen3_5_moe.MODEL_TYPES:
        return _qwen3_5_moe(config)
    return None


def _bounded(config: Mapping[str, Any], per_layer: Iterable[str]) -> None:
    sizes = {}
    for key in ("num_hidden_layers", *per_layer):
        value = config.get(key, 0)
        if type(value) is not int or value < 0:
            raise Rejected(f"config.json {key} must be an integer of at least 0, got {value!r:.60}")
        sizes[key] = value
    layers = sizes["num_hidden_layers"]
    if layers * (16 + 4 * (sum(sizes.values()) - layers)) > MAX_MODULES:
        told = ", ".join(f"{key} {value}" for key, value in sizes.items())
        raise Rejected(f"config.json promises more modules than any model has: {told}")


def _k2_horizon(config: Mapping[str, Any], tensors: Callable[[], Mapping[str, tuple[int, ...]]]) -> Inventory:
    _bounded(config, ("num_experts", "mova_num_experts", "num_shared_experts"))
    _k2_assumptions(config)
    completed, defaulted = dict(config), {}
    stored = tensors() if _K2_OPTIONAL.keys() - config.keys() else {}
    for key, read in _K2_OPTIONAL.items():
        if key not in config:
            completed[key] = defaulted[key] = read(stored, completed)
    modules = {}
    for module in k2_horizon.modules(completed):
        klass = module_class(module.name)
        modules[module.name] = [Promised(klass, module.kind == "linear", module.shape, module.bias)]
    return Inventory(
        "k2_horizon",
        modules,
        completed["num_hidden_layers"],
        completed["num_experts"],
        defaulted={key: value for key, value in defaulted.items() if value not in (None, 0, False, [])},
    )


def _k2_assumptions(config: Mapping[str, Any]) -> None:
    """Refuse values under which K2-Horizon would have other modules than the published checkpoints show."""
    for key, known in (("decoder_sparse_step", (None, 1)), ("query_key_norm", (None, False))):
        if config.get(key) not in known:
            raise Rejected(f"config.json {key} is {config[key]!r:.60}; no published K2-Horizon checkpoint has that")
    for key in ("tie_word_embeddings", "moe_gate_bias"):
        if not isinstance(config.get(key), bool | None):
            raise Rejected(f"config.json {key} must be true or false, got {config[key]!r:.60}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(kv_heads) is int and kv_heads > 0 and heads % kv_heads:
        raise Rejected(f"config.json num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


def _any(names: Iterable[str], leaf: str) -> bool:
    return any(name.endswith(leaf) for name in names)


#: keys that a K2-Horizon config may lack -> how the tensor names supply them
_K2_OPTIONAL = {
    "num_experts": lambda names, config: 0,
    "mova_num_experts": lambda names, config: 0,
    "mlp_only_layers": lambda names, config: (
        [] if config["num_experts"] else list(range(config.get("num_hidden_layers", 0)))
    ),
    "intermediate_size": lambda names, config: (names.get("model.layers.0.mlp.gate_proj.weight") or (0,))[0],
    "num_shared_experts": lambda names, config: int(_any(names, ".shared_experts.gate_proj.weight")),
    "moe_gate_bias": lambda names, config: _any(names, ".mlp.gate.bias"),
    "attention_gate_func": lambda names, config: "softplus" if _any(names, ".self_attn.gate_proj.weight") else None,
}


def _qwen3_5_moe(config: Mapping[str, Any]) -> Inventory:
    text = text_config(config)
    _bounded(text, ("num_experts",))
    modules: dict[str, list[Promised]] = {}
    for module in qwen3_5_moe.modules(config):
        klass = "other" if module.kind in ("conv", "parameter") else module_class(module.name)
        name, leaf = module.name, "weight"
        if module.kind == "parameter":
            name, _, leaf = module.name.rpartition(".")
        # The state-space parameters are small and kept in either precision.
        dtypes = ("BF16",) if module.kind in ("linear", "embedding") else ("BF16", "F32")
        modules.setdefault(name, []).append(
            Promised(klass, module.kind == "linear", module.shape, module.bias, leaf, dtypes)
        )
    return Inventory(
        "qwen3_5_moe",
        modules,
        text["num_hidden_layers"],
        text["num_experts"],
        skipped={"vision": "vision-skipped", "mtp": "mtp"},
    )
