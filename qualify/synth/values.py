"""Values of synthetic tensors, with torch on a CPU or a GPU: the same bytes on either.

The generator is SplitMix64 read at a counter: word ``i`` of a tensor is ``mix(key + (i + 1) * GOLDEN)`` with the
first eight bytes of SHA-256("seed:name") as key. Nothing else decides a value, so that shards can be written in
any order, and a tensor keeps its values when the number of layers, shards or threads changes. Normal draws are
looked up with 16 bits of a word in a table of quantiles; all arithmetic is integer or a single rounded float32
operation at a time, and no transcendental function runs on the device. That is why devices agree to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import NormalDist
from typing import Any

import torch

from qualify.models.k2_horizon import ITEMSIZE, Tensor
from qualify.synth.conditioning import Knobs, Recipe, clusters, preferences, recipes

#: Recorded in the manifest; change it whenever the same seed would give other values.
GENERATOR = "splitmix64-quantiles-1"

#: Bytes produced at once. A GPU wants few large launches (and needs about ten times this much for them); a CPU
#: wants what fits its cache.
PIECE_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}

#: Draws from one 64-bit word.
LANES = 4

_GOLDEN = 0x9E3779B97F4A7C15
_DTYPE = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}


class Values:
    """The payloads of one checkpoint; safe to use from several threads."""

    def __init__(
        self,
        config: Mapping[str, Any],
        inventory: Mapping[str, Tensor],
        *,
        seed: int,
        knobs: Knobs,
        device: torch.device,
    ):
        self.config, self.inventory, self.seed, self.knobs, self.device = config, inventory, seed, knobs, device
        self.recipes = recipes(config, inventory, knobs)
        self.clusters = clusters(config, knobs)
        self.piece_bytes = PIECE_BYTES[device.type]
        self.quantiles = _quantiles()
        self.normal = self.quantiles.to(device)
        self.encoded: dict[tuple[str, float, float], torch.Tensor] = {}
        if self.clusters:
            key = self._keys(["clusters"])
            self.centres = self._normals(key, 0, self.clusters * config["hidden_size"]).view(self.clusters, -1)

    def payload(self, names: Sequence[str]) -> Iterator[memoryview]:
        """Yield the payloads of ``names`` one after the other, little endian, row-major, as consecutive buffers.

        A buffer is valid until the next one is asked for.
        """
        host = torch.empty(0, dtype=torch.uint8)
        for values in self._pieces(names):
            flat = values.contiguous().view(-1).view(torch.uint8)
            if host.numel() < flat.numel():
                # Pinned, because a GPU copies into other memory at a fraction of the speed.
                size = max(flat.numel(), self.piece_bytes)
                host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            piece = host[: flat.numel()].copy_(flat)
            yield memoryview(piece.numpy())

    def _pieces(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Many small tensors of one recipe make one piece, a large tensor is cut into several by rows."""
        for (recipe, dtype, count), run in groupby(names, self._batch_key):
            tensors = list(run)
            size = count * ITEMSIZE[dtype]
            if recipe is None or (recipe.kind in ("normal", "codes") and size <= self.piece_bytes):
                step = max(1, self.piece_bytes // size)
                for first in range(0, len(tensors), step):
                    yield self._draw(tensors[first : first + step], 0, None)
                continue
            for name in tensors:
                shape = self.inventory[name].shape
                rows = max(1, self.piece_bytes // (size // shape[0]))
                # Whole words: a piece of several rows starts at a multiple of four values.
                rows = max(LANES, rows - rows % LANES)
                for first in range(0, shape[0], rows):
                    yield self._draw([name], first, min(first + rows, shape[0]))

    def _batch_key(self, name: str):
        recipe, tensor = self.recipes[name], self.inventory[name]
        count = tensor.nbytes // ITEMSIZE[tensor.dtype]
        # Scales differ in their mean alone, which is a vector in a batch.
        return None if recipe.kind == "scales" else recipe, tensor.dtype, count

    def _draw(self, names: list[str], first: int, last: int | None) -> torch.Tensor:
        """Rows ``first`` to ``last`` of a tensor, or several whole tensors of one recipe."""
        recipe, tensor = self.recipes[names[0]], self.inventory[names[0]]
        dtype = _DTYPE[tensor.dtype]
        count = tensor.nbytes // ITEMSIZE[tensor.dtype]
        width = count // tensor.shape[0]
        if recipe.kind == "embedding":
            return self._embedding(first, last).to(dtype)
        if recipe.kind == "head":
            return self._head(names[0], first, last).to(dtype)
        if recipe.kind == "router":
            return self._router(names[0], first, last).to(dtype)
        keys = self._keys(names)
        if recipe.kind == "scales":
            return self._scales(names, keys, count).to(dtype)
        start, stop = (0, count) if last is None else (first * width, last * width)
        return self._look_up(self._encoded(recipe, tensor.dtype), keys, start, stop - start)

    def _embedding(self, first: int, last: int) -> torch.Tensor:
        """Rows of the embedding: own part and centre of the cluster, together of variance 1."""
        share = self.knobs.cluster_share if self.clusters else 0.0
        rows = self._own_parts(first, last - first, self.config["hidden_size"]).mul_((1 - share) ** 0.5)
        if self.clusters:
            members = torch.arange(first, last, device=self.device) % self.clusters
            rows.add_(self.centres.index_select(0, members).mul_(share**0.5))
        return rows

    def _head(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of ``lm_head``: noise, and the own parts of the tokens that each row may follow."""
        vocabulary, hidden = self.inventory[name].shape
        rows = self._normals(self._keys([name]), first * hidden, (last - first) * hidden).view(-1, hidden)
        rows.mul_(self.knobs.head_noise / hidden**0.5)
        for step in range(1, self.knobs.successors + 1):
            start = (first - step * self.knobs.successor_stride) % vocabulary
            before = min(last - first, vocabulary - start)
            rows[:before].add_(self._own_parts(start, before, hidden).mul_(self.knobs.head_signal / hidden))
            if before < last - first:
                wrapped = self._own_parts(0, last - first - before, hidden)
                rows[before:].add_(wrapped.mul_(self.knobs.head_signal / hidden))
        return rows

    def _router(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows of a router: centres of the clusters that prefer the expert, less half of all, and noise."""
        hidden = self.inventory[name].shape[1]
        rows = self._normals(self._keys([name]), first * hidden, (last - first) * hidden).view(-1, hidden)
        rows.mul_(self.knobs.router_noise / hidden**0.5)
        strength = self.knobs.router_signal / hidden
        wanted = preferences(self.config, name, self.seed, self.knobs)
        # One addition after the other, in the order of the clusters: a matrix product would round as it likes.
        for cluster, experts in enumerate(wanted):
            centre = self.centres[cluster] * strength
            signs = torch.full((self.inventory[name].shape[0], 1), -0.5)
            signs[experts] = 0.5
            rows.add_(signs[first:last].to(self.device) * centre)
        return rows

    def _own_parts(self, first: int, rows: int, hidden: int) -> torch.Tensor:
        """The part of each embedding that belongs to the token alone, variance 1: float32 (rows, hidden)."""
        key = self._keys(["model.embed_tokens.weight"])
        return self._normals(key, first * hidden, rows * hidden).view(rows, hidden)

    def _scales(self, names: list[str], keys: torch.Tensor, count: int) -> torch.Tensor:
        """Block scales of whole tensors: float32 (tensors, blocks), 24 random bits each."""
        uniform = ((self._words(keys, 0, count) >> 40) & 0xFFFFFF).float().mul_(2.0**-23).sub_(1)
        means = torch.tensor([self.recipes[name].mean for name in names], device=self.device)
        return uniform.mul_(self.knobs.scale_spread).add_(1).mul_(means.view(-1, 1))

    def _encoded(self, recipe: Recipe, dtype: str) -> torch.Tensor:
        """The table of quantiles with mean and deviation, encoded: nothing is left to do but look up."""
        key = (dtype, recipe.mean, recipe.deviation)
        if key not in self.encoded:
            values = self.quantiles * recipe.deviation + recipe.mean
            if dtype == "F8_E4M3":
                values = values.clamp(-448, 448)
            # Bytes or 16-bit words, because not every operation knows the 8-bit float.
            bits = torch.uint8 if dtype == "F8_E4M3" else _DTYPE[dtype]
            self.encoded[key] = values.to(_DTYPE[dtype]).view(bits).to(self.device)
        return self.encoded[key]

    def _normals(self, keys: torch.Tensor, start: int, count: int) -> torch.Tensor:
        return self._look_up(self.normal, keys, start, count)

    def _look_up(self, table: torch.Tensor, keys: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Draws ``start`` to ``start + count`` of each key from a table of 65,536: (keys, count)."""
        assert start % LANES == 0
        words = self._words(keys, start // LANES, -(-count // LANES))
        lanes = words.view(torch.int16).to(torch.int32).add_(1 << 15)
        return table.index_select(0, lanes.view(-1)).view(len(keys), -1)[:, :count]

    def _words(self, keys: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Random words ``start`` to ``start + count`` of each key: int64 (keys, count), SplitMix64."""
        counter = torch.arange(start + 1, start + count + 1, device=self.device)
        words = keys.view(-1, 1) + counter.mul_(_signed(_GOLDEN))
        # A right shift of int64 keeps the sign; the mask makes it a shift of unsigned words.
        words ^= (words >> 30) & ((1 << 34) - 1)
        words *= _signed(0xBF58476D1CE4E5B9)
        words ^= (words >> 27) & ((1 << 37) - 1)
        words *= _signed(0x94D049BB133111EB)
        words ^= (words >> 31) & ((1 << 33) - 1)
        return words

    def _keys(self, names: Sequence[str]) -> torch.Tensor:
        digests = [hashlib.sha256(f"{self.seed}:{name}".encode()).digest() for name in names]
        keys = [int.from_bytes(digest[:8], "little", signed=True) for digest in digests]
        return torch.tensor(keys, dtype=torch.int64, device=self.device)


def _quantiles() -> torch.Tensor:
    """The 65,536 midpoint quantiles of the standard normal distribution in rising order, float32."""
    normal = NormalDist()
    lower = [normal.inv_cdf((step + 0.5) / (1 << 16)) for step in range(1 << 15)]
    return torch.tensor(lower + [-value for value in reversed(lower)])


def _signed(word: int) -> int:
    """The 64-bit word as torch spells it: two's complement."""
    return word - (1 << 64) if word >> 63 else word
