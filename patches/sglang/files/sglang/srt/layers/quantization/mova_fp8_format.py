"""The tensors of a K2-Horizon MoVA block-FP8 checkpoint: names, classes, shapes, and which rank keeps which.

Published as IFM/K2-Horizon-MoVA-36B-A4B-FP8: the routed feed-forward experts are E4M3 codes with one FP32 scale
per 128x128 block, everything else is BF16. Names are those of the Hugging Face layout, shapes are (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.model_loader.checkpoint_ledger import Expected, Place, TensorClass

#: Rows and columns that share one scale.
BLOCK = 128

CODES = TensorClass((torch.float8_e4m3fn,), torch.float8_e4m3fn)
SCALE = TensorClass((torch.float32,), torch.float32, positive=True)
PLAIN = TensorClass((torch.bfloat16,), torch.bfloat16)
# The selection biases are the one thing that the engine holds in another dtype: its top-k kernel wants FP32,
# which every BF16 value is exact in.
ROUTER_BIAS = TensorClass((torch.bfloat16, torch.float32), torch.float32)


class Module(NamedTuple):
    """A module that holds a weight; ``layer`` is None outside the stack, ``expert`` is set for a routed expert."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    place: Place
    expert: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class MovaFp8Format:
    """The admitted format; ``bf16_modules`` are the modules that the checkpoint declares to be unquantised."""

    bf16_modules: frozenset[str]
    name = "K2-Horizon MoVA FP8"

    def inventory(self, model: torch.nn.Module) -> dict[str, Expected]:
        """Name -> class, full shape and place of every tensor of the checkpoint, for the rank of ``model``.

        A tensor of another pipeline stage, or an expert of another expert-parallel rank, has no place.
        """
        result: dict[str, Expected] = {}
        for module in modules(model.config):
            place = _place(model, module)
            weight = f"{module.name}.weight"
            if module.expert is None:
                result[weight] = Expected(PLAIN, module.shape, place)
            else:
                rows, columns = module.shape
                blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
                result[weight] = Expected(CODES, module.shape, place)
                scale_place = place and place._replace(parameter=f"{place.parameter}_scale_inv")
                result[f"{weight}_scale_inv"] = Expected(SCALE, blocks, scale_place)
            if module.bias:
                bias_place = place and Place(f"{module.name}.bias")
                result[f"{module.name}.bias"] = Expected(ROUTER_BIAS, module.shape[:1], bias_place)
        return result

    def scope_faults(self, model: torch.nn.Module) -> list[tuple[str, str]]:
        """Live modules whose method or dtype is not: FP8 blocks in the routed experts, BF16 everywhere else."""
        found = []
        experts = set(routed_expert_modules(model.config))
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if name in experts:
                if type(method) is not Fp8MoEMethod or not method.block_quant:
                    found.append((name, f"runs {type(method).__name__}, must run block-wise Fp8MoEMethod"))
                continue
            if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                found.append((name, f"runs {type(method).__name__}, must be unquantised"))
            for leaf, parameter in module.named_parameters(recurse=False):
                bias = leaf == "bias" and name.endswith((".mlp.gate", ".self_attn.v_router"))
                wanted = torch.float32 if bias else torch.bfloat16
                if parameter.dtype != wanted and not _inside(name, experts):
                    found.append((f"{name}.{leaf}", f"is held as {parameter.dtype}, must be {wanted}"))
        return found


def modules(config: Any) -> Iterator[Module]:
    """Yield every module with a weight, in the order of the forward pass."""
    hidden, dense = config.hidden_size, len(config.mlp_only_layers)
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim

    def plain(name: str, shape: tuple[int, ...], layer: int | None, bias: bool = False) -> Module:
        return Module(name, shape, layer, Place(f"{name}.weight"), bias=bias)

    yield plain("model.embed_tokens", (config.vocab_size, hidden), None)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        attention, sparse = f"{layer}.self_attn", index >= dense
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield plain(f"{layer}.{norm}", (hidden,), index)
        for leaf, shape in (
            ("q_proj", (q_width, hidden)),
            ("k_proj", (kv_width, hidden)),
            ("gate_proj", (q_width, hidden)),
            ("o_proj", (hidden, q_width)),
        ):
            yield plain(f"{attention}.{leaf}", shape, index)
        if not sparse:
            yield plain(f"{attention}.v_proj", (kv_width, hidden), index)
            yield from _mlp(f"{layer}.mlp", hidden, config.intermediate_size, index)
            continue
        yield plain(f"{attention}.v_router", (config.mova_num_experts, hidden), index, config.moe_gate_bias)
        for expert in range(config.mova_num_experts):
            name = f"{attention}.v_experts"
            yield Module(f"{name}.{expert}", (kv_width, hidden), index, Place(f"{name}.weight", expert))
        yield plain(f"{layer}.mlp.gate", (config.num_experts, hidden), index, config.moe_gate_bias)
        width = config.moe_intermediate_size
        yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width * config.num_shared_experts, index)
        for expert in range(config.num_experts):
            name = f"{layer}.mlp.experts"
            for leaf, shape, fused, part, parts in (
                ("gate_proj", (width, hidden), "w13_weight", 0, 2),
                ("up_proj", (width, hidden), "w13_weight", 1, 2),
                ("down_proj", (hidden, width), "w2_weight", 0, 1),
            ):
                place = Place(f"{name}.{fused}", expert, part, parts)
                yield Module(f"{name}.{expert}.{leaf}", shape, index, place, expert)
    yield plain("model.norm", (hidden,), None)
    if not config.tie_word_embeddings:
        yield plain("lm_head", (config.vocab_size, hidden), None)


def bf16_modules(config: Any) -> set[str]:
    """Names of all modules outside the routed experts, in the checkpoint's own spelling."""
    return {module.name for module in modules(config) if module.expert is None}


def routed_expert_modules(config: Any) -> list[str]:
    """The engine's names of the fused routed experts, one per sparse layer."""
    layers = range(len(config.mlp_only_layers), config.num_hidden_layers)
    return [f"model.layers.{index}.mlp.experts" for index in layers]


def _mlp(name: str, hidden: int, width: int, layer: int) -> Iterator[Module]:
    fused = f"{name}.gate_up_proj.weight"
    yield Module(f"{name}.gate_proj", (width, hidden), layer, Place(fused, None, 0, 2))
    yield Module(f"{name}.up_proj", (width, hidden), layer, Place(fused, None, 1, 2))
    yield Module(f"{name}.down_proj", (hidden, width), layer, Place(f"{name}.down_proj.weight"))


def _place(model: torch.nn.Module, module: Module) -> Place | None:
    """Where this rank keeps ``module``, None when another pipeline stage or expert-parallel rank does."""
    if module.layer is not None:
        if not model.model.start_layer <= module.layer < model.model.end_layer:
            return None
        if module.expert is None:
            return module.place
        experts = model.model.layers[module.layer].mlp.experts
        local = experts._map_global_expert_id_to_local_expert_id(module.expert)
        return None if local < 0 else module.place._replace(expert=local)
    if module.name == "model.embed_tokens":
        if model.pp_group.is_first_rank:
            return module.place
        # The last stage of a tied model has a head of its own, filled from the embedding.
        tied = model.pp_group.is_last_rank and model.config.tie_word_embeddings
        return Place("lm_head.weight") if tied else None
    return module.place if model.pp_group.is_last_rank else None


def _inside(name: str, experts: set[str]) -> bool:
    return any(name.startswith(f"{expert}.") for expert in experts)
