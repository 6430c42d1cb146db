"""The ignore list against what is stored: every entry names something, and nothing that is quantised."""

from __future__ import annotations

from collections import Counter

from qualify.checkpoint.contents import SCALE_LEAVES, is_quantised, stored_dtype
from qualify.checkpoint.declared import Declared
from qualify.checkpoint.headers import Tensor
from qualify.checkpoint.matching import Match, Names
from qualify.checkpoint.problems import Findings, show


def check(declared: Declared, names: Names, stored: dict[str, dict[str, Tensor]], findings: Findings) -> None:
    """Report entries that name nothing, name a parent only, name quantised modules, or differ by rule."""
    repeated = [entry for entry, count in Counter(declared.ignore).items() if count > 1]
    if repeated:
        findings.note("ignore-repeated", repeated[0][:200], f"{len(repeated)} ignore entries occur more than once")
    ambiguous = []
    for found in declared.matches:
        entry = found.entry
        if found.bad:
            findings.problem("ignore-regex", entry[:200], f"the ignore entry {show(found.bad, 300)}")
            continue
        if found.parent and any(is_quantised(stored.get(child, {})) for child in found.parent):
            child = next(child for child in found.parent if is_quantised(stored.get(child, {})))
            findings.problem(
                "ignore-in-scope",
                entry[:200],
                f"the ignore list names {show(entry)}; below it {show(child)} is stored quantised, and engines "
                "disagree whether a parent counts",
            )
        elif not found.modules and found.parent:
            findings.problem(
                "ignore-parent",
                entry[:200],
                f"the ignore entry {show(entry)} is a parent of {len(found.parent)} modules (first "
                f"{show(found.parent[0])}); {declared.rule} matches modules, so it has no effect",
            )
        elif not found.modules and entry != "lm_head":
            findings.problem(
                "ignore-unmatched",
                entry[:200],
                f"the ignore entry {show(entry)} names no module{_hint(entry, names, found)}",
            )
        elif found.normalised:
            findings.note(
                "ignore-normalised",
                entry[:200],
                f"the ignore entry {show(entry)} matches {len(found.modules)} modules (first "
                f"{show(found.modules[0])}) only after its {found.how} is resolved{_counts(found.counts)}",
            )
        elif len(set(found.counts.values()) - {0}) > 1 or found.how == "infix":
            ambiguous.append(found)
    for found in ambiguous[:50]:
        findings.note(
            "ignore-ambiguous",
            found.entry[:200],
            f"the ignore entry {show(found.entry)} matches differently by rule{_counts(found.counts)}",
        )
    _in_scope(declared, stored, findings)


def _hint(entry: str, names: Names, found: Match) -> str:
    parent, _, last = entry.rpartition(".")
    below = names.below(parent) if parent else []
    if below and any(word in last for word in ("qkv", "gate_up", "in_proj", "fused")):
        parts = ", ".join(show(name.rpartition(".")[2]) for name in below[:6])
        return f": {show(last)} looks like a fused module that nobody here knows; its parent holds {parts}"
    return _counts(found.counts)


def _in_scope(declared: Declared, stored: dict[str, dict[str, Tensor]], findings: Findings) -> None:
    """Ignored modules that are stored quantised: one problem each, naming the entry."""
    for found in declared.matches:
        for module in found.modules:
            leaves = stored.get(module)
            if leaves and is_quantised(leaves):
                scale = next((leaf for leaf in leaves if leaf in SCALE_LEAVES), None)
                findings.problem(
                    "ignore-in-scope",
                    module,
                    f"the ignore entry {show(found.entry)} names {show(module)}, which is stored "
                    f"{stored_dtype(leaves)} {f'with its {scale}' if scale else 'without a scale'}",
                )


def _counts(counts: dict[str, int]) -> str:
    return " (" + ", ".join(f"{rule} {count}" for rule, count in counts.items()) + ")" if counts else ""
