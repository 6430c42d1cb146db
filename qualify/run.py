"""``run``: the stages of one tier, each a pytest module below qualify/checks, each passed, failed or not-run.

A stage passed when at least one of its tests ran and every one passed: a missing module, a skipped or deselected
test or an empty module is *not-run*, and a tier passes only where all its stages did.

The CPU tier is what a built image must pass, on any machine. The artifact tier is what is left of it where all layers
but the last have passed it below another artifact: of files, those of the last layer. The GPU tier qualifies an image
with a checkpoint (docs/qualification.md); its stages run in processes of their own, under :mod:`qualify.suite.sitting`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from qualify.errors import CannotRun, Rejected

CHECKS = Path(__file__).resolve().parent / "checks"

#: Variable that tells a stage which of the tiers without a GPU it belongs to.
TIER = "HORIZON_TIER"

#: tier -> its stages in order
TIERS = {
    "cpu": ["identity", "load", "compiler"],
    "artifact": ["identity", "load"],
    "gpu": ["identity", "checkpoint", "load", "numerics", "requests", "performance", "cleanup"],
}


def module(tier: str, name: str) -> Path:
    """The pytest module of a stage; it need not exist. The GPU tier has its own ones, but for the identity."""
    return (CHECKS / "gpu" if tier == "gpu" and name != "identity" else CHECKS) / f"test_{name}.py"


class Recorder:
    """Pytest plugin that keeps the outcome of every test of one stage, and what they measured.

    A test measures by ``record_property(name, value)``; ``reason`` is the first failure's.
    """

    def __init__(self):
        self.outcomes: dict[str, str] = {}
        self.numbers: dict[str, Any] = {}
        self.reason = ""

    def pytest_collection_finish(self, session):
        # Until it has run: an early end of the session leaves the rest not run.
        self.outcomes.update({item.nodeid: "skipped" for item in session.items})

    def pytest_runtest_logreport(self, report):
        # Set-up and tear-down count too: an error there is a failure, a skip is a skip.
        if report.when == "call" or report.outcome != "passed":
            outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = outcome
        if report.when == "teardown":
            self.numbers.update(report.user_properties)
        if report.failed:
            self._fails(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self._fails(report)

    def _fails(self, report):
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
        self.reason = self.reason or f"{report.nodeid.rpartition('/')[2]}: {sentence(text)}"

    def pytest_deselected(self, items):
        self.outcomes.update({item.nodeid: "skipped" for item in items})


def verdict(exit_code: int, outcomes: dict[str, str]) -> str:
    """passed, failed or not-run, from pytest's exit code (0 ok, 5 nothing collected) and every test's outcome."""
    if "failed" in outcomes.values() or exit_code not in (0, 5):
        return "failed"
    return "passed" if outcomes and set(outcomes.values()) == {"passed"} else "not-run"


def sentence(text: str, length: int = 300) -> str:
    """The first line of an error, without what pytest and Python put before its message."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    for prefix in ("qualify.errors.", "Rejected: ", "CannotRun: ", "AssertionError: ", "Failed: "):
        line = line.removeprefix(prefix)
    return line[:length]


def run_stage(name: str, module: Path) -> dict[str, Any]:
    """Run one stage and return {"stage", "result", "reason", "tests": {id: outcome}, "numbers", "seconds"}."""
    import pytest

    began = time.monotonic()
    recorder = Recorder()
    code = 5
    if module.exists():
        code = pytest.main(
            [str(module), "-q", "--no-header", "--import-mode=importlib", "-p", "no:cacheprovider",
             f"--rootdir={CHECKS}", "--confcutdir", str(CHECKS)],
            plugins=[recorder],
        )  # fmt: skip
    result = verdict(code, recorder.outcomes)
    reason = recorder.reason or f"pytest ended with {code}" if result == "failed" else ""
    if result == "not-run":
        skipped = [test.rpartition("/")[2] for test, outcome in recorder.outcomes.items() if outcome == "skipped"]
        reason = f"skipped: {', '.join(skipped)}" if skipped else f"the stage {name} has no test"
    return {
        "stage": name,
        "result": result,
        "reason": reason,
        "tests": recorder.outcomes,
        "numbers": recorder.numbers,
        "seconds": round(time.monotonic() - began, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=sorted(TIERS), required=True, help="cpu: what needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    gpu = parser.add_argument_group("the GPU tier; declarations and settings are variables, as for serving")
    gpu.add_argument("--artifact", metavar="A", help="the image's artifact")
    gpu.add_argument("--model-dir", type=Path, metavar="DIR", help="the checkpoint, mounted read-only")
    gpu.add_argument("--target", metavar="NAME", help="h200 or sm120")
    gpu.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallelism (default 1)")
    gpu.add_argument("--ep", type=int, default=1, metavar="N", help="expert parallelism (default 1)")
    gpu.add_argument("--out", type=Path, metavar="OUT", help="the run directory; another sitting goes on with it")
    gpu.add_argument("--only", nargs="+", choices=TIERS["gpu"], default=[], metavar="STAGE", help="these stages alone")
    gpu.add_argument("--full", action="store_true", help="performance: also the cookbook's workload, on two launches")


def run(args: argparse.Namespace) -> int:
    """0 every stage passed, 1 not so, 2 cannot run."""
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise CannotRun("`qualify run` works inside an image of this project: pytest is missing here") from None
    results = _gpu(args) if args.tier == "gpu" else _cpu(args)
    if args.json:
        try:
            args.json.write_text(json.dumps({"tier": args.tier, "stages": results}, indent=1) + "\n")
        except OSError as error:
            raise CannotRun(f"--json {args.json}: {error.strerror}") from None
    return 0 if all(result["result"] == "passed" for result in results) else 1


def _cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    if given := [name for name in ("artifact", "model_dir", "target", "out", "only", "full") if getattr(args, name)]:
        raise Rejected(f"--{given[0].replace('_', '-')} is for --tier gpu")
    results = []
    os.environ[TIER] = args.tier
    for name in TIERS[args.tier]:
        print(f"stage {name}", flush=True)
        results.append(run_stage(name, module(args.tier, name)))
    for result in results:
        count = len(result["tests"])
        print(f"{result['stage']:<10} {result['result']:<8} {count:>3} tests {result['seconds']:>6.1f} s")
    return results


def _gpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    if missing := [name for name in ("artifact", "model_dir", "target", "out") if not getattr(args, name)]:
        raise Rejected(f"--tier gpu needs --{missing[0].replace('_', '-')}")
    if args.full and args.only and "performance" not in args.only:
        raise Rejected("--full is of the stage performance, and --only leaves that out")
    from qualify.suite import sitting

    return list(sitting.sit(args, os.environ).values())
