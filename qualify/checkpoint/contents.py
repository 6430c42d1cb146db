"""The tensors of a checkpoint by module, and what the checks find out about each class of modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qualify.checkpoint.headers import Tensor
from qualify.checkpoint.schemes import NARROW, Scheme

PLAIN = frozenset({"BF16", "F16", "F32"})
SCALE_LEAVES = frozenset(
    {
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "input_scale",
        "input_global_scale",
    }
)
_INTEGERS = frozenset({"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
KV_LEAVES = frozenset({"k_scale", "v_scale", "kv_scale", "q_scale", "prob_scale"})
#: stacked experts: ``experts.down_proj_scale_inv`` is the ``weight_scale_inv`` of ``experts.down_proj``
_STACKED = re.compile(r"^(gate_up_proj|gate_proj|up_proj|down_proj)(_scale_inv|_scales?|_blocks|_bias|_packed)?$")
_STACKED_LEAF = {
    None: "weight",
    "_blocks": "weight",
    "_packed": "weight_packed",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_scales": "weight_scale",
    "_bias": "bias",
}
#: (the experts of a layer, the number of one) in a module or tensor name
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)(?:\.|$)")


@dataclass(slots=True)
class ClassScope:
    """Counts of one module class. ``quantised`` and ``unquantised`` count modules, ``dtypes`` weights."""

    quantised: int = 0
    unquantised: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    schemes: set[Scheme] = field(default_factory=set)

    def as_dict(self) -> dict[str, Any]:
        """The class as it stands in the JSON report."""
        entry: dict[str, Any] = {
            "quantised": self.quantised,
            "unquantised": self.unquantised,
            "dtypes": dict(sorted(self.dtypes.items())),
        }
        blocks = sorted({scheme.block for scheme in self.schemes if scheme.block})
        groups = sorted({scheme.group for scheme in self.schemes if scheme.group})
        if blocks:
            entry["block"] = list(blocks[0]) if len(blocks) == 1 else [list(block) for block in blocks]
        if groups:
            entry["group"] = groups[0] if len(groups) == 1 else groups
        if len(self.schemes) > 1 or any(scheme.kind == "fp8-tensor" for scheme in self.schemes):
            entry["schemes"] = sorted(scheme.name for scheme in self.schemes)
        return entry


@dataclass(slots=True)
class Contents:
    """The modules of a checkpoint as stored, by name, and what the checks found out about them."""

    modules: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    schemes: dict[str, Scheme] = field(default_factory=dict)
    kv_scales: list[Tensor] = field(default_factory=list)
    scope: dict[str, ClassScope] = field(default_factory=dict)
    format: str = "bf16"
    mtp: dict[str, int] = field(default_factory=dict)
    #: (class, last part of the name, out, in, scheme) of every stored linear module, for topologies
    signatures: Counter[tuple[str, str, int, int, Scheme | None]] = field(default_factory=Counter)

    @property
    def stored_quantised(self) -> bool:
        """True when any weight is stored FP8 or FP4."""
        return any(entry.quantised for entry in self.scope.values())


def group(tensors: Iterable[Tensor]) -> Contents:
    """Group tensors by module."""
    contents = Contents()
    modules = contents.modules
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        if leaf in KV_LEAVES:
            contents.kv_scales.append(tensor)
            continue
        if module.endswith(".experts") and (match := _STACKED.match(leaf)):
            module, leaf = f"{module}.{match[1]}", _STACKED_LEAF[match[2]]
            if match[2] == "_blocks" and len(tensor.shape) > 2:
                # MXFP4 experts come as [experts, rows, groups, 16 bytes].
                tensor = tensor._replace(shape=(*tensor.shape[:-2], tensor.shape[-2] * tensor.shape[-1]))
        leaves = modules.get(module)
        if leaves is None:
            leaves = modules[module] = {}
        leaves[leaf] = tensor
    return contents


def is_quantised(leaves: dict[str, Tensor]) -> bool:
    """True when a module's weight is stored in FP8, FP4 or packed integers."""
    if "weight_packed" in leaves or "qweight" in leaves:
        return True
    weight = leaves.get("weight")
    # Any integer dtype holds packed codes: I32 in GPTQ, U32 in MLX, U8 in FP4 formats.
    return weight is not None and (weight.dtype in NARROW or weight.dtype in _INTEGERS)


def stored_dtype(leaves: dict[str, Tensor]) -> str:
    """The dtype of a module's weight, for a sentence."""
    weight = leaves.get("weight_packed") or leaves.get("weight") or leaves.get("qweight")
    return weight.dtype if weight else "without a weight"
