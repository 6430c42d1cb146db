"""What the engine admits as MoVA FP8, before it allocates anything: the published format and nothing else."""

import copy
from types import SimpleNamespace

import pytest
import torch

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE
from qualify.models import k2_horizon
from qualify.synth.layout import derive_config

WORKING = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)]


def build(config, **kwargs):
    return engine_cpu.build_model(config, overrides=PROVENANCE, **kwargs)


def refusal(config, **kwargs):
    """The sentence with which the engine refuses to build ``config``."""
    with pytest.raises(ValueError) as caught:
        build(config, **kwargs)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_the_published_config_is_admitted_whole(published):
    """48 layers on the meta device: 45 FP8 expert modules, nothing else quantised, no tensor unaccounted
    for."""
    model = build(published)
    methods = [type(getattr(module, "quant_method", None)).__name__ for module in model.modules()]
    assert methods.count("Fp8MoEMethod") == 45
    assert methods.count("UnquantizedLinearMethod") == 48 * 4 + 3 + 45 + 2 * 48
    assert not {"Fp8LinearMethod", "Fp8KVCacheMethod", "UnquantizedFusedMoEMethod"} & set(methods)
    kept = {entry for entry in model.quant_config.ignored_layers if entry.startswith("model.layers")}
    listed = published["quantization_config"]["ignored_layers"]
    assert kept == {entry for entry in listed if ".self_attn." not in entry and entry.startswith("model.layers")}
    elements = sum(parameter.numel() for parameter in model.parameters())
    bytes_per_element = k2_horizon.ITEMSIZE
    assert elements == sum(
        tensor.nbytes // bytes_per_element[tensor.dtype] for tensor in k2_horizon.tensors(published).values()
    )


def test_the_engine_and_the_inventory_name_the_same_bf16_modules(published):
    """Two independent derivations, and the list that was published."""
    from sglang.srt.layers.quantization import mova_fp8
    from transformers import PretrainedConfig

    wanted = set(published["quantization_config"]["ignored_layers"])
    assert len(wanted) == 3408
    assert mova_fp8.bf16_modules(PretrainedConfig.from_dict(published)) == wanted
    assert set(k2_horizon.bf16_modules(published)) == wanted


FORMAT = [
    ("activation_scheme", "static"),
    ("activation_scheme", None),
    ("weight_block_size", [64, 128]),
    ("weight_block_size", [1, 32]),
    ("weight_block_size", None),
    ("scale_fmt", "ue8m0"),
    ("fmt", "e5m2"),
    ("kv_cache_quant_algo", "FP8"),
    ("modules_to_not_convert", ["lm_head"]),
    ("packed_modules_mapping", {"qkv_proj": ["q_proj"]}),
    ("store_dtype", "mxfp4"),
    ("note", "an unknown key"),
    ("ignored_layers", None),
    ("ignored_layers", []),
    ("ignored_layers", "lm_head"),
]


@pytest.mark.parametrize(("key", "value"), FORMAT, ids=lambda part: str(part)[:24])
def test_another_format_is_refused_by_key(tiny, key, value):
    tiny["quantization_config"][key] = value
    # The engine itself refuses another activation scheme, in its own words.
    with pytest.raises(ValueError, match=key.replace("_", "[_ ]")):
        build(tiny)


def test_a_key_that_repeats_the_format_is_admitted(tiny):
    tiny["quantization_config"]["fmt"] = "e4m3"
    build(tiny)


def test_missing_format_keys_are_refused(tiny):
    for key in ("activation_scheme", "weight_block_size", "ignored_layers"):
        config = copy.deepcopy(tiny)
        del config["quantization_config"][key]
        with pytest.raises(ValueError, match=key):
            build(config)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("is_checkpoint_fp8_serialized", False),
        ("activation_scheme", "static"),
        ("weight_block_size", [1, 32]),
        ("use_mxfp8", True),
        ("is_fp4_experts", True),
        ("scale_fmt", "ue8m0"),
        ("kv_cache_quant_algo", "FP8"),
    ],
)
def test_the_engine_must_mean_the_same_format(attribute, value):
    """The declared format is right and something between it and the engine changed it."""
    from sglang.srt.layers.quantization import mova_fp8
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    effective = Fp8Config(True, weight_block_size=[128, 128])
    mova_fp8.check_effective_format(effective)
    setattr(effective, attribute, value)
    with pytest.raises(ValueError, match=attribute):
        mova_fp8.check_effective_format(effective)


def test_quantising_on_the_fly_is_refused(tiny):
    del tiny["quantization_config"]
    assert "serialized FP8 weights only" in refusal(tiny, quantization="fp8")


def test_mxfp8_is_refused(tiny):
    tiny["quantization_config"].update(quant_method="mxfp8", weight_block_size=[1, 32])
    with pytest.raises(ValueError, match="mxfp8"):
        build(tiny)


def test_the_dense_model_is_not_admitted_as_native_fp8(published):
    dense = copy.deepcopy(published)
    layers = list(range(dense["num_hidden_layers"]))
    dense.update(
        mova_num_experts=0,
        mova_num_experts_per_tok=0,
        num_experts=0,
        num_experts_per_tok=0,
        num_shared_experts=0,
        mlp_only_layers=layers,
        attention_gate_func=None,
    )
    assert "K2-Horizon MoVA only" in refusal(dense)


@pytest.mark.parametrize("value", [None, 0, 3, "2", 2.0, True])
def test_router_provenance_must_be_declared(tiny, value):
    overrides = {} if value is None else {"xllm_source_router_gemm_partitions": value}
    with pytest.raises(ValueError, match=r"xllm_source_router_gemm_partitions|explicit source router GEMM"):
        engine_cpu.build_model(tiny, overrides=overrides)


@pytest.mark.parametrize("value", [None, 0, 3, "2", 2.0, True])
def test_admission_asks_for_provenance_itself(value):
    """Also should the engine one day stop asking."""
    from sglang.srt.layers.quantization import mova_fp8

    with pytest.raises(ValueError, match=r"xllm_source_router_gemm_partitions is .* must be the integer 1 or 2"):
        mova_fp8.check_router_provenance(SimpleNamespace(xllm_source_router_gemm_partitions=value))


@pytest.mark.parametrize("value", [1, 2])
def test_both_declared_provenances_are_admitted(tiny, value):
    engine_cpu.build_model(tiny, overrides={"xllm_source_router_gemm_partitions": value})


def test_another_runtime_dtype_is_refused(tiny):
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        build(tiny, dtype="float16")


EXCLUDING = [
    "model.layers.3.mlp.experts",
    "layers.3.mlp.experts",
    "model.layers.3.mlp.experts.",
    "model.layers.3",
    "model.layers.3.",
    "model",
    "mlp",
    "mlp.experts",
    "experts",
    "3",
    "model.layers.3.mlp.experts.5.gate_proj",
    "model.layers.3.mlp.experts.0",
    "",  # the engine reads it as "model." too, which is everything
]


@pytest.mark.parametrize("entry", EXCLUDING)
def test_an_entry_that_reaches_routed_experts_is_refused(tiny, entry):
    tiny["quantization_config"]["ignored_layers"].append(entry)
    assert f"entry {entry!r} excludes routed experts (model.layers.3.mlp.experts)" in refusal(tiny)


UNKNOWN = [
    "model.layers.9.mlp.gate",
    "model.layers.3.mlp.gates",
    "self_attn.q_proj",
    "model.layers.3.self_attn",
    "layers.0.mlp.gate_proj",
    "model.layers.3.self_attn.qkv_proj",
    "model.layers.3.self_attn.v_experts.8",
    "model.language_model.norm",
    "lm_head.",
    "re:.*gate.*",
    " lm_head",
]


@pytest.mark.parametrize("entry", UNKNOWN)
def test_an_entry_that_is_no_module_is_refused(tiny, entry):
    tiny["quantization_config"]["ignored_layers"].append(entry)
    assert f"entry {entry!r} is not the full name of a BF16 module" in refusal(tiny)


OMITTED = [
    "model.layers.0.self_attn.v_proj",
    "model.layers.3.self_attn.q_proj",
    "model.layers.3.self_attn.gate_proj",
    "model.layers.3.self_attn.v_router",
    "model.layers.3.self_attn.v_experts.7",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.shared_experts.down_proj",
    "model.layers.2.mlp.down_proj",
    "model.layers.4.input_layernorm",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
]


@pytest.mark.parametrize("module", OMITTED)
def test_a_bf16_module_left_out_of_the_list_is_refused(tiny, module):
    tiny["quantization_config"]["ignored_layers"].remove(module)
    assert f"ignored_layers does not name {module!r}" in refusal(tiny)


@pytest.mark.parametrize("value", ["model.layers.3.mlp.experts", "experts", "lm_head", "typo"])
def test_the_environment_may_not_extend_the_list(tiny, monkeypatch, value):
    monkeypatch.setenv("SGLANG_FP8_IGNORED_LAYERS", value)
    assert "SGLANG_FP8_IGNORED_LAYERS" in refusal(tiny)


def admit(config, tp, ep):
    """Admission of a config's dimensions for one (TP, EP)."""
    from sglang.srt.layers.quantization import mova_fp8
    from transformers import PretrainedConfig

    mova_fp8.check_topology(PretrainedConfig.from_dict(config), tp=tp, ep=ep, moe_tp=tp // ep, attn_tp=tp)


@pytest.mark.parametrize(("tp", "ep"), WORKING)
def test_working_topologies_are_admitted(published, tp, ep):
    admit(published, tp, ep)


@pytest.mark.parametrize(
    ("tp", "ep", "arithmetic"),
    [
        (4, 1, "768 / 4 = 192, 192 % 128 = 64"),
        (8, 1, "768 / 8 = 96, 96 % 128 = 96"),
        (8, 2, "768 / 4 = 192, 192 % 128 = 64"),
        (8, 8, "100 % 8 = 4"),
        (3, 1, "32 % 3 = 2"),
        (5, 1, "32 % 5 = 2"),
        (6, 1, "32 % 6 = 2"),
        (16, 8, "8 % 16 = 8"),
    ],
)
def test_other_topologies_are_refused_with_the_arithmetic(published, tp, ep, arithmetic):
    with pytest.raises(ValueError) as caught:
        admit(published, tp, ep)
    message = str(caught.value)
    assert f"--tp-size {tp} with --ep-size {ep}" in message
    assert arithmetic in message
    assert message.endswith(f"pairs that work: {', '.join(map(str, WORKING))}.")


def test_the_topology_is_read_from_the_running_engine(published, monkeypatch):
    """Four ranks of tensor parallelism over the real dimensions, refused while the model is built."""
    from sglang.srt.layers.quantization import mova_fp8

    config = derive_config(published, tiny=False, layers=4)
    # One process cannot pose as four to the engine's own context: it compares sizes with process groups.
    running = SimpleNamespace(tp_size=4, moe_ep_size=1, moe_tp_size=4, attn_tp_size=4)
    monkeypatch.setattr(mova_fp8, "get_parallel", lambda: running)
    assert "192 % 128 = 64" in refusal(config)


def test_attention_is_not_built_without_admission(tiny):
    """The second gate stands on its own: an FP8 config that admission never saw builds no attention."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models.xllm import XllmMoVAAttention

    with pytest.raises(ValueError, match=r"model\.layers\.3\.self_attn\.q_proj is not admitted"):
        XllmMoVAAttention(None, 3, Fp8Config(True), "model.layers.3.self_attn")


def test_an_unquantised_mova_model_needs_no_admission(tiny):
    del tiny["quantization_config"]
    model = build(tiny)
    assert all(parameter.dtype != torch.float8_e4m3fn for parameter in model.parameters())
