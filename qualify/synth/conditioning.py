"""What the random values of a synthetic checkpoint look like, so that a forward pass means something.

Plain random weights give equal logits and near ties in every router: two correct engines then disagree, and a
broken one is not noticed. Here the weights carry a little structure (``docs/synthetic.md`` has the reasons):

- Token ``t`` belongs to cluster ``t % clusters``; its embedding is the cluster's centre plus a part of its own.
- A router row holds the centres of the clusters that prefer its expert, less half of all centres: preferred
  experts score high, the others low, with a gap between them.
- A row of ``lm_head`` holds the own parts of the tokens it may follow: the successors of a token stand out, and
  which of them wins depends on the context.

Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qualify.errors import Rejected
from qualify.models.k2_horizon import Tensor

#: Standard deviation of the FP8 codes of a block: the largest of 16,384 normal draws then lies near 448.
CODE_DEVIATION = 110.0


@dataclass(frozen=True)
class Knobs:
    """What shapes the random values; recorded in ``synthetic.json``.

    A *gain* is the standard deviation of a matrix times the square root of its columns: the amplification of an
    input of random direction. Matrices that are not named have gain 1.

    ``attention_gain``: query and key projections, decides how peaked the attention is. ``output_gain``,
    ``down_gain``: the projections that write into the residual stream; small, so that it keeps the token's
    identity through all layers. ``norm_spread``: deviation of norm weights around one. ``bias_spread``: deviation
    of router selection biases around zero. ``scale_spread``: block scales are uniform within one plus and minus
    this, relative to their mean. ``cluster_share``: share of an embedding's variance that is its cluster's.
    ``cluster_overlap``: number of clusters that prefer an expert, on average, in the router with the most experts
    per chosen one. ``router_signal``: logit by which a preferred expert leads when the normalised input is the
    cluster centre alone. ``router_noise``, ``head_noise``: gain of the unstructured part. ``head_signal``: logit
    of a successor when the normalised input is the token's own part alone. ``successors``, ``successor_stride``:
    token ``t`` is followed by ``t + j * stride`` modulo the vocabulary, ``j`` from 1 to ``successors``.
    """

    attention_gain: float = 1.5
    output_gain: float = 0.4
    down_gain: float = 0.25
    norm_spread: float = 0.1
    bias_spread: float = 0.05
    scale_spread: float = 0.5
    cluster_share: float = 0.5
    cluster_overlap: int = 4
    router_signal: float = 8.0
    router_noise: float = 0.1
    head_signal: float = 64.0
    head_noise: float = 2.0
    successors: int = 2
    successor_stride: int = 7919


@dataclass(frozen=True)
class Recipe:
    """How one tensor is drawn.

    ``kind``: ``normal`` (``mean``, ``deviation``), ``codes`` (E4M3, normal), ``scales`` (uniform around ``mean``),
    ``embedding``, ``head`` or ``router``, which are sums of normal draws as the module says.
    """

    kind: str
    mean: float = 0.0
    deviation: float = 0.0


def recipes(config: Mapping[str, Any], inventory: Mapping[str, Tensor], knobs: Knobs) -> dict[str, Recipe]:
    """Return name -> :class:`Recipe` for every tensor of ``inventory``, which ``config`` describes.

    Raises ``Rejected`` for a hidden size that is no multiple of 4: four values are drawn from one random word, and
    the structured matrices are addressed by row.
    """
    if config["hidden_size"] % 4:
        raise Rejected(f"config.json hidden_size {config['hidden_size']} is not a multiple of 4")
    return {name: _recipe(name, tensor, inventory, knobs) for name, tensor in inventory.items()}


def clusters(config: Mapping[str, Any], knobs: Knobs) -> int:
    """Number of token clusters: enough for every router to choose each expert; 0 for a dense model."""
    ratios = [-(-experts // top_k) for experts, top_k in _routers(config) if experts]
    return knobs.cluster_overlap * max(ratios, default=0)


def preferences(config: Mapping[str, Any], router: str, seed: int, knobs: Knobs) -> list[list[int]]:
    """Return for each cluster the experts that the router of this weight name prefers, as many as it chooses.

    Experts stand on a circle in an order of the router's own; the clusters' windows are spread evenly over it, so
    that every expert is preferred by nearly equally many clusters, and neighbours by number are not neighbours.
    """
    value, feed_forward = _routers(config)
    experts, top_k = value if router.endswith(".v_router.weight") else feed_forward
    order = sorted(range(experts), key=lambda expert: hashlib.sha256(f"{seed}:{router}:{expert}".encode()).digest())
    count = clusters(config, knobs)
    starts = [cluster * experts // count for cluster in range(count)]
    return [[order[(start + step) % experts] for step in range(top_k)] for start in starts]


def _routers(config: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(experts, experts chosen) of the value routers and of the feed-forward routers."""
    return (
        (config["mova_num_experts"], config["mova_num_experts_per_tok"]),
        (config["num_experts"], config["num_experts_per_tok"]),
    )


def _recipe(name: str, tensor: Tensor, inventory: Mapping[str, Tensor], knobs: Knobs) -> Recipe:
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return Recipe("normal", deviation=knobs.bias_spread)
    if len(tensor.shape) == 1:
        return Recipe("normal", mean=1.0, deviation=knobs.norm_spread)
    deviation = _gain(module, knobs) / inventory[f"{module}.weight"].shape[1] ** 0.5
    if leaf.startswith("weight_scale"):
        # The spread of the scales adds to the variance of the products.
        return Recipe("scales", mean=deviation / CODE_DEVIATION / (1 + knobs.scale_spread**2 / 3) ** 0.5)
    if tensor.dtype == "F8_E4M3":
        return Recipe("codes", deviation=CODE_DEVIATION)
    if module == "model.embed_tokens":
        return Recipe("embedding")
    if module == "lm_head":
        return Recipe("head")
    if re.search(r"\.(self_attn\.v_router|mlp\.gate)$", module):
        return Recipe("router")
    return Recipe("normal", deviation=deviation)


def _gain(module: str, knobs: Knobs) -> float:
    projection = module.rpartition(".")[2]
    if projection in ("q_proj", "k_proj"):
        return knobs.attention_gain
    return {"o_proj": knobs.output_gain, "down_proj": knobs.down_gain}.get(projection, 1.0)
