"""Which model a receipt or a benchmark file is of: none names it where the checkpoint is synthetic.

A cut keeps the first layers at their true width, so the number of tensors and of their bytes says which model and how
many of its layers.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qualify.models import DENSE_CONFIG, MOVA_CONFIG, assumed, k2_horizon

#: (artifact, name of the checkpoint in its recipe) -> config, where there is one: published, or as far as it is known
CONFIGS = {
    ("k2-horizon-fp8", "7b"): lambda: json.loads(DENSE_CONFIG.read_text()),
    ("k2-horizon-fp8", "375b-a23b"): assumed.config_375b,
    ("mova-fp8", "36b-a4b"): lambda: json.loads(MOVA_CONFIG.read_text()),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a recipe, or the first ``layers`` of its ``all_layers``."""

    artifact: str
    name: str
    layers: int
    all_layers: int

    def __str__(self) -> str:
        return (
            self.name if self.layers == self.all_layers else f"{self.name}, {self.layers} of {self.all_layers} layers"
        )

    @property
    def assumed(self) -> bool:
        """True where some sizes of the model are this project's guess (qualify/models/assumed.py)."""
        return self.name in assumed.CONFIGS


@functools.cache
def config(artifact: str, name: str) -> Mapping[str, Any]:
    """The config of a model in :data:`CONFIGS`."""
    return CONFIGS[artifact, name]()


@functools.cache
def tensors(artifact: str, name: str) -> dict[str, k2_horizon.Tensor]:
    """Its whole inventory."""
    return k2_horizon.tensors(config(artifact, name))


def layer(tensor: str) -> int | None:
    """The layer that a tensor belongs to; None for embedding, final norm and head."""
    match = _LAYER.match(tensor)
    return int(match[1]) if match else None


@functools.cache
def _sizes() -> dict[tuple[int, int], Model]:
    """(tensors, bytes) of every model and every cut of it. Cuts of one layer more differ, and so do models."""
    found = {}
    for artifact, name in CONFIGS:
        by_layer: dict[int | None, list[int]] = {}
        for key, tensor in tensors(artifact, name).items():
            by_layer.setdefault(layer(key), []).append(tensor.nbytes)
        outside = by_layer.pop(None)
        layers = [by_layer[index] for index in range(len(by_layer))]
        counts = itertools.accumulate((len(sizes) for sizes in layers), initial=len(outside))
        totals = itertools.accumulate((sum(sizes) for sizes in layers), initial=sum(outside))
        for depth, size in enumerate(zip(counts, totals, strict=True)):
            found[size] = Model(artifact, name, depth, len(layers))
    return found


def identify(artifact: str | None = None, count: int | None = None, nbytes: int | None = None) -> Model | None:
    """The one model with that number of tensors or of their bytes, or both; None where none or several have."""
    if count is None and nbytes is None:
        return None
    found = [
        model
        for (tensors_, bytes_), model in _sizes().items()
        if artifact in (None, model.artifact) and count in (None, tensors_) and nbytes in (None, bytes_)
    ]
    return found[0] if len(found) == 1 else None
