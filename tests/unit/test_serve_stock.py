"""benchmarks/serve_stock.py with a stand-in engine: what is started, measured, compared and left behind."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import serve_stock, stock
from launch import plan, recipe, supervise
from qualify import serving
from qualify.errors import CannotRun
from qualify.models import DENSE_CONFIG

FAKE = Path(__file__).with_name("fake_engine.py")
LOG = "Load weight end. elapsed=1.25 s, type=K2HorizonForCausalLM"


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with the config of the published 7B; the stand-in reads no more of it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(DENSE_CONFIG.read_text())
    return folder


@pytest.fixture
def planned(checkpoint):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--model-path", str(checkpoint), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    return plan.build(recipe.load("k2-horizon-fp8"), {}, flags, "sm90")


@pytest.fixture(autouse=True)
def engine(monkeypatch, tmp_path):
    """The stand-in in the place of both engines, told by its argument what to do; small rounds."""
    sees = tmp_path / "sees.json"
    monkeypatch.setattr(serving, "ROUNDS", {"decode-2": (2, 8, 4), "prefill-2x8": (2, 8, 1)})
    monkeypatch.setattr(supervise, "ENGINE", [sys.executable, str(FAKE)])
    monkeypatch.setenv("FAKE_ENGINE_SEES", str(sees))

    def tell(**asked):
        monkeypatch.setenv("FAKE_ENGINE", json.dumps({"print": LOG, "info": {"max_total_num_tokens": 7}} | asked))
        return sees

    tell()
    return tell


def nobody_listens(planned) -> bool:
    """The port is free for the other side."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", planned.value("--port"))) != 0


def test_stock_gets_the_flags_of_the_plan_and_is_measured(planned, engine, tmp_path):
    sees = engine()
    measured = serve_stock.measure("stock", tmp_path, planned, 1000, 2)
    assert json.loads(sees.read_text())["arguments"] == planned.arguments
    assert (measured["load_seconds"], measured["kv_tokens"]) == (1.25, 7)
    assert measured["sanity"]["cold_repeat_equal_tokens"] == 64
    assert {name: len(told["seconds"]) for name, told in measured["rounds"].items()} == {
        "decode-2": 2,
        "prefill-2x8": 2,
    }
    assert nobody_listens(planned)


def test_stock_imports_from_the_tree_and_nothing_of_the_callers_path(planned, monkeypatch, tmp_path):
    """Stock first, then the launcher; an unpacked image is measured with a checkout on PYTHONPATH."""
    started = []

    def popen(command, env, **_):
        started.append((command, env))
        raise OSError("seen")

    monkeypatch.setattr(serve_stock.subprocess, "Popen", popen)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("API_KEY_FILE", "/run/secrets/api-key")
    for side in serve_stock.SIDES:
        with pytest.raises(OSError, match="seen"):
            serve_stock.measure(side, tmp_path / "tree", planned, 1000, 1)
    (ours, launcher), (theirs, environment) = started
    for told in (launcher, environment):
        assert told["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
        assert "API_KEY_FILE" not in told
    assert ours == [serve_stock.ROOT / "recipes/k2-horizon-fp8.sh", *planned.arguments]
    assert theirs == supervise.ENGINE
    assert environment["PYTHONPATH"] == f"{tmp_path / 'tree'}{os.pathsep}{serve_stock.ROOT}"
    assert environment.items() >= supervise.OFFLINE.items()


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"die": 3, "stderr": "no memory"}, "no memory"), ({"print": "a log without the line"}, "Load weight end")],
)
def test_an_engine_that_cannot_be_measured_is_named_and_ended(planned, engine, tmp_path, asked, words):
    engine(**asked)
    with pytest.raises(CannotRun, match=words):
        serve_stock.measure("stock", tmp_path, planned, 1000, 1)
    assert nobody_listens(planned)


def test_without_a_gpu_nothing_is_started(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(stock, "is_stock", lambda: False)
    monkeypatch.setattr(serve_stock, "query", lambda: SimpleNamespace(gpus=[]))
    argv = ["serve_stock", "k2-horizon-fp8", "--model-dir", str(checkpoint), "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(CannotRun, match="no GPU is visible"):
        serve_stock.main()


def test_the_result_compares_both_sides_and_names_no_path(checkpoint, monkeypatch, tmp_path):
    """Ours is twice as fast here; started first."""
    order = []

    def measure(side, tree, planned, vocabulary, repetitions):
        order.append((side, vocabulary, repetitions, planned.tp))
        rate = {"strict": 20.0, "stock": 10.0}[side]
        return {"rounds": {name: {"tokens_per_second": rate} for name in serving.ROUNDS}}

    facts = {"format": "f", "bytes": 1, "tensors": 2, "identity": {}, "synthetic": True}
    for owner, name, value in (
        (serve_stock, "measure", measure),
        (serve_stock, "machine", dict),
        (serve_stock, "fill_page_cache", lambda folder: 1),
        (serve_stock, "query", lambda: SimpleNamespace(gpus=[SimpleNamespace(target="sm90")])),
        (serve_stock.inspection, "inspect", lambda *_, **__: SimpleNamespace(as_dict=lambda: facts)),
        (stock, "is_stock", lambda: False),
        (stock, "installed_package", lambda: tmp_path),
        (stock, "pristine_tree", lambda *_: None),
    ):
        monkeypatch.setattr(owner, name, value)
    out = tmp_path / "out.json"
    flags = ["--tp-size", "2", "--repetitions", "4"]
    argv = ["serve_stock", "k2-horizon-fp8", "--model-dir", str(checkpoint), "--out", str(out), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    assert serve_stock.main() == 0
    assert order == [("strict", 250624, 4, 2), ("stock", 250624, 4, 2)]
    result = json.loads(out.read_text())
    assert result["strict_over_stock"] == {"decode-2": 2.0, "prefill-2x8": 2.0}
    assert result["checkpoint"] == facts | {"layers": 36}
    assert "--tp-size 2" in result["engine"]
    assert "--model-path MODEL_DIR" in result["engine"]
    assert str(tmp_path) not in out.read_text()
