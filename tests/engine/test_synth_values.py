"""Values of synthetic checkpoints: deterministic, correctly encoded, readable by the safetensors library."""

import hashlib

import numpy
import pytest
import torch

from qualify.checks.loading import read_checkpoint
from qualify.errors import Rejected
from qualify.models import MOVA_CONFIG, PUBLISHED, k2_horizon
from qualify.synth import values
from qualify.synth.command import synthesise

HEADER_DTYPE = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


def digests(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_all_256_e4m3_codes_decode_as_torch_decodes_them():
    codes = numpy.arange(256, dtype=numpy.uint8)
    reference = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    assert numpy.array_equal(values.decode_e4m3(codes), reference, equal_nan=True)


def test_encoders_round_as_torch_does():
    draws = numpy.random.default_rng(1).standard_normal(1 << 18, dtype=numpy.float32) * 200
    saturated = torch.from_numpy(draws.clip(-448, 448))
    assert numpy.array_equal(values.encode_e4m3(draws), saturated.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    assert numpy.array_equal(values.encode_bf16(draws), torch.from_numpy(draws).bfloat16().view(torch.uint8).numpy())


def test_the_seed_alone_decides_the_bytes(tiny_mova, tmp_path):
    synthesise(MOVA_CONFIG, tmp_path / "same", tiny=True)
    synthesise(MOVA_CONFIG, tmp_path / "other", tiny=True, seed=1)
    assert digests(tmp_path / "same") == digests(tiny_mova)
    other = digests(tmp_path / "other")
    shards = [name for name in other if name.endswith(".safetensors")]
    assert len(shards) > 1
    assert all(other[name] != digests(tiny_mova)[name] for name in shards)


def test_a_tensor_keeps_its_values_when_layers_are_added(tiny_mova, tmp_path):
    synthesise(MOVA_CONFIG, tmp_path / "more", tiny=True, layers=6)
    fewer, more = read_checkpoint(tiny_mova), read_checkpoint(tmp_path / "more")
    assert len(more) > len(fewer)
    for name, tensor in fewer.items():
        assert torch.equal(tensor.view(torch.uint8), more[name].view(torch.uint8)), name


@pytest.mark.parametrize("name", ["K2-Horizon-MoVA-36B-A4B-FP8", "K2-Horizon-7B-FP8"])
def test_files_hold_exactly_the_inventory_of_their_config(tmp_path, name):
    import json

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


def test_dequantised_weights_have_the_deviation_that_the_knobs_say(tiny_mova):
    from qualify.checks.loading import dequantise

    source = read_checkpoint(tiny_mova)
    name = "model.layers.3.mlp.experts.0.gate_proj.weight"
    deviation = dequantise(source[name], source[f"{name}_scale_inv"]).std()
    # Scales spread over an octave either way raise the deviation by up to a quarter.
    assert 0.8 < deviation * source[name].shape[1] ** 0.5 < 1.5


def test_a_used_directory_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(Rejected, match="not empty"):
        synthesise(MOVA_CONFIG, tmp_path, tiny=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
