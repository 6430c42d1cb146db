"""Token ids that reach every expert of every layer, measured with the reference.

On conditioned synthetic checkpoints token t belongs to cluster t % clusters, and the clusters together prefer every
expert (``docs/synthetic.md``): so tokens are drawn from all clusters alike, and continued as the checkpoint expects.
Whether every expert is reached, depth and noise decide; hence the count. On any other checkpoint the ids are random.
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

#: Length of a run of tokens that follow each other; short, because a run visits few clusters.
WALK = 8


@dataclass(frozen=True)
class Prompts:
    """Token ids of each prompt, and the hits of every expert: (layer, ``router`` or ``values``) -> int64 (experts,)."""

    ids: list[list[int]]
    hits: dict[tuple[int, str], torch.Tensor]

    @property
    def least(self) -> int | None:
        """Tokens of the expert that got the fewest; ``None`` for a model without experts."""
        return min((int(hits.min()) for hits in self.hits.values()), default=None)


def draw(config: dict, synthetic: dict, seed: int, length: int) -> list[int]:
    """``length`` ids, seeded, without the ids that the config names as begin and end.

    ``synthetic`` is the checkpoint's ``synthetic.json``, or empty for random ids. Every :data:`WALK` ids a token is
    drawn, of each cluster in turn; the others follow the one before as the checkpoint expects, so log-probabilities
    are those of likely tokens. (Of a random token it is some -40 nat, where an error of the logits counts manifold.)
    """
    generator, vocabulary = random.Random(seed), config["vocab_size"]
    special = {config.get("bos_token_id"), config.get("eos_token_id")}
    clusters, knobs = synthetic.get("clusters") or 1, synthetic.get("knobs")
    groups = [
        [token for token in range(first, vocabulary, clusters) if token not in special] for first in range(clusters)
    ]
    ids: list[int] = []
    waiting: list[list[int]] = []
    while len(ids) < length:
        if knobs and len(ids) % WALK:
            step = generator.randint(1, knobs["successors"])
            token = (ids[-1] + step * knobs["successor_stride"]) % vocabulary
            if token not in special:
                ids.append(token)
                continue
        waiting = waiting or generator.sample(groups, len(groups))
        ids.append(generator.choice(waiting.pop()))
    return ids


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
    drawn = [draw(reference.config, synthetic, seed * 1000 + number, length) for number in range(prompts)]
    chosen = measure(reference, drawn)
    for (layer, kind), hits in chosen.hits.items():
        if hits.min() < minimum:
            raise Rejected(
                f"layer {layer}: expert {int(hits.argmin())} of {kind} gets {int(hits.min())} of {prompts} x {length} "
                f"tokens, fewer than {minimum}; ask for longer prompts"
            )
    return chosen
