"""The tensors of a checkpoint folder, one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from qualify.errors import Rejected
from qualify.reference import dequantise

#: Leaves of the two published block-FP8 formats.
SCALES = ("weight_scale_inv", "weight_scale")


class Matrix(NamedTuple):
    """A weight ``(out, in)`` in float32, and whether its products take quantised activations."""

    values: torch.Tensor
    fp8: bool


class Weights:
    """Reads single tensors of all shards of ``folder`` to ``device``; shards stay memory-mapped, nothing is kept.

    ``config`` is the folder's ``config.json``. Raises ``Rejected`` for files that cannot be read, a tensor in two
    shards, and later for a name that no shard has.
    """

    def __init__(self, folder: Path | str, device: torch.device | str = "cpu"):
        self.folder, self.device = Path(folder), torch.device(device)
        try:
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise Rejected(f"{self.folder}/config.json cannot be read: {error}") from error
        self._shards: dict[str, Any] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                shard = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise Rejected(f"{path.name} cannot be read: {error}") from error
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name in self._shards:
                    raise Rejected(f"{name} is in two shards of {self.folder}; keep one")
                self._shards[name] = shard
        if not self._shards:
            raise Rejected(f"{self.folder} has no .safetensors file")

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""
        return tuple(self._shard(name).get_slice(name).get_shape())

    def stored(self, name: str) -> torch.Tensor:
        """One tensor as stored, on the device."""
        return self._shard(name).get_tensor(name).to(self.device)

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last`` of one tensor, float32, on the device: for ``lm_head``, which is large."""
        return self._shard(name).get_slice(name)[first:last].to(self.device).float()

    def selected(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64, any device) of one tensor, float32, on the device: only these pages are read."""
        return self._shard(name).get_tensor(name)[ids.cpu()].to(self.device).float()

    def vector(self, name: str) -> torch.Tensor:
        """A norm weight or a router bias in float32."""
        return self.stored(name).float()

    def parts(self, module: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight of ``module`` as stored and its scale; ``None`` where it has none."""
        leaf = next((leaf for leaf in SCALES if f"{module}.{leaf}" in self), None)
        return self.stored(f"{module}.weight"), self.stored(f"{module}.{leaf}") if leaf else None

    def matrix(self, module: str) -> Matrix:
        """The weight of a linear module, dequantised."""
        stored, scale = self.parts(module)
        if scale is not None:
            return Matrix(dequantise.weight(stored, scale), fp8=True)
        if stored.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise Rejected(f"{module}.weight is {stored.dtype} and has no scale beside it")
        return Matrix(stored.float(), fp8=False)

    def _shard(self, name: str):
        try:
            return self._shards[name]
        except KeyError:
            raise Rejected(f"{self.folder} has no tensor {name}") from None
