"""The table of faults on compressed-tensors: a dense and a routed-expert checkpoint, damaged in one way a row.

A kind has the name that it has in ``mutations.py``, where it can occur on MoVA too. Three code paths of the engine
hold the quantised modules of a dense model (fused queries, keys and values; fused gate and up; split by columns), so
that a kind has a row for each. The routed-expert checkpoint has rows for what a dense one cannot have wrong, and one
or two of each group for the rest. Not in the table: an F32 scale, which is exact and admitted, and a transposed scale
of a square weight, which nobody can see.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from tests.engine.mutations import (
    E4M3,
    FINAL,
    INDEX,
    Kind,
    Tensors,
    cast,
    edit_index,
    edit_shard,
    extra,
    in_two_shards,
    longer,
    map_to_another,
    no_index,
    omit_shard,
    one,
    other_checkpoint,
    pickled,
    raw,
    reinterpret,
    renamed,
    repeated,
    second_declaration,
    setting,
    shaped,
    shard_gone,
    shorter,
    stray_shard,
    two_splits,
    without,
)

KINDS: list[Kind] = []

#: Quantised weights of the dense checkpoint by the engine's way of holding them.
LINEAR = {
    "qkv": "model.layers.1.self_attn.k_proj.weight",
    "merged": "model.layers.1.mlp.gate_proj.weight",
    "row": "model.layers.1.mlp.down_proj.weight",
}
EXPERTS = "model.layers.4.mlp.experts"
#: The same of the routed experts.
ROUTED = {"w1": f"{EXPERTS}.3.gate_proj.weight", "w2": f"{EXPERTS}.3.down_proj.weight"}
EXPERT = ROUTED["w1"]
ROUTER = "model.layers.4.mlp.gate"
SHARED = "model.layers.4.mlp.shared_experts"
PREFIX = "model.layers.0.mlp"

#: What is BF16, by checkpoint.
PLAIN = {
    "dense": {
        "norm": "model.layers.1.input_layernorm.weight",
        "final-norm": FINAL,
        "embedding": "model.embed_tokens.weight",
        "head": "lm_head.weight",
    },
    "moe": {
        "router-weight": f"{ROUTER}.weight",
        "router-bias": f"{ROUTER}.bias",
        "shared-expert": f"{SHARED}.up_proj.weight",
        "dense-mlp": f"{PREFIX}.down_proj.weight",
        "query": "model.layers.4.self_attn.q_proj.weight",
    },
}


def add(model: str, identifier: str, route: str, mutate: Callable, *says: str, place: str = "") -> None:
    """Add a row."""
    row = Kind(identifier, f"{identifier} {place}".strip(), route, mutate, says, model, place)
    assert row.case not in {other.case for other in KINDS}, row.case
    KINDS.append(row)


def quantised():
    """(model, place, weight, its scale) of every quantised weight that is damaged."""
    for model, weights in (("dense", LINEAR), ("moe", ROUTED)):
        for place, weight in weights.items():
            yield model, place, weight, f"{weight}_scale"


def plain():
    """(model, place, tensor) of every BF16 one."""
    for model, tensors in PLAIN.items():
        for place, name in tensors.items():
            yield model, place, name


# --- tensors that are not there -------------------------------------------------------------------------------

for model, place, weight, scale in quantised():
    add(model, "missing-scale", "tensors", without(scale), "missing (1):", f"{scale}:", place=place)
    identifier = "missing-linear-weight" if model == "dense" else "missing-expert-weight"
    add(model, identifier, "tensors", without(weight), "missing (1):", f"{weight}:", place=place)
for model, place, name in plain():
    add(model, f"missing-{place}", "tensors", without(name), "missing (1):", f"{name}:")
add("moe", "missing-expert", "tensors", without(f"{EXPERTS}.3."), "missing (6):", f"{EXPERT}:")
add("moe", "missing-first-expert", "tensors", without(f"{EXPERTS}.0."), "missing (6):", f"{EXPERTS}.0.")
add("dense", "missing-layer", "tensors", without("model.layers.1."), "missing (16):")
add("moe", "missing-layer", "tensors", without("model.layers.4."), "missing (107):")


def missing_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]


for model, count in (("dense", 14), ("moe", 96)):
    add(model, "missing-everything", "tensors", lambda tensors: tensors.clear(), "defect(s)")
    add(model, "missing-scales", "tensors", missing_scales, f"missing ({count}):")

# --- shapes, all of them before slicing -------------------------------------------------------------------------

SCALE_SHAPES = {
    "few-rows": shorter(0),
    "few-columns": shorter(1),
    "many-rows": longer(0),
    "many-columns": longer(1),
    "transposed": lambda scale: scale.t(),
    "singleton": lambda scale: scale[:1, :1],
    "one-row": lambda scale: scale[:1],
    "one-column": lambda scale: scale[:, :1],
    "scalar": lambda scale: scale[0, 0],
    "vector": lambda scale: scale[0],
    "per-channel": lambda scale: scale[:1, :1].expand(128 * scale.shape[0], 1),
    "squeezed-rank": lambda scale: scale[:, :, None],
    "four-dimensions": lambda scale: scale[:, None, :, None],
}
WEIGHT_SHAPES = {
    "few-rows": shorter(0),
    "few-columns": shorter(1),
    "one-row": lambda weight: weight[:1],
    "many-rows": longer(0),
    "many-columns": longer(1),
    "transposed": lambda weight: weight.t(),
}
for model, place, weight, scale in quantised():
    for identifier, reshape in SCALE_SHAPES.items():
        mutate = shaped(scale, reshape)
        add(model, f"shape-scale-{identifier}", "tensors", mutate, "shape (1):", f"{scale}:", place=place)
    for identifier, reshape in WEIGHT_SHAPES.items():
        kind = f"shape-{'linear' if model == 'dense' else 'expert'}-{identifier}"
        add(model, kind, "tensors", shaped(weight, reshape), "shape (1):", f"{weight}:", place=place)
for model, place, name in plain():
    kind = f"shape-{place.removesuffix('-weight')}"
    add(model, kind, "tensors", shaped(name, shorter(0)), "shape (1):", f"{name}:", place="short")
    add(model, kind, "tensors", shaped(name, longer(0)), "shape (1):", f"{name}:", place="long")

# --- dtypes -----------------------------------------------------------------------------------------------------


def dtype_kind(model: str, identifier: str, name: str, mutate: Callable, *says: str, place: str = "") -> None:
    add(model, f"dtype-{identifier}", "tensors", mutate, *(says or ("dtype (1):", f"{name}: is")), place=place)


for model, place, weight, scale in quantised():
    what = "linear" if model == "dense" else "expert"
    both = ("dtype (1):", "missing (1):")
    dtype_kind(model, f"{what}-bf16", weight, cast(weight, torch.bfloat16), place=place)
    dtype_kind(model, f"{what}-bf16-no-scale", weight, cast(weight, torch.bfloat16, (scale,)), *both, place=place)
    dtype_kind(model, f"{what}-f32", weight, cast(weight, torch.float32), place=place)
    dtype_kind(model, f"{what}-u8", weight, reinterpret(weight, torch.uint8), place=place)
    dtype_kind(model, f"{what}-i8", weight, reinterpret(weight, torch.int8), place=place)
    dtype_kind(model, f"{what}-e5m2", weight, reinterpret(weight, torch.float8_e5m2), place=place)
    for identifier, dtype in {
        "f16": torch.float16,
        "f64": torch.float64,
        "fp8": E4M3,
        "e8m0": torch.float8_e8m0fnu,
        "u8": torch.uint8,
        "i32": torch.int32,
    }.items():
        dtype_kind(model, f"scale-{identifier}", scale, cast(scale, dtype), place=place)
for model, place, name in plain():
    dtype_kind(model, f"{place.removesuffix('-weight')}-fp8", name, cast(name, E4M3))
dtype_kind("dense", "norm-f32", PLAIN["dense"]["norm"], cast(PLAIN["dense"]["norm"], torch.float32))
dtype_kind("moe", "router-bias-f16", f"{ROUTER}.bias", cast(f"{ROUTER}.bias", torch.float16))


def bf16_checkpoint(tensors: Tensors) -> None:
    missing_scales(tensors)
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def fp8_and_scale(name: str) -> Callable:
    """Quantise one BF16 weight, as an exporter would that knows no scope."""

    def mutate(tensors: Tensors) -> None:
        blocks = tuple(-(-extent // 128) for extent in tensors[name].shape)
        tensors[name] = tensors[name].to(E4M3)
        tensors[f"{name}_scale"] = torch.ones(blocks, dtype=torch.bfloat16)

    return mutate


for model, identifier, count in (("dense", "all-linears-bf16", 14), ("moe", "all-experts-bf16", 96)):
    dtype_kind(model, identifier, "", bf16_checkpoint, f"dtype ({count}):", f"missing ({count}):")
for model, identifier, name in (
    ("dense", "head-fp8-and-scale", "lm_head.weight"),
    ("dense", "embedding-fp8-and-scale", "model.embed_tokens.weight"),
    ("moe", "shared-expert-fp8-and-scale", f"{SHARED}.down_proj.weight"),
    ("moe", "router-fp8-and-scale", f"{ROUTER}.weight"),
):
    dtype_kind(model, identifier, name, fp8_and_scale(name), "dtype (1):", "unexpected (1):")

# --- values -----------------------------------------------------------------------------------------------------

for model, place, weight, scale in quantised():
    for identifier, value in {
        "nan": float("nan"),
        "inf": float("inf"),
        "minus-inf": float("-inf"),
        "zero": 0.0,
        "negative": -1e-4,
        "initialiser": torch.finfo(torch.bfloat16).min,
    }.items():
        words = ("value (1):", f"{scale}: 1 of")
        add(model, f"value-scale-{identifier}", "tensors", one(scale, value), *words, place=place)
    for identifier, code in (("7f", 0x7F), ("ff", 0xFF)):
        words = ("value (1):", f"{weight}: 1 of")
        add(model, f"value-code-{identifier}", "tensors", one(weight, code), *words, place=place)
for model, place, name in plain():
    words = ("value (1):", f"{name}: 1 of")
    add(model, f"value-nan-{place.removesuffix('-weight')}", "tensors", one(name, float("nan")), *words)
add("dense", "value-inf-norm", "tensors", one(FINAL, float("inf")), "value (1):", f"{FINAL}: 1 of")

# --- names ------------------------------------------------------------------------------------------------------


def stacked(tensors: Tensors) -> None:
    """The experts of the layer as one tensor per projection, as other exporters write them."""
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for suffix in ("weight", "weight_scale"):
            parts = [tensors.pop(f"{EXPERTS}.{expert}.{leaf}.{suffix}") for expert in range(16)]
            both = torch.stack([part.view(torch.uint8) for part in parts])
            tensors[f"{EXPERTS}.{leaf}.{suffix}"] = both.view(parts[0].dtype)


def fused_on_disk(tensors: Tensors) -> None:
    """Gate and up as one tensor, codes and scales."""
    for suffix in ("weight", "weight_scale"):
        parts = [tensors.pop(f"model.layers.1.mlp.{leaf}_proj.{suffix}") for leaf in ("gate", "up")]
        both = torch.cat([part.view(torch.uint8) for part in parts])
        tensors[f"model.layers.1.mlp.gate_up_proj.{suffix}"] = both.view(parts[0].dtype)


NORM = PLAIN["dense"]["norm"]
DENSE_EXTRA = {
    "unknown": ("model.layers.1.mlp.gates.weight", None),
    "input-scale": ("model.layers.1.mlp.down_proj.input_scale", None),
    "second-scale": ("model.layers.1.mlp.down_proj.weight_scale_inv", f"{LINEAR['row']}_scale"),
    "linear-bias": ("model.layers.1.mlp.down_proj.bias", None),
    "zero-point": ("model.layers.1.mlp.down_proj.weight_zero_point", None),
    "shape-of-packed": ("model.layers.1.mlp.down_proj.weight_shape", None),
    "cache-scale": ("model.layers.1.self_attn.k_proj.output_scale", None),
    "head-scale": ("lm_head.weight_scale", None),
    "attention-bias": ("model.layers.1.self_attn.q_proj.bias", None),
    "attention-gate": ("model.layers.1.self_attn.gate_proj.weight", None),
    "inv-freq": ("model.layers.1.self_attn.rotary_emb.inv_freq", None),
    "layer": ("model.layers.2.input_layernorm.weight", NORM),
    "draft-layer": ("model.layers.2.eh_proj.weight", NORM),
    "norm-of-heads": ("model.layers.1.self_attn.q_norm.weight", NORM),
    "expert": ("model.layers.1.mlp.experts.0.gate_proj.weight", LINEAR["merged"]),
}
MOE_EXTRA = {
    "expert": (f"{EXPERTS}.16.gate_proj.weight", EXPERT),
    "input-scale": (f"{EXPERTS}.3.gate_proj.input_scale", None),
    "expert-bias": (f"{EXPERTS}.3.gate_proj.bias", None),
    "second-scale": (f"{EXPERT}_scale_inv", f"{EXPERT}_scale"),
    "router-scale": (f"{ROUTER}.weight_scale", None),
}
for model, names in (("dense", DENSE_EXTRA), ("moe", MOE_EXTRA)):
    for identifier, (name, like) in names.items():
        add(model, f"extra-{identifier}", "tensors", extra(name, like), "unexpected (1):", f"{name}:")
add("dense", "name-wrapper", "tensors", renamed("model.", "model.language_model."), "unexpected (34):")
add("dense", "name-scale", "tensors", renamed("weight_scale", "weight_scale_inv"), "missing (14):", "unexpected (14):")
add("moe", "name-scale", "tensors", renamed("weight_scale", "weight_scale_inv"), "missing (96):", "unexpected (96):")
add("moe", "name-block-sparse", "tensors", renamed("mlp.experts", "moe.experts"), "missing (192):")
add("moe", "name-stacked", "tensors", stacked, "unexpected (6):", "missing (96):")
add("dense", "name-fused", "tensors", fused_on_disk, "unexpected (2):", "missing (4):")

# --- files ------------------------------------------------------------------------------------------------------

DOWN = LINEAR["row"]
FILES: dict[str, tuple] = {
    "index-too-long": (
        edit_index(lambda weight_map: weight_map.update({f"{DOWN}_zero": weight_map[DOWN]})),
        f"{DOWN}_zero: is in no shard",
    ),
    "index-too-short": (edit_index(lambda weight_map: weight_map.pop(DOWN)), "index (1):", f"{DOWN}: is in"),
    "index-wrong-shard": (map_to_another(DOWN), "index (1):", f"{DOWN}:"),
    "index-omits-shard": (omit_shard(DOWN), "missing (", "does not name"),
    "scale-lost": (
        edit_shard(f"{DOWN}_scale", lambda tensors: tensors.pop(f"{DOWN}_scale")),
        f"{DOWN}_scale: is in no shard",
        "missing (1):",
    ),
    "stale-index": (
        edit_shard(f"{DOWN}_scale", renamed("weight_scale", "weight_scale_inv")),
        "does not list it",
        "is in no shard",
        "unexpected (",
    ),
    "stray-shard": (stray_shard, "model-00001-of-00001.safetensors: is a"),
    "shard-gone": (shard_gone(DOWN), "unreadable (1):", "missing from"),
    "in-two-shards": (in_two_shards(DOWN), "duplicate (1):", f"{DOWN}: is in model-"),
    "two-splits": (two_splits, "duplicate (35):", "is missing"),
    "no-index": (no_index, "index (1):", f"{INDEX}: is missing"),
    "pickle": (pickled, "pytorch_model.bin: is no safetensors file"),
    "cut-short": (raw(lambda data: data[:-64], DOWN), "unreadable (1):", "is cut short"),
    "trailing": (raw(lambda data: data + bytes(64), DOWN), "has trailing bytes"),
    "empty-shard": (raw(lambda data: b"", DOWN), "has no safetensors header"),
    "cut-header": (raw(lambda data: data[:100], DOWN), "has no safetensors header"),
    "lfs-pointer": (
        raw(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", DOWN),
        "is a Git LFS pointer",
    ),
    "web-page": (raw(lambda data: b"<!DOCTYPE html><html>", DOWN), "is a web page"),
    "two-declarations": (second_declaration, "hf_quant_config.json:"),
}
for identifier, (mutate, *says) in FILES.items():
    add("dense", f"files-{identifier}", "files", mutate, *says)
add("moe", "files-index-omits-shard", "files", omit_shard(EXPERT), "missing (", "does not name")
add("moe", "files-in-two-shards", "files", in_two_shards(EXPERT), "duplicate (1):", f"{EXPERT}: is in model-")

# --- config.json ------------------------------------------------------------------------------------------------


def quantisation(**changes) -> Callable:
    return lambda config: config["quantization_config"].update(changes)


def in_group(part: str = "", **changes) -> Callable:
    """Change the config group, or its weights or activations."""

    def mutate(config: dict) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        (group[part] if part else group).update(changes)

    return mutate


def ignoring(*entries: str) -> Callable:
    return lambda config: config["quantization_config"]["ignore"].extend(entries)


def not_ignoring(part: str) -> Callable:
    def mutate(config: dict) -> None:
        kept = [name for name in config["quantization_config"]["ignore"] if part not in name]
        assert len(kept) < len(config["quantization_config"]["ignore"])
        config["quantization_config"]["ignore"] = kept

    return mutate


def targeting(targets: list[str], not_ignored: str) -> Callable:
    """Other targets, and entries of ``ignore`` that hold ``not_ignored`` taken out."""

    def mutate(config: dict) -> None:
        in_group(targets=targets)(config)
        not_ignoring(not_ignored)(config)

    return mutate


def second_group(**changes) -> Callable:
    """Another group over the same class, of which the engine takes the last."""

    def mutate(config: dict) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = copy.deepcopy(groups["group_0"])
        groups["group_1"].update(changes)

    return mutate


def relabelled(config: dict) -> None:
    """Another quant_method over the same tensors."""
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": list(config["quantization_config"]["ignore"]),
    }


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BOTH = {
    "format-naive": (quantisation(format="naive-quantized"), "format"),
    "format-packed": (quantisation(format="pack-quantized"), "format"),
    "status": (quantisation(quantization_status="frozen"), "quantization_status"),
    "unknown-format-key": (quantisation(rotation="hadamard"), "rotation"),
    "transform": (quantisation(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config"),
    "cache-scheme": (quantisation(kv_cache_scheme=CACHE), "kv_cache_scheme"),
    "activation-bits": (in_group("input_activations", num_bits=4), "num_bits"),
    "activation-group": (in_group("input_activations", group_size=64), "group_size"),
    "activation-strategy": (in_group("input_activations", strategy="token", group_size=None), "strategy"),
    "static": (in_group("input_activations", dynamic=False), "dynamic"),
    "asymmetric": (in_group("weights", symmetric=False), "symmetric"),
    "ue8m0": (in_group("weights", scale_dtype="torch.float8_e8m0fnu"), "scale_dtype"),
    "activation-order": (in_group("weights", actorder="static"), "actorder"),
    "no-activations": (in_group(input_activations=None), "input_activations"),
    "output-activations": (in_group(output_activations={"num_bits": 8, "type": "float"}), "output_activations"),
    "blocks": (in_group("weights", block_structure=[64, 128]), "block_structure"),
    "two-groups": (second_group(), "twice"),
    "no-quantisation": (lambda config: config.pop("quantization_config"), "scale"),
    "relabelled": (relabelled, "for K2-Horizon MoVA only"),
    "tied-with-head": (setting(tie_word_embeddings=True), "lm_head"),
    "grouped-router": (setting(n_group=4), "'n_group'"),
    "dtype": (setting(dtype="float16", torch_dtype="float16"), "bfloat16"),
}
DENSE = BOTH | {
    "softcap": (setting(final_logit_softcapping=30.0), "softcapping"),
    "draft-layers": (setting(num_nextn_predict_layers=1), "num_nextn_predict_layers"),
    "truthy-string": (setting(norm_topk_prob="false"), "norm_topk_prob"),
    "no-norm-groups": (setting(layernorm_num_groups=0), "layernorm_num_groups"),
    "negative-epsilon": (setting(rms_norm_eps=-1e-6), "rms_norm_eps"),
    "rotated-beyond-the-head": (setting(rope_head_dim=256), "rope_head_dim"),
    "biases": (setting(attention_bias=True), "attention_bias"),
    "fewer-layers": (setting(num_hidden_layers=1, mlp_only_layers=[0]), "unexpected (16):"),
    "more-layers": (setting(num_hidden_layers=3, mlp_only_layers=[0, 1, 2]), "missing (16):"),
    "fewer-heads": (setting(num_attention_heads=4), "shape ("),
    "omits-head": (quantisation(ignore=[]), "'lm_head'"),
    "no-ignore": (quantisation(ignore=None), "ignore"),
    "excludes-quantised": (ignoring("model.layers.1.mlp.down_proj"), "dtype (1):", "unexpected (1):", DOWN),
    "excludes-part-of-fused": (ignoring("model.layers.1.self_attn.v_proj"), "one module"),
    "targets-half": (in_group(targets=[r"re:.*\.mlp\..*"]), "dtype (8):", "unexpected (8):"),
    "target-unmatched": (in_group(targets=["Linear", "re:.*experts.*"]), "re:.*experts.*"),
    "target-embedding": (in_group(targets=["Linear", "model.embed_tokens"]), "model.embed_tokens"),
    "target-head": (targeting(["Linear", "lm_head"], "lm_head"), "would quantise 'lm_head'"),
}
MOE = BOTH | {
    "omits-attention": (not_ignoring("self_attn"), "dtype (20):", "missing (20):"),
    "omits-shared-experts": (not_ignoring("shared_experts"), "dtype (6):", "missing (6):"),
    "omits-dense-mlp": (not_ignoring("layers.0.mlp"), "dtype (3):", "missing (3):"),
    "omits-part-of-fused": (not_ignoring("layers.0.mlp.up_proj"), "one module"),
    "excludes-one-expert": (ignoring(*(f"{EXPERTS}.3.{leaf}_proj" for leaf in ("gate", "up", "down"))), "experts.3."),
    "excludes-first-expert": (ignoring(*(f"{EXPERTS}.0.{leaf}_proj" for leaf in ("gate", "up", "down"))), "experts.0."),
    "excludes-experts": (ignoring(EXPERTS), f"{EXPERTS!r}", "a parent"),
    "excludes-layer": (ignoring("model.layers.4"), "'model.layers.4'", "a parent"),
    "excludes-quantised": (ignoring(r"re:.*layers\.4\.mlp\.experts\..*"), "dtype (48):", "unexpected (48):"),
    "target-router": (targeting([r"re:.*\.mlp\..*"], "mlp.gate"), "would quantise 'model.layers.3.mlp.gate'"),
    "other-expert-group": (second_group(targets=[f"{EXPERTS}.3.gate_proj"], weights={"num_bits": 4}), "weights"),
    "more-experts": (setting(num_experts=20), "missing (48):"),
    "fewer-experts": (setting(num_experts=12), "unexpected (48):"),
    "top-k": (setting(num_experts_per_tok=17), "num_experts_per_tok"),
    "every-other-layer": (setting(decoder_sparse_step=2), "decoder_sparse_step"),
    "no-shared-expert": (setting(num_shared_experts=0), "shared_experts"),
    "no-router-bias": (setting(moe_gate_bias=False), "unexpected (2):"),
}
ENTRIES = {
    "typo": "model.layers.1.mlp.gates",
    "regex": "re:.*gates.*",
    "regex-broken": "re:(",
    "fused": "model.layers.1.self_attn.qkv_proj",
    "wrapper": "model.language_model.layers.1.mlp.down_proj",
    "dot": "lm_head.",
}
for model, kinds in (("dense", DENSE), ("moe", MOE)):
    for identifier, (mutate, *says) in kinds.items():
        add(model, f"config-{identifier}", "config", mutate, *says)
for identifier, entry in ENTRIES.items():
    add("dense", f"config-entry-{identifier}", "config", ignoring(entry), f"{entry!r}")

# --- streams ----------------------------------------------------------------------------------------------------

for model, name, count in (("dense", DOWN, 35), ("moe", EXPERT, 244)):
    streams: dict[str, tuple] = {
        "duplicate": (lambda t, name=name: [repeated(t, name)], "duplicate (1):", f"{name}:"),
        "duplicate-differs": (lambda t: [[*t.items(), (FINAL, torch.zeros_like(t[FINAL]))]], "duplicate (1):", FINAL),
        "duplicate-scale": (lambda t, name=name: [repeated(t, f"{name}_scale")], "duplicate (1):", f"{name}_scale:"),
        "second-load": (lambda t: [[*t.items()], [*t.items()]], "second time"),
        "second-checkpoint": (lambda t: [[*t.items()], other_checkpoint(t)], "second time"),
        "partial-update": (lambda t: [[*t.items()], [(FINAL, t[FINAL])]], "second time"),
        "in-two-halves": (lambda t: [[*t.items()][:20], [*t.items()][20:]], "missing ("),
        "empty": (lambda t: [[]], f"missing ({count}):"),
    }
    for identifier, (mutate, *says) in streams.items():
        add(model, f"stream-{identifier}", "stream", mutate, *says)
