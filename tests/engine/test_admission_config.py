"""Admission, key by key: what config.json may say, what the engine must have made of it, and what it may run with."""

import copy
import math
from types import SimpleNamespace

import pytest

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE

COUNTS = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layernorm_num_groups",
    "max_position_embeddings",
    "moe_intermediate_size",
    "mova_num_experts",
    "mova_num_experts_per_tok",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_shared_experts",
    "vocab_size",
)


def as_object(config):
    """A config dict as the library's class; imported late, since the engine sets its environment first."""
    from transformers import PretrainedConfig

    return PretrainedConfig.from_dict(config)


def refusal(config):
    """The sentence with which the engine refuses to build ``config``."""
    with pytest.raises(ValueError) as caught:
        engine_cpu.build_model(config, overrides=PROVENANCE)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def config_refusal(config, **values):
    """The sentence of the config check alone, where the engine or its libraries would stumble before it.

    ``values`` are set behind the library's own reading of the config, which converts some of them."""
    from sglang.srt.layers.quantization import mova_fp8

    config = as_object(config)
    vars(config).update(values)
    with pytest.raises(ValueError) as caught:
        mova_fp8.check_config(config)
    return str(caught.value)


def test_the_published_config_passes_the_config_check(published, tiny):
    """The control of every check_config refusal below."""
    from sglang.srt.layers.quantization import mova_fp8

    for config in (published, tiny):
        mova_fp8.check_config(as_object(config))


# --- architecture -----------------------------------------------------------------------------------------------

NATIVE = {
    "num_values": 8,
    "num_values_per_tok": 4,
    "num_dense_layers": 3,
    "apply_attn_gate": True,
    "attn_gate_func": "softplus",
}


@pytest.mark.parametrize("native", [{}, NATIVE], ids=["published keys", "native keys"])
@pytest.mark.parametrize(
    "architectures",
    [
        ["XllmForCausalLM"],
        ["K2HorizonForCausalLM", "XllmForCausalLM"],
        ["XllmForCausalLM", "K2HorizonForCausalLM"],
        ["K2HorizonForCausalLM", "K2HorizonForCausalLM"],
    ],
    ids=" ".join,
)
def test_another_architecture_is_refused(tiny, architectures, native):
    """XllmForCausalLM takes the same tensors and computes something else with them."""
    tiny |= native | {"architectures": architectures}
    assert f"architectures in config.json is {architectures} and must be ['K2HorizonForCausalLM']" in refusal(tiny)


@pytest.mark.parametrize("architectures", [None, [], "K2HorizonForCausalLM", ["k2horizonforcausallm"]], ids=str)
def test_an_architecture_that_is_not_declared_is_refused(tiny, architectures):
    assert "architectures in config.json is " in config_refusal(tiny, architectures=architectures)


def test_another_model_type_is_refused():
    """Admission itself, whoever calls it: the rest of the config could be that of a MoVA model."""
    from sglang.srt.layers.quantization import mova_fp8
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    effective = Fp8Config(True, weight_block_size=[128, 128])
    for model_type in ("xllm", "K2_horizon", None):
        with pytest.raises(ValueError, match=f"model_type {model_type!r} with quantization 'fp8'"):
            mova_fp8.admit(SimpleNamespace(model_type=model_type, mova_num_experts=8), effective)


def test_the_native_config_is_refused_by_its_model_type(tiny):
    tiny |= NATIVE | {"architectures": ["XllmForCausalLM"], "model_type": "xllm"}
    assert "model_type 'xllm' with quantization 'fp8' has to be exported as compressed-tensors" in refusal(tiny)


# --- keys and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["_x", "_softcap", "__x__", "_n_group"])
def test_an_unknown_key_with_an_underscore_is_refused(tiny, key):
    tiny[key] = 1
    assert f"config.json has the key {key!r}, which no published config has" in refusal(tiny)


@pytest.mark.parametrize("key", COUNTS)
def test_an_absurd_count_is_refused(tiny, key):
    said = config_refusal(tiny, **{key: 10**30})
    assert f"{key} in config.json is 1{'0' * 30} and must be an integer from 1 to 1,048,576:" in said


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "num_experts", "mova_num_experts"])
def test_an_absurd_count_is_refused_before_the_modules_are_listed(tiny, key, monkeypatch):
    """Listing the names of 10**30 modules does not come to an end."""
    from sglang.srt.layers.quantization import mova_fp8

    monkeypatch.setattr(mova_fp8, "bf16_modules", lambda config: pytest.fail("modules were listed"))
    tiny[key] = 10**30
    assert f"{key} in config.json is 1{'0' * 30} and must be " in refusal(tiny)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", None])
def test_a_count_that_is_none_is_refused(tiny, key, value):
    assert f"{key} in config.json is {value!r} and must be " in config_refusal(tiny, **{key: value})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0, 0.0, -1e-6, True, "1", None], ids=str)
@pytest.mark.parametrize("key", ["rms_norm_eps", "router_scaling_factor"])
def test_a_number_that_is_not_positive_and_finite_is_refused(tiny, key, value):
    tiny[key] = value
    assert f"{key} in config.json is {value!r} and must be a positive number" in refusal(tiny)


@pytest.mark.parametrize("change", [{"factor": 2.0}, {"partial_rotary_factor": 0.5}], ids=str)
def test_another_rope_key_is_refused(tiny, change):
    tiny["rope_parameters"] |= change
    assert "rope_parameters in config.json is " in refusal(tiny)


@pytest.mark.parametrize("gone", [True, False], ids=["missing", "null"])
def test_a_config_without_rope_parameters_is_refused(tiny, gone):
    """The engine would rotate with a base of its own."""
    tiny["rope_parameters"] = None
    if gone:
        del tiny["rope_parameters"]
    assert "rope_parameters in config.json is None and must be a mapping with a rope_type of default" in refusal(tiny)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 1e7},
        {"rope_type": "linear", "rope_theta": 1e7},
        {"rope_type": None, "rope_theta": 1e7},
        {"rope_theta": 1e7},
        {"rope_type": "default"},
        {},
        [["rope_type", "default"], ["rope_theta", 1e7]],
        "default",
    ],
    ids=str,
)
def test_other_rope_parameters_are_refused(tiny, rope):
    said = config_refusal(tiny, rope_parameters=rope)
    assert f"rope_parameters in config.json is {rope!r} and must be " in said


@pytest.mark.parametrize("base", [math.inf, math.nan, 0, -1e7, "1e7", True, None], ids=str)
def test_a_rope_base_that_is_no_number_is_refused(tiny, base):
    said = config_refusal(tiny, rope_parameters={"rope_type": "default", "rope_theta": base})
    assert f"rope_parameters.rope_theta in config.json is {base!r} and must be a positive number" in said


@pytest.mark.parametrize(
    "layers",
    [[1, 2, 3], [0, 2], [0, 1, 1], [2, 1, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [4], None, "012", {"0": 0}],
    ids=str,
)
def test_dense_layers_that_are_no_prefix_are_refused(tiny, layers):
    said = config_refusal(tiny, mlp_only_layers=layers)
    assert f"mlp_only_layers in config.json is {layers!r} and must be the list of the first" in said


@pytest.mark.parametrize("key", ["v_head_dim", "swa_head_dim", "swa_v_head_dim"])
def test_another_head_width_for_the_cache_is_refused(tiny, key):
    """The engine sizes its cache by these keys; the model computes with head_dim."""
    tiny[key] = 32
    assert f"{key} in config.json is 32 and must be head_dim, 64:" in refusal(tiny)


def test_a_model_of_dense_layers_only_is_refused_by_the_engine_too(tiny):
    tiny["mlp_only_layers"] = list(range(tiny["num_hidden_layers"]))
    assert "mlp_only_layers in config.json is [0, 1, 2, 3, 4]" in refusal(tiny)


# --- quantization_config ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[128.0, 128.0], [128, 128.0], [128], [128, 128, 1], "128", {"0": 128}], ids=str)
def test_another_spelling_of_the_block_size_is_refused(tiny, value):
    """128.0 equals 128 and is no extent of a tensor."""
    from sglang.srt.layers.quantization import mova_fp8

    tiny["quantization_config"]["weight_block_size"] = value
    with pytest.raises(ValueError, match=r"quantization_config\.weight_block_size is .* and must be "):
        mova_fp8.check_format(tiny["quantization_config"])


def test_a_block_size_of_floats_is_refused_by_the_engine_too(tiny):
    tiny["quantization_config"]["weight_block_size"] = [128.0, 128.0]
    assert "quantization_config.weight_block_size is [128.0, 128.0] and must be [128, 128]" in refusal(tiny)


@pytest.mark.parametrize("entry", ["lm_head", "model.layers.4.self_attn.q_proj"])
def test_a_module_that_is_named_twice_is_refused(tiny, entry):
    tiny["quantization_config"]["ignored_layers"].append(entry)
    assert f"quantization_config.ignored_layers names {entry!r} twice" in refusal(tiny)


# --- what the engine made of it ---------------------------------------------------------------------------------


@pytest.fixture
def effective(monkeypatch):
    """Return a function that sets attributes of the engine's quantisation config, behind the one in config.json."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    original = Fp8Config.from_config

    def override(change):
        def from_config(cls, config):
            result = original(config)
            change(result)
            return result

        monkeypatch.setattr(Fp8Config, "from_config", classmethod(from_config))

    return override


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("scale_fmt", "ue8m0"),
        ("kv_cache_quant_algo", "FP8"),
        ("activation_scheme", "static"),
        ("weight_block_size", [64, 64]),
    ],
)
def test_another_format_than_the_declared_one_is_refused(tiny, effective, attribute, value):
    effective(lambda config: setattr(config, attribute, value))
    assert f"The engine runs MoVA FP8 with {attribute} {value!r}" in refusal(tiny)


@pytest.mark.parametrize(
    "change",
    [
        lambda names: names.append("model.layers.3.mlp.experts"),
        lambda names: names.append("experts"),
        lambda names: names.remove("lm_head") or names.remove("model.lm_head"),
        lambda names: names.clear(),
    ],
    ids=["experts", "part of a name", "one less", "none"],
)
def test_another_scope_than_the_declared_one_is_refused(tiny, effective, change):
    effective(lambda config: change(config.ignored_layers))
    assert "The engine's list of unquantised modules differs from quantization_config.ignored_layers" in refusal(tiny)


# --- topology and flags -----------------------------------------------------------------------------------------


def test_a_hidden_size_of_broken_blocks_is_refused(tiny):
    tiny["hidden_size"] = 448
    assert "hidden_size 448 = 3.5 x 128 cannot be split into whole blocks" in refusal(tiny)


def test_the_hidden_size_is_not_split_over_ranks(published):
    """Ranks that share an expert split its width; 2560 / 8 = 320 would be broken blocks."""
    from sglang.srt.layers.quantization import mova_fp8

    config = copy.deepcopy(published) | {"moe_intermediate_size": 1024}
    mova_fp8.check_topology(as_object(config), tp=8, ep=1, moe_tp=8, attn_tp=8)


def test_the_memory_saver_is_refused(tiny):
    """It hands the memory of weights back, and takes other memory for them later."""
    from sglang.srt.runtime_context import get_exec

    with get_exec().features.override(enable_memory_saver=True):
        assert "MoVA FP8 is not served with --enable-memory-saver True" in refusal(tiny)
