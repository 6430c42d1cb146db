"""The report of a strict load is a count of what is there: of tensors, of parameters, of values after the load."""

import json
import math

import pytest
import torch

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, read_checkpoint
from qualify.suite import load_report as reader

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HORIZON_LOAD_REPORT", str(tmp_path))
    return tmp_path


def test_says_what_the_model_holds(tiny_mova, folder):
    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    [path] = folder.iterdir()
    assert path.name == "rank-0.json"
    report = json.loads(path.read_text())
    live = dict(model.named_parameters())
    assert {entry["name"]: (entry["dtype"], entry["shape"]) for entry in report["parameters"]} == {
        name: (str(parameter.dtype).removeprefix("torch."), list(parameter.shape)) for name, parameter in live.items()
    }
    source = read_checkpoint(tiny_mova)
    assert report["tensors"] == {"expected": len(source), "consumed": len(source)}
    assert (report["rank"], report["ranks"], report["peak_gpu_bytes"]) == (0, 1, None)
    assert report["seconds"] > 0
    assert {entry["invalid"] for entry in report["parameters"]} == {0}
    scales = {entry["name"] for entry in report["parameters"] if entry["scale"]}
    assert scales == {name for name in live if name.endswith("_scale_inv")}

    told = reader.summary([report])
    stored = sum(tensor.numel() for name, tensor in source.items() if name.endswith("_scale_inv"))
    assert told["scales"] == {"routed_expert": stored}
    assert told["classes"]["routed_expert"]["float8_e4m3fn"] == {
        "parameters": 4,
        "elements": sum(tensor.numel() for tensor in source.values() if tensor.dtype == torch.float8_e4m3fn),
    }
    assert set(told["classes"]["dense_linear"]) == {"bfloat16"}
    assert set(told["classes"]["router"]) == {"bfloat16", "float32"}
    elements = sum(kind["elements"] for kinds in told["classes"].values() for kind in kinds.values())
    assert elements == sum(math.prod(entry["shape"]) for entry in report["parameters"])
    assert (told["missing"], told["invalid"]) == (0, 0)


def test_values_are_counted_at_the_seal(tiny_mova, folder):
    """The ledger's own scan was at the end of the stream; here a value is spoilt after it."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    model = engine_cpu.empty_model(tiny_mova, overrides=PROVENANCE)
    model.load_weights(read_checkpoint(tiny_mova).items())
    model.get_parameter("model.layers.4.mlp.experts.w13_weight_scale_inv").data[0, 0, 0] = -1
    model.get_parameter("model.norm.weight").data[:3] = math.nan
    DefaultModelLoader.postprocess_weights(model, CPU)
    report = json.loads((folder / "rank-0.json").read_text())
    assert {entry["name"]: entry["invalid"] for entry in report["parameters"] if entry["invalid"]} == {
        "model.layers.4.mlp.experts.w13_weight_scale_inv": 1,
        "model.norm.weight": 3,
    }
    assert reader.summary([report])["invalid"] == 4


def test_a_refused_load_writes_none(tiny_mova, folder):
    from sglang.srt.model_loader.checkpoint_ledger import CheckpointRefused

    source = read_checkpoint(tiny_mova)
    source.pop("model.norm.weight")
    model = engine_cpu.empty_model(tiny_mova, overrides=PROVENANCE)
    with pytest.raises(CheckpointRefused):
        model.load_weights(source.items())
    assert list(folder.iterdir()) == []


def test_nobody_asked(tiny_mova, tmp_path, monkeypatch):
    monkeypatch.delenv("HORIZON_LOAD_REPORT", raising=False)
    monkeypatch.chdir(tmp_path)
    engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    assert list(tmp_path.iterdir()) == []
