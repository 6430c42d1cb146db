"""Which pairs of tensor and expert parallelism a checkpoint can be served with, and why others cannot.

Every rank must hold whole blocks of every quantised weight: a scale covers 128 rows and columns, and a kernel
cannot split it. Experts are spread over EP ranks first; what is left, TP / EP, splits each expert's
intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qualify.checkpoint.contents import Contents
from qualify.checkpoint.schemes import Scheme
from qualify.models.inventory import expert_count, text_config

#: pairs that a report lists
TP = (1, 2, 4, 8, 16)
#: how the engine splits a module: its rows (output) or its columns (input)
_COLUMNS = {"o_proj", "down_proj", "out_proj", "w2"}
_KV = {"k_proj", "v_proj"}
_VOCAB_PADDING = 64


@dataclass(frozen=True, slots=True)
class Topology:
    """One pair, and the reasons against it (none: it can work)."""

    tp: int
    ep: int
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The pair as it stands in the JSON report."""
        return {
            "tp": self.tp,
            "ep": self.ep,
            "works": not self.reasons,
            "why": "; ".join(self.reasons) or None,
        }


def candidates(contents: Contents, config: Mapping[str, Any]) -> list[Topology]:
    """All pairs of powers of two up to 16, with the reasons against each."""
    if not contents.signatures:
        return []
    experts = expert_count(config)
    return [check(contents, config, tp, ep) for tp in TP for ep in TP if ep <= tp and (ep == 1 or experts)]


def check(contents: Contents, config: Mapping[str, Any], tp: int, ep: int) -> Topology:
    """Whether TP = ``tp`` with EP = ``ep`` can serve the stored modules."""
    if tp < 1 or ep < 1:
        return Topology(tp, ep, ("TP and EP are at least 1",))
    reasons: dict[str, None] = {}
    experts = expert_count(config)
    if ep > 1 and not experts:
        reasons[f"EP {ep}: the model has no routed experts"] = None
    if tp % ep:
        reasons[f"TP {tp} % EP {ep} = {tp % ep}: EP must divide TP"] = None
    if experts and experts % ep:
        reasons[f"{experts} experts % EP {ep} = {experts % ep}"] = None
    text = text_config(config)
    heads, kv_heads = _number(text, "num_attention_heads"), _number(text, "num_key_value_heads")
    if heads and heads % tp:
        reasons[f"{heads} attention heads % TP {tp} = {heads % tp}"] = None
    if kv_heads and (kv_heads % tp if tp <= kv_heads else tp % kv_heads):
        reasons[f"{kv_heads} KV heads and TP {tp}: neither divides the other"] = None
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        count = _number(text, key)
        if count and count % tp:
            reasons[f"{key} {count} % TP {tp} = {count % tp}"] = None
    moe_tp = max(tp // ep, 1)
    for klass, last, rows, columns, scheme in contents.signatures:
        if klass in ("router", "vision", "embedding", "mtp", "value_expert"):
            continue
        ways, label = (moe_tp, f"TP {tp} / EP {ep}") if klass == "routed_expert" else (tp, f"TP {tp}")
        if ways > 1:
            reason = _split(klass, last, rows, columns, scheme, ways, label, kv_heads)
            if reason:
                reasons[reason] = None
    return Topology(tp, ep, tuple(reasons))


def _split(
    klass: str,
    last: str,
    rows: int,
    columns: int,
    scheme: Scheme | None,
    ways: int,
    label: str,
    kv_heads: int,
) -> str | None:
    """The reason why one kind of module cannot be split ``ways`` ways, or None."""
    by_columns = last in _COLUMNS
    extent, axis = (columns, "columns") if by_columns else (rows, "rows")
    what = f"{klass.replace('_', ' ')} {last}".replace("lm head lm_head", "lm_head")
    block = 1
    if scheme is not None and scheme.block:
        block = scheme.block[1 if by_columns else 0]
    elif scheme is not None and scheme.group and by_columns:
        # Kernels take FP4 columns in steps of 32 even where a scale covers 16.
        block = max(scheme.group, 32)
    if klass == "lm_head":
        extent = -(-extent // _VOCAB_PADDING) * _VOCAB_PADDING
    if last in _KV and kv_heads and ways > kv_heads:
        ways = kv_heads  # KV heads are replicated beyond their number
    if extent % ways:
        return f"{what}: {extent} {axis} % {ways} ({label}) = {extent % ways}"
    share = extent // ways
    if share % block:
        return (
            f"{what}: {extent} {axis} / {ways} ({label}) = {share} a rank, {share} % {block} = {share % block}: no "
            f"whole blocks of {block}"
        )
    return None


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0
