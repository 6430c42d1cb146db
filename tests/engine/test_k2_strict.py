"""The ledger on compressed-tensors beyond single faults: scopes that load, one load, no way past it, what runs FP8."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qualify import engine_cpu
from qualify.checks.loading import faults, read_checkpoint
from qualify.models import assumed, k2_horizon
from qualify.synth import layout
from tests.engine.strict import Untouchable, forward, refusal

CPU = torch.device("cpu")
DTYPES = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}


@pytest.fixture(params=["tiny_dense", "tiny_moe"])
def directory(request):
    """Each of the two checkpoints."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def empty(directory):
    """The built model, nothing loaded."""
    return engine_cpu.empty_model(directory, overrides={})


@pytest.fixture
def source(directory):
    return read_checkpoint(directory)


@pytest.fixture
def loaded(empty, source):
    empty.load_weights(source.items())
    postprocess(empty)
    return empty


def postprocess(model):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    DefaultModelLoader.postprocess_weights(model, CPU)


# --- what loads -------------------------------------------------------------------------------------------------

MLP = r"re:.*\.mlp\.(gate|up|down)_proj"
ROUTED = r"re:.*\.mlp\.experts\.\d+\..*"


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        ([ROUTED], []),
        (["Linear"], ["lm_head"]),
        (["Linear"], ["lm_head", ROUTED]),
        ([MLP], ["re:.*shared_experts"]),
        ([r"re:.*layers\.4\.mlp\.experts\..*"], []),
        (["o_proj", r"re:.*\.self_attn\.[qkv]_proj"], []),
    ],
    ids=["experts", "everything", "all-but-experts", "prefix-mlp", "experts-of-one-layer", "attention"],
)
def test_mixed_checkpoints_load_as_declared(targets, ignore, tmp_path):
    """Random values in a scope that no published checkpoint has; every parameter equals its source bit for bit."""
    config = layout.derive_config(assumed.config_375b(), tiny=True, layers=None)
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    config["quantization_config"]["ignore"] = ignore
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.rand(tensor.shape, generator=generator) + 0.01).to(DTYPES[tensor.dtype])
        for name, tensor in k2_horizon.tensors(config).items()
    }
    assert any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert faults(engine_cpu.load_model(tmp_path, overrides={}), tmp_path) == []


def test_scales_are_widened_exactly_and_may_be_stored_as_float32(empty, source, directory):
    stream = {name: tensor.float() if name.endswith("_scale") else tensor for name, tensor in source.items()}
    assert {source[name].dtype for name in source if name.endswith("_scale")} == {torch.bfloat16}
    empty.load_weights(stream.items())
    assert faults(empty, directory) == []


# --- one load, one report ---------------------------------------------------------------------------------------


def test_the_report_names_the_format_and_every_defect(empty, source):
    weight = next(name for name in source if name.endswith("down_proj.weight_scale")).removesuffix("_scale")
    stream = dict(source)
    del stream["lm_head.weight"]
    stream["model.norm.weight"] = stream["model.norm.weight"].float()
    stream[f"{weight}_scale"] = torch.zeros_like(stream[f"{weight}_scale"])
    stream["stray"] = torch.ones(1)
    first, *lines = refusal(empty.load_weights, stream.items()).split("\n")
    assert first.startswith(
        "The checkpoint is not a complete K2-Horizon compressed-tensors FP8 checkpoint (4 defect(s)"
    )
    blocks = stream[f"{weight}_scale"].numel()
    assert lines == [
        "dtype (1):",
        "  model.norm.weight: is torch.float32, must be torch.bfloat16",
        "missing (1):",
        "  lm_head.weight: torch.bfloat16 (1024, 384) is in no shard",
        "unexpected (1):",
        "  stray: torch.float32 (1,) is no tensor of this model",
        "value (1):",
        f"  {weight}_scale: {blocks} of {blocks} values are not finite, positive and in range",
    ]


def test_a_second_load_is_refused_before_its_iterator_is_touched(loaded, directory):
    assert "second time" in refusal(loaded.load_weights, Untouchable())
    assert faults(loaded, directory) == []


def test_a_loaded_model_has_its_own_forward_back(loaded):
    assert loaded.forward.__func__ is type(loaded).forward


def test_nothing_serves_before_all_has_passed(empty, source):
    assert "never loaded by the strict loader" in refusal(forward, empty)
    refusal(empty.load_weights, list(source.items())[1:])
    postprocess(empty)
    assert "its checkpoint was refused" in refusal(forward, empty)


def test_weights_that_bypass_the_ledger_are_not_served(empty):
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    initialize_dummy_weights(empty)
    postprocess(empty)
    assert "never loaded by the strict loader" in refusal(forward, empty)


# --- what is quantised ------------------------------------------------------------------------------------------


def test_a_module_that_lost_its_scheme_is_reported(empty, source):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    name = "model.layers.4.mlp.experts" if empty.config.num_experts else "model.layers.1.mlp.down_proj"
    empty.get_submodule(name).quant_method = UnquantizedLinearMethod()
    report = refusal(empty.load_weights, source.items())
    assert f"{name}: runs UnquantizedLinearMethod, must run FP8 in blocks of 128x128" in report


def test_other_blocks_are_reported(empty, source):
    name = "model.layers.4.mlp.experts" if empty.config.num_experts else "model.layers.1.mlp.down_proj"
    empty.get_submodule(name).scheme.weight_block_size = [64, 128]
    assert f"{name}: runs CompressedTensors" in refusal(empty.load_weights, source.items())


def test_static_activation_scales_are_reported(empty, source):
    """Of one number that no file has."""
    moe = empty.config.num_experts
    name = "model.layers.4.mlp.experts" if moe else "model.layers.1.mlp.down_proj"
    setattr(empty.get_submodule(name).scheme, "static_input_scales" if moe else "is_static_input_scheme", True)
    assert f"{name}: runs CompressedTensors" in refusal(empty.load_weights, source.items())


def test_a_module_quantised_beyond_the_scope_is_reported(tiny_moe):
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod

    model = engine_cpu.empty_model(tiny_moe, overrides={})
    name = "model.layers.4.mlp.shared_experts.down_proj"
    model.get_submodule(name).quant_method = CompressedTensorsLinearMethod(model.quant_config)
    report = refusal(model.load_weights, read_checkpoint(tiny_moe).items())
    assert f"{name}: runs CompressedTensorsLinearMethod, must be unquantised" in report


def test_what_post_processing_quantises_is_reported(empty, source):
    """After the load all is well; then a norm becomes FP8."""
    empty.load_weights(source.items())
    norm = empty.model.layers[1].input_layernorm
    norm.weight.data = norm.weight.data.to(torch.float8_e4m3fn)
    report = refusal(postprocess, empty)
    assert "input_layernorm.weight: is held as torch.float8_e4m3fn, must be torch.bfloat16" in report
    assert "its checkpoint was refused" in refusal(forward, empty)


def test_scales_that_were_rounded_to_powers_of_two_are_reported(empty, source):
    empty.load_weights(source.items())
    leaf = "layers.4.mlp.experts.w2_weight_scale" if empty.config.num_experts else "layers.1.mlp.down_proj.weight_scale"
    empty.get_parameter(f"model.{leaf}").format_ue8m0 = True
    assert f"model.{leaf}: was requantised to UE8M0" in refusal(postprocess, empty)


def test_a_declared_module_that_was_not_built_is_reported(empty, source):
    """The scope names a module that the live model does not have."""
    name = "model.layers.1.mlp.down_proj"
    assert name in dict(empty.named_modules())
    checkpoint_format = empty.checkpoint_ledger.format
    more = checkpoint_format.quantised | {"model.layers.1.mlp.other_proj"}
    found = type(checkpoint_format)(frozenset(more)).scope_faults(empty)
    assert found == [("model.layers.1.mlp.other_proj", "is not a module of the model as it was built")]
