"""The qualification policy: ``qualify/policy.toml``, which stages and numbers an artifact needs on a target.

A threshold without a bound is *unmeasured*: nobody knows yet what it should be. Its stage may pass, and the receipt
then says that it does not count for a release.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected

PATH = Path(__file__).resolve().parent / "policy.toml"
SCHEMA = "horizon-images/policy/v1"
#: every stage of a qualification, in the order in which they run
STAGES = ("identity", "checkpoint", "load", "numerics", "requests", "performance", "cleanup")
#: what a checkpoint can be; only the first can be released
SCOPES = ("published", "synthetic", "uncatalogued", "bf16", "dequantised", "kv-only")
_BOUNDS = ("max", "min", "equals")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\Z")
_TARGET = re.compile(r"sm([0-9]{1,2})([0-9])\Z")


@dataclass(frozen=True, slots=True)
class Threshold:
    """One number of one stage and the bound it must keep."""

    name: str
    stage: str
    #: dotted path into the stage's numbers
    number: str
    #: "max", "min" or "equals"; empty where nobody has measured one
    bound: str
    #: int or float, for "equals" also bool or str; None where there is no bound
    value: Any
    #: where the bound comes from, or why there is none
    source: str
    unit: str = ""

    def judge(self, numbers: dict[str, Any]) -> str:
        """``met``, ``missed``, ``absent`` (the stage does not have the number) or ``unmeasured``."""
        found: Any = numbers
        for part in self.number.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, (bool, int, float, str)):
            return "absent"
        if not self.bound:
            return "unmeasured"
        if _kind(found) != _kind(self.value):
            return "missed"
        keeps = {"max": operator.le, "min": operator.ge, "equals": operator.eq}[self.bound]
        return "met" if keeps(found, self.value) else "missed"

    def as_dict(self) -> dict[str, Any]:
        """As a receipt quotes it."""
        return {
            "name": self.name,
            "stage": self.stage,
            "number": self.number,
            **({self.bound: self.value, "source": self.source} if self.bound else {"unmeasured": self.source}),
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True)
class Section:
    """The policy of one artifact on one target."""

    artifact: str
    target: str
    required: tuple[str, ...]
    gpu_stages: tuple[str, ...]
    #: scopes that can be released
    scopes: tuple[str, ...]
    thresholds: tuple[Threshold, ...]

    def threshold(self, name: str) -> Threshold:
        """The threshold of that name. Raises ``CannotRun``: who asks for another has a wrong policy file."""
        for threshold in self.thresholds:
            if threshold.name == name:
                return threshold
        raise CannotRun(f"the policy of {self.artifact} on {self.target} has no threshold {name}")

    def of_stage(self, stage: str) -> list[Threshold]:
        """The thresholds of one stage."""
        return [item for item in self.thresholds if item.stage == stage]

    def as_dict(self) -> dict[str, Any]:
        """As a receipt quotes it."""
        return {
            "required": list(self.required),
            "gpu_stages": list(self.gpu_stages),
            "scopes": list(self.scopes),
            "thresholds": [threshold.as_dict() for threshold in self.thresholds],
        }


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy file."""

    #: of the file's bytes
    sha256: str
    sections: tuple[Section, ...]

    def section(self, artifact: str, target: str) -> Section:
        """The policy of an artifact on a target. Raises ``Rejected`` where there is none."""
        for section in self.sections:
            if (section.artifact, section.target) == (artifact, target):
                return section
        raise Rejected(f"the policy says nothing of {artifact} on {target}: add it to qualify/policy.toml")


def capability(target: str) -> list[int]:
    """CUDA compute capability of a target: sm90 -> [9, 0], sm120 -> [12, 0]. Raises ``Rejected``."""
    match = _TARGET.match(target)
    if match is None:
        raise Rejected(f"{target!r} is no target like sm90 or sm120")
    return [int(match[1]), int(match[2])]


def load(path: Path | None = None) -> Policy:
    """Read the policy file. Raises ``CannotRun`` when it is unusable: our file is wrong, not the input."""
    path = path or PATH
    try:
        raw = path.read_bytes()
        return Policy(hashlib.sha256(raw).hexdigest(), _sections(tomllib.loads(raw.decode())))
    except OSError as error:
        raise CannotRun(f"the policy {path.name} cannot be read: {error.strerror}") from None
    except (Rejected, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CannotRun(f"{path.name} is not a usable policy: {error}") from None


def _sections(raw: dict[str, Any]) -> tuple[Section, ...]:
    if set(raw) != {"schema", "gpu_stages", "thresholds", "policies"} or raw["schema"] != SCHEMA:
        raise ValueError(f"it holds schema = {SCHEMA!r}, gpu_stages, thresholds and policies, nothing else")
    gpu_stages = _words("gpu_stages", raw["gpu_stages"], STAGES)
    thresholds = {name: _threshold(name, item) for name, item in raw["thresholds"].items()}
    sections = []
    for policy in raw["policies"]:
        if set(policy) != {"artifacts", "targets", "scopes", "required", "thresholds"}:
            raise ValueError("a policy holds artifacts, targets, scopes, required and thresholds, nothing else")
        names = _words("thresholds", policy["thresholds"], tuple(thresholds))
        for artifact in policy["artifacts"]:
            for target in policy["targets"]:
                capability(target)
                sections.append(
                    Section(
                        artifact,
                        target,
                        _words("required", policy["required"], STAGES),
                        gpu_stages,
                        _words("scopes", policy["scopes"], SCOPES),
                        tuple(thresholds[name] for name in names),
                    )
                )
    pairs = [(section.artifact, section.target) for section in sections]
    if len(set(pairs)) != len(pairs):
        raise ValueError("an artifact has two policies on one target")
    return tuple(sections)


def _words(what: str, words: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"{what} names {unknown[0]!r}, which there is not")
    if not words or len(set(words)) != len(words):
        raise ValueError(f"{what} is empty or names one twice")
    return tuple(words)


def _threshold(name: str, raw: dict[str, Any]) -> Threshold:
    bounds = [key for key in _BOUNDS if key in raw]
    measured = "unmeasured" not in raw
    allowed = {"stage", "number", "unit", *(("source", *bounds) if measured else ("unmeasured",))}
    if not _NAME.match(name) or set(raw) - allowed or len(bounds) != measured:
        raise ValueError(f"threshold {name}: one of max, min, equals with its source, or unmeasured, and nothing else")
    source = raw["source"] if measured else raw["unmeasured"]
    value = raw[bounds[0]] if measured else None
    if not isinstance(source, str) or not source.strip():
        raise ValueError(f"threshold {name}: it does not say where it comes from")
    if measured and (_kind(value) is None or (_kind(value) != "number" and bounds != ["equals"])):
        raise ValueError(f"threshold {name}: max and min take numbers, equals also true, false and words")
    if isinstance(value, float) and not math.isfinite(value):  # TOML knows nan and inf
        raise ValueError(f"threshold {name}: its bound is no number")
    if raw["stage"] not in STAGES:
        raise ValueError(f"threshold {name}: there is no stage {raw['stage']!r}")
    bound = bounds[0] if measured else ""
    return Threshold(name, raw["stage"], raw["number"], bound, value, source, raw.get("unit", ""))


def _kind(value: Any) -> str | None:
    """JSON's kinds: true is no number."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, (int, float)) else "string" if isinstance(value, str) else None
