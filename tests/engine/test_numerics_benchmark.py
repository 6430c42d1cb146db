"""The measurement over seeds and prompts, with stand-in engines on a CPU: distribution, bounds, margins, exit codes."""

import json
import os
from contextlib import contextmanager

import pytest

from benchmarks import numerics as benchmark
from qualify import numerics, policy
from qualify.errors import CannotRun
from qualify.models import MOVA_CONFIG
from qualify.serving import Server
from qualify.synth.command import synthesise
from tests.engine.numerics_server import Engine, serving


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """Tiny checkpoints, engines that the reference computes; ``fault`` of the second checkpoint's engine can be set."""
    state = {"fault": None, "served": []}

    @contextmanager
    def engine(model, checkpoint, work, **options):
        (work / "modules").mkdir(exist_ok=True)
        fault = state["fault"] if state["served"] else None
        state["served"].append(checkpoint.name)
        with serving(Engine(checkpoint, work / "modules", 2, fault)) as url:
            yield Server(url, None, 1)

    monkeypatch.setattr(benchmark, "engine", engine)
    monkeypatch.setattr(
        benchmark,
        "synthesise",
        lambda model, folder, layers, seed: synthesise(MOVA_CONFIG, folder, tiny=True, seed=seed),
    )
    monkeypatch.setattr(benchmark, "machine", lambda: {"gpu": []})
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: name)
    monkeypatch.setattr(numerics, "DECODED", 2)
    return state


def command(monkeypatch, tmp_path, *words):
    work, out = tmp_path / "work", tmp_path / "result.json"
    base = ["numerics", "--work", str(work), "--out", str(out), "--length", "64"]
    monkeypatch.setattr("sys.argv", [*base, *words])
    code = benchmark.main()
    return code, json.loads(out.read_text()), work


def test_measure(stand_ins, monkeypatch, tmp_path, capsys):
    words = ["--seeds", "3", "4", "--prompts", "2", "--faults", "experts-swapped", "gate-silu"]
    code, result, work = command(monkeypatch, tmp_path, *words)
    assert code == 0
    assert stand_ins["served"] == ["seed-3", "seed-4"]
    assert [(run["seed"], run["prompt"]) for run in result["runs"]] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert {run["seed"] for run in result["faults"]} == {3}
    assert [path.name for path in work.iterdir()] == ["modules"]  # checkpoints and records are gone
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line.get("fault") for line in lines] == [None, None, "experts-swapped", "gate-silu", None, None, None]
    assert result["margins"]["experts-swapped"]["number"] == "modules.ffn.worst_expert"
    assert result["margins"]["gate-silu"]["number"] == "modules.attention.mean"
    assert all(found["margin"] > 3 for found in result["margins"].values())
    thresholds = policy.load().section("mova-fp8", "sm90").of_stage("numerics")
    told = result["errors"]
    # Every number of the policy is there, apart from the two conditions.
    assert told.keys() == {item.number for item in thresholds} - {"positions", "expert_tokens"}
    name = "modules.attention.mean"
    values = [run["numbers"]["modules"]["attention"]["mean"] for run in result["runs"]]
    assert (told[name]["least"], told[name]["worst"]) == (min(values), max(values))
    assert told[name]["bound"] == max(benchmark.HEADROOM * max(values), benchmark.FLOOR)
    assert told["top5_overlap"]["worst"] == max(1 - run["numbers"]["top5_overlap"] for run in result["runs"])
    assert benchmark.evaluate(result)["margins"] == result["margins"]


def test_a_fault_that_is_hardly_seen_fails(stand_ins, monkeypatch, tmp_path):
    """The second engine swaps experts: the bound is then of a wrong engine, and the same fault is within it."""
    stand_ins["fault"] = "experts-swapped"
    words = ["--seeds", "3", "4", "--prompts", "1", "--faults", "experts-swapped"]
    code, result, _ = command(monkeypatch, tmp_path, *words)
    assert code == 1
    assert result["margins"]["experts-swapped"]["margin"] < 3


def test_bounds_of_the_policy_come_first():
    threshold = policy.Threshold
    thresholds = [
        threshold("a", "numerics", "modules.x.mean", "max", 0.5, "measured"),
        threshold("b", "numerics", "top5_overlap", "min", 0.9, "measured"),
        threshold("c", "numerics", "modules.router.unequal_logits", "", None, "nobody"),
        threshold("d", "numerics", "positions", "min", 256, "a condition"),
        threshold("e", "numerics", "modules.absent.mean", "", None, "nobody"),
    ]
    numbers = {"modules": {"x": {"mean": 0.1}, "router": {"unequal_logits": 0}}, "top5_overlap": 0.95, "positions": 9}
    healthy = benchmark.errors(numbers, thresholds)
    assert healthy == pytest.approx(
        {"modules.x.mean": 0.1, "top5_overlap": 0.05, "modules.router.unequal_logits": 0}
    )  # fmt: skip
    limits = benchmark.bounds([healthy], thresholds)
    assert limits == pytest.approx({"modules.x.mean": 0.5, "top5_overlap": 0.1, "modules.router.unequal_logits": 1e-3})
    wrong = benchmark.errors(numbers | {"top5_overlap": 0.4}, thresholds)
    assert benchmark.margin(wrong, limits) == pytest.approx(
        {"margin": 6, "number": "top5_overlap", "error": 0.6, "bound": 0.1}
    )  # fmt: skip
    broken = benchmark.errors(numbers | {"top5_overlap": numerics.NOT_FINITE}, thresholds[:1])
    assert benchmark.margin(broken, limits)["margin"] == pytest.approx(0.2)
    numbers["modules"]["x"]["mean"] = numerics.NOT_FINITE
    assert benchmark.margin(benchmark.errors(numbers, thresholds), limits)["margin"] == float("inf")


def test_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.shutil, "which", lambda name: None)
    with pytest.raises(CannotRun, match="no nvidia-smi"):
        command(monkeypatch, tmp_path)


def test_the_right_engine_alone_measures_no_margin(stand_ins, monkeypatch, tmp_path):
    code, result, _ = command(monkeypatch, tmp_path, "--seeds", "3", "--prompts", "1", "--faults", "none")
    assert (code, result["margins"], result["faults"]) == (0, {}, [])


def test_an_engine_that_does_not_start(tiny_mova, tmp_path, monkeypatch):
    """The real command, which finds no GPU here: its last words are told, and nothing of it is left."""
    monkeypatch.setenv("PORT", "30078")
    with (
        pytest.raises(CannotRun, match="the engine ended, or is not ready"),
        benchmark.engine("mova", tiny_mova, tmp_path),
    ):
        pass
    assert (tmp_path / "engine.log").stat().st_size > 0
    mine = str(tmp_path).encode()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                with open(f"/proc/{entry.name}/environ", "rb") as file:
                    assert mine not in file.read()
            except OSError:
                continue
