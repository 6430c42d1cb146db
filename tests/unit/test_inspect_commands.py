"""The four commands as a user meets them: exit codes, JSON, the catalogue, pin and verify."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qualify import catalogue, pin, verify
from qualify.checkpoint import hashing, problems
from qualify.errors import CannotRun
from qualify.models import k2_horizon
from tests.cases import bases
from tests.cases.bases import T
from tests.cases.helpers import command, f32

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "verdict",
    "format",
    "scope",
    "tensors",
    "bytes",
    "shards",
    "identity",
    "catalogue",
    "problems",
    "notes",
    "topologies",
}


# ------------------------------------------------------------ inspect


def test_json_has_every_key_in_every_verdict(tmp_path, capsys):
    directory = bases.b0().write(tmp_path / "good")
    status, good, _ = command(capsys, "inspect", directory, "--json")
    assert (status, good["verdict"]) == (0, "accepted")
    (directory / "model.safetensors").write_bytes(b"")
    status, bad, _ = command(capsys, "inspect", directory, "--json")
    assert (status, bad["verdict"]) == (1, "rejected")
    status, none, error = command(capsys, "inspect", tmp_path / "absent", "--json")
    assert (status, none["verdict"]) == (2, "cannot-run")
    assert "absent" in error
    for report in (good, bad, none):
        assert set(report) >= KEYS
        assert isinstance(report["format"], str) and report["format"]
    assert set(good["identity"]) == {"config", "index", "quantization_config", "headers"}
    assert good["scope"]["dense_linear"] == {
        "quantised": 7,
        "unquantised": 0,
        "dtypes": {"F8_E4M3": 7},
        "block": [128, 128],
    }
    for problem in bad["problems"]:
        assert set(problem) == {"code", "subject", "message"}
        assert problem["code"] in problems.PROBLEMS


def test_identity_is_of_the_raw_bytes(tmp_path, capsys):
    base = bases.b0()
    base.shards = 2
    directory = base.write(tmp_path)
    _, report, _ = command(capsys, "inspect", directory, "--json")
    identity = report["identity"]
    assert identity["config"] == hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
    index = directory / "model.safetensors.index.json"
    assert identity["index"] == hashlib.sha256(index.read_bytes()).hexdigest()
    headers = b""
    for shard in sorted(directory.glob("*.safetensors")):
        raw = shard.read_bytes()
        headers += raw[: 8 + int.from_bytes(raw[:8], "little")]
    assert identity["headers"] == hashlib.sha256(headers).hexdigest()
    canonical = json.dumps(base.quantization, sort_keys=True, separators=(",", ":")).encode()
    assert identity["quantization_config"] == hashlib.sha256(canonical).hexdigest()


def test_a_directory_that_cannot_be_read_is_not_a_verdict(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    assert command(capsys, "inspect", file)[0] == 2
    assert command(capsys, "inspect", tmp_path / "a\0b")[0] == 2
    assert command(capsys, "inspect", "x" * 5000)[0] == 2


def test_wrong_flags_exit_1(tmp_path, capsys):
    for arguments in (
        ("inspect",),
        ("inspect", tmp_path, "--head"),
        ("preflight", "--tp", "two"),
        ("pin", "--x"),
    ):
        assert command(capsys, *arguments)[0] == 1


def test_side_files_are_notes(tmp_path, capsys):
    base = bases.b0()
    base.config["auto_map"] = {"AutoConfig": "configuration_x.X"}
    directory = base.write(tmp_path)
    (directory / "configuration_x.py").write_text("raise SystemExit('executed')")
    status, report, _ = command(capsys, "inspect", directory, "--json")
    codes = {note["code"] for note in report["notes"]}
    assert status == 0
    assert {"remote-code", "tokenizer-missing", "template-missing", "generation-config-missing"} <= codes
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (directory / name).write_text("{}")
    _, report, _ = command(capsys, "inspect", directory, "--json")
    codes = {note["code"] for note in report["notes"]}
    assert codes & {"tokenizer-missing", "template-missing", "generation-config-missing"} == set()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "X.CKPT", "a.pkl"])
def test_pickles_are_a_defect(tmp_path, capsys, name):
    directory = bases.b0().write(tmp_path)
    (directory / name).write_bytes(b"\x80\x04.")
    status, report, _ = command(capsys, "inspect", directory, "--json")
    assert status == 1
    assert [(p["code"], p["subject"]) for p in report["problems"]] == [("pickle-weights", name)]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("config.json", None, "config-missing"),
        ("config.json", b"", "config-malformed"),
        ("config.json", b"[]", "config-malformed"),
        ("config.json", b'{"a":1,"a":2}', "config-malformed"),
        ("config.json", b"version https://git-lfs.github.com/spec/v1\n", "lfs-pointer"),
        ("config.json", b"<html>", "html-page"),
        ("hf_quant_config.json", b"{", "config-malformed"),
        ("model.safetensors.index.json", b"{}", "index-malformed"),
        ("model.safetensors.index.json", b'{"weight_map":{}}', "index-malformed"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":1}}', "index-malformed"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":"../x.safetensors"}}', "index-path"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":"/etc/passwd"}}', "index-path"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":"x.bin"}}', "index-path"),
        ("model.safetensors.index.json", b'{"weight_map":{"a":"x\\u0000.safetensors"}}', "index-path"),
    ],
)
def test_side_documents(tmp_path, capsys, name, content, code):
    directory = bases.b0().write(tmp_path)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    status, report, _ = command(capsys, "inspect", directory, "--json")
    assert status == 1
    assert code in {problem["code"] for problem in report["problems"]}


@pytest.mark.parametrize("wrong", [0, 1, 10**15, -1, "many", 2.5])
def test_total_size(tmp_path, capsys, wrong):
    base = bases.b0()
    base.shards = 2
    index = base.index()
    index["metadata"]["total_size"] = wrong
    directory = base.write(tmp_path, index)
    _, report, _ = command(capsys, "inspect", directory, "--json")
    expected = "index-total-size" if isinstance(wrong, int) else "index-malformed"
    assert [problem["code"] for problem in report["problems"]] == [expected]


def test_index_against_headers(tmp_path, capsys):
    base = bases.b0()
    base.shards = 2
    index = base.index()
    one, two = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.embed_tokens.weight"] = two
    index["weight_map"]["phantom.weight"] = one
    del index["weight_map"]["lm_head.weight"]
    _, report, _ = command(capsys, "inspect", base.write(tmp_path, index), "--json")
    found = {(problem["code"], problem["subject"]) for problem in report["problems"]}
    assert found == {
        ("index-wrong-shard", "model.embed_tokens.weight"),
        ("index-tensor-missing", "phantom.weight"),
        ("index-tensor-unlisted", "lm_head.weight"),
    }


def test_several_shards_need_an_index(tmp_path, capsys):
    base = bases.b0()
    base.shards = 2
    _, report, _ = command(capsys, "inspect", base.write(tmp_path / "a", False), "--json")
    assert [problem["code"] for problem in report["problems"]] == ["index-missing"]
    directory = base.write(tmp_path / "b", False)
    (directory / "model-00002-of-00002.safetensors").unlink()
    _, report, _ = command(capsys, "inspect", directory, "--json")
    assert "index-missing" in {problem["code"] for problem in report["problems"]}


def test_no_weights(tmp_path, capsys):
    directory = bases.b0().write(tmp_path)
    (directory / "model.safetensors").unlink()
    _, report, _ = command(capsys, "inspect", directory, "--json")
    assert [problem["code"] for problem in report["problems"]] == ["no-weights"]


def test_the_human_report_reads(tmp_path, capsys):
    base = bases.b1()
    for expert in range(4):
        base.tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight_scale_inv"].data = f32(0.0) * 4
    status, text, _ = command(capsys, "inspect", base.write(tmp_path))
    assert status == 1
    assert text.startswith("REJECTED  fp8-block  54 tensors")
    assert re.search(r"routed expert +12 +0 +F8_E4M3 12 +block 128x128", text)
    assert "scale-zero x 4" in text
    assert "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv has 4 zero values, at [0, 0]" in text
    assert f"-> {problems.PROBLEMS['scale-zero']}" in text
    assert max(map(len, text.splitlines())) < 420


@pytest.mark.parametrize(
    ("value", "code", "where"),
    [
        (float("nan"), "scale-nan", "[1, 0]"),
        (float("inf"), "scale-infinite", "[1, 0]"),
        (0.0, "scale-zero", "[1, 0]"),
        (-2.0, "scale-negative", "[1, 0]"),
    ],
)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_scale_values_have_name_and_position(tmp_path, capsys, value, code, where, dtype):
    base = bases.b0()
    name = "model.layers.0.mlp.down_proj.weight_scale"
    values = [1.0] * 4 + [value] + [1.0] * 3
    raw = b"".join(f32(item) if dtype == "F32" else f32(item)[2:] for item in values)
    base.tensors[name] = T(dtype, [2, 4], raw)
    directory = base.write(tmp_path)
    _, report, _ = command(capsys, "inspect", directory, "--json")
    assert [(problem["code"], problem["subject"]) for problem in report["problems"]] == [(code, name)]
    assert where in report["problems"][0]["message"]
    status, report, _ = command(capsys, "inspect", directory, "--json", "--headers-only")
    assert status == 0 and "scales-not-read" in {note["code"] for note in report["notes"]}


@pytest.mark.parametrize(
    ("code_", "kind"), [(0x00, "zero"), (0x80, "zero"), (0x81, "negative"), (0x7F, "nan"), (0xFF, "nan")]
)
def test_e4m3_group_scales(tmp_path, capsys, code_, kind):
    base = bases.e2m1()
    name = "model.language_model.layers.0.mlp.experts.1.down_proj.weight_scale"
    base.tensors[name].data = b"\x38" * 2047 + bytes([code_])
    _, report, _ = command(capsys, "inspect", base.write(tmp_path), "--json")
    assert [(p["code"], p["subject"]) for p in report["problems"]] == [(f"scale-{kind}", name)]
    assert "[255, 7]" in report["problems"][0]["message"]


# ------------------------------------------------------------ the published inputs


def _published_7b(tmp_path) -> Path:
    document = json.loads((bases.DATA / "K2-Horizon-7B-FP8.header.json").read_text())
    document.pop("__metadata__")
    ordered = sorted(document.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {name: T(entry["dtype"], entry["shape"]) for name, entry in ordered}
    config = (bases.DATA / "K2-Horizon-7B-FP8.config.json").read_bytes()
    return bases.write_headers_only(tmp_path / "7b", {"model.safetensors": tensors}, config, index=False)


def test_the_published_7b_is_accepted_and_catalogued(tmp_path, capsys):
    status, report, _ = command(capsys, "inspect", _published_7b(tmp_path), "--json", "--headers-only")
    assert status == 0, report["problems"]
    assert report["tensors"] == 579
    assert report["format"] == "compressed-tensors-fp8-block"
    assert report["scope"]["dense_linear"]["quantised"] == 36 * 7
    assert report["catalogue"]["status"] == "catalogued"
    assert report["catalogue"]["repository"] == "IFM/K2-Horizon-7B-FP8"
    works = [[item["tp"], item["ep"]] for item in report["topologies"] if item["works"]]
    assert works == [[1, 1], [2, 1], [4, 1], [8, 1], [16, 1]] == report["catalogue"]["topologies"]


def test_the_published_7b_with_other_headers_is_not_catalogued(tmp_path, capsys):
    directory = _published_7b(tmp_path)
    shard = directory / "model.safetensors"
    raw = shard.open("rb").read(100_000)
    length = int.from_bytes(raw[:8], "little")
    with shard.open("r+b") as file:
        file.write(raw[: 8 + length].replace(b'"format":"pt"', b'"format":"np"'))
    status, report, _ = command(capsys, "inspect", directory, "--json", "--headers-only")
    assert status == 0, "the identity never changes the verdict"
    assert report["catalogue"]["status"] == "config-only"


def test_mova_from_its_published_config(tmp_path, capsys):
    raw = (bases.DATA / "K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_bytes()
    config = json.loads(raw)
    tensors = {name: T(t.dtype, list(t.shape)) for name, t in k2_horizon.tensors(config).items()}
    names = list(tensors)
    shards = {
        f"model-{i + 1:05d}-of-00010.safetensors": {n: tensors[n] for n in names[i * 3050 : (i + 1) * 3050]}
        for i in range(10)
    }
    directory = bases.write_headers_only(tmp_path / "m", shards, raw)
    status, report, _ = command(capsys, "inspect", directory, "--json", "--headers-only")
    assert status == 0, report["problems"][:3]
    assert report["tensors"] == 30_498
    assert report["scope"]["routed_expert"]["dtypes"] == {"F8_E4M3": 13_500}
    assert report["scope"]["value_expert"]["unquantised"] == 2_880
    assert len(config["quantization_config"]["ignored_layers"]) == 3_408
    works = [[item["tp"], item["ep"]] for item in report["topologies"] if item["works"]]
    assert works == report["catalogue"]["topologies"], "derived and listed pairs agree"
    # The config is published; headers made up from it are not the published ones.
    assert report["catalogue"]["status"] == "config-only"


def test_a_synthetic_checkpoint_passes_for_no_published_one(tmp_path, capsys):
    directory = _published_7b(tmp_path)
    (directory / "synthetic.json").write_text("{}")
    status, report, _ = command(capsys, "inspect", directory, "--json", "--headers-only")
    assert status == 0
    assert (report["synthetic"], report["catalogue"]["status"]) == (True, "synthetic")
    small = bases.b0()
    small.config["horizon_images_synthetic"] = True
    directory = small.write(tmp_path / "small")
    status, _, error = command(capsys, "pin", directory, "--output", tmp_path / "x.toml")
    assert status == 1 and "synthetic" in error
    status, report, _ = _preflight(capsys, directory)
    assert status == 1 and [problem["code"] for problem in report["problems"]] == ["not-catalogued"]


# ------------------------------------------------------------ preflight


def _preflight(capsys, directory, artifact="k2-horizon-fp8", *more):
    return command(
        capsys,
        "preflight",
        "--artifact",
        artifact,
        "--model-dir",
        directory,
        "--tp",
        1,
        "--ep",
        1,
        "--json",
        *more,
    )


def test_an_uncatalogued_checkpoint_needs_the_flag(tmp_path, capsys):
    directory = bases.b0().write(tmp_path)
    status, report, _ = _preflight(capsys, directory)
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["not-catalogued"]
    assert "32B" in report["problems"][0]["message"] and "not pinned" in report["problems"][0]["message"]
    status, report, _ = _preflight(capsys, directory, "k2-horizon-fp8", "--uncatalogued")
    assert (status, report["verdict"]) == (0, "accepted")


def test_the_weight_gate_says_which(tmp_path, capsys):
    base = bases.b0()
    plain = {n: T("BF16", t.shape) for n, t in base.tensors.items() if not n.endswith("weight_scale")}
    base.tensors = plain
    del base.config["quantization_config"]
    status, report, _ = _preflight(capsys, base.write(tmp_path / "bf16"), "k2-horizon-fp8", "--uncatalogued")
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["bf16-only"]
    for number, declaration in enumerate(
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        )
    ):
        base.config["quantization_config"] = declaration
        directory = base.write(tmp_path / str(number))
        assert command(capsys, "inspect", directory)[0] == 0
        status, report, _ = _preflight(capsys, directory, "k2-horizon-fp8", "--uncatalogued")
        assert status == 1
        assert [problem["code"] for problem in report["problems"]] == ["fp8-kv-only"]
        assert report["format"] == "bf16"


def test_each_artifact_refuses_the_formats_of_the_others(tmp_path, capsys):
    served = {
        "k2-horizon-fp8": ["b0", "b0_moe"],
        "mova-fp8": ["b1"],
        "qwen3.6-nvfp4": ["b2"],
        "e2m1-k32": ["e2m1"],
    }
    for artifact in served:
        for owner, names in served.items():
            for name in names:
                directory = getattr(bases, name)().write(tmp_path / artifact / name)
                more = ("--uncatalogued", "--router-partitions", 2)
                status, report, _ = _preflight(capsys, directory, artifact, *more)
                codes = [problem["code"] for problem in report["problems"]]
                assert codes == ([] if owner == artifact else ["artifact-format"])
                assert (status == 0) == (owner == artifact)


def test_plan_mistakes(tmp_path, capsys):
    directory = bases.b0().write(tmp_path)
    common = ("preflight", "--model-dir", directory, "--uncatalogued")
    for more, word in (
        (("--artifact", "nonsense", "--tp", 1), "nonsense"),
        (("--artifact", "../recipes/mova-fp8", "--tp", 1), "unknown"),
    ):
        status, _, error = command(capsys, *common, *more)
        assert status == 1 and word in error
        _, report, _ = command(capsys, *common, *more, "--json")
        assert [problem["code"] for problem in report["problems"]] == ["artifact-unknown"]
    for tp, ep in ((0, 1), (-1, 1), (1, 0), (3, 1), (1, 2), (10**9, 1)):
        more = ("--artifact", "k2-horizon-fp8", "--tp", tp, "--ep", ep, "--json")
        status, report, _ = command(capsys, *common, *more)
        assert status == 1
        assert {problem["code"] for problem in report["problems"]} == {"topology"}
    assert command(capsys, *common, "--artifact", "k2-horizon-fp8", "--tp", 1, "--arch", "turbo")[0] == 1


def test_a_rejected_checkpoint_is_rejected_at_preflight(tmp_path, capsys):
    base = bases.b0()
    base.tensors["model.layers.0.mlp.up_proj.weight_scale"].data = f32(0.0) * 8
    status, report, _ = _preflight(capsys, base.write(tmp_path), "k2-horizon-fp8", "--uncatalogued")
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["scale-zero"]


# ------------------------------------------------------------ catalogue, pin, verify-checkpoint


def test_the_committed_catalogue_invents_nothing():
    artifacts = catalogue.load()
    entries = {entry.repository: entry for artifact in artifacts.values() for entry in artifact.checkpoints}
    assert entries["IFM/K2-Horizon-7B-FP8"].recognised
    for name in ("IFM/K2-Horizon-32B-FP8", "IFM/K2-Horizon-375B-A23B-FP8"):
        assert entries[name].files == () and entries[name].revision == "" and entries[name].unpinned
    data = {
        "IFM/K2-Horizon-7B-FP8": "K2-Horizon-7B-FP8",
        "IFM/K2-Horizon-MoVA-36B-A4B-FP8": "K2-Horizon-MoVA-36B-A4B-FP8",
    }
    for repository, file in data.items():
        raw = (bases.DATA / f"{file}.config.json").read_bytes()
        assert entries[repository].digest("config") == hashlib.sha256(raw).hexdigest()
        assert entries[repository].source_epoch == "2026-09-13"
        assert re.fullmatch("[0-9a-f]{40}", entries[repository].revision)
    assert not any(entry.pinned for entry in entries.values())


def test_artifact_files_and_capability_checks_name_the_same_formats():
    from qualify.checkpoint import formats

    served = {form: name for name, artifact in catalogue.load().items() for form in artifact.formats}
    assert served.keys() == formats.CAPABILITIES.keys()


ENTRY = """
artifact = "{artifact}"
formats = ["compressed-tensors-fp8-block"]
"""


def _recipes(tmp_path, text, artifact="k2-horizon-fp8"):
    folder = tmp_path / "recipes"
    folder.mkdir(exist_ok=True)
    (folder / f"{artifact}.toml").write_text(ENTRY.format(artifact=artifact) + text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "[[checkpoints]]\nname = 'x'\nrepository = 'a/b'\n",
        "[[checkpoints]]\nname = 'x'\nrepository = 'a/b'\nunpinned = 'y'\nrevision = 'main'\n",
        "[[checkpoints]]\nname = 'x'\nrepository = 'a/b'\nunpinned = 'y'\nsource_epoch = 'today'\n",
        "[[checkpoints]]\nname = 'x'\nrepository = 'a/b'\nunpinned = "
        "'y'\n[[checkpoints.files]]\nrole='config'\n"
        "name='config.json'\nsha256='12'\n",
        "[[checkpoints]]\nrepository = 'a/b'\n",
        "this is not toml",
    ],
)
def test_an_unusable_artifact_file_is_our_fault(tmp_path, text):
    with pytest.raises(CannotRun):
        catalogue.load(_recipes(tmp_path, text))


def _pinned(tmp_path, capsys, base=None):
    """Pin a checkpoint, review the proposal, return (directory, recipes)."""
    base = base or bases.b0()
    base.shards = 2
    directory = base.write(tmp_path / "checkpoint")
    (directory / "tokenizer.json").write_text("{}")
    proposal = tmp_path / "proposal.toml"
    status, _, error = command(
        capsys, "pin", directory, "--repository", "IFM/Test", "--revision", "ab" * 20, "--output", proposal
    )
    assert status == 0, error
    return directory, proposal


def test_a_proposal_counts_only_after_review(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, proposal = _pinned(tmp_path, capsys)
    entry = tomllib.loads(proposal.read_text())["checkpoints"][0]
    roles = {file["name"]: file["role"] for file in entry["files"]}
    assert roles == {
        "config.json": "config",
        "model-00001-of-00002.safetensors": "weights",
        "model-00002-of-00002.safetensors": "weights",
        "model.safetensors.index.json": "index",
        "tokenizer.json": "tokenizer",
    }
    for file in entry["files"]:
        assert file["sha256"] == hashlib.sha256((directory / file["name"]).read_bytes()).hexdigest()
    with pytest.raises(CannotRun, match="reviewed"):
        catalogue.load(_recipes(tmp_path, proposal.read_text()))
    reviewed = proposal.read_text().replace('reviewed_by = ""', 'reviewed_by = "somebody"')
    recipes = _recipes(tmp_path, reviewed)
    loaded = catalogue.load(recipes)["k2-horizon-fp8"].checkpoints[0]
    assert loaded.pinned and loaded.recognised

    status, report, _ = command(capsys, "verify-checkpoint", directory, "--recipes", recipes, "--json")
    assert (status, report["files"]) == (0, 5)

    monkeypatch.setattr(catalogue, "RECIPES", recipes)
    status, report, _ = _preflight(capsys, directory)
    assert status == 0 and report["catalogue"]["status"] == "catalogued"


def test_pin_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = bases.b0().write(tmp_path / "c")
    output = tmp_path / "out.toml"
    known = ("--repository", "IFM/K2-Horizon-7B-FP8")
    for more in (
        ("--revision", "main"),
        ("--repository", "no-owner"),
        ("--epoch", "yesterday"),
        (*known, "--epoch", "2026-09-13"),
    ):
        assert command(capsys, "pin", directory, "--output", output, *more)[0] == 1
        assert not output.exists()
    assert command(capsys, "pin", directory, "--output", output, *known, "--epoch", "2026-12-24")[0] == 0
    assert command(capsys, "pin", directory, "--output", "/proc/nowhere/x.toml")[0] == 2
    bad = bases.b0()
    del bad.tensors["model.norm.weight"]
    status, _, error = command(capsys, "pin", bad.write(tmp_path / "bad"), "--output", tmp_path / "bad.toml")
    assert status == 1 and "model.norm.weight" in error and not (tmp_path / "bad.toml").exists()


def test_pin_refuses_another_revision_than_the_one_on_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "models--IFM--K2-Horizon-7B-FP8" / "snapshots" / ("cd" * 20)
    bases.b0().write(root)
    output = tmp_path / "out.toml"
    status, _, error = command(capsys, "pin", root, "--revision", "ab" * 20, "--output", output)
    assert status == 1 and "cd" * 20 in error and not output.exists()
    assert command(capsys, "pin", root, "--revision", "cd" * 20, "--output", output)[0] == 0


def test_pin_reads_repository_and_revision_off_a_hub_cache(tmp_path):
    root = tmp_path / "models--IFM--K2-Horizon-7B-FP8" / "snapshots" / ("cd" * 20)
    bases.b0().write(root)
    assert pin.hub_repository(root) == "IFM/K2-Horizon-7B-FP8"
    from qualify.checkpoint.files import open_checkpoint
    from qualify.checkpoint.problems import Findings

    assert pin.revision_of(open_checkpoint(root, Findings())) == "cd" * 20


def _verify(capsys, directory, recipes, *more):
    return command(capsys, "verify-checkpoint", directory, "--recipes", recipes, "--json", *more)


def test_verify_finds_every_kind_of_change(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, proposal = _pinned(tmp_path, capsys)
    recipes = _recipes(tmp_path, proposal.read_text().replace('reviewed_by = ""', 'reviewed_by = "somebody"'))
    assert _verify(capsys, directory, recipes)[0] == 0
    shard = directory / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    status, report, _ = _verify(capsys, directory, recipes)
    assert status == 1
    assert [(p["code"], p["subject"]) for p in report["problems"]] == [("file-digest", shard.name)]
    shard.unlink()
    (directory / "extra.safetensors").write_bytes(b"x")
    status, report, _ = _verify(capsys, directory, recipes)
    codes = {(p["code"], p["subject"]) for p in report["problems"]}
    assert {("file-missing", shard.name), ("file-uncatalogued", "extra.safetensors")} <= codes
    (directory / "config.json").write_text("{}")
    status, _, error = _verify(capsys, directory, recipes)
    assert status == 1 and "--repository" in error
    status, report, _ = _verify(capsys, directory, recipes, "--repository", "IFM/Test")
    assert ("file-digest", "config.json") in {(p["code"], p["subject"]) for p in report["problems"]}


def test_verify_of_an_unpinned_checkpoint_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = bases.b0().write(tmp_path / "c")
    status, _, error = command(capsys, "verify-checkpoint", directory)
    assert status == 1 and "IFM/K2-Horizon-32B-FP8" in error
    config = (bases.DATA / "K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_bytes()
    (directory / "config.json").write_bytes(config)
    status, report, _ = command(capsys, "verify-checkpoint", directory, "--json")
    assert status == 1
    assert "catalogue-incomplete" in {problem["code"] for problem in report["problems"]}


def test_hashing_resumes_and_notices_changes(tmp_path):
    paths = {}
    for number in range(5):
        path = tmp_path / f"f{number}"
        path.write_bytes(os.urandom(300_000 + number))
        paths[path.name] = str(path)
    truth = {name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for name, path in paths.items()}
    journal = tmp_path / "cache" / "journal.json"
    seen: list[tuple[int, int]] = []
    assert hashing.digests(paths, hashing.Journal(journal), lambda *a: seen.append(a)) == truth
    assert seen[-1][0] == seen[-1][1] == sum(Path(p).stat().st_size for p in paths.values())
    reopened = hashing.Journal(journal)
    assert all(reopened.get(path) == truth[name] for name, path in paths.items())
    changed = Path(paths["f2"])
    changed.write_bytes(b"other")
    assert hashing.Journal(journal).get(str(changed)) is None
    again = hashing.digests(paths, hashing.Journal(journal))
    assert again == truth | {"f2": hashlib.sha256(b"other").hexdigest()}
    for broken in ("[]", "{", '{"a": 1}'):
        journal.write_text(broken)
        assert hashing.digests(paths, hashing.Journal(journal)) == again


def test_a_journal_that_cannot_be_written_does_not_stop_the_check(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x")
    blocked = tmp_path / "file"
    blocked.write_text("")
    journal = hashing.Journal(blocked / "journal.json")
    assert hashing.digests({"f": str(path)}, journal)["f"] == hashlib.sha256(b"x").hexdigest()


def test_an_unreadable_file_stops_the_check(tmp_path):
    with pytest.raises(OSError):
        hashing.digests({"f": str(tmp_path / "absent")}, hashing.Journal(None))


# ------------------------------------------------------------ rules that hold for all of it


def test_only_the_standard_library_is_imported():
    script = (
        "import sys\nbefore = set(sys.modules)\n"
        "import qualify.inspect, qualify.preflight, qualify.pin, qualify.verify\n"
        "names = {n.partition('.')[0] for n in set(sys.modules) - before} - {'qualify'}\n"
        "print(sorted(names - sys.stdlib_module_names))"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


def test_nothing_executes_or_unpickles():
    for path in [
        *(ROOT / "qualify" / "checkpoint").glob("*.py"),
        *(ROOT / "qualify" / "models").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                assert not names & {"pickle", "runpy", "subprocess", "importlib", "marshal"}, path.name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path.name


def test_every_code_is_documented_and_tested():
    documented = (ROOT / "docs" / "inspect.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "unit").glob("test_inspect*.py"))
    for code in problems.PROBLEMS:
        assert f"`{code}`" in documented, code
        # scale-nan and its like are asserted through f-strings
        assert f'"{code}"' in tests or (code.startswith("scale-") and 'f"scale-{kind}"' in tests), code
    for code in problems.NOTES:
        assert f"`{code}`" in documented, code


def test_codes_that_the_sources_use_are_known():
    known = problems.PROBLEMS.keys() | problems.NOTES.keys()
    used = set()
    for path in (ROOT / "qualify").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
            if call and node.func.attr in ("problem", "note") and isinstance(node.args[0], ast.Constant):
                used.add(node.args[0].value)
    assert used <= known
    dynamic = {"scale-nan", "scale-infinite", "scale-zero", "scale-negative"}
    listed = "".join(path.read_text() for path in (ROOT / "qualify").rglob("*.py") if path.name != "problems.py")
    assert {code for code in known if f'"{code}"' not in listed} <= dynamic


def test_verify_journal_is_outside_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tmp_path / "cache" in verify.journal_path(tmp_path / "checkpoint").parents


def test_a_pair_that_the_artifact_does_not_list(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = bases.b0_moe()
    directory, proposal = _pinned(tmp_path, capsys, base)
    reviewed = proposal.read_text().replace(
        'reviewed_by = ""', 'reviewed_by = "somebody"\ntopologies = [[1, 1], [2, 2]]'
    )
    monkeypatch.setattr(catalogue, "RECIPES", _recipes(tmp_path, reviewed))
    common = ("preflight", "--artifact", "k2-horizon-fp8", "--model-dir", directory, "--json")
    assert command(capsys, *common, "--tp", 2, "--ep", 2)[0] == 0
    status, report, _ = command(capsys, *common, "--tp", 2, "--ep", 1)
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["topology"]
    assert "TP1+EP1, TP2+EP2" in report["problems"][0]["message"]
