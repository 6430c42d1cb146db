"""Statements about many modules at once: what is absent, and whether experts and fused parts are stored alike."""

from __future__ import annotations

from typing import Any

from qualify.checkpoint.contents import EXPERT, SCALE_LEAVES, Contents
from qualify.checkpoint.matching import FUSED
from qualify.checkpoint.problems import Findings, show
from qualify.models.inventory import Promised, layer_of, module_class

#: last part of a projection inside a fused set -> the name of the set
_FUSED_OF = {part: fused for fused, parts in FUSED.items() for part in parts}


def report_missing(
    missing: dict[str, list[str]],
    contents: Contents,
    promised: dict[str, list[Promised]],
    stacked: set[str],
    form: str,
    findings: Findings,
) -> None:
    """Report tensors that are promised and absent: whole layers and whole experts as one problem each.

    ``missing`` is module -> leaves; ``stacked`` are parents whose experts lie in another layout, reported already.
    """
    absent = {name for name in missing if name not in contents.modules}
    whole = _whole_groups(absent, promised, layer_of)
    for layer in sorted(whole):
        names = whole[layer]
        findings.problem(
            "layer-missing",
            f"layer {layer}",
            f"layer {layer} is absent: none of its {len(names):,} modules is stored",
        )
        absent.difference_update(names)
        for name in names:
            del missing[name]
    experts = _whole_groups(absent, promised, lambda name: (m := EXPERT.match(name)) and f"{m[1]}.{m[2]}")
    for expert, names in experts.items():
        for name in names:
            del missing[name]
        if expert.rpartition(".")[0] in stacked:
            continue
        findings.problem(
            "expert-missing",
            expert,
            f"{show(expert)} is absent: {', '.join(n.rpartition('.')[2] for n in names)}",
        )
    for name, leaves in missing.items():
        for leaf in leaves:
            if name == "lm_head" and leaf == "weight":
                findings.problem(
                    "head-missing",
                    "lm_head.weight",
                    "lm_head.weight is absent, and the config does not tie it to the embedding",
                )
                continue
            scale = leaf in SCALE_LEAVES
            findings.problem(
                "scale-missing" if scale else "tensor-missing",
                f"{name}.{leaf}",
                f"{show(name)}.{leaf} is absent; {form if scale else 'the config'} promises it",
            )


def _whole_groups(absent: set[str], promised: dict[str, list[Promised]], key) -> dict[Any, list[str]]:
    """Groups (by ``key``) of promised modules all of which are absent."""
    if not absent:
        return {}
    groups: dict[Any, list[str]] = {}
    for name in promised:
        if (group := key(name)) is not None:
            groups.setdefault(group, []).append(name)
    return {group: names for group, names in groups.items() if len(names) > 1 and absent.issuperset(names)}


def enumerate_layers(contents: Contents, count: int, drafts: int, findings: Findings) -> None:
    """Without an inventory: every one of the config's ``count`` layers is there, and none beyond the ``drafts``."""
    names = (name for name in contents.modules if module_class(name) not in ("vision", "mtp"))
    stored = {layer for name in names if (layer := layer_of(name)) is not None}
    why = f"the config has {count} layers"
    absent = count - sum(layer < count for layer in stored)
    if absent:  # one problem, whatever number a config claims
        first = next(layer for layer in range(count) if layer not in stored)
        findings.problem(
            "layer-missing", f"layer {first}", f"{absent:,} layers are absent, the first is {first}; {why}"
        )
    for layer in sorted(layer for layer in stored if layer >= count + drafts):
        findings.problem("layer-beyond-config", f"layer {layer}", f"layer {layer} is stored; {why}")


def enumerate_experts(contents: Contents, count: int, findings: Findings) -> None:
    """Without an inventory: every layer with experts has all of them, each with the same projections."""
    layers: dict[str, dict[int, set[str]]] = {}
    for name in contents.modules:
        match = EXPERT.match(name)
        if match is not None and len(match[2]) < 7:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(name[match.end() :])
    for layer, experts in layers.items():
        for number in sorted(number for number in experts if number >= count):
            subject = f"{layer}.{number}"
            findings.problem(
                "expert-beyond-config", subject, f"{show(subject)} is stored; the config has {count} experts"
            )
        absent = count - sum(number < count for number in experts)
        first = next((number for number in range(min(count, len(experts) + 1)) if number not in experts), 0)
        if absent:
            findings.problem(
                "expert-missing",
                f"{layer}.{first}",
                f"{absent:,} of {count:,} experts of {show(layer)} are absent, the first is {first}",
            )
        whole = set().union(*experts.values())
        for number, projections in experts.items():
            for projection in sorted(whole - projections):
                name = f"{layer}.{number}.{projection}"
                findings.problem("tensor-missing", f"{name}.weight", f"{show(name)} is absent; other experts have it")


def check_uniform(contents: Contents, findings: Findings) -> None:
    """All experts of a layer alike, all parts of a fused projection alike."""
    layers: dict[str, dict[str, list[str]]] = {}
    fused: dict[tuple[str, str], dict[str, str]] = {}
    for name, leaves in contents.modules.items():
        parent, _, last = name.rpartition(".")
        weight = leaves.get("weight_packed") or leaves.get("weight")
        if weight is None:
            continue
        end = name.find(".experts.")
        if end > 0:
            layers.setdefault(name[: end + 8], {}).setdefault(weight.dtype, []).append(name)
        elif last in _FUSED_OF:
            fused.setdefault((parent, _FUSED_OF[last]), {})[last] = weight.dtype
    for layer, dtypes in layers.items():
        if len(dtypes) > 1 and "v_experts" not in layer:
            odd = min(dtypes.items(), key=lambda item: len(item[1]))
            findings.problem(
                "experts-mixed",
                layer,
                f"the experts of {show(layer)} are stored "
                + ", ".join(f"{len(names)} {dtype}" for dtype, names in sorted(dtypes.items()))
                + f"; {show(odd[1][0])} is {odd[0]}: one kernel computes them all",
            )
    for (parent, name), parts in fused.items():
        if len(set(parts.values())) > 1:
            detail = ", ".join(f"{part} {dtype}" for part, dtype in parts.items())
            findings.problem(
                "fused-mixed",
                f"{parent}.{name}",
                f"{show(parent)}.{name} is one projection in the engine: {detail}",
            )
