"""K2-Horizon: the tensors that a ``config.json`` promises. Standard library only.

Sources of the facts: the published configs under ``tests/data`` (the 3,408 ``ignored_layers`` of the MoVA
checkpoint name every module outside its routed experts) and the published safetensors header of the dense
7B. Names are those of the Hugging Face layout, shapes are ``(out, in)``, dtypes are spelt as in safetensors
headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qualify.checkpoint.matching import Names, match
from qualify.errors import Rejected

#: Rows and columns that share one scale.
BLOCK = 128

#: Bytes of one element of each dtype that a K2-Horizon checkpoint holds.
ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}

_ROUTER = re.compile(r"\.(self_attn\.v_router|mlp\.gate)$")


@dataclass(frozen=True)
class Tensor:
    """One tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        size = ITEMSIZE[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Module:
    """One parameter-holding module of the Hugging Face layout.

    ``kind`` is ``linear``, ``norm`` or ``embedding``; ``routed`` marks the feed-forward experts behind the
    router (not the value experts, not the shared expert). ``bias`` is a router's selection bias, one per row.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    routed: bool = False
    bias: bool = False


def modules(config: Mapping[str, Any]) -> Iterator[Module]:
    """Yield every module with parameters, in the order of the forward pass.

    Raises ``Rejected`` when the config lacks a key or describes another architecture.
    """
    _check_architecture(config)
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    vocab, head_dim = _size(config, "vocab_size"), _size(config, "head_dim")
    q_width = _size(config, "num_attention_heads") * head_dim
    kv_width = _size(config, "num_key_value_heads") * head_dim
    dense_layers = len(_prefix(config))
    value_experts = _size(config, "mova_num_experts", minimum=0)
    experts = _size(config, "num_experts", minimum=0)
    router_bias = bool(config.get("moe_gate_bias"))

    yield Module("model.embed_tokens", "embedding", (vocab, hidden))
    for index in range(layers):
        layer = f"model.layers.{index}"
        sparse = experts > 0 and index >= dense_layers
        yield Module(f"{layer}.input_layernorm", "norm", (hidden,))
        yield Module(f"{layer}.self_attn.q_proj", "linear", (q_width, hidden))
        yield Module(f"{layer}.self_attn.k_proj", "linear", (kv_width, hidden))
        if sparse and value_experts:
            router = f"{layer}.self_attn.v_router"
            yield Module(router, "linear", (value_experts, hidden), bias=router_bias)
            for expert in range(value_experts):
                yield Module(f"{layer}.self_attn.v_experts.{expert}", "linear", (kv_width, hidden))
        else:
            yield Module(f"{layer}.self_attn.v_proj", "linear", (kv_width, hidden))
        if config.get("attention_gate_func") is not None:
            yield Module(f"{layer}.self_attn.gate_proj", "linear", (q_width, hidden))
        yield Module(f"{layer}.self_attn.o_proj", "linear", (hidden, q_width))
        yield Module(f"{layer}.post_attention_layernorm", "norm", (hidden,))
        if not sparse:
            yield from _mlp(f"{layer}.mlp", hidden, _size(config, "intermediate_size"))
            continue
        width = _size(config, "moe_intermediate_size")
        yield Module(f"{layer}.mlp.gate", "linear", (experts, hidden), bias=router_bias)
        for expert in range(experts):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, width, routed=True)
        shared = _size(config, "num_shared_experts", minimum=0)
        if shared:
            yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width * shared)
    yield Module("model.norm", "norm", (hidden,))
    if not config.get("tie_word_embeddings"):
        yield Module("lm_head", "linear", (vocab, hidden))


def tensors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return name -> :class:`Tensor` for every tensor of the checkpoint that ``config`` describes.

    A block-quantised weight ``(out, in)`` is ``F8_E4M3`` and has a scale of shape
    ``(ceil(out / 128), ceil(in / 128))``; everything else is BF16. Raises ``Rejected`` for a quantisation
    format that no published K2-Horizon checkpoint uses.
    """
    scale_leaf, scale_dtype, is_quantised = _scope(config)
    inventory = {}
    for module in modules(config):
        quantised = is_quantised(module)
        inventory[f"{module.name}.weight"] = Tensor("F8_E4M3" if quantised else "BF16", module.shape)
        if quantised:
            blocks = tuple(-(-extent // BLOCK) for extent in module.shape)
            inventory[f"{module.name}.{scale_leaf}"] = Tensor(scale_dtype, blocks)
        if module.bias:
            inventory[f"{module.name}.bias"] = Tensor("BF16", module.shape[:1])
    return inventory


def bf16_modules(config: Mapping[str, Any]) -> list[str]:
    """Names of all modules outside the routed experts, sorted as the published ``ignored_layers`` is."""
    return sorted(module.name for module in modules(config) if not module.routed)


def _mlp(name: str, hidden: int, width: int, routed: bool = False) -> Iterator[Module]:
    yield Module(f"{name}.gate_proj", "linear", (width, hidden), routed)
    yield Module(f"{name}.up_proj", "linear", (width, hidden), routed)
    yield Module(f"{name}.down_proj", "linear", (hidden, width), routed)


def _scope(config: Mapping[str, Any]):
    """Return (scale leaf, scale dtype, predicate over modules) of the config's quantisation."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return "", "", lambda module: False
    method = quantisation.get("quant_method")
    if method == "fp8":
        if quantisation.get("weight_block_size") != [BLOCK, BLOCK]:
            raise Rejected(
                f"quantization_config.weight_block_size is {quantisation.get('weight_block_size')!r}; "
                f"published K2-Horizon checkpoints use [{BLOCK}, {BLOCK}]"
            )
        ignored = set(quantisation.get("ignored_layers") or ())
        return (
            "weight_scale_inv",
            "F32",
            lambda module: module.kind == "linear" and module.name not in ignored,
        )
    if method == "compressed-tensors":
        groups = list((quantisation.get("config_groups") or {}).values())
        if any(group.get("weights", {}).get("block_structure") != [BLOCK, BLOCK] for group in groups):
            raise Rejected(
                "quantization_config.config_groups has weights.block_structure other than that of published "
                f"K2-Horizon checkpoints, [{BLOCK}, {BLOCK}]"
            )
        ignored = _named(config, quantisation.get("ignore") or ())
        targets = {target for group in groups for target in group.get("targets") or ()}
        named = _named(config, targets - {"Linear"})
        # The dtype is the 7B header's: its scales are stored BF16. "Linear" is a class, and no router's.
        return (
            "weight_scale",
            "BF16",
            lambda module: (
                module.kind == "linear"
                and module.name not in ignored
                and (module.name in named or ("Linear" in targets and not _ROUTER.search(module.name)))
            ),
        )
    raise Rejected(f"quantization_config.quant_method {method!r} is not a K2-Horizon checkpoint format")


def _named(config: Mapping[str, Any], entries: Iterable[str]) -> set[str]:
    """The modules that compressed-tensors entries name, by the rule that inspection uses."""
    names = Names(module.name for module in modules(config))
    return {name for entry in entries for name in match(entry, names, "compressed-tensors").modules}


def _check_architecture(config: Mapping[str, Any]) -> None:
    if config.get("model_type") != "k2_horizon":
        raise Rejected(f"config.json has model_type {config.get('model_type')!r}, expected 'k2_horizon'")
    if config.get("attention_bias"):
        raise Rejected("config.json has attention_bias true; no published K2-Horizon checkpoint does")


def _prefix(config: Mapping[str, Any]) -> list[int]:
    """The dense layers, which form a prefix of the stack."""
    prefix = config.get("mlp_only_layers")
    if not isinstance(prefix, list) or prefix != list(range(len(prefix))):
        raise Rejected(f"config.json mlp_only_layers must be the list 0..n-1, got {prefix!r}")
    return prefix


def _size(config: Mapping[str, Any], key: str, minimum: int = 1) -> int:
    value = config.get(key)
    if type(value) is not int or not minimum <= value < 1 << 40:
        raise Rejected(f"config.json {key} must be an integer from {minimum} below 2^40, got {value!r:.60}")
    return value
