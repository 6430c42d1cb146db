"""From what stages reported to what counts: recomputed from tests, numbers and policy, never taken over."""

from __future__ import annotations

from typing import Any

from qualify.policy import STAGES, Section, capability

PASSED, FAILED, NOT_RUN = "passed", "failed", "not-run"


def judge(name: str, stage: dict[str, Any], section: Section, topology: dict[str, Any]) -> tuple[str, str]:
    """(result, reason) of one stage; the reason is empty when it passed.

    ``stage`` has reported, reason, tests, numbers and gpu as in a receipt. What failed anywhere failed; what is
    incomplete in any way did not run.
    """
    tests, gpu = stage["tests"], stage["gpu"]
    if tests["failed"]:
        return FAILED, f"{len(tests['failed'])} of its tests failed, the first {tests['failed'][0]}"[:500]
    if stage["reported"] == FAILED:
        return FAILED, stage["reason"] or "the stage failed and does not say why"
    thresholds = [(item, item.judge(stage["numbers"])) for item in section.of_stage(name)]
    if missed := [item for item, verdict in thresholds if verdict == "missed"]:
        return FAILED, f"{missed[0].number} misses the threshold {missed[0].name}"
    if stage["reported"] == NOT_RUN:
        return NOT_RUN, stage["reason"] or "the stage did not run and does not say why"
    if not tests["passed"] or tests["skipped"]:
        return NOT_RUN, f"{len(tests['passed'])} tests passed and {len(tests['skipped'])} were skipped"
    if absent := [item for item, verdict in thresholds if verdict == "absent"]:
        return NOT_RUN, f"it did not measure {absent[0].number}, which the threshold {absent[0].name} needs"
    if name in section.gpu_stages:
        if gpu is None:
            return NOT_RUN, "it ran without a GPU"
        if gpu["capability"] != capability(section.target):
            return NOT_RUN, f"it ran on another architecture than {section.target}"
        if gpu["count"] < topology["tp"] * topology["pp"]:
            return NOT_RUN, f"it saw {gpu['count']} GPUs, fewer than the topology needs"
    return PASSED, ""


def unmeasured(name: str, stage: dict[str, Any], section: Section) -> list[str]:
    """Names of the stage's thresholds for which nobody has a bound."""
    return [item.name for item in section.of_stage(name) if item.judge(stage["numbers"]) == "unmeasured"]


def blockers(extension: dict[str, Any], section: Section) -> list[str]:
    """Every reason why this run cannot stand behind a release; empty: it can."""
    found = []
    scope, image, stages = extension["scope"], extension["image"], extension["stages"]
    if scope not in section.scopes:
        found.append(f"the scope is {scope}; only {', '.join(section.scopes)} can be released")
    if image["substituted_libraries"]:
        found.append("the run replaced libraries of the image by the host's")
    if not image["labels_compared"]:
        found.append("nobody compared the image's labels with the identity that ran")
    for name in section.required:
        if stages[name]["result"] != PASSED:
            found.append(f"the stage {name} is {stages[name]['result']}")
        elif stages[name]["unmeasured"]:
            missing = stages[name]["unmeasured"]
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            found.append(f"the stage {name} has no measured bound for {', '.join(missing[:5])}{more}")
    found += [f"the stage {name} is failed" for name in STAGES
              if name not in section.required and stages[name]["result"] == FAILED]  # fmt: skip
    return found


def summary(extension: dict[str, Any], section: Section) -> dict[str, Any]:
    """The predicate's standard fields: result and the three lists of stages.

    A reader who ignores our extension must not read more into a receipt than it says: PASSED is for what can be
    released, WARNED for a run in which every required stage passed and something else stands in the way.
    """
    stages = extension["stages"]
    passed = [name for name in STAGES if stages[name]["result"] == PASSED]
    failed = [name for name in STAGES if stages[name]["result"] == FAILED]
    complete = not failed and set(section.required) <= set(passed)
    blocked = bool(extension["release_blockers"])
    return {
        "result": ("WARNED" if blocked else "PASSED") if complete else "FAILED",
        "passedTests": [name for name in passed if not stages[name]["unmeasured"]],
        "warnedTests": [name for name in passed if stages[name]["unmeasured"]],
        "failedTests": failed,
    }


def gpu(stages: dict[str, dict[str, Any]]) -> tuple[dict[str, Any] | None, list[str]]:
    """The one GPU model of all sittings, and the stages that ran on another one."""
    models = {name: {key: stages[name]["gpu"][key] for key in ("name", "capability", "count")}
              for name in STAGES if stages[name]["gpu"] is not None}  # fmt: skip
    first = next(iter(models.values()), None)
    return first, [name for name, model in models.items() if model != first]
