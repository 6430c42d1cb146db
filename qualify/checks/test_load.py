"""Stage "load": the engine's own loader reads synthetic checkpoints in the published formats exactly."""

from collections import Counter

import pytest

from qualify import engine_cpu
from qualify.checks import loading


def test_every_parameter_equals_its_source(loaded_mova, tiny_mova):
    assert loading.faults(loaded_mova, tiny_mova) == []


def methods_of(model):
    """Module name -> class of its quantisation method."""
    return {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }


def test_only_the_routed_experts_are_quantised(loaded_mova):
    methods = methods_of(loaded_mova)
    experts = {name for name in methods if name.endswith(".mlp.experts")}
    assert len(experts) == 2
    assert {methods.pop(name) for name in experts} == {"Fp8MoEMethod"}
    # Attention projections, value router, shared experts, dense prefix, embedding and head.
    assert set(Counter(methods.values())) == {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}


@pytest.fixture(scope="module", params=["tiny_dense", "tiny_moe"])
def compressed_tensors(request):
    """(directory, loaded model) of a dense checkpoint and of one with routed experts."""
    engine_cpu.start()
    directory = request.getfixturevalue(request.param)
    return directory, engine_cpu.load_model(directory, overrides={})


def test_every_parameter_of_compressed_tensors_equals_its_source(compressed_tensors):
    directory, model = compressed_tensors
    assert loading.faults(model, directory) == []


def test_what_compressed_tensors_declares_is_quantised_and_nothing_else(compressed_tensors):
    _, model = compressed_tensors
    methods = methods_of(model)
    quantised = {name: methods.pop(name) for name in list(methods) if methods[name].startswith("CompressedTensors")}
    if model.config.num_experts:
        experts = [f"model.layers.{index}.mlp.experts" for index in (3, 4)]
        assert quantised == dict.fromkeys(experts, "CompressedTensorsFusedMoEMethod")
    else:
        leaves = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        names = [f"model.layers.{index}.{leaf}" for index in (0, 1) for leaf in leaves]
        assert quantised == dict.fromkeys(names, "CompressedTensorsLinearMethod")
    assert set(methods.values()) <= {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
