"""The public fault reports, one test or more a row: sections 1 to 4, and topology rows of section 5.

Numbers are the rows'. Each test has more than the row's own input where the kind has more faces.
"""

from __future__ import annotations

import json
import math
import struct

import pytest

from qualify.checkpoint import mounts, scales
from tests.cases import bases
from tests.cases.bases import T
from tests.cases.helpers import codes, command, f32, inspect, messages, notes, subjects

Q = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts"


# ------------------------------------------------------------ the bases themselves


@pytest.mark.parametrize("name", ["b0", "b1", "b0_moe", "b2", "e2m1"])
def test_the_served_bases_are_accepted(tmp_path, name):
    result = inspect(getattr(bases, name)(), tmp_path)
    assert codes(result) == set()
    assert result.verdict == "accepted"


@pytest.mark.parametrize("shards", [2, 3, 7])
@pytest.mark.parametrize("name", ["b0", "b1", "b2"])
def test_the_bases_in_several_shards_are_accepted(tmp_path, name, shards):
    base = getattr(bases, name)()
    base.shards = shards
    assert codes(inspect(base, tmp_path)) == set()


# ------------------------------------------------------------ 1: scales lost, renamed, left at an initialiser


@pytest.mark.parametrize("shape", [[256, 1], [2, 2]])
def test_1_a_quantised_head_is_refused_by_the_name_of_its_scale(tmp_path, shape):
    base = bases.b0()
    base.quantization["config_groups"]["group_0"]["targets"].append("lm_head")
    base.quantization["ignore"] = []
    base.tensors["lm_head.weight"] = T("F8_E4M3", [256, 256])
    base.tensors["lm_head.weight_scale"] = T("BF16", shape)
    result = inspect(base, tmp_path)
    assert "head-quantised" in codes(result)
    assert "lm_head.weight_scale" in messages(result, "head-quantised")
    assert ("scale-shape" in codes(result)) == (shape == [256, 1])


def test_2_the_scale_is_gone_from_the_shard_and_still_in_the_index(tmp_path):
    base = bases.b0()
    base.quantization["ignore"] = []
    base.tensors["lm_head.weight"] = T("F8_E4M3", [256, 256])
    base.tensors["lm_head.weight_scale"] = T("BF16", [2, 2])
    index = base.index()
    del base.tensors["lm_head.weight_scale"]
    result = inspect(base.write(tmp_path, index))
    assert subjects(result, "index-tensor-missing") == ["lm_head.weight_scale"]
    assert subjects(result, "scale-missing") == ["lm_head.weight_scale"]


def test_4_dense_block_fp8_with_its_own_leaf_is_well_formed_and_unserved(tmp_path):
    result = inspect(bases.b1_dense(), tmp_path)
    assert result.contents.format == "fp8-block"
    assert codes(result) == {"unsupported-format"}


def test_4_the_wrong_leaf_is_named_not_renamed(tmp_path):
    base = bases.b1_dense()
    base.tensors = {name.replace("weight_scale_inv", "weight_scale"): t for name, t in base.tensors.items()}
    result = inspect(base, tmp_path)
    assert len(subjects(result, "scale-leaf")) == 7
    assert f"{Q}.weight_scale" in subjects(result, "scale-leaf")


def test_5_a_relabelled_mova_is_refused(tmp_path):
    base = bases.b1()
    base.config["quantization_config"] = bases.b0().quantization
    result = inspect(base, tmp_path)
    assert len(subjects(result, "scale-leaf")) == 12
    assert "initialiser" in messages(result, "scale-leaf")
    assert "linear-not-ignored" in codes(result)


def test_7_a_map_key_that_names_nothing_and_a_packed_tensor_outside(tmp_path):
    base = bases.b2()
    for quantization in (base.quantization, base.hf_quant["quantization"]):
        layers = quantization["quantized_layers"]
        layers["model.language_model.layers.0.block_sparse_moe.experts"] = layers.pop(
            "model.language_model.layers.0.mlp.experts"
        )
    result = inspect(base, tmp_path)
    assert subjects(result, "quantized-layer-unmatched") == ["model.language_model.layers.0.block_sparse_moe.experts"]
    assert len(subjects(result, "quantised-outside-scope")) == 6


def test_8_the_index_lists_a_scale_that_the_shard_lacks(tmp_path):
    base = bases.b0()
    base.shards = 2
    index = base.index()
    del base.tensors[f"{Q}.weight_scale"]
    directory = base.write(tmp_path, index)
    # The names moved between shards with the removal: keep the index's idea of them.
    for name, tensors in _split_as(index, base.tensors).items():
        (directory / name).write_bytes(bases.shard_bytes(tensors))
    result = inspect(directory)
    assert subjects(result, "index-tensor-missing") == [f"{Q}.weight_scale"]
    assert subjects(result, "scale-missing") == [f"{Q}.weight_scale"]


def _split_as(index, tensors):
    shards: dict[str, dict[str, T]] = {}
    for name, shard in index["weight_map"].items():
        if name in tensors:
            shards.setdefault(shard, {})[name] = tensors[name]
    return shards


def test_10_exponent_scales_come_back_bit_identical(tmp_path):
    codes_ = bytes((120, 125, 127, 130, 140))
    result = inspect(bases.b3("F8_E8M0", codes_), tmp_path)
    assert codes(result) == {"unsupported-format"}
    values = scales.decode(codes_, "F8_E8M0")
    assert bytes(int(math.log2(value)) + 127 for value in values) == codes_
    assert values == [2.0**-7, 0.25, 1.0, 8.0, 8192.0]


def test_10_expert_zero_counts(tmp_path):
    base = bases.b1()
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        del base.tensors[f"{EXPERT}.0.{leaf}.weight"], base.tensors[f"{EXPERT}.0.{leaf}.weight_scale_inv"]
    assert subjects(inspect(base, tmp_path), "expert-missing") == [f"{EXPERT}.0"]


def test_11_exponents_in_u8_mean_the_same(tmp_path):
    raw = bytes((120, 125, 127, 130, 140))
    assert scales.decode(raw, "U8", exponent_only=True) == scales.decode(raw, "F8_E8M0")
    for dtype in ("U8", "F8_E8M0"):
        result = inspect(bases.b3(dtype), tmp_path / dtype)
        assert result.contents.format == "mxfp4"
        assert codes(result) == {"unsupported-format"}


def test_11_a_nan_exponent_is_found_in_either_dtype(tmp_path):
    for dtype in ("U8", "F8_E8M0"):
        result = inspect(bases.b3(dtype, bytes((255, 127))), tmp_path / dtype)
        assert len(subjects(result, "scale-nan")) == 6


def test_13_one_scalar_for_a_fused_projection_is_noted(tmp_path):
    base = bases.b2()
    base.config |= {"model_type": "other", "architectures": ["OtherForCausalLM"]}
    base.config["text_config"]["num_hidden_layers"] = 1
    base.hf_quant = None
    tensors: dict[str, T] = {}
    bases.bf16(tensors, "model.embed_tokens", 256, 256)
    tensors["model.layers.0.mlp.gate_up_proj.weight"] = T("F8_E4M3", [512, 256])
    tensors["model.layers.0.mlp.gate_up_proj.weight_scale"] = T("F32", [1])
    tensors["model.layers.0.mlp.gate_up_proj.input_scale"] = T("F32", [1])
    base.tensors = tensors
    base.quantization["quantized_layers"] = {"model.layers.0.mlp.gate_up_proj": {"quant_algo": "FP8"}}
    base.quantization["exclude_modules"] = []
    result = inspect(base, tmp_path)
    assert "fused-scalar" in notes(result)
    assert codes(result) == {"unsupported-architecture"}


def _ct_nvfp4(companions=("weight_global_scale",)):
    base = bases.b3()
    base.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "dynamic": False,
                },
                "input_activations": None,
            }
        },
    }
    tensors: dict[str, T] = {}
    bases.bf16(tensors, "model.embed_tokens", 32, 256)
    for expert in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            tensors[f"{module}.weight_packed"] = T("U8", [256, 128])
            tensors[f"{module}.weight_scale"] = T("F8_E4M3", [256, 16])
            for leaf in companions:
                tensors[f"{module}.{leaf}"] = T("F32", [1])
    bases.bf16(tensors, "lm_head", 32, 256)
    base.tensors = tensors
    return base


def test_14_all_companions_of_a_scheme_are_demanded(tmp_path):
    good = inspect(_ct_nvfp4(), tmp_path / "good")
    assert good.contents.format == "compressed-tensors-nvfp4"
    assert codes(good) == {"unsupported-format"}
    bad = inspect(_ct_nvfp4(()), tmp_path / "bad")
    assert len(subjects(bad, "scale-missing")) == 6
    assert all(subject.endswith(".weight_global_scale") for subject in subjects(bad, "scale-missing"))


@pytest.mark.parametrize("name", ["b2", "e2m1"])
def test_16_gate_and_up_need_one_global_scale(tmp_path, name):
    base = getattr(bases, name)()
    gate = next(n for n in base.tensors if n.endswith("experts.0.gate_proj.weight_scale_2"))
    base.tensors[gate].data = f32(3.85e-5)
    base.tensors[gate.replace("gate_proj", "up_proj")].data = f32(4.83e-5)
    result = inspect(base, tmp_path)
    assert codes(result) == {"scale-pair"}
    assert subjects(result, "scale-pair") == [gate]
    assert "1.2545" in messages(result, "scale-pair")


def test_17_an_architecture_without_a_quantised_path(tmp_path):
    base = bases.b0()
    base.config["architectures"] = ["OtherForCausalLM"]
    result = inspect(base, tmp_path)
    assert codes(result) == {"unsupported-architecture"}
    assert "OtherForCausalLM" in messages(result, "unsupported-architecture")


# ------------------------------------------------------------ 2: values, dtypes, shapes


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (math.nan, "scale-nan"),
        (math.inf, "scale-infinite"),
        (-math.inf, "scale-infinite"),
        (0.0, "scale-zero"),
        (-0.0, "scale-zero"),
        (-1.0, "scale-negative"),
        (-3.4e38, "scale-negative"),
        (3e38, "kv-scale-overflow"),
    ],
)
def test_19_values_of_kv_scales(tmp_path, value, code):
    base = bases.b0()
    base.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    base.tensors["model.layers.0.self_attn.k_scale"] = T("F32", [], f32(value))
    base.tensors["model.layers.0.self_attn.v_scale"] = T("F32", [], f32(0.5))
    result = inspect(base, tmp_path)
    assert codes(result) == {code}
    assert subjects(result, code) == ["model.layers.0.self_attn.k_scale"]


def test_19_a_kv_scale_is_one_value(tmp_path):
    base = bases.b0()
    base.quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    base.tensors["model.layers.0.self_attn.k_scale"] = T("F32", [2])
    base.tensors["model.layers.0.self_attn.v_scale"] = T("F32", [])
    assert codes(inspect(base, tmp_path)) == {"kv-scale-shape"}


def test_19_kv_scales_that_nobody_declared(tmp_path):
    base = bases.b0()
    base.tensors["model.layers.0.self_attn.k_scale"] = T("F32", [])
    assert codes(inspect(base, tmp_path)) == {"tensor-unexpected"}


def test_20_a_zero_tile_with_a_zero_scale_and_nan_codes(tmp_path):
    base = bases.b0()
    scale = struct.pack("<4f", 1.0, 1.0, 0.0, 1.0)
    base.tensors[f"{Q}.weight_scale"].data = scale
    payload = bytearray(256 * 256)
    payload[128 * 256 : 128 * 256 + 128] = b"\x7f" * 128
    base.tensors[f"{Q}.weight"].data = bytes(payload)
    directory = base.write(tmp_path)
    quick = inspect(directory)
    assert codes(quick) == {"scale-zero"}
    assert "[1, 0]" in messages(quick, "scale-zero")
    full = inspect(directory, weights=True)
    assert codes(full) == {"scale-zero", "weight-nan"}
    assert "[128, 0]" in messages(full, "weight-nan")


def test_20_the_other_nan_code(tmp_path):
    base = bases.b0()
    base.tensors[f"{Q}.weight"].data = bytes(65535) + b"\xff"
    assert "[255, 255]" in messages(inspect(base, tmp_path, weights=True), "weight-nan")


@pytest.mark.parametrize("shape", [[1, 1], [1], []])
def test_22_the_strategy_decides_not_the_rank(tmp_path, shape):
    base = bases.b0()
    base.quantization["config_groups"]["group_0"]["weights"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
    }
    for name in base.tensors:
        if name.endswith("weight_scale"):
            base.tensors[name] = T("F32", shape)
    result = inspect(base, tmp_path)
    assert result.contents.format == "compressed-tensors-fp8-tensor"
    assert codes(result) == {"unsupported-format"}


def test_22_one_value_is_not_a_grid(tmp_path):
    base = bases.b0()
    base.tensors[f"{Q}.weight_scale"] = T("F32", [1, 1])
    assert subjects(inspect(base, tmp_path), "scale-shape") == [f"{Q}.weight_scale"]


def test_23_bf16_scales_are_said_not_condemned_outside_mova(tmp_path):
    result = inspect(bases.b1_dense("BF16"), tmp_path)
    assert codes(result) == {"unsupported-format"}
    assert "scale-dtype" in notes(result)


def test_23_mova_scales_are_f32(tmp_path):
    base = bases.b1()
    name = f"{EXPERT}.2.up_proj.weight_scale_inv"
    base.tensors[name] = T("BF16", [2, 2])
    result = inspect(base, tmp_path)
    assert codes(result) == {"scale-dtype"}
    assert subjects(result, "scale-dtype") == [name]


@pytest.mark.parametrize("dtype", ["F16", "F8_E8M0", "F8_E4M3", "I32"])
def test_23_other_scale_dtypes_destroy_values(tmp_path, dtype):
    base = bases.b0()
    base.tensors[f"{Q}.weight_scale"] = T(dtype, [2, 2], b"\x38" * (4 * bases.BITS[dtype] // 8))
    assert "scale-dtype" in codes(inspect(base, tmp_path))


def test_25_a_partial_last_block_is_legal_in_the_file(tmp_path):
    base = bases.b0()
    base.config["intermediate_size"] = 576
    for name in ("gate_proj", "up_proj"):
        bases.fp8(base.tensors, f"model.layers.0.mlp.{name}", 576, 256)
    bases.fp8(base.tensors, "model.layers.0.mlp.down_proj", 256, 576)
    assert base.tensors["model.layers.0.mlp.up_proj.weight_scale"].shape == [5, 2]
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "partial-block" in notes(result)


def test_25_floor_is_not_the_rule(tmp_path):
    base = bases.b0()
    base.config["intermediate_size"] = 576
    for name in ("gate_proj", "up_proj"):
        bases.fp8(base.tensors, f"model.layers.0.mlp.{name}", 576, 256)
        base.tensors[f"model.layers.0.mlp.{name}.weight_scale"].shape = [4, 2]
    bases.fp8(base.tensors, "model.layers.0.mlp.down_proj", 256, 576)
    assert len(subjects(inspect(base, tmp_path), "scale-shape")) == 2


@pytest.mark.parametrize(("shape", "fits"), [([4, 2, 1], True), ([4, 2], False), ([4, 2, 1, 1], False)])
def test_26_a_stacked_scale_has_the_rank_of_its_weight(tmp_path, shape, fits):
    base = bases.b1_dense()
    base.config["model_type"] = "other_moe"
    base.tensors["model.layers.0.mlp.experts.down_proj"] = T("F8_E4M3", [4, 256, 128])
    base.tensors["model.layers.0.mlp.experts.down_proj_scale_inv"] = T("F32", shape)
    result = inspect(base, tmp_path)
    assert ("scale-shape" in codes(result)) is not fits


@pytest.mark.parametrize(
    ("leaf", "shape", "fits"),
    [
        ("weight_scale", [2, 1, 2, 1], True),
        ("weight_scale_inv", [2, 2], True),
        ("weight_scale", [2, 2], True),
        ("weight_scale", [2, 1, 2, 2], False),
        ("weight_scale", [4], False),
    ],
)
def test_28_modelopt_block_scales_in_both_layouts(tmp_path, leaf, shape, fits):
    base = bases.b2()
    name = "model.language_model.layers.1.self_attn.o_proj"
    for quantization in (base.quantization, base.hf_quant["quantization"]):
        quantization["quantized_layers"][name] = {"quant_algo": "FP8_PB_WO"}
    del base.tensors[f"{name}.weight_scale"], base.tensors[f"{name}.input_scale"]
    base.tensors[f"{name}.{leaf}"] = T("F32", shape)
    result = inspect(base, tmp_path)
    assert codes(result) == (set() if fits else {"scale-shape"})


def test_29_subnormal_scales_decode_as_subnormals():
    assert scales.decode(bytes(range(8)), "F8_E4M3") == [k * 2.0**-9 for k in range(8)]
    finite = [scales.E4M3[code] for code in range(0x7F)]
    assert finite == sorted(finite) and finite[0x7E] == 448.0 and finite[8] == 2.0**-6
    assert all(scales.E4M3[code | 0x80] == -value for code, value in enumerate(finite))
    assert math.isnan(scales.E4M3[0x7F]) and math.isnan(scales.E4M3[0xFF])


# ------------------------------------------------------------ 3: which layers are quantised


def test_31_a_trailing_dot_means_everything_below(tmp_path):
    base = bases.b1()
    layer = [entry for entry in base.quantization["ignored_layers"] if not entry.startswith("model.layers.0.")]
    base.quantization["ignored_layers"] = [*layer, "model.layers.0."]
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "ignore-normalised" in notes(result)


def test_31_a_trailing_dot_that_reaches_into_the_scope(tmp_path):
    base = bases.b1()
    base.quantization["ignored_layers"].append("model.layers.1.")
    result = inspect(base, tmp_path)
    assert codes(result) == {"ignore-in-scope"}
    assert len(subjects(result, "ignore-in-scope")) == 12
    assert "model.layers.1." in messages(result, "ignore-in-scope")


def test_32_short_names_are_counted_under_every_rule(tmp_path):
    base = bases.b1()
    entries = base.quantization["ignored_layers"]
    short = [entry for entry in entries if not entry.endswith("self_attn.q_proj")]
    base.quantization["ignored_layers"] = [*short, "self_attn.q_proj"]
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    message = messages(result, "ignore-ambiguous")
    for count in ("exact 0", "prefix 0", "suffix 2", "infix 2", "substring 2", "regex 0"):
        assert count in message


def test_32_an_entry_that_matches_nothing(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append("linear_attn.in_proj_qkv")
    result = inspect(base, tmp_path)
    assert subjects(result, "ignore-unmatched") == ["linear_attn.in_proj_qkv"]


def test_34_wrapper_prefixes_are_normalised_and_then_judged(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append(f"model.language_model.{Q.removeprefix('model.')}")
    result = inspect(base, tmp_path)
    assert "ignore-normalised" in notes(result)
    assert codes(result) == {"ignore-in-scope"}
    assert subjects(result, "ignore-in-scope") == [Q]


def test_34_the_bf16_face_of_it(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append(f"model.language_model.{Q.removeprefix('model.')}")
    base.tensors[f"{Q}.weight"] = T("BF16", [256, 256])
    del base.tensors[f"{Q}.weight_scale"]
    result = inspect(base, tmp_path)
    assert codes(result) == {"fused-mixed"}
    assert Q.rpartition(".")[0] in messages(result, "fused-mixed")


@pytest.mark.parametrize("entry", ["model.layers.0.mlp", "model.layers.0", "mlp"])
@pytest.mark.parametrize("name", ["b0", "b1_dense"])
def test_35_an_ignored_parent_of_quantised_children_is_a_conflict(tmp_path, name, entry):
    base = getattr(bases, name)()
    base.quantization["ignore" if name == "b0" else "ignored_layers"].append(entry)
    result = inspect(base, tmp_path)
    assert codes(result) & {"ignore-in-scope", "ignore-unmatched"}
    text = messages(result, "ignore-in-scope") + messages(result, "ignore-unmatched")
    assert entry in text


def test_35_qwen_parent(tmp_path):
    base = bases.b2()
    parent = "model.language_model.layers.0.linear_attn"
    for quantization in (base.quantization, base.hf_quant["quantization"]):
        quantization["exclude_modules"].append(parent)
    result = inspect(base, tmp_path)
    assert f"{parent}.in_proj_qkv" in subjects(result, "ignore-in-scope")


def _plain(base, *modules):
    for module in modules:
        base.tensors[f"{module}.weight"] = T("BF16", base.tensors[f"{module}.weight"].shape)
        base.tensors.pop(f"{module}.weight_scale")


def test_37_the_fused_name_covers_its_leaves(tmp_path):
    base = bases.b0()
    attention = Q.rpartition(".")[0]
    _plain(base, *(f"{attention}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")))
    base.quantization["ignore"].append(f"{attention}.qkv_proj")
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    assert "ignore-normalised" in notes(result)


def test_37_the_fused_name_over_quantised_leaves(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append("model.layers.0.self_attn.qkv_proj")
    assert len(subjects(inspect(base, tmp_path), "ignore-in-scope")) == 3


def test_38_two_leaves_of_three(tmp_path):
    base = bases.b0()
    attention = Q.rpartition(".")[0]
    leaves = [f"{attention}.q_proj", f"{attention}.k_proj"]
    _plain(base, *leaves)
    base.quantization["ignore"] += leaves
    result = inspect(base, tmp_path)
    assert codes(result) == {"fused-mixed"}
    assert subjects(result, "fused-mixed") == [f"{attention}.qkv_proj"]


def test_38_an_unknown_fused_name(tmp_path):
    base = bases.b0()
    base.quantization["ignore"].append("model.layers.0.self_attn.in_proj_qkvgfab")
    result = inspect(base, tmp_path)
    assert codes(result) == {"ignore-unmatched"}
    assert "fused module" in messages(result, "ignore-unmatched")


def _both(base, change):
    for quantization in (base.quantization, base.hf_quant["quantization"]):
        change(quantization)


def test_40_mixed_precision_is_routed_by_content(tmp_path):
    absent = bases.b2()
    _both(absent, lambda q: q.pop("quantized_layers"))
    result = inspect(absent, tmp_path / "absent")
    assert result.contents.format == "modelopt-w4afp8"
    assert "unsupported-format" in codes(result)

    empty = bases.b2()
    _both(empty, lambda q: q.update(quantized_layers={}))
    assert "quantized-layers-empty" in codes(inspect(empty, tmp_path / "empty"))

    twice = bases.b2()
    twice.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quantization": {"quantization": twice.hf_quant["quantization"]},
    }
    result = inspect(twice, tmp_path / "twice")
    assert "quantization-malformed" in codes(result)
    assert "nested twice" in messages(result, "quantization-malformed")

    nested = bases.b2()
    nested.config["quantization_config"] = {"quant_method": "modelopt", **nested.hf_quant}
    assert codes(inspect(nested, tmp_path / "nested")) == set()


@pytest.mark.parametrize("label", ["W4A16_NEWFP4", "NVFP4 ", "nvfp4", "", 7, None])
def test_41_an_unknown_algorithm_is_an_error_at_parse(tmp_path, label):
    base = bases.b2()
    key = "model.language_model.layers.1.mlp.experts"
    _both(base, lambda q: q["quantized_layers"].update({key: {"quant_algo": label}}))
    assert key in subjects(inspect(base, tmp_path), "algorithm-unknown")


def test_41_as_the_only_algorithm(tmp_path):
    base = bases.e2m1()
    base.quantization["quant_algo"] = "W4A16_NEWFP4"
    assert "algorithm-unknown" in codes(inspect(base, tmp_path))


def test_43_two_files_that_disagree(tmp_path):
    base = bases.b2()
    base.hf_quant["quantization"]["quant_algo"] = "FP8"
    result = inspect(base, tmp_path / "algo")
    message = messages(result, "quantization-conflict")
    assert "MIXED_PRECISION" in message and "FP8" in message
    assert "config.json" in message and "hf_quant_config.json" in message

    base = bases.b2()
    base.hf_quant["quantization"]["exclude_modules"].append("model.visual*")
    result = inspect(base, tmp_path / "exclude")
    assert "model.visual*" in messages(result, "quantization-conflict")

    base = bases.b2()
    base.hf_quant["quantization"]["kv_cache_quant_algo"] = "FP8"
    result = inspect(base, tmp_path / "kv")
    assert codes(result) == set(), "silence in one file is not a statement"
    assert "kv-cache" in notes(result)


def test_43_nvfp4_against_fp8(tmp_path):
    base = bases.b2()
    base.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    base.hf_quant = {"quantization": {"quant_algo": "FP8"}}
    assert "quantization-conflict" in codes(inspect(base, tmp_path))


@pytest.mark.parametrize("name", ["b0", "b1"])
def test_44_bf16_weights_under_a_foreign_declaration(tmp_path, name):
    base = getattr(bases, name)()
    _plain_all(base)
    result = inspect(base, tmp_path)
    assert result.contents.format == "bf16"
    assert codes(result) == {"declared-not-stored"}
    assert "config.json quantization_config" in messages(result, "declared-not-stored")


def _plain_all(base):
    base.tensors = {
        name: T("BF16", t.shape) if t.dtype == "F8_E4M3" else t
        for name, t in base.tensors.items()
        if "weight_scale" not in name
    }


def test_46_a_draft_layer_is_classified_from_tensors(tmp_path):
    base = bases.e2m1(layers=2)
    base.config |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    for name in list(base.tensors):
        if ".layers.1.mlp.experts." in name:
            del base.tensors[name]
    for expert in range(2):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            bases.bf16(base.tensors, f"model.language_model.layers.1.mlp.experts.{expert}.{leaf}", 256, 256)
    result = inspect(base, tmp_path)
    assert codes(result) == {"mtp-not-excluded"}
    assert result.contents.mtp["quantised"] == 0
    assert result.contents.mtp["unquantised"] >= 6
    assert "mtp" in notes(result)


def test_46_a_draft_layer_beside_a_per_layer_map(tmp_path):
    base = bases.b2()
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        bases.bf16(base.tensors, f"mtp.layers.0.mlp.experts.0.{leaf}", 256, 256)
    result = inspect(base, tmp_path)
    assert codes(result) == set(), "a module that the map does not name is unquantised"
    assert result.contents.mtp == {"quantised": 0, "unquantised": 3}


@pytest.mark.parametrize(
    ("tied", "head", "expected"),
    [
        (False, "BF16", set()),
        (False, None, {"head-missing"}),
        (False, "F8_E4M3", {"head-quantised"}),
        (True, None, set()),
        (True, "BF16", {"head-tied-present"}),
        (True, "F8_E4M3", {"head-quantised"}),
    ],
)
def test_47_the_truth_table_of_the_head(tmp_path, tied, head, expected):
    base = bases.b0()
    base.config["tie_word_embeddings"] = tied
    del base.tensors["lm_head.weight"]
    if head is not None:
        base.tensors["lm_head.weight"] = T(head, [256, 256])
    if head == "F8_E4M3":
        base.tensors["lm_head.weight_scale"] = T("F32", [2, 2])
        base.quantization["ignore"] = []
    assert codes(inspect(base, tmp_path)) == expected


# ------------------------------------------------------------ 4: files


@pytest.mark.parametrize("cut", [1, 64, 4096])
def test_52_a_short_shard(tmp_path, cut):
    directory = bases.b0().write(tmp_path)
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-cut])
    result = inspect(directory)
    assert codes(result) == {"shard-truncated"}
    assert f"{cut:,} are missing" in messages(result, "shard-truncated")


@pytest.mark.parametrize("more", [1, 64])
def test_52_a_long_shard(tmp_path, more):
    directory = bases.b0().write(tmp_path)
    with (directory / "model.safetensors").open("ab") as file:
        file.write(bytes(more))
    assert codes(inspect(directory)) == {"shard-trailing"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "lfs-pointer"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "html-page"),
        (b"\n  <html>", "html-page"),
        (b"", "shard-empty"),
        (b"\x10\x00\x00", "header-truncated"),
        (struct.pack("<Q", 5000) + b'{"a"', "header-truncated"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header-oversized"),
        (b"PK\x03\x04" + bytes(100), "pickle-weights"),
        (b"\x80\x02}q\x00X" + bytes(100), "pickle-weights"),
        (struct.pack("<Q", 8) + b"notjson!", "header-malformed"),
        (b'{"error":"Repository not found"}', "header-oversized"),
        (b"Invalid credentials in Authorization header", "header-oversized"),
    ],
)
def test_53_what_is_not_a_shard_is_named(tmp_path, content, code):
    base = bases.b0()
    base.shards = 2
    directory = base.write(tmp_path)
    name = "model-00002-of-00002.safetensors"
    (directory / name).write_bytes(content)
    result = inspect(directory)
    assert code in codes(result)
    assert subjects(result, code) == [name]
    assert "tensor-missing" not in codes(result), "what an unreadable shard holds is not missing as well"


def test_55_two_splits_side_by_side(tmp_path):
    base = bases.b0()
    base.shards = 2
    directory = base.write(tmp_path)
    base.shards = 4
    for name, tensors in base.split().items():
        (directory / name).write_bytes(bases.shard_bytes(tensors))
    result = inspect(directory)
    assert codes(result) == {"shard-two-sets", "shard-stray"}
    assert len(subjects(result, "shard-stray")) == 4


def test_55_a_consolidated_file_and_an_original_folder(tmp_path):
    base = bases.b0()
    base.shards = 2
    directory = base.write(tmp_path)
    (directory / "consolidated.safetensors").write_bytes(bases.shard_bytes(base.tensors))
    (directory / "original").mkdir()
    (directory / "original" / "consolidated.00.pth").write_bytes(b"PK")
    result = inspect(directory)
    assert subjects(result, "shard-stray") == ["consolidated.safetensors"]
    assert subjects(result, "pickle-weights") == ["original/consolidated.00.pth"]


def test_55_without_an_index_a_name_may_be_stored_twice(tmp_path):
    base = bases.b0()
    directory = base.write(tmp_path)
    (directory / "more.safetensors").write_bytes(bases.shard_bytes({"model.norm.weight": T("BF16", [256])}))
    result = inspect(directory)
    assert codes(result) == {"index-missing", "tensor-duplicate"}


def test_56_a_stale_index_is_not_a_missing_shard(tmp_path):
    base = bases.b0()
    base.shards = 4
    index = base.index()
    base.shards = 2
    result = inspect(base.write(tmp_path / "stale", index))
    assert codes(result) == {"index-stale"}

    base.shards = 4
    directory = base.write(tmp_path / "missing")
    (directory / "model-00003-of-00004.safetensors").unlink()
    result = inspect(directory)
    assert codes(result) == {"shard-missing"}
    assert subjects(result, "shard-missing") == ["model-00003-of-00004.safetensors"]


def _hub(tmp_path, base):
    repo = tmp_path / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("9b" * 20)
    base.write(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = repo / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(f"../../blobs/{blob.name}")
    return repo, snapshot


def test_58_a_snapshot_without_its_blobs(tmp_path):
    repo, snapshot = _hub(tmp_path, bases.b0())
    (repo / "blobs").rename(tmp_path / "elsewhere")
    result = inspect(snapshot)
    assert codes(result) == {"link-dangling"}
    assert subjects(result, "link-dangling") == ["config.json", "model.safetensors"]
    assert "mount the whole hub repository" in messages(result, "link-dangling")


def test_59_a_hub_cache_is_legal_and_an_escape_is_not(tmp_path):
    _, snapshot = _hub(tmp_path, bases.b0())
    assert codes(inspect(snapshot)) == set()
    (snapshot / "generation_config.json").symlink_to("/etc/hostname")
    result = inspect(snapshot)
    assert codes(result) == {"link-escape"}
    assert "/etc/hostname" in messages(result, "link-escape")


def test_59_the_blobs_of_another_repository_are_outside(tmp_path):
    repo, snapshot = _hub(tmp_path, bases.b0())
    other = repo.parent / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("{}")
    (snapshot / "extra.json").symlink_to("../../../models--org--other/blobs/x")
    assert codes(inspect(snapshot)) == {"link-escape"}


def test_59_a_linked_blobs_directory_is_an_escape(tmp_path):
    repo, snapshot = _hub(tmp_path, bases.b0())
    (repo / "blobs").rename(tmp_path / "elsewhere")
    (repo / "blobs").symlink_to(tmp_path / "elsewhere")
    assert codes(inspect(snapshot)) == {"link-escape"}


def test_59_links_inside_a_plain_directory(tmp_path):
    directory = bases.b0().write(tmp_path / "plain")
    (directory / "model.safetensors").rename(directory / "weights")
    (directory / "model.safetensors").symlink_to("weights")
    assert codes(inspect(directory)) == set()
    (directory / "loop.json").symlink_to("loop.json")
    assert codes(inspect(directory)) == {"link-dangling"}


def test_61_a_revision_is_40_hex_and_on_disk(tmp_path):
    repo, snapshot = _hub(tmp_path, bases.b0())
    assert codes(inspect(snapshot, revision="9b" * 20)) == set()
    assert codes(inspect(repo, revision="9b" * 20)) == set()
    for place in (repo, snapshot):
        result = inspect(place, revision="0123456789abcdef" * 2 + "01234567")
        assert "revision" in codes(result)
        assert "9b9b" in messages(result, "revision")
    plain = bases.b0().write(tmp_path / "plain")
    assert "no snapshot" in messages(inspect(plain, revision="9b" * 20), "revision")
    for bad in ("main", "9b9e", "9B" * 20):
        assert "revision" in codes(inspect(snapshot, revision=bad))


MOUNTINFO = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
40 22 8:2 / /models rw,relatime - ext4 /dev/sdb1 rw
41 40 8:2 /k2 /models/k2\\040horizon ro,relatime - ext4 /dev/sdb1 rw
42 22 8:3 / /archive rw,relatime - ext4 /dev/sdc1 ro
43 22 0:50 / /var/cache/horizon rw - tmpfs tmpfs rw
44 22 8:2 / /twice rw - ext4 /dev/sdb1 rw
45 22 8:2 / /twice ro - ext4 /dev/sdb1 rw
"""


@pytest.mark.parametrize(
    ("path", "point", "read_only"),
    [
        ("/models/other", "/models", False),
        ("/models/k2 horizon/7b", "/models/k2 horizon", True),
        ("/models/k2 horizontal", "/models", False),
        ("/archive/x", "/archive", True),
        ("/var/cache/horizon", "/var/cache/horizon", False),
        ("/twice/x", "/twice", True),
        ("/etc", "/", False),
    ],
)
def test_62_the_effective_mount(path, point, read_only):
    assert mounts.effective(MOUNTINFO, path) == (point, read_only)


def test_62_a_writable_mount_is_noted_and_the_cache_is_elsewhere(tmp_path, capsys):
    directory = bases.b0().write(tmp_path / "m")
    info = tmp_path / "mountinfo"
    common = [
        "preflight",
        "--artifact",
        "k2-horizon-fp8",
        "--model-dir",
        directory,
        "--tp",
        1,
        "--uncatalogued",
    ]
    for options, writable in (("rw", True), ("ro", False)):
        info.write_text(f"22 1 8:1 / / rw - ext4 /dev/a rw\n40 22 8:2 / {directory} {options} - ext4 /dev/b rw\n")
        status, report, _ = command(capsys, *common, "--json", "--mountinfo", info)
        assert status == 0
        assert ("mount-writable" in {note["code"] for note in report["notes"]}) is writable
    inside = directory / "cache"
    inside.mkdir()
    for cache in (inside, tmp_path / "absent"):
        status, report, _ = command(capsys, *common, "--json", "--cache-dir", cache)
        assert status == 1
        assert [problem["code"] for problem in report["problems"]] == ["cache-dir"]


def test_64_a_missing_expert(tmp_path):
    base = bases.b1()
    base.tensors = {name: t for name, t in base.tensors.items() if ".experts.3." not in name}
    result = inspect(base, tmp_path)
    assert codes(result) == {"expert-missing"} | codes(result) & {"tensor-missing"}
    assert subjects(result, "expert-missing") == [f"{EXPERT}.3"]


@pytest.mark.parametrize("layout", ["stacked", "fused", "renamed"])
def test_64_another_expert_layout(tmp_path, layout):
    base = bases.b1()
    base.tensors = {name: t for name, t in base.tensors.items() if ".mlp.experts." not in name}
    if layout == "stacked":
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            base.tensors[f"{EXPERT}.{leaf}"] = T("F8_E4M3", [4, 256, 256])
            base.tensors[f"{EXPERT}.{leaf}_scale_inv"] = T("F32", [4, 2, 2])
    elif layout == "fused":
        base.tensors[f"{EXPERT}.gate_up_proj.weight"] = T("F8_E4M3", [4, 512, 256])
        base.tensors[f"{EXPERT}.down_proj.weight"] = T("F8_E4M3", [4, 256, 256])
    else:
        for expert in range(4):
            for leaf in ("w1", "w2", "w3"):
                bases.fp8(base.tensors, f"{EXPERT}.{expert}.{leaf}", 256, 256, "weight_scale_inv")
    result = inspect(base, tmp_path)
    assert result.verdict == "rejected"
    assert codes(result) & {"expert-layout", "expert-missing"}
    if layout != "renamed":
        assert subjects(result, "expert-layout") == [EXPERT]
        assert "expert-missing" not in codes(result)


# ------------------------------------------------------------ 5: topology, for preflight

WORKING = {(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)}


def _preflight(capsys, directory, artifact, tp, ep, *more):
    return command(
        capsys,
        "preflight",
        "--artifact",
        artifact,
        "--model-dir",
        directory,
        "--tp",
        tp,
        "--ep",
        ep,
        "--uncatalogued",
        "--router-partitions",
        2,
        "--json",
        *more,
    )


def test_65_blocks_and_experts_against_tp_and_ep(tmp_path, capsys):
    base = bases.b1(width=768)
    base.config |= {"num_attention_heads": 8, "head_dim": 32, "num_key_value_heads": 4}
    directory = base.write(tmp_path)
    for tp in (1, 2, 4, 8):
        for ep in (1, 2, 4, 8):
            status, report, _ = _preflight(capsys, directory, "mova-fp8", tp, ep)
            assert (status == 0) == ((tp, ep) in WORKING), (tp, ep)
            if status:
                assert {problem["code"] for problem in report["problems"]} == {"topology"}
    _, report, _ = _preflight(capsys, directory, "mova-fp8", 4, 1)
    assert "768 rows / 4 (TP 4 / EP 1) = 192 a rank, 192 % 128 = 64" in report["problems"][0]["message"]


@pytest.mark.parametrize(
    ("width", "tp", "works"), [(320, 2, False), (1536, 8, False), (1536, 4, True), (3072, 16, False)]
)
def test_65_other_widths(tmp_path, width, tp, works):
    base = bases.b1(width=width)
    base.config |= {"num_attention_heads": 16, "head_dim": 16, "num_key_value_heads": 8}
    result = inspect(base, tmp_path, headers_only=True)
    plain = [item for item in result.topologies if (item.tp, item.ep) == (tp, 1)]
    assert (plain[0].reasons == ()) is works


def test_65_a_quantised_shared_expert_and_fused_leaves(tmp_path):
    base = bases.b0_moe(width=512)
    shared = "model.layers.1.mlp.shared_experts"
    for leaf, rows, columns in (("gate_proj", 512, 256), ("up_proj", 512, 256), ("down_proj", 256, 512)):
        bases.fp8(base.tensors, f"{shared}.{leaf}", rows, columns)
    base.quantization["ignore"].remove("re:.*shared_experts.*")
    base.config |= {"num_attention_heads": 8, "head_dim": 32, "num_key_value_heads": 4}
    result = inspect(base, tmp_path)
    assert codes(result) == set()
    pairs = {(item.tp, item.ep): item.reasons for item in result.topologies}
    assert pairs[(4, 4)] == ()
    assert any("shared expert" in reason and "= 64 a rank" in reason for reason in pairs[(8, 4)])


def test_65_dense_18432_over_32(tmp_path, capsys):
    base = bases.b0()
    base.config |= {"intermediate_size": 18432, "num_attention_heads": 32, "head_dim": 8}
    base.config |= {"num_key_value_heads": 16}
    for leaf, rows, columns in (
        ("gate_proj", 18432, 256),
        ("up_proj", 18432, 256),
        ("down_proj", 256, 18432),
    ):
        bases.fp8(base.tensors, f"model.layers.0.mlp.{leaf}", rows, columns)
    directory = base.write(tmp_path)
    status, report, _ = _preflight(capsys, directory, "k2-horizon-fp8", 32, 1)
    assert status == 1
    assert any("18432 rows / 32 (TP 32) = 576 a rank, 576 % 128 = 64" in p["message"] for p in report["problems"])


def test_65_experts_of_a_dense_model(tmp_path, capsys):
    directory = bases.b0().write(tmp_path)
    status, report, _ = _preflight(capsys, directory, "k2-horizon-fp8", 2, 2)
    assert status == 1
    assert any("no routed experts" in problem["message"] for problem in report["problems"])


def test_65_the_published_pairs(tmp_path):
    raw = (bases.DATA / "K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_bytes()
    from qualify.models import k2_horizon

    config = json.loads(raw)
    tensors = {name: T(t.dtype, list(t.shape)) for name, t in k2_horizon.tensors(config).items()}
    bases.write_headers_only(tmp_path, {"model.safetensors": tensors}, raw, index=False)
    result = inspect(tmp_path, headers_only=True)
    assert {(item.tp, item.ep) for item in result.topologies if not item.reasons} == WORKING


def test_70_fp4_columns_go_in_steps_of_32(tmp_path, capsys):
    base = bases.b2()
    base.config["text_config"]["shared_expert_intermediate_size"] = 29568 // 8
    base.config["text_config"] |= {"num_key_value_heads": 4}
    for layer in (0, 1):
        module = f"model.language_model.layers.{layer}.mlp.shared_expert"
        width = 29568 // 8
        for leaf, rows, columns in (
            ("gate_proj", width, 256),
            ("up_proj", width, 256),
            ("down_proj", 256, width),
        ):
            bases.nvfp4(base.tensors, f"{module}.{leaf}", rows, columns, input_scale=False)
    for leaf in ("k_proj", "v_proj"):
        bases.fp8_tensor(base.tensors, f"model.language_model.layers.1.self_attn.{leaf}", 256, 256)
    directory = base.write(tmp_path)
    status, report, _ = _preflight(capsys, directory, "qwen3.6-nvfp4", 2, 1)
    assert status == 1
    assert any("1848 % 32 = 24" in problem["message"] for problem in report["problems"])


def test_67_families_are_not_architectures(tmp_path, capsys):
    directory = bases.b0().write(tmp_path)
    for arch, works in (("12.0", True), ("sm120", True), ("sm_90a", True), ("12.1", False), ("sm100", False)):
        status, report, _ = _preflight(capsys, directory, "k2-horizon-fp8", 1, 1, "--arch", arch)
        assert (status == 0) is works
        if not works:
            assert [problem["code"] for problem in report["problems"]] == ["arch-unsupported"]


def test_71_fp4_on_sm90_is_weight_only(tmp_path, capsys):
    directory = bases.b2().write(tmp_path)
    _, report, _ = _preflight(capsys, directory, "qwen3.6-nvfp4", 1, 1, "--arch", "9.0")
    assert "no-native-fp4" in {note["code"] for note in report["notes"]}


def test_49_router_provenance_is_declared_never_derived(tmp_path, capsys, monkeypatch):
    base = bases.b1()
    directory = base.write(tmp_path / "without")
    assert "router-provenance" in notes(inspect(directory))
    assert inspect(directory).verdict == "accepted"
    common = [
        "preflight",
        "--artifact",
        "mova-fp8",
        "--model-dir",
        directory,
        "--tp",
        2,
        "--ep",
        2,
        "--uncatalogued",
    ]
    monkeypatch.delenv("ROUTER_PARTITIONS", raising=False)
    status, report, _ = command(capsys, *common, "--json")
    assert status == 1
    assert [problem["code"] for problem in report["problems"]] == ["router-provenance"]
    monkeypatch.setenv("ROUTER_PARTITIONS", "2")
    assert command(capsys, *common)[0] == 0
    monkeypatch.setenv("ROUTER_PARTITIONS", "auto")
    assert command(capsys, *common)[0] == 1
    monkeypatch.delenv("ROUTER_PARTITIONS")
    for value in (1, 2):
        base.config["xllm_source_router_gemm_partitions"] = value
        directory = base.write(tmp_path / str(value))
        common[4] = directory
        assert "router-provenance" not in notes(inspect(directory))
        assert command(capsys, *common)[0] == 0
        assert command(capsys, *common, "--router-partitions", 3 - value)[0] == 1
