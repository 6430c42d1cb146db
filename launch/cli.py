"""Launch an artifact's engine as its recipe says.

    recipes/ARTIFACT.sh [--print | --check] [--json] [FLAG OF THE ENGINE]...

--print shows the engine's command line and needs neither model nor GPU; --check does everything but start; --json
gives the answer of either to a machine. Variables: docs/serving.md; each flag's reason: recipes/ARTIFACT.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch import all_to_all, machine, memory, models, plan, recipe
from qualify import catalogue, inspect, preflight
from qualify.checkpoint import inspection, report
from qualify.errors import CannotRun, Rejected, exit_code

CACHE = Path("/var/cache/horizon")
START_SECONDS, DRAIN_SECONDS = 1800, 90
OWN = ("--print", "--check", "--json")


def main(argv: Sequence[str] | None = None) -> int:
    """0 served and stopped in order (or printed, or checked), 1 rejected, 2 cannot run."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help") or argv[1:2] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0 if argv else 1
    own = [word for word in argv[1:] if word in OWN]
    passed = [word for word in argv[1:] if word not in OWN]

    def run() -> int:
        try:
            return launch(argv[0], passed, set(own))
        except (CannotRun, Rejected) as error:
            if "--json" in own:
                verdict = "rejected" if isinstance(error, Rejected) else "cannot-run"
                print(json.dumps({"verdict": verdict, "reason": str(error)}))
            raise

    return exit_code(run)


def launch(artifact: str, passed: Sequence[str], own: set[str]) -> int:
    """Plan, check and serve."""
    settings = recipe.load(artifact)
    environment = dict(os.environ)
    printing = "--print" in own
    found = trouble = None
    if not printing:
        try:
            found = machine.query()
        except CannotRun as error:  # what is wrong with the input is said first
            trouble = error
    target = environment.get("TARGET", "").strip()
    if not target and found and found.gpus and found.gpus[0].target in settings.targets:
        target = found.gpus[0].target
    target = target or next(iter(settings.targets))
    planned = plan.build(settings, environment, passed, target, printing)
    if printing:
        inspect.emit(json.dumps(planned.as_dict(), indent=1) if "--json" in own else planned.command)
        return 0
    start = seconds(environment, "START_SECONDS", START_SECONDS)
    drain = seconds(environment, "DRAIN_SECONDS", DRAIN_SECONDS)
    result, facts = checkpoint(planned)
    models.recognise(settings, result.config, planned.model)
    if trouble:
        raise trouble
    actual = machine.check(found, settings.targets, planned.tp, machine.image_cuda())
    if actual != planned.target:
        raise CannotRun(f"TARGET={target}, and {found.gpus[0].name} is {actual}: leave TARGET out")
    if settings.targets[actual] == "not-run":
        print(f"launch: note: nobody has qualified {artifact} on {actual} yet", file=sys.stderr)
    machine.check_port(planned.value("--host"), planned.value("--port"))
    machine.check_shared_memory(planned.tp)
    machine.check_cache(CACHE, Path(planned.value("--model-path")))
    fits = fit(planned, result, found)
    if "--served-model-name" not in planned.choices:
        planned.name(*_name(planned, facts))
    record = {
        "launch": {
            "plan": planned.as_dict(),
            "machine": found.as_dict(),
            "memory": fits.as_dict(),
            "checkpoint": {name: facts[name] for name in ("identity", "catalogue", "synthetic", "format", "bytes")},
        }
    }
    if "--check" in own and "--json" in own:
        print(json.dumps({"verdict": "accepted", **record["launch"]}, indent=1))
        return 0
    print(f"launch: {json.dumps(record['launch'])}", flush=True)
    if "--check" in own:
        return 0
    from launch import supervise

    return supervise.serve(planned, record, start, drain)


def _name(planned: plan.Plan, facts: dict[str, Any]) -> tuple[str, str]:
    """The name that clients see, where nobody gave one: it must not claim more than the catalogue knows."""
    folder = Path(planned.value("--model-path")).resolve().name
    if facts["synthetic"]:
        return f"synthetic/{folder}", "the checkpoint is synthetic"
    if facts["catalogue"].get("repository"):
        return facts["catalogue"]["repository"], "catalogue"
    return folder, "name of the folder"


def checkpoint(planned: plan.Plan) -> tuple[inspection.Inspection, dict[str, Any]]:
    """Inspection and preflight of the checkpoint. Raises Rejected where it cannot be served so."""
    model = planned.value("--model-path")
    result = inspection.inspect(model, revision=planned.revision)
    partitions = planned.declared.get("ROUTER_PARTITIONS", {}).get("value")
    facts = preflight.check(
        result,
        catalogue.load(),
        argparse.Namespace(
            artifact=planned.artifact, tp=planned.tp, ep=planned.ep, arch=None, uncatalogued=planned.uncatalogued,
            router_partitions=partitions, cache_dir=None, mountinfo=str(preflight.MOUNTINFO),
        ),
    )  # fmt: skip
    if result.verdict != "accepted":
        print(report.render(facts, *inspect.both(result)), file=sys.stderr)
        first = facts["problems"][0]["message"]
        more = len(facts["problems"]) - 1
        raise Rejected(f"{model}: {first}" + (f" (and {more} more, above)" if more else ""))
    return result, facts


def fit(planned: plan.Plan, result: inspection.Inspection, found: machine.Machine) -> memory.Fit:
    """The tightest of the GPUs in use. Raises CannotRun or Rejected where the plan does not fit."""
    gpu = min(found.gpus[: planned.tp], key=lambda item: item.free)
    size = result.as_dict()["bytes"]
    per_token = memory.kv_bytes_per_token(result.config, planned.tp, planned.value("--kv-cache-dtype", "auto"))
    whole = all_to_all.replicated(planned.value(all_to_all.FLAG, all_to_all.NONE), result.headers)
    fits = memory.fit(size, per_token, planned.tp, gpu, planned.value("--mem-fraction-static"), whole)
    if limit := planned.value("--max-total-tokens"):
        fits = replace(fits, tokens=min(fits.tokens, limit))
    context = planned.value("--context-length", result.config.get("max_position_embeddings", 0))
    memory.check(fits, context, gpu, planned.tp)
    return fits


def seconds(environment: dict[str, str], name: str, default: float) -> float:
    """The number of seconds in a variable. Raises Rejected where it is none."""
    text = environment.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 < value < 1e6:
        raise Rejected(f"{name}={text}: must be a number of seconds above 0")
    return value
