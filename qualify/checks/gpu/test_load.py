"""Stage "load": the recipe gets ready, and every rank's live parameters are what the checkpoint stores."""

import json
import math
import time
from collections import defaultdict

import pytest

from launch import machine
from qualify.checkpoint import inspection
from qualify.checkpoint.contents import SCALE_LEAVES
from qualify.models.inventory import module_class
from qualify.suite import load_report, processes, server

#: a dtype of safetensors -> torch's name for it, as load reports have it
DTYPES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "U8": "uint8"}
#: classes in which the engine may widen what is stored, exactly: selection biases of routers
WIDENED = {"router": {"float32"}}
PERIOD = 0.2


def test_gets_ready(directory, launched, planned, measure):
    own = resident = gpu = 0
    state: dict = {}
    while state.get("state") not in ("ready", "broken"):
        pids = [launched["pid"], *processes.descendants(launched["pid"])]
        sizes = processes.memory(pids)
        own, resident = max(own, sizes[0]), max(resident, sizes[1])
        seen = [card.total - card.free for card in machine.query().gpus[: planned.tp]]
        gpu = max(gpu, *(now - before for now, before in zip(seen, launched["gpu_bytes_before"], strict=True)))
        if directory.status.exists():
            state = json.loads(directory.status.read_text())
        if directory.exit.exists():
            break
        time.sleep(PERIOD)
    measure(host_peak_anonymous_bytes=own, host_peak_resident_bytes=resident, gpu_peak_bytes=gpu)
    said = state.get("detail") or server.last_line(directory.log("server"))
    assert state.get("state") == "ready", f"the server did not get ready: {said}"
    measure(seconds_to_ready=round(directory.status.stat().st_mtime - launched["began"], 1))
    measure(kv_cache_bytes_per_token=state["launch"]["memory"]["kv_per_token"])


@pytest.fixture(scope="session")
def reports(directory):
    return load_report.read(directory.load_reports)


@pytest.fixture(scope="session")
def stored(model) -> dict[str, list]:
    """Module class -> its tensors in the files."""
    found = defaultdict(list)
    for header in inspection.inspect(model, headers_only=True).headers:
        for tensor in header.tensors:
            found[module_class(tensor.name.rpartition(".")[0])].append(tensor)
    return dict(found)


def elements(tensors: list) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def test_every_rank_loaded_everything(reports, run, measure):
    """Read from inside the engine: tensors that were expected and came, and values of the live parameters."""
    told = load_report.summary(reports)
    measure(**told)
    ranks = run["topology"]["tp"] * run["topology"]["pp"]
    assert [report["rank"] for report in reports] == list(range(ranks))
    assert {report["ranks"] for report in reports} == {ranks}
    assert told["tensors_expected"] > 0
    assert (told["missing"], told["invalid"]) == (0, 0)


def test_live_parameters_are_what_is_stored(reports, stored):
    """Dtypes per module class, and how many elements of each: over several ranks replicas may add to them."""
    live = load_report.summary(reports)["classes"]
    assert live.keys() == stored.keys()
    for klass, tensors in stored.items():
        dtypes = {DTYPES.get(tensor.dtype, tensor.dtype) for tensor in tensors}
        surplus = live[klass].keys() - dtypes - WIDENED.get(klass, set())
        assert (klass, surplus, dtypes - live[klass].keys()) == (klass, set(), set())
        total, held = elements(tensors), sum(kind["elements"] for kind in live[klass].values())
        assert held == total if len(reports) == 1 else held >= total, f"{klass}: {held} elements live, {total} stored"


def test_scales_are_all_there(reports, stored):
    """One live scale for each stored one (over several ranks: at least)."""
    scales = {
        klass: elements([tensor for tensor in tensors if tensor.name.rpartition(".")[2] in SCALE_LEAVES])
        for klass, tensors in stored.items()
    }
    scales = {klass: count for klass, count in scales.items() if count}
    live = load_report.summary(reports)["scales"]
    assert live.keys() == scales.keys()
    assert all(live[klass] == scales[klass] if len(reports) == 1 else live[klass] >= scales[klass] for klass in scales)
