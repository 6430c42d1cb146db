"""Values of synthetic checkpoints: deterministic, correctly encoded, readable by the safetensors library."""

import hashlib
import json
from dataclasses import asdict

import numpy
import pytest
import torch

from qualify.checks.loading import dequantise, read_checkpoint
from qualify.errors import CannotRun, Rejected
from qualify.models import MOVA_CONFIG, PUBLISHED, k2_horizon
from qualify.synth import layout, values
from qualify.synth.command import synthesise
from qualify.synth.conditioning import Knobs

HEADER_DTYPE = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def shards_of(directory):
    return {name: digest for name, digest in digests(directory).items() if name.endswith(".safetensors")}


@pytest.fixture
def drawn(mova_tiny_config):
    """The values of the tiny checkpoint before they are written."""
    inventory = k2_horizon.tensors(mova_tiny_config)
    device = torch.device("cpu")
    return values.Values(mova_tiny_config, inventory, seed=0, knobs=Knobs(), device=device)


@pytest.fixture
def mova_tiny_config():
    return layout.derive_config(json.loads(MOVA_CONFIG.read_text()), tiny=True, layers=None)


def test_the_words_are_those_of_splitmix64(drawn):
    """The reference output of SplitMix64 for the seed 1234567, whole and from the middle."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    key = torch.tensor([1234567])
    assert drawn._words(key, 0, 5).numpy().view(numpy.uint64).tolist() == [expected]
    assert drawn._words(key, 3, 2).numpy().view(numpy.uint64).tolist() == [expected[3:]]


def test_the_quantiles_are_a_standard_normal_distribution(drawn):
    table = drawn.quantiles.double()
    assert table.numel() == 1 << 16
    assert table.sum() == 0
    assert abs(table.std() - 1) < 1e-4
    assert (table.diff() > 0).all()
    draws = drawn._normals(torch.tensor([1, 2]), 0, 1 << 20)
    assert draws.shape == (2, 1 << 20)
    assert (draws.mean(1).abs() < 0.005).all()
    assert ((draws.std(1) - 1).abs() < 0.005).all()
    assert abs(torch.corrcoef(draws)[0, 1]) < 0.005


def test_neither_threads_nor_pieces_have_an_influence(tiny_mova, tmp_path, monkeypatch):
    for number, (piece, jobs) in enumerate([(4096, 1), (1 << 30, 3)]):
        monkeypatch.setitem(values.PIECE_BYTES, "cpu", piece)
        synthesise(MOVA_CONFIG, tmp_path / str(number), tiny=True, jobs=jobs)
        assert digests(tmp_path / str(number)) == digests(tiny_mova)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pieces_cover_the_full_model_in_order_and_stay_small(monkeypatch, device):
    """The plan of the full model for either device; nothing is drawn."""
    config = json.loads(MOVA_CONFIG.read_text())
    inventory = k2_horizon.tensors(config)
    drawn = values.Values(config, inventory, seed=0, knobs=Knobs(), device=torch.device("cpu"))
    drawn.piece_bytes = values.PIECE_BYTES[device]
    monkeypatch.setattr(drawn, "_draw", lambda *piece: piece)
    for shard in layout.plan_shards(inventory, layout.SHARD_BYTES).values():
        rows = dict.fromkeys(shard, 0)
        order = []
        for names, first, last in drawn._pieces(shard):
            size = 0
            for name in names:
                shape = inventory[name].shape
                assert rows[name] == first
                rows[name] = shape[0] if last is None else last
                size += inventory[name].nbytes // shape[0] * (rows[name] - first)
                order.append(name)
            assert size <= drawn.piece_bytes
        assert rows == {name: inventory[name].shape[0] for name in shard}
        assert list(dict.fromkeys(order)) == shard


def test_the_bytes_of_a_generator_never_change(tiny_mova):
    """Whoever changes them gives the generator a new name, and puts its digest here."""
    assert values.GENERATOR == "splitmix64-quantiles-1"
    digest = hashlib.sha256(json.dumps(shards_of(tiny_mova), sort_keys=True).encode()).hexdigest()
    assert digest == "c98eeb3aa1826378c4fc63ba3c575d0687afb6139dfc7c0574af13d6262b01b6"


def test_codes_use_the_range_and_scales_vary(tiny_mova):
    source = read_checkpoint(tiny_mova)
    codes = torch.cat([tensor.view(torch.uint8).flatten() for tensor in source.values() if tensor.element_size() == 1])
    counts = torch.bincount(codes, minlength=256)
    assert counts[0x7F] == counts[0xFF] == 0
    # From 1/16 on: neighbours in the table of draws lie further apart than the smallest magnitudes.
    assert (counts[0x18:0x7F] > 0).all()
    assert (counts[0x98:0xFF] > 0).all()
    scales = torch.cat([tensor.flatten() for name, tensor in source.items() if name.endswith("_scale_inv")])
    assert (torch.frexp(scales).mantissa != 0.5).all()
    assert scales.max() / scales.min() > 2


def test_the_seed_alone_decides_the_bytes(tiny_mova, tmp_path):
    synthesise(MOVA_CONFIG, tmp_path / "same", tiny=True)
    synthesise(MOVA_CONFIG, tmp_path / "other", tiny=True, seed=1)
    assert digests(tmp_path / "same") == digests(tiny_mova)
    other, before = shards_of(tmp_path / "other"), shards_of(tiny_mova)
    assert len(other) > 1
    assert all(other[name] != before[name] for name in before)


def test_a_tensor_keeps_its_values_when_layers_are_added(tiny_mova, tmp_path):
    synthesise(MOVA_CONFIG, tmp_path / "more", tiny=True, layers=6)
    fewer, more = read_checkpoint(tiny_mova), read_checkpoint(tmp_path / "more")
    assert len(more) > len(fewer)
    for name, tensor in fewer.items():
        assert torch.equal(tensor.view(torch.uint8), more[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", ["K2-Horizon-MoVA-36B-A4B-FP8", "K2-Horizon-7B-FP8"])
def test_files_hold_exactly_the_inventory_of_their_config(tmp_path, name):
    synthesise(PUBLISHED / f"{name}.config.json", tmp_path / "out", tiny=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    found = {
        name: k2_horizon.Tensor(HEADER_DTYPE[tensor.dtype], tuple(tensor.shape))
        for name, tensor in read_checkpoint(tmp_path / "out").items()
    }
    assert found == k2_horizon.tensors(config)


def test_values_are_finite_and_scales_distinct_and_positive(tiny_mova):
    for name, tensor in read_checkpoint(tiny_mova).items():
        assert torch.isfinite(tensor.float()).all(), name
        if name.endswith("_scale_inv"):
            assert (tensor > 0).all(), name
            assert tensor.unique().numel() == tensor.numel(), name


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("model.layers.3.mlp.experts.0.gate_proj", 1.0),
        ("model.layers.3.mlp.experts.0.down_proj", Knobs().down_gain),
        ("model.layers.0.self_attn.q_proj", Knobs().attention_gain),
        ("model.layers.0.self_attn.o_proj", Knobs().output_gain),
    ],
)
def test_weights_have_the_deviation_that_the_knobs_say(tiny_mova, name, gain):
    source = read_checkpoint(tiny_mova)
    weight = source[f"{name}.weight"]
    if weight.dtype == torch.float8_e4m3fn:
        weight = dequantise(weight, source[f"{name}.weight_scale_inv"])
    # Few blocks: the mean square of their scales is within a tenth of what the spread says.
    assert weight.float().std() * weight.shape[1] ** 0.5 == pytest.approx(gain, rel=0.1)


def test_the_manifest_says_how_the_values_were_made(tiny_mova):
    manifest = json.loads((tiny_mova / "synthetic.json").read_text())
    assert manifest["synthetic"] is True
    assert manifest["generator"] == values.GENERATOR
    assert manifest["device"] == "cpu"
    assert manifest["torch"] == torch.__version__
    assert manifest["knobs"] == asdict(Knobs())
    assert manifest["clusters"] == 8


def test_a_missing_gpu_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotRun, match="no usable GPU"):
        synthesise(MOVA_CONFIG, tmp_path / "out", tiny=True, device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bytes(tiny_mova, tmp_path):
    synthesise(MOVA_CONFIG, tmp_path / "out", tiny=True, device="cuda")
    assert shards_of(tmp_path / "out") == shards_of(tiny_mova)


def test_the_tokenizer_reads_and_prints_any_text_and_any_id(tiny_mova):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_mova / "tokenizer.json"))
    config = json.loads((tiny_mova / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    text = "Grüße, 世界 \n\t<|synthetic-300|> 🙂"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|end|>").ids == [config["eos_token_id"]]
    assert tokenizer.decode([300, config["vocab_size"] - 1]) == "<|synthetic-300|><|synthetic-1023|>"


def test_a_used_directory_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(Rejected, match="not empty"):
        synthesise(MOVA_CONFIG, tmp_path, tiny=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
