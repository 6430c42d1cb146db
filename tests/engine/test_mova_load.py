"""The load check can fail: every kind of difference between a checkpoint and the loaded model is reported."""

import json
import shutil
import struct

import pytest

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, faults

LAYER = "model.layers.4"


def payload(directory, name):
    """Return (shard path, byte offset, byte size) of a tensor, from the header alone."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    path = directory / index["weight_map"][name]
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        begin, end = json.loads(file.read(length))[name]["data_offsets"]
    return path, 8 + length + begin, end - begin


@pytest.fixture
def damaged(tiny_mova, tmp_path):
    """Return a function that flips the lowest bit of a tensor's first byte in a copy of the checkpoint."""
    copy = tmp_path / "damaged"
    shutil.copytree(tiny_mova, copy)

    def flip(name):
        path, offset, _ = payload(copy, name)
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        return copy

    return flip


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.mlp.experts.15.gate_proj.weight_scale_inv",
        f"{LAYER}.mlp.experts.0.up_proj.weight_scale_inv",
        f"{LAYER}.mlp.experts.7.down_proj.weight_scale_inv",
        f"{LAYER}.mlp.experts.3.up_proj.weight",
        f"{LAYER}.mlp.gate.bias",
        f"{LAYER}.mlp.shared_experts.up_proj.weight",
        f"{LAYER}.self_attn.v_experts.7.weight",
        f"{LAYER}.self_attn.gate_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_flipped_bit_on_disk_is_reported(loaded_mova, damaged, name):
    """The model was loaded from the intact files: exactly the damaged tensor differs."""
    found = faults(loaded_mova, damaged(name))
    if name.endswith("_scale_inv"):
        weight = name.removesuffix("_scale_inv")
        assert found.pop(0).startswith(f"{weight}: dequantises to other values in ")
    (fault,) = found
    assert fault.startswith(f"{name}: differs in ")


def test_a_scale_damaged_before_loading_is_reported(tiny_mova, damaged):
    """The other direction: the engine loads the damaged files, the comparison is with the intact ones."""
    name = f"{LAYER}.mlp.experts.9.down_proj.weight_scale_inv"
    model = engine_cpu.load_model(damaged(name), overrides=PROVENANCE)
    fused = f"{LAYER}.mlp.experts.w2_weight"
    assert faults(model, tiny_mova) == [
        f"{name.removesuffix('_scale_inv')}: dequantises to other values in {fused}",
        f"{name}: differs in {fused}_scale_inv",
    ]


def test_swapped_experts_are_reported(loaded_mova, tiny_mova):
    scale = loaded_mova.get_parameter(f"{LAYER}.mlp.experts.w13_weight_scale_inv").data
    original = scale.clone()
    scale[[0, 1]] = scale[[1, 0]]
    try:
        found = faults(loaded_mova, tiny_mova)
    finally:
        scale.copy_(original)
    scales = [line for line in found if "weight_scale_inv: differs" in line]
    weights = [line for line in found if ".weight: dequantises to other values" in line]
    assert (len(found), len(scales), len(weights)) == (8, 4, 4)


def test_a_parameter_without_source_and_a_source_without_parameter_are_reported(loaded_mova, tiny_mova):
    router = loaded_mova.model.layers[4].mlp.gate
    bias = router.bias
    router.bias = None
    router.register_parameter("extra", bias)
    try:
        found = faults(loaded_mova, tiny_mova)
    finally:
        del router.extra
        router.bias = bias
    assert found == [
        f"{LAYER}.mlp.gate.bias: in the checkpoint, but in no parameter",
        f"{LAYER}.mlp.gate.bias: the model has no such parameter",
        f"{LAYER}.mlp.gate.extra: a parameter without a source",
    ]
    assert faults(loaded_mova, tiny_mova) == []
