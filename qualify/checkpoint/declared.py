"""A declaration of quantisation: a format, and a scheme for each module. Read by one module per family of formats."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from qualify.checkpoint.matching import Match, Names, match
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import Scheme


@dataclass(slots=True)
class Declared:
    """The effective declaration of a checkpoint.

    ``format`` is always a string; ``raw`` is what was declared.
    """

    format: str = "bf16"
    origin: str = "nothing: no quantization_config"
    raw: dict[str, Any] | None = None
    rule: str = "compressed-tensors"
    #: entry -> scheme: "Linear" covers every linear module, other entries name modules
    targets: list[tuple[str, Scheme]] = field(default_factory=list)
    #: ModelOpt's map, module or parent -> scheme (None: an algorithm that is no scheme here)
    layer_map: dict[str, Scheme | None] | None = None
    ignore: list[str] = field(default_factory=list)
    kv_cache: str | None = None
    #: why no artifact can serve the declaration although it is well-formed
    unserved: str | None = None
    # filled by bind()
    ignored: set[str] = field(default_factory=set)
    matches: list[Match] = field(default_factory=list)
    named: dict[str, Scheme | None] = field(default_factory=dict)
    linear: Scheme | None = None

    def bind(self, names: Names, findings: Findings) -> None:
        """Resolve ignore entries, targets and map keys against ``names``; report what names nothing."""
        for entry in dict.fromkeys(self.ignore):
            found = match(entry, names, self.rule)
            self.matches.append(found)
            self.ignored.update(found.modules)
        for entry, scheme in self.targets:
            if entry == "Linear":
                self.linear = scheme
                continue
            found = match(entry, names, "compressed-tensors")
            if found.bad:
                findings.problem("ignore-regex", entry[:200], f"target {show(found.bad)}")
            elif not found.modules:
                findings.problem("target-unmatched", entry[:200], f"the target {show(entry)} names no module")
            self.named.update(dict.fromkeys(found.modules, scheme))
        for key, scheme in (self.layer_map or {}).items():
            found = match(key, names, "modelopt")
            if found.bad or not found.modules:
                findings.problem(
                    "quantized-layer-unmatched",
                    key[:200],
                    f"quantized_layers names {show(key)}, which is no module of the checkpoint" + _nearby(key, names),
                )
            self.named.update(dict.fromkeys(found.modules, scheme))

    def scheme(self, module: str, linear: bool) -> Scheme | None:
        """The scheme declared for ``module``, or None: unquantised.

        ``linear``: the class target covers it.
        """
        if module in self.ignored:
            return None
        if module in self.named:
            return self.named[module]
        return self.linear if linear else None


def _nearby(key: str, names: Names) -> str:
    last = key.rpartition(".")[2]
    others = names.containing(f".{last}.")[:1]
    return f"; {show(others[0])} is one" if others else ""


def canonical(raw: dict[str, Any] | None) -> bytes | None:
    """The quantisation config in one spelling, for its digest: sorted keys, no spaces, ASCII."""
    if raw is None:
        return None
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode("ascii")


# ---------------------------------------------------------------- compressed-tensors


def kv_scheme(value: Any, findings: Findings) -> str | None:
    """``fp8`` for any spelling of an FP8 KV cache; other schemes are reported and named."""
    if isinstance(value, str):
        if value.upper() in ("FP8", "FP8_E4M3"):
            return "fp8"
        if value.upper() in ("NONE", "AUTO", ""):
            return None
    elif isinstance(value, dict):
        if not value:
            return None
        if value.get("num_bits") == 8 and value.get("type") == "float":
            return "fp8"
    findings.problem(
        "quantization-value",
        "kv_cache_scheme",
        f"the KV cache scheme is {show(value)}; engines would read it as FP8",
    )
    return "unknown"


def unknown_keys(mapping: dict[str, Any], known: set[str], where: str, findings: Findings) -> None:
    for key in mapping:
        if key not in known:
            findings.problem(
                "quantization-key",
                key[:200],
                f"{where} has the unknown key {show(key)} {show(mapping[key], 60)}",
            )


def names_of(raw: dict[str, Any], keys: tuple[str, ...], findings: Findings) -> list[str]:
    entries: list[str] | None = None
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            findings.problem("quantization-malformed", key, f"{key} is {show(value)}, not a list of names")
            continue
        # An empty list is a statement as well: engines take the first key that is there.
        if entries is not None and set(entries) != set(value):
            findings.problem("quantization-conflict", key, f"{' and '.join(keys)} differ")
        entries = entries or value
    return entries or []


def pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(item) is int and 0 < item <= 1 << 20 for item in value):
        return value[0], value[1]
    return None


def slug(text: str) -> str:
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in str(text).lower()).strip("-")
    return slug[:64] or "unknown"
