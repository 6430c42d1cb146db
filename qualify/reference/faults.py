"""Known errors, planted in the reference instead of the engine: how sharp a comparison is, from one engine run.

A fault is named ``NAME`` or ``NAME:LAYER``; without a layer it is the first sparse one (dense: the first).
Faults of a whole model ignore it. Expert numbers are fixed: 1, and 2 where two are needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from qualify.errors import Rejected
from qualify.reference.weights import Weights

#: name -> what is wrong
FAULTS = {
    "expert-scale-doubled": "the scale of one routed expert's down_proj is doubled",
    "experts-swapped": "routed experts 1 and 2 of one layer are exchanged",
    "router-provenance": "router products are rounded as 1 partition where 2 are declared, and the reverse",
    "gate-silu": "SiLU instead of softplus in the attention gate of every layer",
    "norm-groups": "both norms of one layer have another number of groups",
    "value-expert-zeroed": "one value expert's weight is zero",
    "router-bias-in-weights": "selection biases enter the mixing weights of every router",
    "rope-pairing": "partial rotation pairs (i, i + rope_head_dim/2); full rotation pairs neighbours",
    "scale-power-of-two": "the scales of one weight are rounded to powers of two",
    "sibling-scales-swapped": "the scales of one gate_proj and its up_proj, one fused weight, are exchanged",
    "activation-not-quantised": "the activations of one layer's FP8 weights stay as they are",
}

_ONE, _OTHER = 1, 2


@dataclass(frozen=True)
class Semantics:
    """What a fault may change of one layer's computation."""

    norm_groups: int
    gate: str | None
    router_partitions: int
    quantise_activations: bool
    rope_pairing: str = "halves"
    biased_mixing: bool = False


@dataclass(frozen=True)
class Fault:
    """One planted fault; see :func:`parse`."""

    name: str
    layer: int

    def semantics(self, layer: int, right: Semantics, config: dict[str, Any]) -> Semantics:
        """The semantics of ``layer`` with the fault in it."""
        if self.name == "router-provenance":
            return replace(right, router_partitions=3 - right.router_partitions)
        if self.name == "gate-silu":
            return replace(right, gate="silu")
        if self.name == "router-bias-in-weights":
            return replace(right, biased_mixing=True)
        if self.name == "rope-pairing":
            partial = config["rope_head_dim"] < config["head_dim"]
            return replace(right, rope_pairing="slice" if partial else "interleaved")
        if layer == self.layer and self.name == "norm-groups":
            return replace(right, norm_groups=1 if right.norm_groups > 1 else 2)
        if layer == self.layer and self.name == "activation-not-quantised":
            return replace(right, quantise_activations=False)
        return right


class FaultyWeights(Weights):
    """:class:`Weights` with the fault, where it is one of weights."""

    def __init__(self, folder, device, fault: Fault):
        super().__init__(folder, device)
        self.fault = fault
        mlp = f"model.layers.{fault.layer}.mlp"
        routed = f"{mlp}.experts.{_ONE}.down_proj.weight" in self
        self._expert = f"{mlp}.experts.{_ONE}" if routed else mlp
        self._value = f"model.layers.{fault.layer}.self_attn.v_experts.{_ONE}"
        if fault.name == "value-expert-zeroed" and f"{self._value}.weight" not in self:
            raise Rejected(f"fault {fault.name}: layer {fault.layer} has no value expert {_ONE}")
        if fault.name in ("expert-scale-doubled", "experts-swapped") and not routed:
            raise Rejected(f"fault {fault.name}: layer {fault.layer} has no routed expert {_ONE}")
        scaled = ("expert-scale-doubled", "scale-power-of-two", "sibling-scales-swapped", "activation-not-quantised")
        if fault.name in scaled and super().parts(f"{self._expert}.down_proj")[1] is None:
            raise Rejected(f"fault {fault.name}: {self._expert}.down_proj is stored without a scale")

    def parts(self, module: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the checkpoint has them, apart from the fault."""
        name = self.fault.name
        if name == "experts-swapped":
            return super().parts(self._swapped(module))
        weight, scale = super().parts(module)
        if name == "value-expert-zeroed" and module == self._value:
            weight = torch.zeros_like(weight)
        if module == f"{self._expert}.down_proj":
            if name == "expert-scale-doubled":
                scale = scale * 2
            if name == "scale-power-of-two":
                scale = scale.float().log2().round().exp2()
        if name == "sibling-scales-swapped":
            siblings = {f"{self._expert}.gate_proj": "up_proj", f"{self._expert}.up_proj": "gate_proj"}
            if module in siblings:
                scale = super().parts(f"{self._expert}.{siblings[module]}")[1]
        return weight, scale

    def _swapped(self, module: str) -> str:
        experts = f"model.layers.{self.fault.layer}.mlp.experts."
        for one, other in ((_ONE, _OTHER), (_OTHER, _ONE)):
            if module.startswith(f"{experts}{one}."):
                return module.replace(f"{experts}{one}.", f"{experts}{other}.")
        return module


def parse(text: str, config: dict[str, Any]) -> Fault:
    """Read ``NAME`` or ``NAME:LAYER``; raises ``Rejected`` for an unknown one, or one that this model cannot have."""
    name, _, number = text.partition(":")
    if name not in FAULTS:
        raise Rejected(f"fault {name!r} is unknown; known are {', '.join(FAULTS)}")
    sparse = bool(config["num_experts"])
    layer = len(config["mlp_only_layers"]) if sparse else 0
    if number:
        layer = int(number) if number.isdecimal() else -1
    if not 0 <= layer < config["num_hidden_layers"]:
        raise Rejected(f"fault {text!r}: the layer must be a number from 0 to {config['num_hidden_layers'] - 1}")
    if name in ("router-provenance", "router-bias-in-weights") and not sparse:
        raise Rejected(f"fault {name}: the model has no router")
    if name == "router-bias-in-weights" and not config.get("moe_gate_bias"):
        raise Rejected(f"fault {name}: the model's routers have no bias")
    if name == "gate-silu" and config.get("attention_gate_func") != "softplus":
        raise Rejected(f"fault {name}: the model has no softplus gate")
    return Fault(name, layer)
