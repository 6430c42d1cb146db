"""Where SGLang 0.5.23 keeps each tensor of a K2-Horizon checkpoint. Standard library only.

One rank without tensor or expert parallelism: every runtime parameter is made of whole checkpoint tensors,
some stacked along the first axis (experts), some concatenated along the rows (gate before up; queries, keys and
values in this order where a layer has no value experts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qualify.models import k2_horizon

#: Parameters that the engine keeps in float32 although the checkpoint stores BF16; the conversion is exact.
WIDENED = re.compile(r"model\.layers\.\d+\.(self_attn\.v_router|mlp\.gate)\.bias|.*weight_scale")

_VALUE_EXPERT = re.compile(r"(.*\.self_attn\.v_experts)\.(\d+)\.weight")
_ROUTED_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight(?:_scale(?:_inv)?)?)")
_GATE_UP = re.compile(r"(.*\.mlp(?:\.shared_experts)?)\.(gate|up)_proj\.(weight(?:_scale)?)")
_QKV = re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight(?:_scale)?)")


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor inside a runtime parameter: at ``parameter[expert]`` (when stacked), rows from
    ``row``."""

    source: str
    row: int = 0
    expert: int | None = None


def parameters(config: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Return runtime parameter name -> the pieces that fill it completely."""
    inventory = k2_horizon.tensors(config)
    fuses_qkv = not config.get("mova_num_experts")
    result: dict[str, list[Piece]] = {}
    for name, tensor in inventory.items():
        # In a fused gate/up parameter the up rows follow the gate rows; both have as many.
        if match := _ROUTED_EXPERT.fullmatch(name):
            experts, index, projection, leaf = match.groups()
            fused = f"{experts}.{'w2' if projection == 'down' else 'w13'}_{leaf}"
            row = tensor.shape[0] if projection == "up" else 0
            piece = Piece(name, row, int(index))
        elif match := _VALUE_EXPERT.fullmatch(name):
            fused, piece = f"{match[1]}.weight", Piece(name, expert=int(match[2]))
        elif match := _GATE_UP.fullmatch(name):
            fused = f"{match[1]}.gate_up_proj.{match[3]}"
            piece = Piece(name, tensor.shape[0] if match[2] == "up" else 0)
        elif fuses_qkv and (match := _QKV.fullmatch(name)):
            before = {"q": "", "k": "q", "v": "qk"}[match[2]]
            row = sum(inventory[f"{match[1]}.{leaf}_proj.{match[3]}"].shape[0] for leaf in before)
            fused, piece = f"{match[1]}.qkv_proj.{match[3]}", Piece(name, row)
        else:
            fused, piece = name, Piece(name)
        result.setdefault(fused, []).append(piece)
    return result
