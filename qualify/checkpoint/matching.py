"""Which modules an ignore or target entry names, under the rule of each format.

Three engines read such lists in three ways. The rules here, by format:

* ``compressed-tensors``: the whole name, a dotted suffix of it, or ``re:`` and a regular expression matched
  at the start. A parent names nothing.
* ``fp8`` (block FP8): the whole name, a dotted prefix (parents count), or dotted components anywhere.
* ``modelopt``: the whole name, a parent, or a shell glob.

On top of each rule the entry may carry a wrapper prefix (``model.language_model.``), end in a dot ("all
below"), or name the fused module an engine builds (``qkv_proj``). These match too, and are reported: not
every engine does so.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

#: fused module -> its parts on disk
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
#: longest first
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")

_MAX_PATTERN = 512
#: bytes of module names searched for short entries before the search is given up; a second or two
_BUDGET = 2_000_000_000
_SECONDS = 2.0
#: all globs of one list: a thousand on the largest checkpoints known
_GLOB_SECONDS = 15.0


class BadPattern(ValueError):
    """A regular expression that is invalid, or that could take for ever on some name."""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern from a config, unless it could backtrack without bound. Raises ``BadPattern``.

    A repeated group (``(a+)+``) or a back-reference can take exponential time, six open repeats a polynomial
    of degree six; module patterns need neither.
    """
    if len(pattern) > _MAX_PATTERN:
        raise BadPattern(f"has {len(pattern)} characters")
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "x", re.sub(r"\\.", "x", pattern))
    if re.search(r"\)[*+{]", bare) or re.search(r"\\[1-9]", pattern) or "(?P=" in pattern or "(?(" in pattern:
        raise BadPattern("repeats a group or refers back to one, which can take for ever")
    repeats, choices = len(re.findall(r"[*+{]", bare)), _choices(bare)
    if repeats > 4:
        raise BadPattern("has more than four open repeats, which can take for ever")
    if choices > 1 << 18 - 3 * repeats:
        raise BadPattern(f"has {choices:.0e} combinations of alternatives, which can take for ever")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise BadPattern(f"is no regular expression ({str(error)[:60]})") from None


def _choices(bare: str) -> int:
    """Upper bound on the ways through ``|`` and ``?``: ``(a|a)`` and ``a?`` in a row double the time each."""
    bare = re.sub(r"\(\?(?:[:=!]|<[=!]|P<\w*>)", "(", bare)
    total, open_groups = 1, [1]
    for character in bare:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")" and len(open_groups) > 1:
            total *= open_groups.pop()
        elif character == "?":
            total *= 2
    return total * open_groups[0]


@dataclass(slots=True)
class Match:
    """What one entry names: ``modules`` under the format's rule (``how`` says by which part of it).

    ``parent`` is set when the entry is a parent that the rule does not honour; ``counts`` has the number of
    modules under every rule, for entries that are not simply one module's whole name; ``bad`` says what is
    wrong with it.
    """

    entry: str
    modules: list[str] = field(default_factory=list)
    how: str = "exact"
    parent: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    bad: str | None = None

    @property
    def normalised(self) -> bool:
        """True when the entry matched only after resolving a prefix, a dot or a fused name."""
        return self.how in ("wrapper", "trailing-dot", "fused")


class Names:
    """The module names of a checkpoint, ready to be asked what an entry names."""

    def __init__(self, modules: Iterable[str]):
        self.modules = list(modules)
        self.leaves = set(self.modules)
        #: immediate parents only
        self.parents = {name.rpartition(".")[0] for name in self.modules}
        self._below: dict[str, list[str]] | None = None
        self._text = ""
        self._spent = 0
        self._seconds = 0.0
        self._glob_seconds = 0.0

    def below(self, parent: str) -> list[str]:
        """The modules below ``parent``."""
        if self._below is None:
            self._below = {}
            for name in self.modules:
                end = name.rfind(".")
                while end > 0:
                    self._below.setdefault(name[:end], []).append(name)
                    end = name.rfind(".", 0, end)
        return self._below.get(parent, [])

    def containing(self, text: str) -> list[str]:
        """The modules whose name between two dots contains ``text``; nothing once the budget is spent."""
        if not self._text:
            self._text = "\n" + "\n".join(f".{name}." for name in self.modules) + "\n"
        if not text or "\n" in text or self._spent > _BUDGET:
            return []
        self._spent += len(self._text)
        found, position = [], self._text.find(text)
        while position >= 0:
            start = self._text.rfind("\n", 0, position) + 1
            end = self._text.find("\n", position)
            found.append(self._text[start + 1 : end - 1])
            position = self._text.find(text, end)
        return found

    def regex(self, pattern: str) -> list[str]:
        """The modules that ``pattern`` matches at their start. Raises ``BadPattern``."""
        compiled = compile_pattern(pattern)
        found = []
        began = time.monotonic()
        for name in self.modules:
            # Asked first: once the time is spent, not even one more match is tried.
            if time.monotonic() - began > _SECONDS - self._seconds:
                self._seconds = _SECONDS
                raise BadPattern("takes too long on these module names")
            if compiled.match(name):
                found.append(name)
        self._seconds += time.monotonic() - began
        return found

    def glob(self, pattern: str) -> list[str]:
        """The modules that the shell glob ``pattern`` matches, a wrapper prefix aside. Raises ``BadPattern``."""
        if self._glob_seconds > _GLOB_SECONDS:
            raise BadPattern("comes after too many others: all globs together take too long")
        if len(pattern) > _MAX_PATTERN or pattern.count("*") > 6:
            raise BadPattern("is too long or has more than six stars")
        try:
            compiled = re.compile(fnmatch.translate(pattern))
        except re.error as error:
            raise BadPattern(f"is no glob ({str(error)[:60]})") from None
        began = time.monotonic()
        found = [name for name in self.modules if compiled.match(name)]
        if not found:
            bare = re.compile(fnmatch.translate(_unwrap(pattern)))
            found = [name for name in self.modules if bare.match(_unwrap(name))]
        self._glob_seconds += time.monotonic() - began
        return found


def match(entry: str, names: Names, rule: str) -> Match:
    """What ``entry`` names under ``rule``: ``compressed-tensors``, ``fp8`` or ``modelopt``."""
    if entry in names.leaves:
        if entry not in names.parents:
            return Match(entry, [entry])
        # A module with parameters of its own and modules below it (Qwen's linear_attn).
        if rule == "compressed-tensors":
            return Match(entry, [entry], parent=names.below(entry))
        return Match(entry, [entry, *names.below(entry)], how="prefix")
    found = Match(entry, how="none")
    try:
        _match_rule(found, names, rule)
        if not found.modules:
            _match_normalised(found, names, rule)
    except BadPattern as error:
        found.bad = f"{entry!r} {error}"
        return found
    if not found.modules:
        found.parent = names.below(entry.rstrip("."))
    _count(found, names)
    return found


def _match_rule(found: Match, names: Names, rule: str) -> None:
    entry = found.entry
    if rule == "compressed-tensors":
        if entry.startswith("re:"):
            found.modules, found.how = names.regex(entry[3:]), "regex"
        else:
            found.modules = [name for name in names.containing(f".{entry}.") if name.endswith(f".{entry}")]
            found.how = "suffix"
    elif rule == "fp8":
        if not entry.startswith("re:"):
            found.modules, found.how = list(names.below(entry)), "prefix"
            if not found.modules and entry and not entry.endswith("."):
                found.modules, found.how = names.containing(f".{entry}."), "infix"
    elif any(character in entry for character in "*?["):
        found.modules, found.how = names.glob(entry), "glob"
    else:
        found.modules, found.how = list(names.below(entry)), "parent"


def _match_normalised(found: Match, names: Names, rule: str) -> None:
    entry = found.entry
    if entry.startswith("re:") or not entry:
        return
    bare = entry.rstrip(".")
    candidates = [bare, *(prefix + _unwrap(bare) for prefix in (*WRAPPERS, ""))]
    for candidate in dict.fromkeys(candidates):
        how = "trailing-dot" if bare != entry else "wrapper"
        if candidate != entry and candidate in names.leaves:
            found.modules, found.how = [candidate], how
            return
        parent, _, last = candidate.rpartition(".")
        parts = [f"{parent}.{part}" if parent else part for part in FUSED.get(last, ())]
        parts = [part for part in parts if part in names.leaves]
        if parts:
            found.modules, found.how = parts, "fused"
            return
        honours_parents = rule != "compressed-tensors" or bare != entry
        if honours_parents and candidate != entry and (below := names.below(candidate)):
            found.modules, found.how = list(below), how
            return


def _unwrap(name: str) -> str:
    for prefix in WRAPPERS:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _count(found: Match, names: Names) -> None:
    entry = found.entry
    if entry.startswith("re:"):
        found.counts = {"regex": len(found.modules)}
        return
    infix = names.containing(f".{entry}.") if entry else []
    found.counts = {
        "exact": int(entry in names.leaves),
        "prefix": len(names.below(entry)),
        "suffix": sum(name.endswith(f".{entry}") for name in infix),
        "infix": len(infix),
        "substring": len(names.containing(entry)),
        "regex": 0,
    }
