"""The tensors of a K2-Horizon compressed-tensors block-FP8 checkpoint without value experts: dense or MoE.

Published as IFM/K2-Horizon-7B-FP8: a quantised linear module is E4M3 codes with one scale per 128x128 block in
``weight_scale``, everything else is BF16. Which modules are quantised is the checkpoint's own declaration. Names
are those of the Hugging Face layout, shapes are (out, in).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsFusedMoEMethod,
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A8Fp8MoE,
)
from sglang.srt.layers.quantization.mova_fp8_format import BLOCK, CODES, PLAIN, ROUTER_BIAS, owns, parameter_of
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader.checkpoint_ledger import Expected, TensorClass
from sglang.srt.runtime_context import get_parallel

# BF16 in the published 7B, FP32 where an exporter kept it; the engine holds FP32, which either is exact in.
SCALE = TensorClass((torch.bfloat16, torch.float32), torch.float32, positive=True)

#: Fused module of the engine -> the linear modules of the checkpoint that it is made of.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Module(NamedTuple):
    """A module with a weight. ``linear`` ones can be quantised; ``layer`` is None outside the stack. The engine keeps
    the weight in ``parameter`` as ``span`` of ``parts`` parts from ``part`` on, or stacked at ``expert``."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    parameter: str
    linear: bool = False
    expert: int | None = None
    part: int = 0
    parts: int = 1
    span: int = 1
    bias: bool = False


@dataclass(frozen=True)
class K2HorizonFp8Format:
    """The admitted format; ``quantised`` names the linear modules that the checkpoint declares to be FP8."""

    quantised: frozenset[str]
    name = "K2-Horizon compressed-tensors FP8"
    updatable = True

    def inventory(self, model: torch.nn.Module) -> dict[str, Expected]:
        """Name -> class, full shape and place of every tensor of the checkpoint, for the rank of ``model``.

        A tensor of another pipeline stage, or an expert of another expert-parallel rank, has no parameter.
        """
        result: dict[str, Expected] = {}
        local_of: dict[int, Any] = {}
        for module in modules(model.config, get_parallel().attn_tp_size):
            owned, expert = owns(model, module), module.expert
            if owned and expert is not None:
                if module.layer not in local_of:
                    experts = model.model.layers[module.layer].mlp.experts
                    local_of[module.layer] = experts._map_global_expert_id_to_local_expert_id
                expert = local_of[module.layer](expert)
                owned = expert >= 0
            parameter = parameter_of(model, module) if owned else None
            place = (expert, module.part, module.parts, module.span)
            weight = f"{module.name}.weight"
            if module.name in self.quantised:
                blocks = tuple(-(-extent // BLOCK) for extent in module.shape)
                result[weight] = Expected(CODES, module.shape, parameter, *place)
                result[f"{weight}_scale"] = Expected(SCALE, blocks, parameter and f"{parameter}_scale", *place)
            else:
                result[weight] = Expected(PLAIN, module.shape, parameter, *place)
            if module.bias:
                bias = f"{module.name}.bias"
                result[bias] = Expected(ROUTER_BIAS, module.shape[:1], bias if owned else None)
        return result

    def scope_faults(self, model: torch.nn.Module) -> list[tuple[str, str]]:
        """Live modules whose method or dtype is not the declared one: FP8 in blocks, or BF16."""
        found = []
        quantised = {engine_name(name) for name in self.quantised}
        for name, module in model.named_modules():
            method, declared = getattr(module, "quant_method", None), name in quantised
            if method is not None and declared and not _runs_blocks(module, method):
                found.append((name, f"runs {type(method).__name__}, must run FP8 in blocks of {BLOCK}x{BLOCK}"))
            elif method is not None and not declared and type(method) not in _UNQUANTISED:
                found.append((name, f"runs {type(method).__name__}, must be unquantised"))
            for leaf, parameter in module.named_parameters(recurse=False):
                if leaf.endswith("_scale"):
                    # Some backends round scales to powers of two after the load, and the codes with them.
                    if getattr(parameter, "format_ue8m0", False):
                        found.append((f"{name}.{leaf}", "was requantised to UE8M0: choose another FP8 backend"))
                    continue
                router_bias = leaf == "bias" and name.endswith(".mlp.gate")
                wanted = torch.float8_e4m3fn if declared else torch.float32 if router_bias else torch.bfloat16
                if parameter.dtype != wanted:
                    found.append((f"{name}.{leaf}", f"is held as {parameter.dtype}, must be {wanted}"))
        live = {name for name, _ in model.named_modules()}
        first, end = model.model.start_layer, model.model.end_layer
        for name in sorted(quantised - live):
            layer = _LAYER.match(name)
            if layer is None or first <= int(layer[1]) < end:
                found.append((name, "is not a module of the model as it was built"))
        return found


_UNQUANTISED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.\w+")


def modules(config: Any, attn_tp: int = 1) -> Iterator[Module]:
    """Yield every module that holds a weight, in the order of the forward pass.

    ``config`` is the Hugging Face config of a K2-Horizon model without value experts; shapes are whole. The shares
    of fused queries, keys and values depend on ``attn_tp``, the ranks that share one attention.
    """
    hidden, dense = config.hidden_size, len(config.mlp_only_layers)
    yield Module("model.embed_tokens", (config.vocab_size, hidden), None, "model.embed_tokens.weight")
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Module(f"{layer}.{norm}", (hidden,), index, f"{layer}.{norm}.weight")
        yield from _attention(f"{layer}.self_attn", config, index, attn_tp)
        if not config.num_experts or index < dense:
            yield from _mlp(f"{layer}.mlp", hidden, config.intermediate_size, index)
            continue
        router = f"{layer}.mlp.gate"
        shape = (config.num_experts, hidden)
        yield Module(router, shape, index, f"{router}.weight", bias=config.moe_gate_bias)
        yield from _routed_experts(f"{layer}.mlp.experts", config, index)
        if config.num_shared_experts:
            width = config.moe_intermediate_size * config.num_shared_experts
            yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width, index)
    yield Module("model.norm", (hidden,), None, "model.norm.weight")
    if not config.tie_word_embeddings:
        yield Module("lm_head", (config.vocab_size, hidden), None, "lm_head.weight")


def engine_name(name: str) -> str:
    """The engine's module that a linear module of the checkpoint becomes a part of."""
    if match := _EXPERT.fullmatch(name):
        return match[1]
    parent, _, leaf = name.rpartition(".")
    fused = next((fused for fused, leaves in FUSED.items() if leaf in leaves), leaf)
    return f"{parent}.{fused}"


def fused_sets(quantisable: Iterable[Module]) -> dict[str, list[Module]]:
    """Engine module -> the checkpoint's modules that it is made of: all of them must be quantised, or none."""
    sets: dict[str, list[Module]] = {}
    for module in quantisable:
        sets.setdefault(engine_name(module.name), []).append(module)
    return sets


def _attention(name: str, config: Any, layer: int, attn_tp: int) -> Iterator[Module]:
    hidden, head_dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    # Heads of one rank; beyond the number of KV heads several ranks keep the same one.
    share, kv_share = heads // attn_tp, max(1, kv_heads // attn_tp)
    fused, parts = f"{name}.qkv_proj.weight", share + 2 * kv_share
    q, kv, o = (heads * head_dim, hidden), (kv_heads * head_dim, hidden), (hidden, heads * head_dim)
    yield Module(f"{name}.q_proj", q, layer, fused, True, None, 0, parts, share)
    yield Module(f"{name}.k_proj", kv, layer, fused, True, None, share, parts, kv_share)
    yield Module(f"{name}.v_proj", kv, layer, fused, True, None, share + kv_share, parts, kv_share)
    yield Module(f"{name}.o_proj", o, layer, f"{name}.o_proj.weight", True)


def _mlp(name: str, hidden: int, width: int, layer: int) -> Iterator[Module]:
    fused = f"{name}.gate_up_proj.weight"
    yield Module(f"{name}.gate_proj", (width, hidden), layer, fused, True, None, 0, 2)
    yield Module(f"{name}.up_proj", (width, hidden), layer, fused, True, None, 1, 2)
    yield Module(f"{name}.down_proj", (hidden, width), layer, f"{name}.down_proj.weight", True)


def _routed_experts(name: str, config: Any, layer: int) -> Iterator[Module]:
    up, down = (config.moe_intermediate_size, config.hidden_size), (config.hidden_size, config.moe_intermediate_size)
    gate_up, w2 = f"{name}.w13_weight", f"{name}.w2_weight"
    for expert in range(config.num_experts):
        yield Module(f"{name}.{expert}.gate_proj", up, layer, gate_up, True, expert, 0, 2)
        yield Module(f"{name}.{expert}.up_proj", up, layer, gate_up, True, expert, 1, 2)
        yield Module(f"{name}.{expert}.down_proj", down, layer, w2, True, expert)


def _runs_blocks(module: torch.nn.Module, method: Any) -> bool:
    scheme = getattr(module, "scheme", None)
    if type(method) is CompressedTensorsFusedMoEMethod:
        fits = type(scheme) is CompressedTensorsW8A8Fp8MoE and not scheme.static_input_scales
    else:
        fits = type(method) is CompressedTensorsLinearMethod and type(scheme) is CompressedTensorsW8A8Fp8
        fits = fits and not scheme.is_static_input_scheme
    return fits and list(scheme.weight_block_size or ()) == [BLOCK, BLOCK]
