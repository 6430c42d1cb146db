"""The launcher from its command line to the engine's start: checkpoint and plan are real, the GPU is made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import cli, machine, supervise
from launch.machine import GIB, Gpu, Machine
from qualify.errors import CannotRun

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.cases import bases  # noqa: E402

H200 = Gpu("NVIDIA H200", (9, 0), int(139.8 * GIB), int(139.3 * GIB))


@pytest.fixture
def model(tmp_path) -> Path:
    """A small MoVA checkpoint in the published layout."""
    return bases.b1().write(tmp_path / "tiny-mova")


@pytest.fixture
def launch(monkeypatch, model, tmp_path, capsys):
    """Launch with variables; returns exit code, stdout, stderr. ``gpus`` are what the driver shows."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(cli, "CACHE", cache)
    monkeypatch.setattr(machine, "image_cuda", lambda: (13, 0))
    started = []
    monkeypatch.setattr(supervise, "serve", lambda *arguments: started.append(arguments) or 0)

    def start(*passed: str, gpus=(H200,), artifact: str = "mova-fp8", **environment: str) -> tuple[int, str, str]:
        monkeypatch.setattr(machine, "query", lambda: Machine(tuple(gpus), "580.1", (13, 0)))
        for name, value in (
            {"MODEL_DIR": str(model), "ROUTER_PARTITIONS": "2", "UNCATALOGUED": "1"} | environment
        ).items():
            monkeypatch.setenv(name, value)
        code = cli.main([artifact, *passed])
        return code, *capsys.readouterr()

    start.started = started
    return start


def test_starts_what_was_planned(launch, model):
    code, out, _ = launch("--page-size", "64", MAX_RUNNING="32", DRAIN_SECONDS="7")
    assert code == 0
    [(planned, record, start_seconds, drain_seconds)] = launch.started
    assert (start_seconds, drain_seconds) == (1800, 7)
    assert planned.arguments[-2:] == ["--served-model-name", planned.value("--served-model-name")]
    assert planned.value("--page-size") == 64
    told = json.loads(out.splitlines()[0].removeprefix("launch: "))
    assert told == json.loads(json.dumps(record["launch"]))
    assert told["plan"]["declared"]["ROUTER_PARTITIONS"]["value"] == 2
    assert told["machine"]["gpus"][0]["name"] == "NVIDIA H200"
    assert len(told["checkpoint"]["identity"]["headers"]) == 64


@pytest.fixture
def dense(tmp_path) -> Path:
    """One layer with the 7B's widths but for the vocabulary and the MLP."""
    base = bases.b0()
    base.config |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    for name, tensor in base.tensors.items():
        wide = name.endswith(("gate_proj.weight", "up_proj.weight", "gate_proj.weight_scale", "up_proj.weight_scale"))
        if name.endswith("_scale"):
            tensor.shape = [extent * 128 for extent in tensor.shape]
        rows = {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096, "down_proj": 4096}
        rows = rows.get(name.split(".")[-2], tensor.shape[0])
        columns = 512 if "down_proj" in name else 4096
        shape = [4096] if len(tensor.shape) == 1 else [512 if wide else rows, columns]
        tensor.shape = [extent // 128 for extent in shape] if name.endswith("_scale") else shape
    return base.write(tmp_path / "7b-one-layer")


def test_the_size_comes_from_the_checkpoint(launch, dense):
    code, out, err = launch("--check", artifact="k2-horizon-fp8", MODEL_DIR=str(dense), ROUTER_PARTITIONS="")
    assert code == 0, err
    told = json.loads(out.removeprefix("launch: "))
    assert (told["plan"]["model"], told["plan"]["flags"]["--tp-size"]["value"]) == ("7b", 1)


def test_another_size_than_the_checkpoints_is_refused(launch, dense):
    k2 = {"artifact": "k2-horizon-fp8", "ROUTER_PARTITIONS": ""}
    code, _, err = launch("--check", MODEL_DIR=str(dense), MODEL="375b-a23b", **k2)
    assert (code, "config.json is that of 7b" in err) == (1, True)
    code, _, err = launch("--check", **k2)  # a MoVA checkpoint: its inspection says more than its size would
    assert (code, "the format is fp8-block; k2-horizon-fp8 serves" in err) == (1, True)


def test_a_size_without_a_plan_is_refused_after_its_inspection(launch, tmp_path):
    tiny = bases.b0().write(tmp_path / "tiny-dense")
    code, _, err = launch("--check", artifact="k2-horizon-fp8", MODEL_DIR=str(tiny), ROUTER_PARTITIONS="")
    assert (code, "config.json (hidden_size 256" in err) == (1, True)


def test_check_starts_nothing(launch):
    assert launch("--check")[0] == 0
    assert launch.started == []


def test_check_tells_a_machine(launch):
    assert json.loads(launch("--check", "--json")[1])["verdict"] == "accepted"
    code, out, err = launch("--check", "--json", TP="2")
    assert (code, json.loads(out)["verdict"]) == (2, "cannot-run")
    assert json.loads(out)["reason"] in err
    assert json.loads(launch("--check", "--json", "--dtype", "half")[1])["verdict"] == "rejected"


def test_nobody_gets_a_published_name_by_default(launch, model):
    _, out, _ = launch("--check", "--served-model-name", "mine")
    assert json.loads(out.removeprefix("launch: "))["plan"]["flags"]["--served-model-name"]["value"] == "mine"
    _, out, _ = launch("--check")
    assert "tiny-mova" in json.loads(out.removeprefix("launch: "))["plan"]["flags"]["--served-model-name"]["value"]


@pytest.mark.parametrize(
    ("environment", "gpus", "code", "says"),
    [
        ({"UNCATALOGUED": ""}, [H200], 1, "UNCATALOGUED"),
        ({"MODEL_DIR": "/nowhere"}, [H200], 2, "/nowhere"),
        ({"TP": "3"}, [H200] * 3, 1, "TP 3"),
        ({"TP": "2", "CONTEXT_LENGTH": "4096"}, [H200], 2, "2 GPUs and 1 are visible"),
        ({}, [Gpu("NVIDIA A100", (8, 0), 80 * GIB, 80 * GIB)], 2, "is sm80"),
        ({}, [Gpu("NVIDIA H200", (9, 0), H200.total, 10 * GIB)], 2, "another process"),
        ({"TARGET": "sm120"}, [H200], 2, "leave TARGET out"),
        ({"TARGET": "sm70"}, [H200], 1, "target sm70"),
        ({"CONTEXT_LENGTH": "900000000"}, [H200], 1, "does not fit"),
        ({"REVISION": "a" * 40}, [H200], 1, "a" * 40),
        ({"DRAIN_SECONDS": "soon"}, [H200], 1, "DRAIN_SECONDS=soon"),
        ({"START_SECONDS": "-1"}, [H200], 1, "START_SECONDS=-1"),
    ],
)
def test_refused_before_the_engine_starts(launch, environment, gpus, code, says):
    found, out, err = launch(gpus=gpus, **environment)
    assert (found, out) == (code, "")
    assert says in err.splitlines()[-1]
    assert launch.started == []


def test_a_wrong_checkpoint_is_refused_before_the_gpu_is_asked(launch, model):
    shard = next(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    code, out, err = launch(gpus=[])  # asking for one would be exit code 2
    assert (code, out) == (1, "")
    assert shard.name in err.splitlines()[-1]


def test_every_rank_holds_the_shared_experts_of_deepep(launch, model):
    found = {}
    for a2a in ("none", "deepep"):
        out = launch("--check", gpus=[H200] * 2, TP="2", EP="2", A2A=a2a, CONTEXT_LENGTH="4096")[1]
        found[a2a] = json.loads(out.removeprefix("launch: "))["memory"]["weights"]
    config = json.loads((model / "config.json").read_text())
    sparse = config["num_hidden_layers"] - len(config["mlp_only_layers"])
    shared = 3 * 2 * config["hidden_size"] * config["moe_intermediate_size"] * config["num_shared_experts"] * sparse
    assert found["deepep"] - found["none"] == shared // 2 > 0


def test_limits_of_the_plan_count(launch):
    code, _, err = launch("--max-total-tokens", "1000")
    assert (code, "holds 1,000 tokens" in err) == (1, True)
    code, _, err = launch("--kv-cache-dtype", "nvfp4")
    assert (code, "--kv-cache-dtype nvfp4" in err) == (1, True)


def test_the_tightest_gpu_counts(launch):
    tight = Gpu("NVIDIA H200", (9, 0), H200.total, 10 * GIB)
    for gpus in ([H200, tight], [tight, H200]):
        assert launch(gpus=gpus, TP="2", CONTEXT_LENGTH="4096")[0] == 2
    assert launch(gpus=[H200, tight], TP="1", CONTEXT_LENGTH="4096")[0] == 0  # the second is not used


def test_cache_memory_and_port_are_checked(launch, monkeypatch):
    for name in ("check_cache", "check_shared_memory", "check_port"):
        with monkeypatch.context() as patch:
            patch.setattr(machine, name, lambda *_, name=name: (_ for _ in ()).throw(CannotRun(f"{name} says no")))
            code, _, err = launch("--check")
        assert (code, f"{name} says no" in err) == (2, True)


def test_flags_are_refused_before_a_missing_gpu(launch, monkeypatch):
    monkeypatch.setattr(machine, "query", lambda: (_ for _ in ()).throw(CannotRun("no driver")))
    assert cli.main(["mova-fp8", "--nope"]) == 1


def test_target_of_the_gpu_decides(launch):
    launch("--attention-backend", "triton", gpus=[Gpu("RTX", (12, 0), 96 * GIB, 96 * GIB)], CONTEXT_LENGTH="4096")
    assert launch.started[0][0].value("--attention-backend") == "triton"


def test_a_closed_log_is_not_the_exit_code():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for ending in ("| true; exit ${PIPESTATUS[0]}", ">&-"):
        command = f"{sys.executable} -m launch mova-fp8 --print {ending}"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), ending


def test_help_and_no_artifact():
    done = subprocess.run(
        [sys.executable, "-m", "launch", "mova-fp8", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "--check" in done.stdout) == (0, True)
    done = subprocess.run([sys.executable, "-m", "launch", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.split(":")[0]) == (1, "rejected")
