"""Formats are told by content, each with its capability check; ignore lists and values are judged."""

from __future__ import annotations

import copy

import pytest

from qualify.checkpoint import matching
from tests.cases import bases
from tests.cases.bases import T
from tests.cases.helpers import codes, inspect, messages, notes, subjects

LAYER = "model.layers.0"
EXPERT = "model.layers.1.mlp.experts"


def _weights(base) -> dict:
    return base.quantization["config_groups"]["group_0"]["weights"]


def _activations(base) -> dict:
    return base.quantization["config_groups"]["group_0"]["input_activations"]


# ------------------------------------------------------------ names of formats


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "Weird Méthod\n"}, "weird-m-thod"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt-fp8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt-w4a8-awq"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8-tensor"),
    ],
)
def test_formats_that_nobody_serves_are_named(tmp_path, method, name):
    base = bases.b3()
    base.config["quantization_config"] = method
    base.tensors = {n: t for n, t in base.tensors.items() if "scale" not in n}
    for tensor in list(base.tensors):
        if "experts" in tensor:
            base.tensors[tensor] = T("I32", [256, 32])
            base.tensors[tensor.replace(".weight", ".qweight")] = base.tensors.pop(tensor)
    result = inspect(base, tmp_path)
    assert result.contents.format == name
    assert "unsupported-format" in codes(result)
    assert name in messages(result, "unsupported-format")


def test_stacked_mxfp4_experts_are_well_formed(tmp_path):
    base = bases.b3()
    base.tensors = {name: t for name, t in base.tensors.items() if "experts" not in name}
    for leaf, rows in (("gate_up_proj", 512), ("down_proj", 256)):
        module = f"model.layers.0.mlp.experts.{leaf}"
        base.tensors[f"{module}_blocks"] = T("U8", [2, rows, 8, 16])
        base.tensors[f"{module}_scales"] = T("U8", [2, rows, 8])
        base.tensors[f"{module}_bias"] = T("BF16", [2, rows])
    result = inspect(base, tmp_path)
    assert result.contents.format == "mxfp4"
    assert codes(result) == {"unsupported-format"}


def test_block_fp8_of_other_models_names_neither_head_nor_router(tmp_path):
    base = bases.b1_dense()
    base.config |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    del base.quantization["ignored_layers"]
    bases.bf16(base.tensors, "model.layers.0.mlp.gate", 8, 256)
    result = inspect(base, tmp_path)
    assert result.contents.format == "fp8-block"
    assert codes(result) == {"unsupported-architecture"}


@pytest.mark.parametrize(("shape", "fits"), [([], True), ([1], True), ([2], True), ([3], False), ([2, 2], False)])
def test_scalars_of_a_projection_fused_on_disk(tmp_path, shape, fits):
    base = bases.b2()
    base.config |= {"model_type": "other", "architectures": ["OtherForCausalLM"]}
    base.hf_quant = None
    module = "model.layers.0.mlp.gate_up_proj"
    base.tensors = {
        f"{module}.weight": T("F8_E4M3", [512, 256]),
        f"{module}.weight_scale": T("F32", shape),
        f"{module}.input_scale": T("F32", []),
    }
    base.quantization |= {"quantized_layers": {module: {"quant_algo": "FP8"}}, "exclude_modules": []}
    assert ("scale-shape" not in codes(inspect(base, tmp_path))) is fits


def test_two_families_in_two_files(tmp_path):
    base = bases.b0()
    base.hf_quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    result = inspect(base, tmp_path / "files")
    assert codes(result) == {"quantization-conflict"}
    assert "hf_quant_config.json modelopt" in messages(result, "quantization-conflict")
    base = bases.b0()
    base.config["compression_config"] = base.quantization | {"ignore": []}
    assert "quantization-conflict" in codes(inspect(base, tmp_path / "keys"))
    base.config["compression_config"] = copy.deepcopy(base.quantization)
    assert codes(inspect(base, tmp_path / "equal")) == set()


def test_nvfp4_alone_is_modelopt_nvfp4(tmp_path):
    base = bases.e2m1()
    base.quantization |= {"quant_algo": "NVFP4", "group_size": 16}
    del base.quantization["config_groups"]
    for name in list(base.tensors):
        if name.endswith("weight_scale"):
            base.tensors[name] = T("F8_E4M3", [256, 16])
    result = inspect(base, tmp_path)
    assert result.contents.format == "modelopt-nvfp4"
    assert codes(result) == {"unsupported-format"}


def test_the_group_size_on_disk_decides_with_the_declared_one(tmp_path):
    base = bases.e2m1()
    base.quantization["group_size"] = 16
    result = inspect(base, tmp_path)
    assert result.contents.format == "modelopt-w4a16-nvfp4"
    assert len(subjects(result, "scale-shape")) == 6
    assert "stored: 32" in messages(result, "scale-shape")


def test_bf16_is_accepted_and_served_by_nobody(tmp_path):
    base = bases.b0()
    del base.config["quantization_config"]
    base.tensors = {name: T("BF16", t.shape) for name, t in base.tensors.items() if not name.endswith("weight_scale")}
    result = inspect(base, tmp_path)
    assert (result.verdict, result.contents.format) == ("accepted", "bf16")
    assert "no-artifact" in notes(result)


def test_fp8_kv_alone_is_bf16(tmp_path):
    base = bases.b0()
    base.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    base.tensors = {name: T("BF16", t.shape) for name, t in base.tensors.items() if not name.endswith("weight_scale")}
    base.tensors[f"{LAYER}.self_attn.k_scale"] = T("F32", [])
    base.tensors[f"{LAYER}.self_attn.v_scale"] = T("F32", [])
    result = inspect(base, tmp_path)
    assert (result.verdict, result.contents.format) == ("accepted", "bf16")
    assert "kv-cache" in notes(result)


def test_fp8_weights_without_a_declaration(tmp_path):
    for empty in (None, {}):
        base = bases.b0()
        base.config["quantization_config"] = empty
        result = inspect(base, tmp_path / str(empty))
        assert result.contents.format == "fp8-undeclared"
        assert codes(result) == {"stored-not-declared"} | (codes(result) & {"scale-orphan"})
        assert codes(result) == {"stored-not-declared"}


def test_mova_relabelled_dense_relabelled(tmp_path):
    base = bases.b0_moe()
    base.config["quantization_config"] = bases.b1().quantization
    result = inspect(base, tmp_path)
    assert result.contents.format == "fp8-block"
    assert len(subjects(result, "scale-leaf")) == 12


# ------------------------------------------------------------ capability: compressed-tensors


@pytest.mark.parametrize(
    ("where", "key", "value", "code"),
    [
        (_weights, "num_bits", 4, "scale-"),
        (_weights, "num_bits", 8.0, "quantization-value"),
        (_weights, "type", "int", "unsupported-format"),
        (_weights, "dynamic", True, "quantization-value"),
        (_weights, "symmetric", False, "quantization-value"),
        (_weights, "actorder", "group", "quantization-value"),
        (_weights, "block_structure", [64, 64], "unsupported-format"),
        (_weights, "block_structure", [128], "quantization-value"),
        (_weights, "block_structure", None, "quantization-value"),
        (_weights, "block_structure", "128x128", "quantization-value"),
        (_weights, "strategy", "channel", "unsupported-format"),
        (_weights, "strategy", "nonsense", "quantization-value"),
        (_weights, "zero_points", True, "quantization-key"),
        (_activations, "num_bits", 4, "quantization-value"),
        (_activations, "group_size", 64, "quantization-value"),
        (_activations, "dynamic", False, "quantization-value"),
        (_activations, "strategy", "token", "quantization-value"),
        (_activations, "type", "int", "quantization-value"),
        (lambda base: base.quantization, "format", "pack-quantized", "quantization-value"),
        (lambda base: base.quantization, "format", "naive-quantized", "quantization-value"),
        (lambda base: base.quantization, "quantization_status", "initialized", "quantization-value"),
        (lambda base: base.quantization, "transform_config", {"config_groups": {}}, "quantization-value"),
        (lambda base: base.quantization, "sparsity_config", {"format": "sparse-24"}, "quantization-value"),
        (
            lambda base: base.quantization,
            "kv_cache_scheme",
            {"num_bits": 4, "type": "int"},
            "quantization-value",
        ),
        (lambda base: base.quantization, "scale_fmt", "ue8m0", "quantization-key"),
        (lambda base: base.quantization, "surprise", None, "quantization-key"),
        (lambda base: base.quantization, "config_groups", {}, "quantization-malformed"),
        (lambda base: base.quantization, "config_groups", [], "quantization-malformed"),
        (lambda base: base.quantization, "config_groups", {"g": None}, "quantization-malformed"),
        (lambda base: base.quantization, "ignore", "lm_head", "quantization-malformed"),
        (lambda base: base.quantization, "ignore", [1], "quantization-malformed"),
        (lambda base: base.quantization, "quant_method", 3, "quantization-malformed"),
        (lambda base: base.config, "quantization_config", [], "quantization-malformed"),
        (lambda base: base.config, "quantization_config", "fp8", "quantization-malformed"),
    ],
)
def test_values_of_a_compressed_tensors_declaration(tmp_path, where, key, value, code):
    base = bases.b0()
    where(base)[key] = value
    result = inspect(base, tmp_path)
    assert result.verdict == "rejected"
    assert any(found.startswith(code) for found in codes(result)), codes(result)


def test_a_second_group_with_the_same_target(tmp_path):
    base = bases.b0()
    groups = base.quantization["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    assert "quantization-value" in codes(inspect(base, tmp_path))


def test_weight_only_block_fp8_is_well_formed_and_unserved(tmp_path):
    base = bases.b0()
    base.quantization["config_groups"]["group_0"]["input_activations"] = None
    result = inspect(base, tmp_path)
    assert codes(result) == {"unsupported-format"}
    assert "input_activations is null" in messages(result, "unsupported-format")


def test_regex_targets_work(tmp_path):
    base = bases.b0()
    base.quantization["config_groups"]["group_0"]["targets"] = [
        r"re:.*self_attn\..*_proj$",
        r"re:.*\.mlp\..*",
    ]
    base.quantization["ignore"] = []
    assert codes(inspect(base, tmp_path)) == set()


def test_a_target_that_names_nothing(tmp_path):
    base = bases.b0()
    base.quantization["config_groups"]["group_0"]["targets"].append("re:.*block_sparse.*")
    assert codes(inspect(base, tmp_path)) == {"target-unmatched"}


def test_expert_only_scope_needs_its_declaration(tmp_path):
    good = bases.b0_moe()
    assert codes(inspect(good, tmp_path / "good")) == set()
    for removed in ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:model\.layers\.0\.mlp\..*"):
        base = bases.b0_moe()
        base.quantization["ignore"].remove(removed)
        result = inspect(base, tmp_path / str(len(removed)))
        assert codes(result) == {"linear-not-ignored"}


def test_routers_are_noted_not_condemned(tmp_path):
    base = bases.b0_moe()
    base.quantization["ignore"].remove(r"re:.*mlp\.gate$")
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "router-not-ignored" in notes(result)


def test_mova_in_compressed_tensors_is_named(tmp_path):
    base = bases.b1()
    base.config["quantization_config"] = bases.b0_moe().quantization
    base.quantization["ignore"].append("re:.*v_experts.*")
    base.tensors = {name.replace("weight_scale_inv", "weight_scale"): t for name, t in base.tensors.items()}
    result = inspect(base, tmp_path)
    assert codes(result) == {"unsupported-format"}
    assert "value experts" in messages(result, "unsupported-format")


# ------------------------------------------------------------ capability: MoVA fp8


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("scale_fmt", "ue8m0", "quantization-key"),
        ("fmt", "e5m2", "quantization-key"),
        ("fmt", "e4m3", "quantization-key"),
        ("is_checkpoint_fp8_serialized", True, "quantization-key"),
        ("activation_scheme", "static", "quantization-value"),
        ("activation_scheme", None, "quantization-value"),
        ("weight_block_size", [128, 64], "unsupported-format"),
        ("weight_block_size", [128, 128, 128], "quantization-value"),
        ("weight_block_size", [0, 128], "quantization-value"),
        ("weight_block_size", [True, 128], "quantization-value"),
        ("weight_block_size", None, "unsupported-format"),
        ("ignored_layers", None, "linear-not-ignored"),
        ("ignored_layers", {}, "quantization-malformed"),
        ("modules_to_not_convert", ["lm_head"], "quantization-conflict"),
    ],
)
def test_values_of_a_mova_declaration(tmp_path, key, value, code):
    base = bases.b1()
    base.quantization[key] = value
    result = inspect(base, tmp_path)
    assert code in codes(result)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_router",
        "model.layers.1.self_attn.v_experts.2",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.shared_experts.down_proj",
        "model.layers.0.mlp.gate_proj",
        "lm_head",
    ],
)
def test_every_linear_outside_the_scope_is_named_and_unquantised(tmp_path, module):
    base = bases.b1()
    base.quantization["ignored_layers"].remove(module)
    result = inspect(base, tmp_path / "unnamed")
    assert codes(result) == {"linear-not-ignored"}
    assert subjects(result, "linear-not-ignored") == [module]

    shape = base.tensors[f"{module}.weight"].shape
    bases.fp8(base.tensors, module, *shape, "weight_scale_inv")
    result = inspect(base, tmp_path / "declared")
    assert "unsupported-scope" in codes(result)

    base = bases.b1()
    bases.fp8(base.tensors, module, *shape, "weight_scale_inv")
    result = inspect(base, tmp_path / "undeclared")
    assert subjects(result, "ignore-in-scope") == [module]
    assert "weight_scale_inv" in messages(result, "ignore-in-scope")

    del base.tensors[f"{module}.weight_scale_inv"]
    result = inspect(base, tmp_path / "noscale")
    assert "without a scale" in messages(result, "ignore-in-scope")


@pytest.mark.parametrize(
    "entry", [f"{EXPERT}.3.gate_proj", f"{EXPERT}.3", EXPERT, "experts", "mlp.experts", "1", "model"]
)
def test_an_entry_that_reaches_into_the_scope(tmp_path, entry):
    base = bases.b1()
    base.quantization["ignored_layers"].append(entry)
    result = inspect(base, tmp_path)
    assert codes(result) == {"ignore-in-scope"}
    assert f"{EXPERT}.3.gate_proj" in subjects(result, "ignore-in-scope")


@pytest.mark.parametrize("entry", ["mlp.exp", "re:.*shared.*", "", "model.layers.7.mlp.gate", "Model.norm", " lm_head"])
def test_an_entry_that_names_nothing(tmp_path, entry):
    base = bases.b1()
    base.quantization["ignored_layers"].append(entry)
    assert subjects(inspect(base, tmp_path), "ignore-unmatched") == [entry]


def test_repeated_entries_are_noted(tmp_path):
    base = bases.b1()
    base.quantization["ignored_layers"] *= 2
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "ignore-repeated" in notes(result)


def test_one_plain_expert_among_quantised_ones(tmp_path):
    base = bases.b1()
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        base.tensors[f"{EXPERT}.2.{leaf}.weight"] = T("BF16", [256, 256])
        del base.tensors[f"{EXPERT}.2.{leaf}.weight_scale_inv"]
    base.quantization["ignored_layers"] += [f"{EXPERT}.2.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    result = inspect(base, tmp_path)
    assert "experts-mixed" in codes(result)
    assert "unsupported-scope" in codes(result)


# ------------------------------------------------------------ capability: ModelOpt


def _both(base, change):
    for quantization in (base.quantization, base.hf_quant["quantization"]):
        change(quantization)


def test_leaves_of_a_fused_module_agree(tmp_path):
    base = bases.b2()
    module = "model.language_model.layers.1.self_attn.v_proj"
    _both(base, lambda q: q["quantized_layers"].pop(module))
    base.tensors[f"{module}.weight"] = T("BF16", [128, 256])
    del base.tensors[f"{module}.weight_scale"], base.tensors[f"{module}.input_scale"]
    assert codes(inspect(base, tmp_path)) == {"fused-mixed"}


def test_map_keys_may_lack_the_wrapper(tmp_path):
    base = bases.b2()

    def unwrap(quantization):
        layers = quantization["quantized_layers"]
        quantization["quantized_layers"] = {
            key.replace("model.language_model.", "model."): value for key, value in layers.items()
        }

    _both(base, unwrap)
    assert codes(inspect(base, tmp_path)) == set()


def test_map_keys_may_name_experts_one_by_one(tmp_path):
    base = bases.b2()

    def spell(quantization):
        layers = quantization["quantized_layers"]
        for layer in range(2):
            parent = f"model.language_model.layers.{layer}.mlp.experts"
            value = layers.pop(parent)
            layers |= {
                f"{parent}.{expert}.{leaf}": value
                for expert in range(2)
                for leaf in ("gate_proj", "up_proj", "down_proj")
            }

    _both(base, spell)
    assert codes(inspect(base, tmp_path)) == set()


def test_a_missing_companion_of_the_head(tmp_path):
    base = bases.b2()
    del base.tensors["lm_head.weight_scale_2"]
    assert subjects(inspect(base, tmp_path), "scale-missing") == ["lm_head.weight_scale_2"]


def test_vision_and_mtp_are_counted_skips(tmp_path):
    base = bases.b2()
    bases.bf16(base.tensors, "model.visual.blocks.0.attn.qkv", 64, 64)
    bases.bf16(base.tensors, "mtp.fc", 256, 512)
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert {"vision-skipped", "mtp"} <= notes(result)
    assert result.contents.scope["vision"].unquantised == 1


def test_e2m1_input_scale_is_one(tmp_path):
    base = bases.e2m1()
    name = next(n for n in base.tensors if n.endswith("input_scale"))
    base.tensors[name].data = b"\x00\x00\x00\x3f"
    assert subjects(inspect(base, tmp_path), "scale-not-one") == [name]


def test_models_without_an_inventory_still_need_all_experts(tmp_path):
    root = "model.language_model.layers.0.mlp.experts"
    for change, code, subject in (
        (lambda n: ".experts.1." not in n, "expert-missing", f"{root}.1"),
        (lambda n: ".experts.0." not in n, "expert-missing", f"{root}.0"),
        (lambda n: ".experts.0.up_proj." not in n, "tensor-missing", f"{root}.0.up_proj.weight"),
    ):
        base = bases.e2m1()
        base.tensors = {name: t for name, t in base.tensors.items() if change(name)}
        assert subjects(inspect(base, tmp_path / subject), code) == [subject]
    base = bases.e2m1()
    base.config["n_routed_experts"] = 1
    assert subjects(inspect(base, tmp_path / "more"), "expert-beyond-config") == [f"{root}.1"]
    base.config["n_routed_experts"] = 10**15
    assert "expert-missing" in codes(inspect(base, tmp_path / "many"))


@pytest.mark.parametrize(("leaf", "dtype"), [("bias", "U8"), ("qweight", "BF16"), ("zero_point", "F32")])
def test_unknown_companions_of_a_quantised_module(tmp_path, leaf, dtype):
    base = bases.e2m1()
    name = f"model.language_model.layers.0.mlp.experts.1.up_proj.{leaf}"
    base.tensors[name] = T(dtype, [256])
    assert subjects(inspect(base, tmp_path), "tensor-unexpected") == [name]


@pytest.mark.parametrize("model_type", ["llama", None, 7, ["k2_horizon"]])
def test_an_architecture_needs_its_model_type(tmp_path, model_type):
    for name in ("b0", "b1", "b2"):
        base = getattr(bases, name)()
        base.config["model_type"] = model_type
        result = inspect(base, tmp_path / name)
        assert "unsupported-architecture" in codes(result)


def test_e2m1_experts_have_no_bias(tmp_path):
    base = bases.e2m1()
    name = "model.language_model.layers.0.mlp.experts.0.down_proj.bias"
    base.tensors[name] = T("BF16", [256])
    assert subjects(inspect(base, tmp_path), "unsupported-scope") == [name]


def test_e2m1_outside_the_experts_is_not_served(tmp_path):
    base = bases.e2m1()
    module = "model.language_model.layers.0.self_attn.q_proj"
    base.quantization["ignore"].remove("*self_attn*")
    bases.nvfp4(base.tensors, module, 256, 256, group=32)
    assert codes(inspect(base, tmp_path)) == {"unsupported-scope"}


# ------------------------------------------------------------ what a config promises


@pytest.mark.parametrize(
    ("name", "dtype", "code"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", "F8_E5M2", "weight-dtype"),
        (f"{LAYER}.self_attn.q_proj.weight", "U8", "weight-dtype"),
        (f"{LAYER}.self_attn.q_proj.weight", "BF16", "weight-dtype"),
        ("model.norm.weight", "F32", "tensor-dtype"),
        ("model.norm.weight", "F8_E4M3", "quantised-outside-scope"),
        ("model.embed_tokens.weight", "F16", "tensor-dtype"),
        ("lm_head.weight", "F32", "tensor-dtype"),
    ],
)
def test_dtypes(tmp_path, name, dtype, code):
    base = bases.b0()
    base.tensors[name] = T(dtype, base.tensors[name].shape)
    assert code in codes(inspect(base, tmp_path))


@pytest.mark.parametrize(
    "name",
    [f"{LAYER}.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"],
)
def test_shapes(tmp_path, name):
    base = bases.b0()
    base.tensors[name].shape = [base.tensors[name].shape[0] * 2, *base.tensors[name].shape[1:]]
    result = inspect(base, tmp_path)
    assert name in subjects(result, "tensor-shape")


@pytest.mark.parametrize("name", ["b0", "b1", "b0_moe", "b2"])
def test_every_tensor_is_needed(tmp_path, name):
    whole = getattr(bases, name)()
    for number, tensor in enumerate(whole.tensors):
        base = whole.copy()
        del base.tensors[tensor]
        result = inspect(base, tmp_path / str(number), headers_only=True)
        assert result.verdict == "rejected", tensor
        assert any(tensor.startswith(problem.subject) for problem in result.findings.problems), tensor


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_proj.bias", "model.rotary_emb.inv_freq", "new.weight"])
def test_every_extra_tensor_is_reported(tmp_path, extra):
    base = bases.b0()
    base.tensors[extra] = T("BF16", [256])
    assert subjects(inspect(base, tmp_path), "tensor-unexpected") == [extra]


def test_beyond_the_config(tmp_path):
    base = bases.b1()
    base.config["num_hidden_layers"] = 1
    assert "layer-beyond-config" in codes(inspect(base, tmp_path / "layers"))
    base = bases.b1()
    base.config["num_experts"] = 3
    result = inspect(base, tmp_path / "experts")
    assert subjects(result, "expert-beyond-config") == [f"{EXPERT}.3"]


def test_a_whole_layer_is_one_problem(tmp_path):
    base = bases.b1()
    base.tensors = {name: t for name, t in base.tensors.items() if ".layers.1." not in name}
    result = inspect(base, tmp_path)
    assert subjects(result, "layer-missing") == ["layer 1"]
    assert "expert-missing" not in codes(result)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**12),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "1"),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 1.0),
        ("num_experts", 10**9),
        ("num_experts", None),
        ("mova_num_experts", [4]),
        ("head_dim", 0),
        ("hidden_size", True),
        ("vocab_size", {}),
        ("mlp_only_layers", [1]),
        ("mlp_only_layers", "0"),
        ("attention_bias", True),
        ("query_key_norm", True),
        ("decoder_sparse_step", 2),
        ("tie_word_embeddings", "false"),
        ("moe_gate_bias", 1),
        ("num_key_value_heads", 3),
    ],
)
def test_sizes_that_cannot_be_right(tmp_path, key, value):
    base = bases.b1()
    base.config[key] = value
    result = inspect(base, tmp_path)
    assert "config-value" in codes(result)
    assert key in messages(result, "config-value")


@pytest.mark.parametrize("name", ["mtp.0.x.weight", "model.layers.1.self_attn.q_proj.weight", "model.visual.x.weight"])
def test_k2_horizon_has_neither_draft_layers_nor_vision(tmp_path, name):
    base = bases.b0()
    base.config["num_nextn_predict_layers"] = 1
    base.tensors[name] = T("BF16", [4, 4])
    assert codes(inspect(base, tmp_path)) in ({"tensor-unexpected"}, {"layer-beyond-config"})


def test_kv_scales_are_there_for_all_layers_or_none(tmp_path):
    for leaves, missing in ((("k_scale",), ["v_scale"]), (("v_scale",), ["k_scale"]), (("k_scale", "v_scale"), [])):
        base = bases.b0()
        base.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        for leaf in leaves:
            base.tensors[f"{LAYER}.self_attn.{leaf}"] = T("F32", [])
        result = inspect(base, tmp_path / "".join(leaves))
        assert subjects(result, "scale-missing") == [f"layer 0.{leaf}" for leaf in missing]
    base = bases.b0()
    base.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    result = inspect(base, tmp_path / "none")
    assert codes(result) == set() and "kv-scales-missing" in notes(result)


def test_a_missing_size(tmp_path):
    for key in (
        "hidden_size",
        "num_attention_heads",
        "vocab_size",
        "moe_intermediate_size",
    ):
        base = bases.b1()
        del base.config[key]
        assert key in messages(inspect(base, tmp_path / key), "config-value")


@pytest.mark.parametrize("dtype", [None, "float32", "float16", "absent", "torch_dtype-null"])
def test_an_implicit_dtype_is_noted(tmp_path, dtype):
    base = bases.b0()
    base.config["dtype"] = dtype
    if dtype == "absent":
        del base.config["dtype"]
    if dtype == "torch_dtype-null":
        base.config |= {"dtype": None, "torch_dtype": None}
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "dtype-declared" in notes(result)


# ------------------------------------------------------------ matching


NAMES = matching.Names(
    [
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.gate_proj",
        "model.layers.10.mlp.gate",
        "model.layers.10.self_attn.q_proj",
        "model.layers.10.self_attn.k_proj",
        "model.layers.10.self_attn.v_proj",
    ]
)


@pytest.mark.parametrize(
    ("rule", "entry", "expected"),
    [
        ("compressed-tensors", "gate", 2),
        ("compressed-tensors", "mlp.gate", 2),
        ("compressed-tensors", "model.layers.1.mlp", 0),
        ("compressed-tensors", "re:.*gate", 3),
        ("compressed-tensors", "re:.*gate$", 2),
        ("compressed-tensors", "re:mlp", 0),
        ("compressed-tensors", "self_attn.qkv_proj", 0),
        ("compressed-tensors", "model.layers.10.self_attn.qkv_proj", 3),
        ("compressed-tensors", "layers.10.mlp.gate", 1),
        ("fp8", "model.layers.1", 2),
        ("fp8", "mlp", 3),
        ("fp8", "10", 4),
        ("fp8", "gate_pro", 0),
        ("fp8", "layers.10.mlp.gate", 1),
        ("modelopt", "model.layers.1*", 6),
        ("modelopt", "model.layers.1.*", 2),
        ("modelopt", "*.q_proj", 1),
        ("modelopt", "model.layers.10.self_attn", 3),
        ("modelopt", "model.language_model.layers.10.self_attn.q_proj", 1),
    ],
)
def test_rules(rule, entry, expected):
    assert len(matching.match(entry, NAMES, rule).modules) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*)*x",
        "(a|a)*b",
        "(?:x{2,}){3}",
        r"(a)\1",
        ".*.*.*.*.*x",
        "(",
        "[",
        "a{1,99999999999}",
        "x" * 600,
    ],
)
def test_patterns_that_could_take_for_ever(pattern):
    with pytest.raises(matching.BadPattern):
        matching.compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head.*",
        r"model\.layers\.[0-9]+\.self_attn\..*",
        "(visual|mtp).*",
        r".*mlp\.(gate|up)_proj$",
        r"\d+",
        "[*+]x",
    ],
)
def test_patterns_that_real_configs_use(pattern):
    matching.compile_pattern(pattern)


def test_a_bad_pattern_is_a_problem(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append("re:(a+)+$")
    assert subjects(inspect(base, tmp_path), "ignore-regex") == ["re:(a+)+$"]


def test_a_parent_has_no_effect_in_compressed_tensors(tmp_path):
    base = bases.b0_moe()
    base.quantization["ignore"] = [
        entry if entry != "re:.*shared_experts.*" else "model.layers.1.mlp.shared_experts"
        for entry in base.quantization["ignore"]
    ]
    result = inspect(base, tmp_path)
    assert "ignore-parent" in codes(result)
    assert len(subjects(result, "linear-not-ignored")) == 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda base: [base.tensors.pop(name) for name in list(base.tensors) if ".layers.1." in name], "layer-missing"),
        (lambda base: base.config.update(num_hidden_layers=1), "layer-beyond-config"),
    ],
)
def test_layers_without_an_inventory_are_counted(tmp_path, change, code):
    base = bases.e2m1(layers=2)
    change(base)
    assert code in codes(inspect(base, tmp_path))


def test_a_draft_layer_is_no_layer_too_many(tmp_path):
    base = bases.e2m1(layers=2)
    base.config.update(num_hidden_layers=1, num_nextn_predict_layers=1)
    assert "layer-beyond-config" not in codes(inspect(base, tmp_path))
