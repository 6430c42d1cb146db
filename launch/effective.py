"""Compares what the running engine says of itself with what was planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launch.plan import OVERRIDES, Plan


def differences(plan: Plan, info: Mapping[str, Any]) -> list[str]:
    """One sentence for every flag or expectation of the plan that ``/server_info`` contradicts or does not know."""
    found = []
    for name, choice in plan.choices.items():
        if choice.flag.field not in info:
            found.append(f"{name}: /server_info has no {choice.flag.field}")
        elif not _equal(name, choice.value, info[choice.flag.field]):
            found.append(f"{name}: planned {choice.value}, the engine runs {info[choice.flag.field]}")
    for field, value in plan.expect.items():
        if field not in info or info[field] != value:
            found.append(f"{field}: expected {value}, the engine runs {info.get(field, 'without it')}")
    return found


def _equal(name: str, planned: Any, runs: Any) -> bool:
    if name == OVERRIDES and isinstance(runs, str):
        return json.loads(planned) == json.loads(runs)
    return type(planned) is type(runs) and planned == runs
