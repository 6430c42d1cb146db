"""Metrics between an engine and the reference. Every function is pure; tensors may lie on any device.

A value that is not finite makes the metric infinite or NaN, which no bound admits (test ``not value <= bound``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qualify.errors import Rejected
from qualify.reference.model import Record, Reference

#: Two tokens are tied when their log-probabilities differ by less, in nat: the margin of the model makers' BF16 gate.
TIE_MARGIN = 0.25


def logprobs(engine: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
    """Absolute errors, in nat, of log-probabilities ``(N,)`` of the same tokens."""
    error = (_same(engine, reference) - reference.double().cpu()).abs()
    return {
        "mean_abs_logprob_error": _mean(error),
        "p95_abs_logprob_error": _quantile(error, 0.95),
        "max_abs_logprob_error": _max(error),
    }


def top5_overlap(engine_ids: torch.Tensor, reference_ids: torch.Tensor) -> float:
    """Mean share of the reference's five most likely tokens ``(N, 5)`` that are among the engine's five."""
    engine_ids, reference_ids = engine_ids.cpu(), reference_ids.cpu()
    _same(engine_ids, reference_ids)
    return (reference_ids[:, :, None] == engine_ids[:, None, :]).any(-1).double().mean().item()


def greedy(
    engine_ids: torch.Tensor, reference_ids: torch.Tensor, reference_top: torch.Tensor, margin: float = TIE_MARGIN
) -> dict[str, float]:
    """Greedy agreement: engine's best token ``(N,)`` against the reference's best five ids and log-probabilities.

    ``tie_aware_agreement``: share of positions where the engine's token is the reference's best or less than ``margin``
    below it (one outside the five counts as below). ``non_tie_mismatch``: among positions without a tie, where the
    reference's second is ``margin`` or more below its first, the share where the engine has another token; NaN where
    every position is a tie. ``ties``: share of positions with a tie.
    """
    engine_ids, reference_ids, top = engine_ids.cpu(), reference_ids.cpu(), reference_top.double().cpu()
    if engine_ids.shape != reference_ids.shape[:1]:
        raise Rejected(f"{len(engine_ids)} engine tokens against {len(reference_ids)} reference positions")
    below = top[:, :1] - top
    same = engine_ids == reference_ids[:, 0]
    close = ((engine_ids[:, None] == reference_ids) & (below < margin)).any(-1)
    clear = below[:, 1] >= margin
    return {
        "tie_aware_agreement": (same | close).double().mean().item(),
        "non_tie_mismatch": (~same[clear]).double().mean().item(),
        "ties": (~clear).double().mean().item(),
    }


def token_errors(engine: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of each token, float64 ``(T,)``: norm of the difference over norm of the reference's row."""
    wanted = reference.double().cpu().flatten(1)
    difference = (_same(engine, reference).flatten(1) - wanted).norm(dim=1)
    # 0 / 0 is no error; something where nothing should be is an infinite one.
    return torch.where(difference == 0, difference, difference / wanted.norm(dim=1))


def relative(errors: torch.Tensor) -> dict[str, float]:
    """Mean, 95th percentile and maximum of token errors ``(T,)``."""
    return {"mean": _mean(errors), "p95": _quantile(errors, 0.95), "max": _max(errors)}


def by_expert(errors: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Mean token error ``(T,)`` over the tokens that chose each expert, float64 ``(experts,)``; NaN where none did.

    One wrong expert of many touches few tokens: the mean over all hides it, this does not.
    """
    chosen, errors = chosen.cpu(), errors.double().cpu()
    hits = coverage([chosen], experts)
    total = torch.zeros(experts, dtype=torch.float64).index_add_(
        0, chosen.flatten(), errors.repeat_interleave(chosen.shape[1])
    )
    return total / hits


def unequal_logits(engine: torch.Tensor, reference: torch.Tensor) -> float:
    """Share of router logits ``(T, experts)`` that are not bit-for-bit the reference's: sees a wrong provenance."""
    return (_same(engine, reference) != reference.double().cpu()).double().mean().item()


def routing_flips(engine_chosen: torch.Tensor, reference_chosen: torch.Tensor) -> int:
    """Number of tokens whose set of experts ``(T, k)`` differs."""
    _same(engine_chosen, reference_chosen)
    sets = (chosen.cpu().sort(-1).values for chosen in (engine_chosen, reference_chosen))
    return int(torch.ne(*sets).any(-1).sum())


def coverage(chosen: Iterable[torch.Tensor], experts: int) -> torch.Tensor:
    """Tokens that each expert got, int64 ``(experts,)``, over several records of chosen ids ``(T, k)``."""
    hits = torch.zeros(experts, dtype=torch.int64)
    for ids in chosen:
        hits += ids.flatten().cpu().bincount(minlength=experts)
    return hits


@torch.no_grad()
def layer(reference: Reference, number: int, records: dict[str, Record]) -> dict[str, dict[str, float]]:
    """Compare one layer's engine records with the reference on the same inputs: kind -> metric -> value.

    A record has ``input`` and ``output`` and, for routers, ``logits`` (see :meth:`Reference.module`). The input of
    ``values`` may be left to ``attention``, that of ``router`` to ``ffn``: they are the same. Outputs give
    ``mean``, ``p95``, ``max`` of the relative errors of tokens; logits give ``unequal_logits`` and ``flips``. With the
    engine's logits at hand (``values``: its own; ``ffn``: those of ``router``) the experts are compared under the
    engine's routing, and ``worst_expert`` is the largest mean error over the tokens of one expert.
    """
    found = {}
    for kind, record in records.items():
        metrics: dict[str, float] = {}
        record = {"input": _input(kind, records), **record}
        given: Record = {"input": record["input"]}
        routing = record.get("logits")
        if kind == "ffn" and routing is None:
            routing = records.get("router", {}).get("logits")
        if routing is not None and kind in ("values", "ffn"):
            given["logits"] = routing
        if "output" in record:
            wanted = reference.module(number, kind, given)
            errors = token_errors(record["output"], wanted["output"])
            metrics |= relative(errors)
            if "chosen" in wanted:
                experts = by_expert(errors, wanted["chosen"], wanted["logits"].shape[1])
                # Experts without a token are NaN by definition; a NaN of the errors must stay.
                metrics["worst_expert"] = _max(experts[coverage([wanted["chosen"]], len(experts)) > 0])
        if "logits" in record and kind in ("values", "router"):
            metrics |= _router(reference, number, kind, record)
        found[kind] = metrics
    return found


def _input(kind: str, records: dict[str, Record]) -> torch.Tensor:
    for holder in (kind, {"values": "attention", "router": "ffn"}.get(kind)):
        if "input" in records.get(holder, {}):
            return records[holder]["input"]
    raise Rejected(f"the record of {kind} has no input")


def _router(reference: Reference, number: int, kind: str, record: Record) -> dict[str, float]:
    own = reference.routing(number, kind, {"input": record["input"]})
    engine = reference.routing(number, kind, record)
    return {
        "unequal_logits": unequal_logits(record["logits"], own["logits"]),
        "flips": routing_flips(engine["chosen"], own["chosen"]),
    }


def _same(engine: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    if engine.shape != reference.shape or not engine.numel():
        raise Rejected(f"the engine gave {tuple(engine.shape)}, the reference {tuple(reference.shape)}")
    return engine.double().cpu()


def _mean(values: torch.Tensor) -> float:
    return values.mean().item()


def _max(values: torch.Tensor) -> float:
    return values.max().item()  # of NaN and numbers: NaN


def _quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN if there is one."""
    if values.isnan().any():
        return float("nan")
    return values.sort().values[-(-round(share * 10_000) * len(values) // 10_000) - 1].item()
