"""Engines that are wrong on purpose fail the comparison by at least three times its bounds. In the image, on one GPU:

    WORK=/dev/shm/numerics [BOUNDS=FILE] python3 -m pytest -s tests/gpu/test_planted_faults.py [-k FAULT]

A six-layer true-width cut. BOUNDS is a result file of benchmarks/numerics.py; without one, numbers for which the policy
has no bound get theirs from one right engine, started first. Every engine runs without CUDA graphs, which no fault here
touches. Each margin is one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from benchmarks import numerics as benchmark  # noqa: E402
from qualify import numerics, policy  # noqa: E402
from tests.gpu import planted  # noqa: E402

WORK = Path(os.environ.get("WORK", "/dev/shm/numerics"))
FLAGS = ["--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"]
LAYERS, SEED, TIMES = 6, 0, 3
THRESHOLDS = policy.load().section("mova-fp8", "sm90").of_stage("numerics")


def measured(checkpoint: Path, right: Path, partitions: int = 2, **options) -> dict[str, float]:
    """Errors of an engine that serves ``checkpoint``, against the reference of ``right``."""
    variables = {"ROUTER_PARTITIONS": str(partitions)}
    with benchmark.engine("mova", checkpoint, WORK, flags=FLAGS, **options, **variables) as server:
        pair = numerics.references(right, numerics.device(), 2)
        ids = numerics.draw(right, pair[0].config, SEED, numerics.LENGTHS[0])
        run = numerics.observe(server, ids, numerics.DECODED, WORK / "modules")
    return benchmark.errors(numerics.compare(*pair, run), THRESHOLDS)


@pytest.fixture(scope="session")
def cut() -> Path:
    folder = WORK / f"seed-{SEED}"
    if not (folder / "config.json").exists():
        WORK.mkdir(parents=True, exist_ok=True)
        benchmark.synthesise("mova", folder, LAYERS, SEED)
    return folder


@pytest.fixture(scope="session")
def limits(cut) -> dict[str, float]:
    if file := os.environ.get("BOUNDS"):
        result = json.loads(Path(file).read_text())
        return benchmark.bounds([benchmark.errors(run["numbers"], THRESHOLDS) for run in result["runs"]], THRESHOLDS)
    return benchmark.bounds([measured(cut, cut)], THRESHOLDS)


@pytest.mark.parametrize("fault", planted.FAULTS)
def test_a_planted_fault_fails_by_three_times_the_bound(fault, cut, limits):
    began = time.monotonic()
    spoilt, options = cut, {}
    if fault in planted.WEIGHTS:
        spoilt = WORK / "spoilt"
        shutil.rmtree(spoilt, ignore_errors=True)
        planted.checkpoint(fault, cut, spoilt)
    elif fault == planted.DECLARED:
        options = {"partitions": 1}
    else:
        options = {"site": planted.code(fault, WORK / "site")}
    try:
        found = benchmark.margin(measured(spoilt, cut, **options), limits)
    finally:
        shutil.rmtree(WORK / "spoilt", ignore_errors=True)
    if "site" in options:
        # Otherwise the engine was right, and the margin says nothing of the fault.
        assert f"planted: {fault}" in (WORK / "engine.log").read_text(errors="replace")
    print(json.dumps({"planted": fault, **found, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    assert found["margin"] >= TIMES
