"""The formulas of K2-Horizon, one function each, on float32 tensors: ``T`` tokens of one sequence, positions 0 to T-1.

Matrices are ``(out, in)``. With ``bf16`` a result is rounded as an engine that stores BF16 does; ``pairing`` and
``biased`` are there for :mod:`qualify.reference.faults`. The defaults are the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from qualify.reference import dequantise
from qualify.reference.weights import Matrix


def stored(x: torch.Tensor, bf16: bool) -> torch.Tensor:
    """``x`` in float32, rounded to BF16 and back if ``bf16``."""
    return x.bfloat16().float() if bf16 else x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """RMSNorm of ``(T, H)`` over each of ``groups`` equal parts of the vector, then one weight ``(H,)`` over all."""
    parts = x.view(len(x), groups, -1)
    return (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).view_as(x) * weight


def linear(x: torch.Tensor, matrix: Matrix, quantised: bool, bf16: bool = False) -> torch.Tensor:
    """``(T, in)`` times the transposed matrix. With ``quantised`` an FP8 matrix sees quantised activations."""
    return stored((dequantise.rounded(x) if matrix.fp8 and quantised else x) @ matrix.values.T, bf16)


def rope(heads: torch.Tensor, theta: float, rotated: int, pairing: str = "halves") -> torch.Tensor:
    """Rotary embedding of ``(T, heads, D)``: pair i turns by position * theta^(-2i / rotated), i < rotated / 2.

    Pair i is dimensions (i, i + D/2), whatever ``rotated`` is; what is in no pair passes through. Other pairings, which
    are wrong: ``slice`` has (i, i + rotated/2), ``interleaved`` (2i, 2i + 1).
    """
    size, half = heads.shape[-1], rotated // 2
    # In float64: the angle of a late position has no digits left in float32.
    steps = torch.arange(half, device=heads.device, dtype=torch.float64)
    angle = torch.arange(len(heads), device=heads.device)[:, None] * theta ** (-2 * steps / rotated)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    first, second = {
        "halves": (slice(0, half), slice(size // 2, size // 2 + half)),
        "slice": (slice(0, half), slice(half, rotated)),
        "interleaved": (slice(0, rotated, 2), slice(1, rotated, 2)),
    }[pairing]
    low, high = heads[..., first], heads[..., second]
    turned = heads.clone()
    turned[..., first] = low * cos - high * sin
    turned[..., second] = high * cos + low * sin
    return turned


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention, scale D^-0.5: q ``(T, heads, D)``, k and v ``(T, kv heads, D)`` -> ``(T, heads
    * D)``. Query head h reads KV head h // (heads / kv heads)."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    mixed = []
    # One KV head at a time bounds the scores to T * T * (heads / kv heads).
    for head, queries in enumerate(q.view(tokens, kv_heads, -1, size).unbind(1)):
        scores = queries.transpose(0, 1) @ k[:, head].T * size**-0.5
        mixed.append(scores.masked_fill_(future, -torch.inf).softmax(-1) @ v[:, head])
    return torch.stack(mixed).permute(2, 0, 1, 3).reshape(tokens, heads * size)


def gate(z: torch.Tensor, function: str) -> torch.Tensor:
    """The factor of the attention output: ``softplus`` is softplus(z, beta = ln 2) = log2(1 + 2^z), or ``silu``."""
    return torch.logaddexp2(z, torch.zeros_like(z)) if function == "softplus" else silu(z)


def router_logits(x: torch.Tensor, weight: torch.Tensor, partitions: int) -> torch.Tensor:
    """Router product of ``(T, H)`` and ``(experts, H)`` by the declared provenance, float32.

    The hidden axis is split into ``partitions`` (1 or 2) equal parts; each part's product is rounded to BF16, then they
    are added in float32. Products are made in float64, so that this rounding is the only one.
    """
    parts = zip(x.double().chunk(partitions, 1), weight.double().chunk(partitions, 1), strict=True)
    return sum((part @ rows.T).bfloat16().float() for part, rows in parts)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    score: str = "sigmoid",
    normalise: bool = True,
    scaling: float = 1.0,
    biased: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by logits ``(T, experts)``: int64 ids and float32 mixing weights, both ``(T, top_k)``.

    The bias ``(experts,)`` decides the choice alone. Mixing weights are the unbiased scores of the chosen, divided by
    their sum if ``normalise`` and ``top_k`` > 1, times ``scaling``. ``biased`` mixes by the biased scores: wrong.
    """
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    selection = scores if bias is None else scores + bias
    chosen = selection.topk(top_k, -1).indices
    weights = (selection if biased else scores).gather(1, chosen)
    if normalise and top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * scaling


def mlp(x: torch.Tensor, gate: Matrix, up: Matrix, down: Matrix, quantised: bool, bf16: bool = False) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))``."""
    inner = silu(linear(x, gate, quantised, bf16)) * linear(x, up, quantised, bf16)
    return linear(stored(inner, bf16), down, quantised, bf16)


def mix(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    width: int,
    experts: int,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
    bf16: bool = False,
) -> torch.Tensor:
    """Sum over the chosen experts of weight times ``expert(number, rows of x)``, ``(T, width)``.

    Each expert is called once, with all tokens that chose it; those that nobody chose are not called.
    """
    order = chosen.flatten().argsort(stable=True)
    tokens = order.div(chosen.shape[1], rounding_mode="floor")
    shares = weights.flatten()[order, None]
    output = torch.zeros(len(x), width, device=x.device)
    first = 0
    for number, count in enumerate(chosen.flatten().bincount(minlength=experts).tolist()):
        if count:
            rows = tokens[first : first + count]
            output.index_add_(0, rows, stored(shares[first : first + count] * expert(number, x[rows]), bf16))
            first += count
    return stored(output, bf16)
