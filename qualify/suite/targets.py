"""The names of targets: which architecture and which GPU model each stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.machine import Machine
from qualify.errors import CannotRun, Rejected


@dataclass(frozen=True, slots=True)
class Target:
    """``arch`` as recipes name it; ``gpu`` must be part of the GPU's name, empty for any of that architecture."""

    arch: str
    gpu: str = ""


TARGETS = {"h200": Target("sm90", "H200"), "sm120": Target("sm120")}


def get(name: str) -> Target:
    """Raises Rejected for an unknown name."""
    if name not in TARGETS:
        raise Rejected(f"target {name!r} is unknown: give {' or '.join(TARGETS)}")
    return TARGETS[name]


def check(name: str, machine: Machine, count: int) -> dict[str, Any]:
    """What a stage file says of the first ``count`` GPUs. Raises CannotRun where they are not the target's."""
    target = get(name)
    if len(machine.gpus) < count:
        raise CannotRun(f"{count} GPUs are needed and {len(machine.gpus)} are visible")
    for gpu in machine.gpus[:count]:
        if gpu.target != target.arch or target.gpu not in gpu.name:
            raise CannotRun(
                f"the GPU is {gpu.name} ({gpu.target}), and target {name} is {target.gpu or 'any'} ({target.arch})"
            )
    first = machine.gpus[0]
    if other := {gpu.name for gpu in machine.gpus[:count]} - {first.name}:
        raise CannotRun(f"{first.name} and {other.pop()} would share the work: qualify on GPUs of one model")
    return {
        "name": first.name,
        "capability": list(first.capability),
        "count": count,
        "driver": machine.driver,
        "cuda": ".".join(map(str, machine.cuda)),
    }
