"""Token ids that reach every expert of every layer, measured with the reference.

On conditioned synthetic checkpoints token t belongs to cluster t % clusters, and the clusters together prefer every
expert (``docs/synthetic.md``): so tokens are drawn from all clusters alike. Whether that suffices, depth and noise
decide; hence the count. On any other checkpoint the ids are random and the count is what tells.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import torch

from qualify.errors import Rejected
from qualify.reference.compare import coverage
from qualify.reference.model import Reference

#: Tokens that every expert must get, over all prompts.
MINIMUM = 8


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt, and the hits of every expert: (layer, ``router`` or ``values``) -> int64 (experts,)."""

    ids: list[list[int]]
    hits: dict[tuple[int, str], torch.Tensor]

    @property
    def least(self) -> int | None:
        """Tokens of the expert that got the fewest; ``None`` for a model without experts."""
        return min((int(hits.min()) for hits in self.hits.values()), default=None)


def draw(config: dict, clusters: int, seed: int, length: int) -> list[int]:
    """``length`` ids, seeded: every run of ``clusters`` (0: none are known) ids has one of each, shuffled.

    The ids that the config names as begin and end are left out.
    """
    generator, special = random.Random(seed), {config.get("bos_token_id"), config.get("eos_token_id")}
    groups: list[list[int]] = [[] for _ in range(clusters or 1)]
    for token in range(config["vocab_size"]):
        if token not in special:
            groups[token % len(groups)].append(token)
    ids: list[int] = []
    while len(ids) < length:
        ids += [generator.choice(group) for group in generator.sample(groups, len(groups))]
    return ids[:length]


def measure(reference: Reference, prompts: list[list[int]]) -> Prompts:
    """Run the reference over the prompts and count."""
    hits: dict[tuple[int, str], torch.Tensor] = {}
    sizes = {"router": reference.config["num_experts"], "values": reference.config["mova_num_experts"]}
    for ids in prompts:
        for number, records in enumerate(reference.layers(ids)):
            for kind in sizes.keys() & records.keys():
                found = coverage([records[kind]["chosen"]], sizes[kind])
                hits[number, kind] = hits.get((number, kind), 0) + found
    return Prompts(prompts, hits)


def choose(
    reference: Reference, *, seed: int = 0, prompts: int = 1, length: int = 512, minimum: int = MINIMUM
) -> Prompts:
    """``prompts`` sequences of ``length`` ids that give every expert of every layer ``minimum`` tokens together.

    Raises ``Rejected`` when an expert gets fewer, naming it: ask for longer prompts then.
    """
    try:
        synthetic = json.loads((reference.weights.folder / "synthetic.json").read_text())
    except FileNotFoundError:
        synthetic = {}
    clusters = synthetic.get("clusters", 0)
    chosen = measure(
        reference, [draw(reference.config, clusters, seed * 1000 + number, length) for number in range(prompts)]
    )
    for (layer, kind), hits in chosen.hits.items():
        if hits.min() < minimum:
            raise Rejected(
                f"layer {layer}: expert {int(hits.argmin())} of {kind} gets {int(hits.min())} of {prompts} x {length} "
                f"tokens, fewer than {minimum}; ask for longer prompts"
            )
    return chosen
