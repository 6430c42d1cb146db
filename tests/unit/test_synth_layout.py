"""The tensor inventory and the layout of synthetic checkpoints: standard library only."""

import copy
import errno
import hashlib
import json
import re
import struct
import threading
from collections import Counter
from pathlib import Path

import pytest

from qualify.cli import main
from qualify.errors import CannotRun, Rejected
from qualify.models import assumed, k2_horizon, k2_horizon_sglang
from qualify.models.k2_horizon import Tensor
from qualify.synth import conditioning, layout, tokenizer, writer

DATA = Path(__file__).resolve().parent.parent / "data"
MOVA = DATA / "K2-Horizon-MoVA-36B-A4B-FP8.config.json"
DENSE = DATA / "K2-Horizon-7B-FP8.config.json"


@pytest.fixture
def mova():
    return json.loads(MOVA.read_text())


@pytest.fixture
def dense():
    return json.loads(DENSE.read_text())


def test_the_published_files_are_verbatim():
    rows = re.findall(r"^\| `([^`]+)` \|.* `([0-9a-f]{64})` \|$", (DATA / "README.md").read_text(), re.M)
    assert len(rows) == 3
    for name, digest in rows:
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest, name


def test_mova_has_the_tensors_that_were_published(mova):
    inventory = k2_horizon.tensors(mova)
    assert len(inventory) == 30_498
    assert Counter(tensor.dtype for tensor in inventory.values()) == {
        "F8_E4M3": 13_500,
        "F32": 13_500,
        "BF16": 3_498,
    }
    assert round(sum(tensor.nbytes for tensor in inventory.values()) / 1e9, 2) == 48.35
    expert = "model.layers.47.mlp.experts.99.gate_proj"
    assert inventory[f"{expert}.weight"] == Tensor("F8_E4M3", (768, 2560))
    assert inventory[f"{expert}.weight_scale_inv"] == Tensor("F32", (6, 20))


def test_mova_ignores_exactly_the_modules_outside_the_routed_experts(mova):
    assert k2_horizon.bf16_modules(mova) == mova["quantization_config"]["ignored_layers"]


def test_the_dense_inventory_is_the_published_header(dense):
    header = json.loads((DATA / "K2-Horizon-7B-FP8.header.json").read_text())
    del header["__metadata__"]
    published = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    assert len(published) == 579
    assert k2_horizon.tensors(dense) == published


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_size": "2560"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_experts": -1}, "num_experts"),
        ({"mlp_only_layers": [1, 2]}, "mlp_only_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
    ],
)
def test_an_unknown_config_is_rejected_by_key(mova, change, message):
    with pytest.raises(Rejected, match=message):
        k2_horizon.tensors(mova | change)


def test_every_checkpoint_tensor_has_one_place_in_the_engine(mova):
    pieces = [piece for pieces in k2_horizon_sglang.parameters(mova).values() for piece in pieces]
    assert sorted(piece.source for piece in pieces) == sorted(k2_horizon.tensors(mova))


def test_up_rows_follow_gate_rows_and_their_scales_follow_likewise(mova):
    experts = "model.layers.3.mlp.experts"
    places = k2_horizon_sglang.parameters(mova)
    rows = {piece.source: (piece.expert, piece.row) for piece in places[f"{experts}.w13_weight"]}
    scales = {piece.source: (piece.expert, piece.row) for piece in places[f"{experts}.w13_weight_scale_inv"]}
    assert rows[f"{experts}.99.gate_proj.weight"] == (99, 0)
    assert rows[f"{experts}.99.up_proj.weight"] == (99, 768)
    assert scales[f"{experts}.99.up_proj.weight_scale_inv"] == (99, 6)


def test_tiny_changes_extents_and_nothing_else(mova):
    before = copy.deepcopy(mova)
    config = layout.derive_config(mova, tiny=True, layers=None)
    assert mova == before
    changed = {key for key in config if config[key] != mova.get(key)}
    assert changed == {*layout.TINY, "rope_head_dim", "num_hidden_layers", "quantization_config", layout.MARK}
    assert config["rope_head_dim"] == config["head_dim"]
    quantisation = config["quantization_config"]
    assert quantisation.pop("ignored_layers") == k2_horizon.bf16_modules(config)
    assert quantisation.items() <= mova["quantization_config"].items()


def test_tiny_keeps_the_set_of_tensor_names_of_a_layer(mova):
    """Only the numbers of layers, experts and value experts differ; the kinds of names are the published
    ones."""

    def kinds(config):
        return {
            (re.sub(r"\d+", "N", name), tensor.dtype, len(tensor.shape))
            for name, tensor in k2_horizon.tensors(config).items()
        }

    assert kinds(layout.derive_config(mova, tiny=True, layers=None)) == kinds(mova)


def test_a_true_width_cut_changes_only_the_number_of_layers(mova):
    config = layout.derive_config(mova, tiny=False, layers=6)
    cut, whole = k2_horizon.tensors(config), k2_horizon.tensors(mova)
    assert cut == {name: tensor for name, tensor in whole.items() if _layer(name) < 6}


def _layer(name):
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


@pytest.mark.parametrize(
    ("change", "layers", "message"),
    [
        ({}, 3, "at least 4"),
        ({}, 0, "at least 4"),
        ({}, 49, "more than the 48"),
        ({layout.MARK: True}, None, "itself a synthetic config"),
    ],
)
def test_impossible_cuts_are_rejected(mova, change, layers, message):
    with pytest.raises(Rejected, match=message):
        layout.derive_config(mova | change, tiny=True, layers=layers)


def test_a_source_with_another_ignore_list_is_rejected(mova):
    mova["quantization_config"]["ignored_layers"].pop()
    with pytest.raises(Rejected, match="ignored_layers"):
        layout.derive_config(mova, tiny=True, layers=None)


def test_the_dense_model_stays_dense(dense):
    config = layout.derive_config(dense, tiny=True, layers=None)
    assert config["num_experts"] == config["mova_num_experts"] == 0
    assert config["mlp_only_layers"] == list(range(config["num_hidden_layers"]))


def test_shards_hold_every_tensor_once_within_the_limit(mova):
    inventory = k2_horizon.tensors(mova)
    shards = layout.plan_shards(inventory, 5_000_000_000)
    assert next(iter(shards)) == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(name for names in shards.values() for name in names) == sorted(inventory)
    assert all(sum(inventory[name].nbytes for name in names) <= 5_000_000_000 for names in shards.values())


def test_the_full_dense_checkpoint_has_the_published_header(dense):
    """One shard; names, dtypes, shapes and offsets of all 579 tensors, in the order of the file."""
    published = json.loads((DATA / "K2-Horizon-7B-FP8.header.json").read_text())
    del published["__metadata__"]
    config = layout.derive_config(dense, tiny=False, layers=None)
    inventory = k2_horizon.tensors(config)
    (names,) = layout.plan_shards(inventory, layout.shard_bytes(config, tiny=False)).values()
    header, offset = {}, 0
    for name in names:
        tensor, begin = inventory[name], offset
        offset += tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, offset]}
    assert header == published
    assert sorted(header, key=lambda name: header[name]["data_offsets"]) == list(header)


def test_the_assumed_config_says_what_it_assumes():
    config = assumed.config_375b()
    for key, (value, why) in assumed.ASSUMED_375B.items():
        assert why
        assert "." in key or config[key] == value
    assert not assumed.KNOWN_375B.keys() & assumed.ASSUMED_375B.keys()
    inventory = k2_horizon.tensors(config)
    quantised = {name for name, tensor in inventory.items() if tensor.dtype == "F8_E4M3"}
    assert len(quantised) == 58 * 192 * 3
    assert all(".mlp.experts." in name for name in quantised)
    assert round(sum(tensor.nbytes for tensor in inventory.values()) / 1e9, 1) == 390.3


def test_a_cut_keeps_the_entries_that_still_name_something(dense):
    dense["quantization_config"]["ignore"] = [
        "lm_head",
        "model.layers.35.mlp.down_proj",
        r"re:.*\.o_proj",
        "re:nothing",
    ]
    config = layout.derive_config(dense, tiny=True, layers=None)
    assert config["quantization_config"]["ignore"] == ["lm_head", r"re:.*\.o_proj"]


INVENTORY = {"a.weight": Tensor("BF16", (2, 3)), "b.scale": Tensor("F32", (1,))}


def write(out, payload, jobs=1, limit=1 << 20):
    writer.write_checkpoint(
        out,
        documents={"config.json": {layout.MARK: True}, "synthetic.json": {"synthetic": True}},
        inventory=INVENTORY,
        shards=layout.plan_shards(INVENTORY, limit),
        metadata={layout.MARK: "true", "seed": "7"},
        payload=payload,
        jobs=jobs,
    )


def zeros(names):
    size = sum(INVENTORY[name].nbytes for name in names)
    return [bytes(size - 1), bytes(1)]


def test_the_shard_is_a_safetensors_file_and_says_that_it_is_synthetic(tmp_path):
    write(tmp_path / "new" / "out", zeros)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out"]
    out = tmp_path / "new" / "out"
    raw = (out / "model-00001-of-00001.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    assert header["__metadata__"] == {"format": "pt", layout.MARK: "true", "seed": "7"}
    assert header["b.scale"] == {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    assert header["a.weight"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]}
    assert len(raw) == 8 + length + 16
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 16
    assert index["weight_map"] == dict.fromkeys(INVENTORY, "model-00001-of-00001.safetensors")
    assert json.loads((out / "config.json").read_text())[layout.MARK] is True
    assert json.loads((out / "synthetic.json").read_text())["synthetic"] is True


def test_an_empty_directory_is_filled_and_a_used_one_is_left_alone(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    write(empty, zeros)
    before = {path: path.read_bytes() for path in empty.iterdir()}
    with pytest.raises(Rejected, match="not empty"):
        write(empty, zeros)
    assert {path: path.read_bytes() for path in empty.iterdir()} == before
    with pytest.raises(Rejected, match="not a directory"):
        write(empty / "config.json", zeros)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_full_disk_leaves_nothing_behind(tmp_path, jobs):
    def full(names):
        yield b"\0"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CannotRun, match="No space left on device; nothing was left behind"):
        write(tmp_path / "out", full, jobs, limit=1)
    assert list(tmp_path.iterdir()) == []


def test_one_failing_shard_stops_the_others(tmp_path):
    """The second shard never ends of its own accord."""
    failing = threading.Event()

    def payload(names):
        if names == ["a.weight"]:
            failing.wait(10)
            raise OSError(errno.ENOSPC, "No space left on device")
        failing.set()
        while True:
            yield b"\0"

    with pytest.raises(CannotRun, match="No space left on device"):
        write(tmp_path / "out", payload, jobs=2, limit=1)
    assert list(tmp_path.iterdir()) == []


def test_a_payload_of_the_wrong_length_is_not_a_checkpoint(tmp_path):
    with pytest.raises(AssertionError, match="15 bytes of values, 16 in the header"):
        write(tmp_path / "out", lambda names: [bytes(15)])
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "PROGRESS_SECONDS", 0.0)
    write(tmp_path / "out", zeros)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r"synth: 0\.0 of 0\.0 GB, 0 s, [0-9.]+ GB/s\n", captured.err)


def test_a_mount_point_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(Rejected, match="mount point"):
        write(tmp_path / "out", zeros)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 15}))
    with pytest.raises(CannotRun, match="15 bytes free, the checkpoint needs 16"):
        write(tmp_path / "out", zeros)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", str(MOVA)], "say --full, --tiny, --layers N"),
        (["--config", str(MOVA), "--full", "--tiny"], "--full contradicts"),
        (["--config", str(MOVA), "--full", "--layers", "4"], "--full contradicts"),
        (["--config", str(DATA / "absent.json"), "--tiny"], "absent.json cannot be read"),
        (["--config", str(DATA / "README.md"), "--tiny"], "is not JSON"),
        (["--config", str(DATA / "K2-Horizon-7B-FP8.header.json"), "--tiny"], "none of the published configs"),
        (["--config", str(MOVA), "--tiny", "--out", "o" * 300], "File name too long"),
        (["--config", str(MOVA), "--tiny", "--layers", "2"], "at least 4"),
        (["--config", str(MOVA), "--tiny", "--layers", "x"], "invalid int value"),
    ],
)
def test_wrong_arguments_exit_with_one_sentence_and_write_nothing(tmp_path, capsys, arguments, message):
    assert main(["synth", "--out", str(tmp_path / "out"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("rejected: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tiny", [True, False])
def test_every_expert_is_preferred_by_some_cluster_and_equally_often(mova, tiny):
    config = layout.derive_config(mova, tiny=tiny, layers=4)
    knobs = conditioning.Knobs()
    count = conditioning.clusters(config, knobs)
    for router, experts, top_k in (
        ("model.layers.3.self_attn.v_router.weight", config["mova_num_experts"], config["mova_num_experts_per_tok"]),
        ("model.layers.3.mlp.gate.weight", config["num_experts"], config["num_experts_per_tok"]),
    ):
        preferred = conditioning.preferences(config, router, 0, knobs)
        assert len(preferred) == count
        assert all(len(set(chosen)) == top_k for chosen in preferred)
        usage = Counter(expert for chosen in preferred for expert in chosen)
        assert sorted(usage) == list(range(experts))
        assert max(usage.values()) - min(usage.values()) <= 1


def test_a_dense_model_has_no_clusters(dense):
    assert conditioning.clusters(dense, conditioning.Knobs()) == 0


def test_routers_of_different_layers_and_seeds_prefer_different_experts(mova):
    knobs = conditioning.Knobs()
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in (3, 4)]
    first, second = (conditioning.preferences(mova, name, 0, knobs) for name in names)
    assert first != second
    assert first != conditioning.preferences(mova, names[0], 1, knobs)


def test_every_tensor_has_a_recipe_of_its_kind(mova):
    inventory = k2_horizon.tensors(mova)
    kinds = Counter(recipe.kind for recipe in conditioning.recipes(mova, inventory, conditioning.Knobs()).values())
    assert kinds.pop("normal") == 3_498 - 90 - 2
    assert kinds == {"codes": 13_500, "scales": 13_500, "router": 90, "embedding": 1, "head": 1}


def test_the_tokenizer_has_every_id_once_and_every_byte(mova):
    files = tokenizer.documents(mova)
    vocabulary = files["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(mova["vocab_size"]))
    assert len(set(tokenizer._byte_alphabet())) == 256
    assert vocabulary["<|begin|>"] == mova["bos_token_id"]
    assert vocabulary["<|end|>"] == mova["eos_token_id"]
    with pytest.raises(Rejected, match="vocab_size 200"):
        tokenizer.documents(mova | {"vocab_size": 200})
