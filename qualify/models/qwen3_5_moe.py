"""Qwen3.5/3.6-MoE: the modules that a ``config.json`` promises. Standard library only.

Source: the Transformers 5.19 model ``qwen3_5_moe`` (module names and shapes of the Hugging Face layout), with
routed experts one by one, as ModelOpt exports them. The published Qwen3.6-35B-A3B-NVFP4 config is not at
hand, so nothing here has been compared with the published headers. Vision tower and ``mtp.*`` are outside
this inventory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qualify.errors import Rejected
from qualify.models.k2_horizon import Module

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")


def modules(config: Mapping[str, Any]) -> Iterator[Module]:
    """Yield every module of the language model, in the order of the forward pass.

    Kinds are those of :class:`qualify.models.k2_horizon.Module` and ``conv`` and ``parameter`` (a bare
    tensor: its name is the tensor's). Raises ``Rejected`` when the config lacks a size.
    """
    nested = isinstance(config.get("text_config"), dict)
    text = config["text_config"] if nested else config
    prefix = "model.language_model" if nested else "model"
    hidden, vocab = _size(text, "hidden_size"), _size(text, "vocab_size")
    yield Module(f"{prefix}.embed_tokens", "embedding", (vocab, hidden))
    for index, kind in enumerate(_layer_types(text)):
        layer = f"{prefix}.layers.{index}"
        yield Module(f"{layer}.input_layernorm", "norm", (hidden,))
        if kind == "linear_attention":
            yield from _linear_attention(f"{layer}.linear_attn", text, hidden)
        else:
            yield from _attention(f"{layer}.self_attn", text, hidden)
        yield Module(f"{layer}.post_attention_layernorm", "norm", (hidden,))
        yield Module(f"{layer}.mlp.gate", "linear", (_size(text, "num_experts"), hidden))
        for expert in range(_size(text, "num_experts")):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, _size(text, "moe_intermediate_size"), True)
        yield from _mlp(f"{layer}.mlp.shared_expert", hidden, _size(text, "shared_expert_intermediate_size"))
        yield Module(f"{layer}.mlp.shared_expert_gate", "linear", (1, hidden))
    yield Module(f"{prefix}.norm", "norm", (hidden,))
    if not (config.get("tie_word_embeddings") or text.get("tie_word_embeddings")):
        yield Module("lm_head", "linear", (vocab, hidden))


def _linear_attention(name: str, text: Mapping[str, Any], hidden: int) -> Iterator[Module]:
    keys = _size(text, "linear_num_key_heads") * _size(text, "linear_key_head_dim")
    heads, width = _size(text, "linear_num_value_heads"), _size(text, "linear_value_head_dim")
    values, mixed = heads * width, 2 * keys + heads * width
    yield Module(f"{name}.in_proj_qkv", "linear", (mixed, hidden))
    yield Module(f"{name}.in_proj_z", "linear", (values, hidden))
    yield Module(f"{name}.in_proj_b", "linear", (heads, hidden))
    yield Module(f"{name}.in_proj_a", "linear", (heads, hidden))
    yield Module(f"{name}.conv1d", "conv", (mixed, 1, _size(text, "linear_conv_kernel_dim")))
    yield Module(f"{name}.A_log", "parameter", (heads,))
    yield Module(f"{name}.dt_bias", "parameter", (heads,))
    yield Module(f"{name}.norm", "norm", (width,))
    yield Module(f"{name}.out_proj", "linear", (hidden, values))


def _attention(name: str, text: Mapping[str, Any], hidden: int) -> Iterator[Module]:
    head_dim = _size(text, "head_dim")
    q_width = _size(text, "num_attention_heads") * head_dim
    kv_width = _size(text, "num_key_value_heads") * head_dim
    # The output gate's rows are interleaved with the query's.
    gated = 2 if text.get("attn_output_gate", True) else 1
    yield Module(f"{name}.q_proj", "linear", (gated * q_width, hidden))
    yield Module(f"{name}.k_proj", "linear", (kv_width, hidden))
    yield Module(f"{name}.v_proj", "linear", (kv_width, hidden))
    yield Module(f"{name}.o_proj", "linear", (hidden, q_width))
    yield Module(f"{name}.q_norm", "norm", (head_dim,))
    yield Module(f"{name}.k_norm", "norm", (head_dim,))


def _mlp(name: str, hidden: int, width: int, routed: bool = False) -> Iterator[Module]:
    yield Module(f"{name}.gate_proj", "linear", (width, hidden), routed)
    yield Module(f"{name}.up_proj", "linear", (width, hidden), routed)
    yield Module(f"{name}.down_proj", "linear", (hidden, width), routed)


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    layers = _size(text, "num_hidden_layers")
    types = text.get("layer_types")
    if types is None:
        interval = text.get("full_attention_interval", 4)
        if type(interval) is not int or interval < 1:
            raise Rejected(f"config.json full_attention_interval must be a positive integer, got {interval!r:.60}")
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise Rejected(f"config.json layer_types must hold {layers} of {', '.join(known)}")
    return types


def _size(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise Rejected(f"config.json {key} must be an integer from 1 below 2^40, got {value!r:.60}")
    return value
