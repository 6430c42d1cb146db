"""What the engine admits as compressed-tensors FP8, before it allocates anything: a scope it serves as declared."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from qualify import engine_cpu
from qualify.models import DENSE_CONFIG, assumed, k2_horizon
from qualify.synth.layout import derive_config

SPELT = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


@pytest.fixture
def published_dense():
    """The published 7B config."""
    return json.loads(DENSE_CONFIG.read_text())


@pytest.fixture
def dense(published_dense):
    """The config of a tiny dense checkpoint, fresh for every test."""
    return derive_config(published_dense, tiny=True, layers=None)


@pytest.fixture
def moe():
    """The config of a tiny checkpoint with routed experts."""
    return derive_config(assumed.config_375b(), tiny=True, layers=None)


def build(config, **kwargs):
    return engine_cpu.build_model(config, overrides={}, **kwargs)


def refusal(config, **kwargs):
    """The sentence with which the engine refuses to build ``config``."""
    with pytest.raises(ValueError) as caught:
        build(config, **kwargs)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def group(config):
    return config["quantization_config"]["config_groups"]["group_0"]


def quantised(model):
    """Names of the live modules that run FP8."""
    return {
        name
        for name, module in model.named_modules()
        if type(getattr(module, "quant_method", None)).__name__.startswith("CompressedTensors")
    }


def same_inventory(model, config):
    """Is the format's inventory the one that the qualification derives, and does it fill every parameter?"""
    inventory = model.checkpoint_ledger.format.inventory(model)
    found = {name: (SPELT[entry.tensor_class.stored[0]], entry.shape) for name, entry in inventory.items()}
    assert found == {name: (tensor.dtype, tensor.shape) for name, tensor in k2_horizon.tensors(config).items()}
    assert {entry.parameter for entry in inventory.values()} == dict(model.named_parameters()).keys()
    assert model.checkpoint_ledger.format.scope_faults(model) == []
    return found


def test_the_published_config_is_admitted_whole(published_dense):
    """36 layers on the meta device; two independent derivations and the header that was published, 579 tensors."""
    model = build(published_dense)
    assert len(same_inventory(model, published_dense)) == 579
    assert len(quantised(model)) == 36 * 4


def test_a_model_with_the_widths_of_the_375b_is_admitted():
    """Four layers of the assumed config at true width."""
    config = derive_config(assumed.config_375b(), tiny=False, layers=4)
    model = build(config)
    assert len(same_inventory(model, config)) == 1193
    assert quantised(model) == {"model.layers.3.mlp.experts"}


# --- scopes -----------------------------------------------------------------------------------------------------

ATTENTION = r"re:model\.layers\.\d+\.self_attn\..*_proj"
MLP = r"re:.*\.mlp\.(gate|up|down)_proj"


def scoped(config, targets, ignore):
    group(config)["targets"] = targets
    config["quantization_config"]["ignore"] = ignore
    return config


@pytest.mark.parametrize(
    ("targets", "ignore", "leaves"),
    [
        ([ATTENTION, MLP], [], "qkv_proj o_proj gate_up_proj down_proj"),
        ([MLP], ["lm_head"], "gate_up_proj down_proj"),
        (["Linear"], ["lm_head", ATTENTION], "gate_up_proj down_proj"),
        (["Linear"], ["lm_head", "down_proj", "o_proj"], "qkv_proj gate_up_proj"),
        (["o_proj"], [], "o_proj"),
        ([r"re:.*layers.*"], [], "qkv_proj o_proj gate_up_proj down_proj"),
    ],
    ids=["regex", "regex-part", "regex-ignored", "suffix-ignored", "suffix", "norms-have-no-scale"],
)
def test_a_declared_scope_is_what_runs(dense, targets, ignore, leaves):
    model = build(scoped(dense, targets, ignore))
    same_inventory(model, dense)
    assert {name.rpartition(".")[2] for name in quantised(model)} == set(leaves.split())


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        ([r"re:.*\.mlp\.experts\..*"], []),
        ([r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"], ["lm_head"]),
        (["Linear"], ["lm_head", "re:.*self_attn", "re:.*shared_experts", r"re:.*layers\.[012]\.mlp", "mlp.gate"]),
        (["Linear"], ["lm_head", "re:.*self_attn", "re:.*shared_experts", r"re:.*layers\.[012]\.mlp"]),
    ],
    ids=["regex", "regex-with-head", "ignored", "router-not-named"],
)
def test_an_expert_only_scope_needs_no_full_list(moe, targets, ignore):
    model = build(scoped(moe, targets, ignore))
    same_inventory(model, moe)
    assert quantised(model) == {"model.layers.3.mlp.experts", "model.layers.4.mlp.experts"}


def test_experts_and_dense_modules_may_be_quantised_together(moe):
    model = build(scoped(moe, ["Linear"], ["lm_head"]))
    same_inventory(model, moe)
    assert len(quantised(model)) == 5 * 2 + 3 * 2 + 2 * 2 + 2


def test_one_layer_of_experts_may_stay_unquantised(moe):
    model = build(scoped(moe, [r"re:.*layers\.4\.mlp\.experts\..*"], []))
    same_inventory(model, moe)
    assert quantised(model) == {"model.layers.4.mlp.experts"}


def test_several_groups_of_one_scheme_are_one_scope(dense):
    groups = dense["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    groups["group_0"]["targets"], groups["group_1"]["targets"] = [ATTENTION], [MLP]
    assert len(quantised(build(dense))) == 2 * 4


@pytest.mark.parametrize("where", ["ignore", "targets"])
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("model.layers.9.mlp.down_proj", "no module's name"),
        ("model.layers.1.self_attn.qkv_proj", "no module's name"),
        ("model.layers.1.self_attn", "a parent (model.layers.1.self_attn.q_proj is below it)"),
        ("model.language_model.layers.0.mlp.down_proj", "no module's name"),
        ("model.layers.1.", "no module's name"),
        ("re:.*gates", "no module's name"),
        ("re:(", "no regular expression"),
        ("linear", "no module's name"),
    ],
)
def test_an_entry_that_names_nothing_is_refused(dense, where, entry, words):
    (group(dense) if where == "targets" else dense["quantization_config"])[where].append(entry)
    message = refusal(dense)
    assert where in message
    assert repr(entry) in message
    assert words in message


@pytest.mark.parametrize(
    ("targets", "ignore", "name"),
    [
        (["Linear"], [], "lm_head"),
        (["Linear", "lm_head"], [], "lm_head"),
        (["re:.*"], ["lm_head"], "model.embed_tokens"),
        ([r"re:.*mlp\..*"], [], "model.layers.3.mlp.gate"),
        (["Linear", "mlp.gate"], ["lm_head"], "model.layers.3.mlp.gate"),
    ],
)
def test_a_scope_beyond_what_the_engine_quantises_is_refused(moe, targets, ignore, name):
    assert f"would quantise {name!r}" in refusal(scoped(moe, targets, ignore))


@pytest.mark.parametrize(
    ("ignore", "inside", "outside", "engine_name"),
    [
        ("self_attn.v_proj", "q_proj", "v_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.1.mlp.gate_proj", "up_proj", "gate_proj", "model.layers.1.mlp.gate_up_proj"),
        ("model.layers.4.mlp.experts.3.up_proj", "experts.0", "experts.3.up_proj", "model.layers.4.mlp.experts"),
        ("re:.*experts.0..*", "experts.1", "experts.0", "model.layers.3.mlp.experts"),
    ],
)
def test_what_runs_as_one_module_is_quantised_as_one(moe, ignore, inside, outside, engine_name):
    message = refusal(scoped(moe, ["Linear"], ["lm_head", ignore]))
    assert f"({engine_name})" in message
    assert inside in message
    assert outside in message


def test_a_scope_of_nothing_is_refused(dense):
    assert "quantises no module" in refusal(scoped(dense, ["o_proj"], ["o_proj"]))


def test_the_rule_of_matching_is_the_one_of_inspection(moe):
    """Exact names, dotted suffixes and regular expressions name the same modules in the image and on the host."""
    from sglang.srt.layers.quantization import k2_horizon_fp8

    from qualify.checkpoint.matching import Names, match

    names = [module.name for module in k2_horizon.modules(moe)]
    known = Names(names)
    for entry in ("lm_head", "o_proj", "mlp.gate", "3.up_proj", "re:.*gate", "re:model.layers.[34].mlp", "experts.1"):
        wanted = set(match(entry, known, "compressed-tensors").modules)
        try:
            found = k2_horizon_fp8.matches("ignore", [entry], names)
        except ValueError:
            found = set()
        assert found == wanted, entry


def test_the_engine_reads_the_scope_that_was_spelt_out(moe):
    config = build(scoped(moe, [r"re:.*\.mlp\.experts\..*"], [])).quant_config
    assert list(config.target_scheme_map) == ["Linear", "FusedMoE", "DeepEPMoE"]
    assert config.weight_block_size == [128, 128]
    outside = {m.name for m in k2_horizon.modules(moe) if m.kind == "linear" and not m.routed}
    assert set(config.ignore) == {name for name in outside if name != "lm_head" and not name.endswith("mlp.gate")}


# --- the format, key by key -------------------------------------------------------------------------------------

FORMAT = [
    ("format", "naive-quantized"),
    ("format", "pack-quantized"),
    ("format", None),
    ("quantization_status", "frozen"),
    ("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}),
    ("sparsity_config", {"format": "dense"}),
    ("transform_config", {"config_groups": {"u": {}}}),
    ("config_groups", {}),
    ("ignore", "lm_head"),
    ("ignore", None),
    ("linear_fp8_config", {"quant_method": "fp8"}),
    ("packed_modules_mapping", {"qkv_proj": ["q_proj"]}),
    ("note", "an unknown key"),
]
WEIGHTS = [
    ("num_bits", 4),
    ("type", "int"),
    ("strategy", "channel"),
    ("block_structure", [64, 128]),
    ("block_structure", [128.0, 128]),
    ("block_structure", None),
    ("dynamic", True),
    ("symmetric", False),
    ("actorder", "group"),
    ("group_size", 128),
    ("scale_dtype", "torch.float8_e8m0fnu"),
    ("zp_dtype", "torch.int8"),
    ("note", 1),
]
ACTIVATIONS = [
    ("num_bits", 4),
    ("type", "int"),
    ("strategy", "token"),
    ("group_size", 64),
    ("dynamic", False),
    ("dynamic", "local"),
    ("symmetric", False),
    ("actorder", "group"),
    ("note", 1),
]


def refused(config, *words):
    """Whoever refuses first, admission or a library that reads the config before, names the key."""
    with pytest.raises(Exception, match="|".join(words)) as caught:
        build(config)
    assert type(caught.value).__name__ in ("ValueError", "ValidationError", "TypeError", "AttributeError")


@pytest.mark.parametrize(("key", "value"), FORMAT, ids=lambda part: str(part)[:24])
def test_another_format_is_refused_by_key(dense, key, value):
    dense["quantization_config"][key] = value
    refused(dense, key)


@pytest.mark.parametrize(("key", "value"), WEIGHTS, ids=str)
def test_other_weights_are_refused_by_key(dense, key, value):
    group(dense)["weights"][key] = value
    refused(dense, key, "strategy", "block")


@pytest.mark.parametrize(("key", "value"), ACTIVATIONS, ids=str)
def test_other_activations_are_refused_by_key(dense, key, value):
    group(dense)["input_activations"][key] = value
    refused(dense, key, "strategy")


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", "int-quantized"), ("output_activations", {"num_bits": 8}), ("note", 1)],
)
def test_another_group_is_refused_by_key(dense, key, value):
    from sglang.srt.layers.quantization import k2_horizon_fp8

    group(dense)[key] = value
    with pytest.raises(ValueError, match=rf"config_groups\.group_0\.{key} is "):
        k2_horizon_fp8.check_format(dense["quantization_config"])


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_weights_without_quantised_activations_are_refused(config, request):
    config = request.getfixturevalue(config)
    group(config)["input_activations"] = None
    assert "input_activations is None and must be a mapping" in refusal(config)


def test_a_target_named_twice_is_refused(dense):
    groups = dense["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    assert "the target 'Linear' twice" in refusal(dense)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("quant_format", "pack-quantized"),
        ("ignore", ["lm_head", "o_proj"]),
        ("target_scheme_map", {}),
        ("sparsity_scheme_map", {"Linear": None}),
        ("linear_fp8_config", object()),
        (
            "kv_cache_scheme",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
        ),
        ("weights", {"block_structure": [64, 64]}),
        ("weights", {"num_bits": 4}),
        ("input_activations", {"strategy": "token"}),
        ("input_activations", {"dynamic": False}),
    ],
)
def test_the_engine_must_mean_the_same_format(dense, attribute, value):
    """The declared format is right and something between it and the engine changed it."""
    from sglang.srt.layers.quantization import k2_horizon_fp8
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    effective = CompressedTensorsConfig.from_config(dense["quantization_config"])
    k2_horizon_fp8.check_effective_format(effective, ["Linear"], ["lm_head"])
    if attribute in ("weights", "input_activations"):
        [scheme] = effective.target_scheme_map.values()
        scheme[attribute] = scheme[attribute].model_copy(update=value)
    else:
        setattr(effective, attribute, value)
    with pytest.raises(ValueError, match="differs from quantization_config"):
        k2_horizon_fp8.check_effective_format(effective, ["Linear"], ["lm_head"])


# --- each format by its own name --------------------------------------------------------------------------------


def test_compressed_tensors_mova_is_refused_by_name(tiny, dense):
    """The other format's model under this declaration."""
    tiny["quantization_config"] = dense["quantization_config"]
    with pytest.raises(ValueError, match=r"MoVA is served from quant_method 'fp8' \(MoVA FP8\)"):
        engine_cpu.build_model(tiny, overrides={"xllm_source_router_gemm_partitions": 2})


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_this_model_under_the_other_declaration_is_refused_by_name(config, request, tiny):
    config = request.getfixturevalue(config)
    config["quantization_config"] = tiny["quantization_config"]
    assert "quant_method 'fp8' for K2-Horizon MoVA only" in refusal(config)


def test_the_legacy_layout_is_refused(dense):
    from sglang.srt.layers.quantization import k2_horizon_fp8

    with pytest.raises(ValueError, match="model_type 'k2_horizon' only, not 'xllm'"):
        k2_horizon_fp8.admit(SimpleNamespace(**dense | {"model_type": "xllm"}), None)


@pytest.mark.parametrize("config", ["dense", "moe"])
def test_a_tied_model_has_no_head_and_may_ignore_it(config, request):
    """Exporters name the head although no file has it."""
    config = request.getfixturevalue(config) | {"tie_word_embeddings": True}
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert "lm_head.weight" not in build(config).checkpoint_ledger.format.inventory(build(config))


def test_an_unquantised_model_needs_no_admission(moe):
    del moe["quantization_config"]
    model = build(moe)
    assert not hasattr(model, "checkpoint_ledger")
    assert all(parameter.dtype != torch.float8_e4m3fn for parameter in model.parameters())


# --- config.json and flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_nextn_predict_layers", 1),
        ("n_group", 4),
        ("rms_norm_eps", 0),
        ("layernorm_num_groups", 0),
        ("decoder_sparse_step", 2),
        ("attention_bias", True),
        ("rope_head_dim", 256),
        ("rope_head_dim", 0),
        ("rope_head_dim", 127),
        ("num_key_value_heads", 3),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 17),
        ("moe_intermediate_size", 0),
        ("num_shared_experts", -1),
        ("mlp_only_layers", None),
        ("mlp_only_layers", [0, 1, 2, 3, 4]),
        ("mlp_only_layers", [1, 2]),
        ("architectures", ["XllmForCausalLM"]),
        ("rope_parameters", {"rope_theta": 1e7, "rope_type": "linear"}),
        ("rope_parameters", {"rope_theta": 1e7, "rope_type": "default", "factor": 2.0}),
        ("norm_topk_prob", "false"),
        ("router_score_func", "tanh"),
    ],
)
def test_impossible_configs_are_refused_by_key(moe, key, value):
    moe[key] = value
    refused(moe, key)


def test_a_dense_config_may_leave_out_what_only_experts_need(dense):
    for key in ("num_experts", "num_experts_per_tok", "num_shared_experts", "moe_intermediate_size"):
        del dense[key]
    assert len(quantised(build(dense))) == 2 * 4


def test_yarn_is_the_checkpoints_own_statement(dense):
    yarn = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 2.0, "original_max_position_embeddings": 2048}
    build(dense | {"rope_parameters": yarn})


def test_another_runtime_dtype_is_refused(dense):
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        build(dense, dtype="float16")


def test_flags_that_move_weights_are_refused(dense):
    from sglang.srt.runtime_context import get_model

    for value in ("sharded_state", "remote", "remote_instance", "layered", "dummy"):
        with get_model().override(load_format=value):
            said = refusal(dense)
        assert f"K2-Horizon compressed-tensors FP8 is not served with --load-format {value}" in said


def test_an_all_to_all_backend_without_a_kernel_is_refused(moe, dense, monkeypatch):
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.layers.quantization import k2_horizon_fp8

    monkeypatch.setattr(k2_horizon_fp8, "get_moe_a2a_backend", lambda: MoeA2ABackend.MOONCAKE)
    assert "--moe-a2a-backend mooncake" in refusal(moe)
    build(dense)


# --- topology ---------------------------------------------------------------------------------------------------


def check_topology(config, tp, ep):
    from sglang.srt.layers.quantization import k2_horizon_fp8
    from transformers import PretrainedConfig

    config = PretrainedConfig.from_dict(config)
    scope = ["Linear"], config.quantization_config["ignore"]
    quantised = k2_horizon_fp8.check_scope(list(k2_horizon_fp8.modules(config)), *scope)
    k2_horizon_fp8.check_topology(config, quantised, tp=tp, ep=ep, moe_tp=tp // ep, attn_tp=tp, mlp_tp=tp)


DENSE_WORKING = [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1)]
MOE_WORKING = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16)]


@pytest.mark.parametrize(("tp", "ep"), DENSE_WORKING)
def test_working_dense_topologies_are_admitted(published_dense, tp, ep):
    check_topology(published_dense, tp, ep)


@pytest.mark.parametrize(("tp", "ep"), MOE_WORKING)
def test_working_moe_topologies_are_admitted(tp, ep):
    check_topology(assumed.config_375b(), tp, ep)


@pytest.mark.parametrize(
    ("tp", "ep", "arithmetic"),
    [
        (3, 1, "32 attention heads % 3 ranks = 2"),
        (2, 2, "no routed experts"),
    ],
)
def test_other_dense_topologies_are_refused_with_the_arithmetic(published_dense, tp, ep, arithmetic):
    with pytest.raises(ValueError) as caught:
        check_topology(published_dense, tp, ep)
    assert f"--tp-size {tp} with --ep-size {ep}" in str(caught.value)
    assert arithmetic in str(caught.value)
    assert "pairs that work: (1, 1), (2, 1)" in str(caught.value)


def test_a_split_within_a_block_is_refused_with_the_arithmetic(published_dense):
    published_dense["intermediate_size"] = 97 * 128
    with pytest.raises(ValueError, match=r"mlp gate_proj has 12416 rows .* 12416 / 2 = 6208, 6208 % 128 = 64"):
        check_topology(published_dense, 2, 1)


@pytest.mark.parametrize(
    ("tp", "ep", "arithmetic"),
    [
        (4, 1, "1792 / 4 = 448, 448 % 128 = 64"),
        (8, 2, "1792 / 4 = 448, 448 % 128 = 64"),
        (5, 1, "48 attention heads % 5 ranks = 3"),
        (6, 1, "8 KV heads and 6 attention ranks"),
    ],
)
def test_other_moe_topologies_are_refused_with_the_arithmetic(tp, ep, arithmetic):
    with pytest.raises(ValueError) as caught:
        check_topology(assumed.config_375b(), tp, ep)
    assert arithmetic in str(caught.value)
    assert str(caught.value).endswith(f"pairs that work: {', '.join(map(str, MOE_WORKING))}.")


def test_each_part_of_the_model_is_checked_against_its_own_group_of_ranks(moe, monkeypatch):
    """Under DP attention and --moe-dense-tp-size 1 they differ."""
    from sglang.srt.layers.quantization import k2_horizon_fp8

    sizes = SimpleNamespace(tp_size=8, moe_ep_size=4, moe_tp_size=2, attn_tp_size=1)
    checked = []
    monkeypatch.setattr(k2_horizon_fp8, "get_parallel", lambda: sizes)
    monkeypatch.setattr(k2_horizon_fp8, "check_topology", lambda *_, **ranks: checked.append(ranks))
    for alone in (False, True):
        monkeypatch.setattr(k2_horizon_fp8, "is_dense_ffn_fully_dp", lambda alone=alone: alone)
        build(moe)
    ranks = {"tp": 8, "ep": 4, "moe_tp": 2, "attn_tp": 1, "deepep": False}
    assert checked == [ranks | {"mlp_tp": 8}, ranks | {"mlp_tp": 1}]


def test_under_deepep_the_shared_expert_is_not_split():
    """1,792 columns in four would be 448, and 448 % 128 = 64: only as a whole it works with EP4."""
    from sglang.srt.layers.quantization import k2_horizon_fp8
    from transformers import PretrainedConfig

    config = assumed.config_375b()
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*self_attn", r"re:.*\.mlp\.(gate|up|down)_proj"]
    config = PretrainedConfig.from_dict(config)
    scope = ["Linear"], config.quantization_config["ignore"]
    quantised = k2_horizon_fp8.check_scope(list(k2_horizon_fp8.modules(config)), *scope)
    assert any("shared_experts" in name for name in quantised)
    ranks = {"tp": 4, "ep": 4, "moe_tp": 1, "attn_tp": 4, "mlp_tp": 4}
    k2_horizon_fp8.check_topology(config, quantised, **ranks, deepep=True)
    with pytest.raises(ValueError, match="1792 / 4 = 448, 448 % 128 = 64"):
        k2_horizon_fp8.check_topology(config, quantised, **ranks)
