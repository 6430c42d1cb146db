"""Stage "performance": start-up, latencies and rates are recorded; a wrong count or an error fails it, no rate does."""

import json
import os

import pytest

from qualify import serving
from qualify.suite import load_report
from qualify.suite.rundir import write_json
from qualify.suite.sitting import FULL

REPETITIONS = 2


def test_start_up(directory, server, launched, status, measure):
    """Where the seconds from the launcher's start to ready went: by the engine's own clocks, but for checks and ready.

    ``checks``: from the launcher's start to the engine's; ``scheduler``: all of weights, cache and graphs; ``other``:
    the interpreter, imports, processes, tokeniser and warm-up.
    """
    told = server.ask("/server_info", method="GET")["startup_time"]
    ready = directory.status.stat().st_mtime - launched["began"]
    checks = status["began"] - launched["began"]
    split = {
        "ready": ready, "checks": checks, "scheduler": told["scheduler_e2e"], "weights": told["load_weight"],
        "kv_cache": told["kv_cache_allocation"], "graphs": sum(told["cuda_graph"].values()),
        "other": ready - checks - told["scheduler_e2e"],
    }  # fmt: skip
    strict = load_report.summary(load_report.read(directory.load_reports))["load_seconds"]
    measure(start_up_seconds={name: round(seconds, 2) for name, seconds in split.items()} | {"strict_load": strict})
    assert all(seconds >= 0 for seconds in split.values()), split


def test_rounds(server, measure):
    found = serving.rounds(server, REPETITIONS)
    assert found.keys() == serving.ROUNDS.keys()
    measure(repetitions=REPETITIONS, **found)


if os.environ.get(FULL):

    def test_cookbook(directory, server, planned, measure):
        """On several launches, of which this is one: each leaves its numbers, and the last one reports all."""
        path = directory.work / "cookbook.json"
        launches = [*(json.loads(path.read_text()) if path.exists() else []), serving.cookbook(server, planned.tp)]
        write_json(path, launches)
        measure(cookbook={f"launch-{number}": one for number, one in enumerate(launches, 1)})
        assert len(launches) == int(os.environ[FULL]), "an earlier launch has not measured the cookbook's workload"


@pytest.fixture(scope="session", autouse=True)
def idle(server):
    """Nothing of an earlier stage is still being answered."""
    server.flush()
