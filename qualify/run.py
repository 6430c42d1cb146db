"""``run``: the stages of one tier, each a pytest module below qualify/checks, each passed, failed or not-run.

A stage passed when at least one of its tests ran and every one passed: a missing module, a skipped or deselected
test or an empty module is *not-run*, and a tier passes only where all its stages did.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from qualify.errors import CannotRun

CHECKS = Path(__file__).resolve().parent / "checks"

#: tier -> its stages in order; stage NAME is the module checks/test_NAME.py.
TIERS = {"cpu": ["identity", "load"]}


class Recorder:
    """Pytest plugin that keeps the outcome of every test of one stage."""

    def __init__(self):
        self.outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session):
        # Until it has run: an early end of the session leaves the rest not run.
        self.outcomes.update({item.nodeid: "skipped" for item in session.items})

    def pytest_runtest_logreport(self, report):
        # Set-up and tear-down count too: an error there is a failure, a skip is a skip.
        if report.when == "call" or report.outcome != "passed":
            outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
            if self.outcomes.get(report.nodeid) != "failed":
                self.outcomes[report.nodeid] = outcome

    def pytest_deselected(self, items):
        self.outcomes.update({item.nodeid: "skipped" for item in items})


def verdict(exit_code: int, outcomes: dict[str, str]) -> str:
    """passed, failed or not-run, from pytest's exit code (0 ok, 5 nothing collected) and every test's outcome."""
    if "failed" in outcomes.values() or exit_code not in (0, 5):
        return "failed"
    return "passed" if outcomes and set(outcomes.values()) == {"passed"} else "not-run"


def run_stage(name: str, checks: Path = CHECKS) -> dict:
    """Run one stage and return {"stage", "result", "tests", "seconds"}."""
    import pytest

    module = checks / f"test_{name}.py"
    began = time.monotonic()
    recorder = Recorder()
    code = 5
    if module.exists():
        code = pytest.main(
            [str(module), "-q", "--no-header", "--import-mode=importlib", "-p", "no:cacheprovider",
             f"--rootdir={checks}", "--confcutdir", str(checks)],
            plugins=[recorder],
        )  # fmt: skip
    result = verdict(code, recorder.outcomes)
    return {
        "stage": name,
        "result": result,
        "tests": recorder.outcomes,
        "seconds": round(time.monotonic() - began, 1),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=sorted(TIERS), required=True, help="cpu: what needs no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        import pytest  # noqa: F401
    except ImportError:
        raise CannotRun("`qualify run` works inside an image of this project: pytest is missing here") from None
    results = []
    for name in TIERS[args.tier]:
        print(f"stage {name}", flush=True)
        results.append(run_stage(name))
    for result in results:
        count = len(result["tests"])
        print(f"{result['stage']:<10} {result['result']:<8} {count:>3} tests {result['seconds']:>6.1f} s")
    if args.json:
        try:
            args.json.write_text(json.dumps({"tier": args.tier, "stages": results}, indent=1) + "\n")
        except OSError as error:
            raise CannotRun(f"--json {args.json}: {error.strerror}") from None
    return 0 if all(result["result"] == "passed" for result in results) else 1
