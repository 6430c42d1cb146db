"""Tells whether an answer is the one that belongs to its prompt, by what the server said to that prompt alone before.

Kernels that depend on the size of the batch change low bits, so an answer among 64 need not be equal to the one alone:
log-probabilities are compared within a bound, and where the two best tokens are nearly tied either may come. After such
a fork the texts differ, and nothing is compared any more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens with their log-probabilities in nat; ``top`` are the likeliest tokens at each place, if asked."""

    ids: list[int]
    logprobs: list[float]
    top: list[dict[int, float]] | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``wrong``: why it is not the same answer, else empty; ``differences``: of log-probabilities up to a fork, in nat.

    ``tie``: by how much the other token was less likely alone where they forked, in nat; None where they did not.
    """

    wrong: str
    differences: list[float]
    tie: float | None = None


def of(meta: dict[str, Any]) -> Answer:
    """The answer in the ``meta_info`` of /generate: pairs of log-probability and id. Raises KeyError, TypeError."""
    pairs = meta["output_token_logprobs"]
    top = [{entry[1]: entry[0] for entry in place} for place in meta.get("output_top_logprobs") or []]
    return Answer([entry[1] for entry in pairs], [entry[0] for entry in pairs], top or None)


def compare(alone: Answer, other: Answer, bound: float, margin: float) -> Comparison:
    """Compare ``other`` with what came ``alone`` (which has ``top``), as far as that goes.

    ``bound``: of the mean absolute difference of log-probabilities; ``margin``: two tokens are tied where their
    log-probabilities differ by no more. Both in nat.
    """
    differences: list[float] = []
    tie = None
    if len(other.ids) < len(alone.ids) or len(other.ids) != len(other.logprobs):
        return Comparison(f"it has {len(other.ids)} tokens with {len(other.logprobs)} log-probabilities", [])
    for place, (mine, its, before, now) in enumerate(
        zip(alone.ids, other.ids, alone.logprobs, other.logprobs, strict=False)
    ):
        if not isinstance(now, float) or not math.isfinite(now):
            return Comparison(f"the log-probability of token {place} is no finite number", differences)
        if mine != its:
            tie = before - alone.top[place].get(its, -math.inf)
            if tie > margin:
                return Comparison(f"token {place} is another one, and no near tie", differences)
            break
        differences.append(abs(now - before))
    if differences and statistics.fmean(differences) > bound:
        mean = statistics.fmean(differences)
        return Comparison(f"its log-probabilities differ by {mean:.3f} nat on average", differences, tie)
    return Comparison("", differences, tie)


def alike(answers: Sequence[Answer], bound: float, margin: float) -> list[tuple[int, int]]:
    """Pairs of which the second would be taken for the first: an exchange of these two could not be seen."""
    return [
        (first, second)
        for first, one in enumerate(answers)
        for second, other in enumerate(answers)
        if first != second and not compare(one, other, bound, margin).wrong
    ]
