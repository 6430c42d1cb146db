"""Inputs made to be accepted, to crash, to hang or to lose a file, and what must happen instead."""

from __future__ import annotations

import resource
import struct
import time

import pytest

from qualify import pin
from qualify.checkpoint import matching
from qualify.checkpoint.problems import Findings
from qualify.checkpoint.quantization import parse
from qualify.errors import Rejected
from qualify.models import inventory
from tests.cases import bases
from tests.cases.bases import T
from tests.cases.helpers import codes, command, inspect, rewrite_header, subjects

ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize("method", ["bf16", "BF16", "fp16", "fp32"])
@pytest.mark.parametrize("make", [bases.b0, bases.b1])
def test_a_method_called_bf16_is_no_bf16_checkpoint(tmp_path, make, method):
    base = make()
    base.config["quantization_config"] = {"quant_method": method}
    result = inspect(base, tmp_path)
    assert codes(result) == {"unsupported-format"}
    assert result.contents.format == f"unknown-{method.lower()}"


@pytest.mark.parametrize("dtype", ["U32", "I64", "U16"])
def test_packed_integers_are_quantised_weights(tmp_path, dtype, monkeypatch):
    monkeypatch.setitem(bases.BITS, dtype, int(dtype[1:]))
    base = bases.e2m1()
    del base.config["quantization_config"]
    base.tensors = {name: tensor for name, tensor in base.tensors.items() if "experts" not in name}
    base.tensors["model.layers.0.mlp.up_proj.weight"] = T(dtype, [256, 32])
    result = inspect(base, tmp_path)
    assert result.contents.format == "integer-undeclared"
    assert subjects(result, "stored-not-declared") == ["model.layers.0.mlp.up_proj"]


def _kv(**tensors) -> bases.Base:
    base = bases.b0()
    base.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    base.tensors |= {f"{ATTENTION}.{leaf}_scale": T("F32", []) for leaf in "kv"}
    base.tensors |= tensors
    return base


def test_kv_scales_have_a_float_dtype(tmp_path):
    base = _kv()
    assert codes(inspect(base, tmp_path / "good")) == set()
    base.tensors[f"{ATTENTION}.k_scale"] = T("I32", [])
    assert subjects(inspect(base, tmp_path / "bad"), "scale-dtype") == [f"{ATTENTION}.k_scale"]


@pytest.mark.parametrize("module", ["model.layers.7.self_attn", "foo", "model.layers.0.mlp"])
def test_kv_scales_belong_to_an_attention_of_the_config(tmp_path, module):
    base = _kv(**{f"{module}.{leaf}_scale": T("F32", []) for leaf in "kv"})
    assert subjects(inspect(base, tmp_path), "tensor-unexpected") == [f"{module}.k_scale", f"{module}.v_scale"]


def test_global_scales_in_bf16_must_agree_too(tmp_path):
    base = bases.b2()
    for name in base.tensors:
        if name.endswith("weight_scale_2"):
            base.tensors[name] = T("BF16", [], b"\x80\x3f")
    assert codes(inspect(base, tmp_path / "good")) == set()
    name = "model.language_model.layers.0.mlp.experts.0.gate_proj.weight_scale_2"
    base.tensors[name] = T("BF16", [], b"\x00\x40")
    assert subjects(inspect(base, tmp_path / "bad"), "scale-pair") == [name]


def test_input_scale_in_bf16_must_be_one_too(tmp_path):
    base = bases.e2m1()
    name = next(name for name in base.tensors if name.endswith("input_scale"))
    base.tensors[name] = T("BF16", [], b"\x00\x40")
    assert subjects(inspect(base, tmp_path), "scale-not-one") == [name]


@pytest.mark.parametrize("value", [True, 1.0, "1", 0, 3])
def test_router_provenance_is_the_integer_1_or_2(tmp_path, value):
    base = bases.b1()
    base.config["xllm_source_router_gemm_partitions"] = value
    assert codes(inspect(base, tmp_path)) == {"config-value"}


def test_router_provenance_null_is_absent(tmp_path):
    base = bases.b1()
    base.config["xllm_source_router_gemm_partitions"] = None
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "router-provenance" in {note.code for note in result.findings.notes}


@pytest.mark.parametrize("empty", ["ignored_layers", "modules_to_not_convert"])
def test_an_empty_ignore_list_beside_a_full_one_is_a_conflict(empty):
    raw = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    raw |= {"ignored_layers": ["lm_head"], "modules_to_not_convert": ["lm_head"]} | {empty: []}
    findings = Findings()
    parse({"quantization_config": raw}, None, findings)
    assert {problem.code for problem in findings.problems} == {"quantization-conflict"}


@pytest.mark.parametrize("offset", [10**4300 - 1, 1 << 63])
def test_offsets_beyond_any_file(tmp_path, offset):
    directory = bases.b0().write(tmp_path / "checkpoint")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [offset, offset]}
    rewrite_header(directory / "model.safetensors", lambda document: document | {"extra": entry})
    assert subjects(inspect(directory), "tensor-entry") == ["extra"]


def test_an_empty_tensor_inside_another_overlaps(tmp_path):
    directory = bases.e2m1().write(tmp_path / "checkpoint")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [5, 5]}
    rewrite_header(directory / "model.safetensors", lambda document: document | {"model.extra": entry})
    assert subjects(inspect(directory), "tensor-overlap") == ["model.extra"]


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (bases.b0, ("num_attention_heads", "head_dim")),
        (bases.b2, ("linear_num_value_heads", "linear_value_head_dim")),
    ],
)
def test_sizes_whose_product_cannot_be_printed(tmp_path, make, keys):
    base = make()
    inventory.text_config(base.config).update(dict.fromkeys(keys, 10**4000))
    assert "config-value" in codes(inspect(base, tmp_path))


@pytest.mark.parametrize("pattern", ["a?" * 30 + "a" * 30, "(a|a)" * 30 + "b", "(?:a|aa)" * 25 + "b"])
def test_alternatives_that_double_the_time(pattern):
    with pytest.raises(matching.BadPattern, match="combinations"):
        matching.compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.layers\.\d+\..*\.(q|k|v|o)_proj.*",
        r"(?:model\.)?layers\.(?:" + "|".join(map(str, range(48))) + r")\.mlp\..*",
        r"^(?!.*experts).*$",
    ],
)
def test_patterns_as_exporters_write_them(pattern):
    matching.compile_pattern(pattern)


def test_slow_patterns_together_cost_one_match(monkeypatch):
    monkeypatch.setattr(matching, "_SECONDS", 0.05)
    names = matching.Names(["x" * 200] * 50)
    began = time.monotonic()
    for _ in range(50):
        with pytest.raises(matching.BadPattern, match="too long"):
            names.regex(".*.*.*.*#")
    assert time.monotonic() - began < 3


def test_globs_have_a_budget(monkeypatch):
    monkeypatch.setattr(matching, "_GLOB_SECONDS", -1.0)
    assert "too long" in matching.match("*a*", matching.Names(["a"]), "modelopt").bad


def test_a_sparse_scale_is_told_once(tmp_path):
    base = bases.b0()
    name = f"{ATTENTION}.q_proj.weight_scale"
    base.tensors[name] = T("F32", [4096, 4096])
    directory = tmp_path / "checkpoint"
    bases.write_headers_only(directory, {"model.safetensors": base.tensors}, b"{}", index=False)
    result = inspect(directory)
    assert subjects(result, "scale-zero").count(name) == 1
    message = next(p.message for p in result.findings.problems if p.code == "scale-zero" and p.subject == name)
    assert "at least 1,048,576 zero" in message


def test_sparse_headers_do_not_fill_the_memory(tmp_path):
    for number in range(8):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", 30_000_000) + b"{")
            file.truncate(30_000_100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = inspect(tmp_path)
    assert "header-malformed" in codes(result)
    assert all(not header.raw for header in result.headers)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kB: about one header, not all"


def test_pin_overwrites_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = bases.b0().write(tmp_path / "checkpoint")
    for victim in (directory / "config.json", tmp_path / "notes.toml"):
        if not victim.exists():
            victim.write_text("edited by hand")
        kept = victim.read_bytes()
        status, _, error = command(capsys, "pin", directory, "--output", victim)
        assert status == 1
        assert "is there already" in error
        assert victim.read_bytes() == kept
    assert not list(tmp_path.glob(".*.toml*")), "no temporary file is left"


def test_pin_overwrites_nothing_that_appears_while_it_hashes(tmp_path):
    output = tmp_path / "proposal.toml"
    output.write_text("first")
    with pytest.raises(Rejected, match="is there already"):
        pin.write(output, "second")
    assert [path.name for path in tmp_path.iterdir()] == ["proposal.toml"]
    assert output.read_text() == "first"


def test_an_empty_directory_argument_is_not_the_current_one(capsys):
    status, _, error = command(capsys, "preflight", "--artifact", "mova-fp8", "--model-dir", "", "--tp", 1)
    assert status == 2
    assert "no model directory" in error


def test_preflight_of_an_empty_directory_claims_nothing_of_its_weights(tmp_path, capsys):
    status, report, _ = command(
        capsys, "preflight", "--artifact", "mova-fp8", "--model-dir", tmp_path, "--tp", 1, "--json"
    )
    assert status == 1
    assert "bf16-only" not in {problem["code"] for problem in report["problems"]}
    assert report["topologies"] == []


def test_verify_does_not_tell_to_remove_weights_that_nobody_hashed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "checkpoint"
    config = (bases.DATA / "K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_bytes()
    bases.write_headers_only(directory, {"model.safetensors": {"a": T("BF16", [1])}}, config, index=False)
    status, report, _ = command(capsys, "verify-checkpoint", directory, "--json")
    assert status == 1
    assert {problem["code"] for problem in report["problems"]} == {"catalogue-incomplete"}


@pytest.mark.parametrize("text", ['checkpoints = ["x"]', 'targets = "sm90"', "targets = [1]"])
def test_an_artifact_file_of_other_types_is_one_sentence(tmp_path, capsys, text):
    (tmp_path / "bad.toml").write_text(f'artifact = "bad"\nformats = []\n{text}\n')
    directory = bases.b0().write(tmp_path / "checkpoint")
    status, _, error = command(capsys, "verify-checkpoint", directory, "--recipes", tmp_path)
    assert status == 2
    assert "bad.toml is not a usable artifact file" in error
