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
from sglang.srt.model_loader.checkpoint_ledger import Expected, TensorClass

#: Rows and columns that share one scale.
BLOCK = 128

CODES = TensorClass((torch.float8_e4m3fn,), torch.float8_e4m3fn)
SCALE = TensorClass((torch.float32,), torch.float32, positive=True)
PLAIN = TensorClass((torch.bfloat16,), torch.bfloat16)
# The selection biases are the one thing that the engine holds in another dtype: its top-k kernel wants FP32,
# which every BF16 value is exact in.
ROUTER_BIAS = TensorClass((torch.bfloat16, torch.float32), torch.float32)


class Module(NamedTuple):
    """A BF16 module: ``layer`` is None outside the stack; the engine keeps its weight in ``parameter``, stacked at
    ``expert``, or as ``part`` of ``parts`` fused ones."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    parameter: str
    expert: int | None = None
    part: int = 0
    parts: int = 1
    bias: bool = False


@dataclass(frozen=True)
class MovaFp8Format:
    """The admitted format; ``bf16_modules`` are the modules that the checkpoint declares to be unquantised."""

    bf16_modules: frozenset[str]
    name = "K2-Horizon MoVA FP8"
    updatable = False

    def inventory(self, model: torch.nn.Module) -> dict[str, Expected]:
        """Name -> class, full shape and place of every tensor of the checkpoint, for the rank of ``model``.

        A tensor of another pipeline stage, or an expert of another expert-parallel rank, has no parameter.
        """
        result: dict[str, Expected] = {}
        for module in modules(model.config):
            owned = owns(model, module)
            parameter = parameter_of(model, module) if owned else None
            place = (parameter, module.expert, module.part, module.parts)
            result[f"{module.name}.weight"] = Expected(PLAIN, module.shape, *place)
            if module.bias:
                bias = f"{module.name}.bias"
                result[bias] = Expected(ROUTER_BIAS, module.shape[:1], bias if owned else None)
        for layer in range(len(model.config.mlp_only_layers), model.config.num_hidden_layers):
            result.update(_routed_experts(model, layer))
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
                for leaf, parameter in module.named_parameters(recurse=False):
                    # Some backends round scales to powers of two after the load, and the codes with them.
                    if getattr(parameter, "format_ue8m0", False):
                        found.append((f"{name}.{leaf}", "was requantised to UE8M0: use --moe-runner-backend triton"))
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
    """Yield every module outside the routed experts that holds a weight, in the order of the forward pass."""
    hidden, dense = config.hidden_size, len(config.mlp_only_layers)
    q_width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim

    def plain(name: str, shape: tuple[int, ...], layer: int | None, bias: bool = False) -> Module:
        return Module(name, shape, layer, f"{name}.weight", bias=bias)

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
            yield Module(f"{name}.{expert}", (kv_width, hidden), index, f"{name}.weight", expert)
        yield plain(f"{layer}.mlp.gate", (config.num_experts, hidden), index, config.moe_gate_bias)
        width = config.moe_intermediate_size * config.num_shared_experts
        yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width, index)
    yield plain("model.norm", (hidden,), None)
    if not config.tie_word_embeddings:
        yield plain("lm_head", (config.vocab_size, hidden), None)


def bf16_modules(config: Any) -> set[str]:
    """Names of all modules outside the routed experts, in the checkpoint's own spelling."""
    return {module.name for module in modules(config)}


def routed_expert_modules(config: Any) -> list[str]:
    """The engine's names of the fused routed experts, one per sparse layer."""
    layers = range(len(config.mlp_only_layers), config.num_hidden_layers)
    return [f"model.layers.{index}.mlp.experts" for index in layers]


def _routed_experts(model: torch.nn.Module, layer: int) -> Iterator[tuple[str, Expected]]:
    """(name, expectation) of the codes and scales of one layer: most of a checkpoint, so kept lean."""
    config, name = model.config, f"model.layers.{layer}.mlp.experts"
    here = model.model.start_layer <= layer < model.model.end_layer
    local_of = model.model.layers[layer].mlp.experts._map_global_expert_id_to_local_expert_id if here else None
    up, down = (config.moe_intermediate_size, config.hidden_size), (config.hidden_size, config.moe_intermediate_size)
    leaves = [
        (leaf, shape, tuple(-(-extent // BLOCK) for extent in shape), f"{name}.{fused}_weight", part, parts)
        for leaf, shape, fused, part, parts in (
            ("gate_proj", up, "w13", 0, 2),
            ("up_proj", up, "w13", 1, 2),
            ("down_proj", down, "w2", 0, 1),
        )
    ]
    for expert in range(config.num_experts):
        local = local_of(expert) if here else -1
        for leaf, shape, blocks, parameter, part, parts in leaves:
            weight = f"{name}.{expert}.{leaf}.weight"
            codes, scales = (parameter, f"{parameter}_scale_inv") if local >= 0 else (None, None)
            yield weight, Expected(CODES, shape, codes, local, part, parts)
            yield f"{weight}_scale_inv", Expected(SCALE, blocks, scales, local, part, parts)


def _mlp(name: str, hidden: int, width: int, layer: int) -> Iterator[Module]:
    fused = f"{name}.gate_up_proj.weight"
    yield Module(f"{name}.gate_proj", (width, hidden), layer, fused, None, 0, 2)
    yield Module(f"{name}.up_proj", (width, hidden), layer, fused, None, 1, 2)
    yield Module(f"{name}.down_proj", (hidden, width), layer, f"{name}.down_proj.weight")


def owns(model: torch.nn.Module, module: Module) -> bool:
    """Whether the pipeline stage of ``model`` holds ``module``."""
    if module.layer is not None:
        return model.model.start_layer <= module.layer < model.model.end_layer
    if module.name == "model.embed_tokens":
        # The last stage of a tied model has a head of its own, filled from the embedding.
        tied = model.pp_group.is_last_rank and model.config.tie_word_embeddings
        return model.pp_group.is_first_rank or tied
    return model.pp_group.is_last_rank


def parameter_of(model: torch.nn.Module, module: Module) -> str:
    """The name of the parameter that holds ``module`` on the pipeline stage of ``model``."""
    if module.name == "model.embed_tokens" and not model.pp_group.is_first_rank:
        return "lm_head.weight"
    return module.parameter


def _inside(name: str, experts: set[str]) -> bool:
    return any(name.startswith(f"{expert}.") for expert in experts)
