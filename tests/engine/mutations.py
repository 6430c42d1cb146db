"""The table of faults on MoVA: what can be wrong with a MoVA FP8 checkpoint or its load, one distinct kind a row.

Every row damages the tiny synthetic checkpoint in one way and names words that this image's refusal must contain.
``mutations_k2.py`` has the rows of the compressed-tensors checkpoints; a kind has one name in all of them. The rows
are the lines of the project's two lists of reported faults that can occur on MoVA. Not in the table, because no
loader can see them: a flipped payload bit that leaves a number a number (the checkpoint's manifest of hashes is for
that), two tensors of one shape under each other's names, and a wrong but well-formed declaration of router
provenance, gate function, scaling factor or norm groups, which are the checkpoint's own statement.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]

LAYER = "model.layers.4"
EXPERTS = f"{LAYER}.mlp.experts"
GATE, UP, DOWN = (f"{EXPERTS}.3.{leaf}_proj.weight" for leaf in ("gate", "up", "down"))
SCALE, DOWN_SCALE = f"{GATE}_scale_inv", f"{DOWN}_scale_inv"
ROUTER = f"{LAYER}.mlp.gate"
V_ROUTER, V_EXPERTS = f"{LAYER}.self_attn.v_router", f"{LAYER}.self_attn.v_experts"
SHARED = f"{LAYER}.mlp.shared_experts"
DENSE = "model.layers.0.mlp"
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", f"{LAYER}.input_layernorm.weight"
FINAL = "model.norm.weight"


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    ``route`` says how it reaches the engine and what ``mutate`` takes: ``tensors`` (a dict of tensors, written to
    a directory and also streamed), ``config`` (a config dict), ``files`` (a directory) or ``stream`` (the dict;
    returns the streams that are loaded one after the other into one model). ``model`` is the checkpoint that is
    damaged; ``place`` tells rows of one kind and model apart.
    """

    id: str
    what: str
    route: str
    mutate: Callable
    says: tuple[str, ...]
    model: str = "mova"
    place: str = ""

    @property
    def case(self) -> str:
        """The row's own name."""
        return ":".join(filter(None, (self.model, self.id, self.place)))


KINDS: list[Kind] = []


def kind(identifier: str, what: str, route: str, mutate: Callable, *says: str) -> None:
    """Add a row."""
    assert identifier not in {row.id for row in KINDS}, identifier
    KINDS.append(Kind(identifier, what, route, mutate, says))


# --- tensors that are not there -------------------------------------------------------------------------------


def without(which: str) -> Callable:
    """Drop a tensor, or with a trailing dot all tensors whose names start so."""

    def mutate(tensors: Tensors) -> None:
        dropped = [name for name in tensors if name == which or (which[-1] == "." and name.startswith(which))]
        assert dropped
        for name in dropped:
            del tensors[name]

    return mutate


for identifier, name in {
    "scale": SCALE,
    "expert-weight": UP,
    "router-weight": f"{ROUTER}.weight",
    "router-bias": f"{ROUTER}.bias",
    "value-router-weight": f"{V_ROUTER}.weight",
    "value-router-bias": f"{V_ROUTER}.bias",
    "value-expert": f"{V_EXPERTS}.7.weight",
    "query": f"{LAYER}.self_attn.q_proj.weight",
    "attention-gate": f"{LAYER}.self_attn.gate_proj.weight",
    "shared-expert": f"{SHARED}.up_proj.weight",
    "dense-mlp": f"{DENSE}.down_proj.weight",
    "dense-value": "model.layers.0.self_attn.v_proj.weight",
    "norm": NORM,
    "final-norm": "model.norm.weight",
    "embedding": EMBED,
    "head": HEAD,
}.items():
    kind(f"missing-{identifier}", f"{name} is missing", "tensors", without(name), "missing (1):", f"{name}:")
kind("missing-expert", "a whole routed expert", "tensors", without(f"{EXPERTS}.3."), "missing (6):", SCALE)
kind("missing-first-expert", "expert 0", "tensors", without(f"{EXPERTS}.0."), "missing (6):", f"{EXPERTS}.0.")
kind("missing-value-experts", "all value experts of a layer", "tensors", without(f"{V_EXPERTS}."), "missing (8):")
kind("missing-layer", "the whole last layer", "tensors", without(f"{LAYER}."), "missing (117):", "107 more")
kind("missing-everything", "an empty checkpoint", "tensors", lambda tensors: tensors.clear(), "defect(s)")


def missing_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        del tensors[name]


kind("missing-scales", "every scale", "tensors", missing_scales, "missing (96):")

# --- shapes, all of them before slicing ----------------------------------------------------------------------


def shaped(name: str, reshape: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """Replace a tensor by another one of its dtype; floats are not arithmetic, so that FP8 works too."""

    def mutate(tensors: Tensors) -> None:
        before = tensors[name]
        tensors[name] = reshape(before).contiguous()
        assert tensors[name].shape != before.shape
        assert tensors[name].dtype == before.dtype

    return mutate


def longer(dim: int) -> Callable:
    """Append the first row or column (of 128, or the one) once more."""
    return lambda tensor: torch.cat([tensor, tensor.narrow(dim, 0, min(128, tensor.shape[dim]))], dim)


def shorter(dim: int) -> Callable:
    return lambda tensor: tensor.narrow(dim, 0, tensor.shape[dim] // 2)


def shape_kind(identifier: str, name: str, reshape: Callable) -> None:
    kind(f"shape-{identifier}", f"{name}: {identifier}", "tensors", shaped(name, reshape), "shape (1):", f"{name}:")


shape_kind("scale-few-rows", SCALE, shorter(0))
shape_kind("scale-few-columns", SCALE, shorter(1))
shape_kind("scale-few-columns-down", DOWN_SCALE, shorter(1))
shape_kind("scale-many-rows", SCALE, longer(0))
shape_kind("scale-many-columns", DOWN_SCALE, longer(1))
shape_kind("scale-transposed", SCALE, lambda scale: scale.t())
shape_kind("scale-singleton", SCALE, lambda scale: scale[:1, :1])
shape_kind("scale-one-row", SCALE, lambda scale: scale[:1])
shape_kind("scale-one-column", DOWN_SCALE, lambda scale: scale[:, :1])
shape_kind("scale-scalar", SCALE, lambda scale: scale[0, 0])
shape_kind("scale-vector", SCALE, lambda scale: scale[0])
shape_kind("scale-vector-down", DOWN_SCALE, lambda scale: scale[0])
shape_kind("scale-per-channel", SCALE, lambda scale: scale[:1, :1].expand(256, 1))
shape_kind("scale-squeezed-rank", SCALE, lambda scale: scale[:, :, None])
shape_kind("scale-four-dimensions", SCALE, lambda scale: scale[:, None, :, None])
shape_kind("expert-few-rows", GATE, shorter(0))
shape_kind("expert-few-columns", GATE, shorter(1))
shape_kind("expert-one-row", DOWN, lambda weight: weight[:1])
shape_kind("expert-many-rows", GATE, longer(0))
shape_kind("expert-many-columns", DOWN, longer(1))
shape_kind("expert-transposed", DOWN, lambda weight: weight.t())
shape_kind("value-expert", f"{V_EXPERTS}.2.weight", shorter(0))
shape_kind("router", f"{ROUTER}.weight", shorter(0))
shape_kind("router-bias", f"{ROUTER}.bias", longer(0))
shape_kind("value-router", f"{V_ROUTER}.weight", shorter(0))
shape_kind("value-router-bias", f"{V_ROUTER}.bias", longer(0))
shape_kind("query", f"{LAYER}.self_attn.q_proj.weight", shorter(0))
shape_kind("output", f"{LAYER}.self_attn.o_proj.weight", longer(1))
shape_kind("shared-gate-short", f"{SHARED}.gate_proj.weight", shorter(0))
shape_kind("shared-down-long", f"{SHARED}.down_proj.weight", longer(1))
shape_kind("dense-up-short", f"{DENSE}.up_proj.weight", shorter(0))
shape_kind("dense-down-short", f"{DENSE}.down_proj.weight", shorter(1))
shape_kind("norm", NORM, shorter(0))
shape_kind("embedding", EMBED, shorter(0))
shape_kind("head", HEAD, longer(0))

# --- dtypes -----------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


def cast(name: str, dtype: torch.dtype, also: tuple[str, ...] = ()) -> Callable:
    """Convert a tensor's values to another dtype and drop the tensors ``also``."""

    def mutate(tensors: Tensors) -> None:
        assert tensors[name].dtype != dtype
        tensors[name] = tensors[name].float().to(dtype)
        for other in also:
            del tensors[other]

    return mutate


def reinterpret(name: str, dtype: torch.dtype) -> Callable:
    """Keep a tensor's bytes and declare another dtype."""

    def mutate(tensors: Tensors) -> None:
        tensors[name] = tensors[name].view(dtype)

    return mutate


def dtype_kind(identifier: str, name: str, mutate: Callable, *says: str) -> None:
    words = says or ("dtype (1):", f"{name}: is")
    kind(f"dtype-{identifier}", f"{name}: {identifier}", "tensors", mutate, *words)


dtype_kind("expert-bf16", GATE, cast(GATE, torch.bfloat16))
dtype_kind("expert-bf16-no-scale", GATE, cast(GATE, torch.bfloat16, (SCALE,)), "dtype (1):", "missing (1):")
dtype_kind("expert-f32", DOWN, cast(DOWN, torch.float32))
dtype_kind("expert-u8", GATE, reinterpret(GATE, torch.uint8))
dtype_kind("expert-i8", GATE, reinterpret(GATE, torch.int8))
dtype_kind("expert-e5m2", GATE, reinterpret(GATE, torch.float8_e5m2))
dtype_kind("scale-bf16", SCALE, cast(SCALE, torch.bfloat16))
dtype_kind("scale-f16", SCALE, cast(SCALE, torch.float16))
dtype_kind("scale-f64", SCALE, cast(SCALE, torch.float64))
dtype_kind("scale-fp8", SCALE, cast(SCALE, E4M3))
dtype_kind("scale-e8m0", SCALE, cast(SCALE, torch.float8_e8m0fnu))
dtype_kind("scale-u8", SCALE, cast(SCALE, torch.uint8))
dtype_kind("scale-i32", SCALE, reinterpret(SCALE, torch.int32))
for identifier, name in {
    "router": f"{ROUTER}.weight",
    "router-bias": f"{ROUTER}.bias",
    "value-router": f"{V_ROUTER}.weight",
    "value-router-bias": f"{V_ROUTER}.bias",
    "value-expert": f"{V_EXPERTS}.0.weight",
    "query": f"{LAYER}.self_attn.q_proj.weight",
    "attention-gate": f"{LAYER}.self_attn.gate_proj.weight",
    "shared-expert": f"{SHARED}.gate_proj.weight",
    "dense-mlp": f"{DENSE}.gate_proj.weight",
    "norm": NORM,
    "embedding": EMBED,
    "head": HEAD,
}.items():
    dtype_kind(f"{identifier}-fp8", name, cast(name, E4M3))
dtype_kind("output-f16", f"{LAYER}.self_attn.o_proj.weight", cast(f"{LAYER}.self_attn.o_proj.weight", torch.float16))
dtype_kind("norm-f32", NORM, cast(NORM, torch.float32))
dtype_kind("router-bias-f16", f"{ROUTER}.bias", cast(f"{ROUTER}.bias", torch.float16))


def bf16_checkpoint(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.endswith("_scale_inv"):
            del tensors[name]
        else:
            tensors[name] = tensors[name].bfloat16()


def fp8_shared_expert(tensors: Tensors) -> None:
    name = f"{SHARED}.down_proj.weight"
    tensors[name] = tensors[name].to(E4M3)
    tensors[f"{name}_scale_inv"] = torch.ones(3, 2)


dtype_kind("all-experts-bf16", "a BF16 checkpoint under an FP8 config", bf16_checkpoint, "dtype (96):", "missing (96):")
dtype_kind("shared-expert-fp8-and-scale", SHARED, fp8_shared_expert, "dtype (1):", "unexpected (1):")

# --- values -----------------------------------------------------------------------------------------------------


def one(name: str, value: float, count: int = 1) -> Callable:
    """Overwrite the last ``count`` elements; FP8 by code."""

    def mutate(tensors: Tensors) -> None:
        tensors[name] = tensors[name].clone()
        flat = tensors[name].view(-1)
        if flat.dtype == E4M3:
            flat = flat.view(torch.uint8)
        flat[-count:] = value

    return mutate


for identifier, value in {
    "nan": float("nan"),
    "inf": float("inf"),
    "minus-inf": float("-inf"),
    "zero": 0.0,
    "negative": -1e-4,
    "initialiser": torch.finfo(torch.float32).min,
}.items():
    what = f"a scale that is {identifier}"
    kind(f"value-scale-{identifier}", what, "tensors", one(SCALE, value), "value (1):", f"{SCALE}: 1 of 6 values")
kind("value-scales-zero", "a scale tensor of zeros", "tensors", one(SCALE, 0.0, 6), f"{SCALE}: 6 of 6 values")
for identifier, name, code in (("7f", GATE, 0x7F), ("ff", UP, 0xFF), ("down", DOWN, 0x7F)):
    what = f"the NaN code {code:#x} in {name}"
    kind(f"value-code-{identifier}", what, "tensors", one(name, code), "value (1):", f"{name}: 1 of 98,304 values")
for identifier, name in {
    "embedding": EMBED,
    "head": HEAD,
    "router": f"{ROUTER}.weight",
    "router-bias": f"{ROUTER}.bias",
    "value-router-bias": f"{V_ROUTER}.bias",
    "value-expert": f"{V_EXPERTS}.5.weight",
    "shared-expert": f"{SHARED}.up_proj.weight",
    "key": f"{LAYER}.self_attn.k_proj.weight",
    "norm": NORM,
}.items():
    what = f"a NaN in {name}"
    kind(f"value-nan-{identifier}", what, "tensors", one(name, float("nan")), "value (1):", f"{name}: 1 of")
kind("value-inf-norm", "an infinity in a norm", "tensors", one("model.norm.weight", float("inf")), "model.norm.weight:")


def zero_tile(tensors: Tensors) -> None:
    tensors[GATE] = tensors[GATE].clone()
    tensors[GATE].view(torch.uint8)[:128, :128] = 0x7F
    tensors[SCALE] = tensors[SCALE].clone()
    tensors[SCALE][0, 0] = 0


kind("value-zero-tile", "a converter's 0/0: NaN codes under a zero scale", "tensors", zero_tile, "value (2):", "16,384")

# --- names ------------------------------------------------------------------------------------------------------


def extra(name: str, like: str | None = None, shape: tuple[int, ...] = (1,)) -> Callable:
    """Add a tensor: a copy of another one, or FP32 ones."""

    def mutate(tensors: Tensors) -> None:
        assert name not in tensors
        tensors[name] = torch.ones(shape) if like is None else tensors[like].clone()

    return mutate


def renamed(before: str, after: str) -> Callable:
    """Replace a part of every name that has it."""

    def mutate(tensors: Tensors) -> None:
        for name in [name for name in tensors if before in name]:
            tensors[name.replace(before, after)] = tensors.pop(name)

    return mutate


def stacked(tensors: Tensors) -> None:
    """The experts of the layer as one tensor per projection, as other exporters write them."""
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        for suffix in ("weight", "weight_scale_inv"):
            names = [f"{EXPERTS}.{expert}.{leaf}.{suffix}" for expert in range(16)]
            parts = [tensors.pop(name) for name in names]
            integer = torch.stack([part.view(torch.uint8) for part in parts])
            tensors[f"{EXPERTS}.{leaf}.{suffix}"] = integer.view(parts[0].dtype)


def fused_on_disk(tensors: Tensors) -> None:
    name = f"{SHARED}.gate_up_proj.weight"
    tensors[name] = torch.cat([tensors.pop(f"{SHARED}.{leaf}_proj.weight") for leaf in ("gate", "up")])


for identifier, name, like in (
    ("unknown", "model.layers.4.mlp.gates.weight", None),
    ("expert", f"{EXPERTS}.16.gate_proj.weight", GATE),
    ("value-expert", f"{V_EXPERTS}.8.weight", f"{V_EXPERTS}.0.weight"),
    ("packed-value-experts", f"{V_EXPERTS}.weight", None),
    ("input-scale", f"{EXPERTS}.3.gate_proj.input_scale", None),
    ("expert-bias", f"{EXPERTS}.3.gate_proj.bias", None),
    ("second-scale", f"{EXPERTS}.3.gate_proj.weight_scale", None),
    ("cache-scale", f"{LAYER}.self_attn.k_proj.k_scale", None),
    ("head-scale", "lm_head.weight_scale_inv", None),
    ("attention-bias", f"{LAYER}.self_attn.q_proj.bias", None),
    ("inv-freq", f"{LAYER}.self_attn.rotary_emb.inv_freq", None),
    ("layer", "model.layers.5.input_layernorm.weight", NORM),
    ("draft-layer", "model.layers.5.eh_proj.weight", NORM),
    ("norm-of-heads", f"{LAYER}.self_attn.q_norm.weight", NORM),
):
    shape = (8, 256, 384) if identifier == "packed-value-experts" else (1,)
    kind(f"extra-{identifier}", f"{name} too much", "tensors", extra(name, like, shape), "unexpected (1):", f"{name}:")
kind("name-wrapper", "a wrapper's prefix", "tensors", renamed("model.", "model.language_model."), "unexpected (266)")
kind("name-scale", "scales named weight_scale", "tensors", renamed("weight_scale_inv", "weight_scale"), "missing (96)")
kind("name-block-sparse", "experts under another name", "tensors", renamed("mlp.experts", "moe.experts"), "(192)")
kind("name-stacked", "experts stacked into one tensor", "tensors", stacked, "unexpected (6):", "missing (96):")
kind("name-fused", "gate and up fused on disk", "tensors", fused_on_disk, "unexpected (1):", "missing (2):")

# --- files ------------------------------------------------------------------------------------------------------


def edit_index(change: Callable[[dict], None]) -> Callable:
    def mutate(directory: Path) -> None:
        path = directory / INDEX
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.unlink()
        path.write_text(json.dumps(index))

    return mutate


def shard_of(directory: Path, name: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def edit_shard(name: str, change: Callable[[Tensors], None]) -> Callable:
    """Rewrite the shard that holds ``name``, not the index."""

    def mutate(directory: Path) -> None:
        path = shard_of(directory, name)
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path)

    return mutate


def raw(change: Callable[[bytes], bytes], name: str = GATE) -> Callable:
    """Rewrite the bytes of the shard that holds ``name``."""

    def mutate(directory: Path) -> None:
        path = shard_of(directory, name)
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(change(data))

    return mutate


def map_to_another(name: str) -> Callable:
    """Let the index say another shard for a tensor."""

    def change(weight_map: dict) -> None:
        weight_map[name] = next(shard for shard in weight_map.values() if shard != weight_map[name])

    return edit_index(change)


def omit_shard(name: str) -> Callable:
    """Take everything that lies in the shard of a tensor out of the index."""

    def change(weight_map: dict) -> None:
        shard = weight_map[name]
        for other in [other for other in weight_map if weight_map[other] == shard]:
            del weight_map[other]

    return edit_index(change)


def in_two_shards(name: str) -> Callable:
    def mutate(directory: Path) -> None:
        other = next(path for path in sorted(directory.glob("*.safetensors")) if path != shard_of(directory, name))
        copy = load_file(shard_of(directory, name))[name].clone()
        tensors = load_file(other) | {name: copy}
        other.unlink()
        save_file(tensors, other)

    return mutate


def stray_shard(directory: Path) -> None:
    save_file({FINAL: torch.zeros(384, dtype=torch.bfloat16)}, directory / "model-00001-of-00001.safetensors")


def shard_gone(name: str) -> Callable:
    return lambda directory: shard_of(directory, name).unlink()


def no_index(directory: Path) -> None:
    (directory / INDEX).unlink()


def pickled(directory: Path) -> None:
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (directory / INDEX).unlink()
    torch.save(tensors, directory / "pytorch_model.bin")


def two_splits(directory: Path) -> None:
    """Another split of the same tensors beside the first, and no index to say which."""
    for path in sorted(directory.glob("*.safetensors")):
        shutil.copy(path, path.with_name(path.name.replace("model-", "weights-")))
    (directory / INDEX).unlink()


def second_declaration(directory: Path) -> None:
    declaration = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    (directory / "hf_quant_config.json").write_text(json.dumps(declaration))


def file_kind(identifier: str, what: str, mutate: Callable, *says: str) -> None:
    kind(f"files-{identifier}", what, "files", mutate, *says)


file_kind(
    "index-too-long",
    "the index lists a tensor that is in no shard",
    edit_index(lambda weight_map: weight_map.update({f"{GATE}_scale": weight_map[GATE]})),
    "index (1):",
    f"{GATE}_scale: is in no shard",
)
file_kind(
    "index-too-short",
    "a tensor is in a shard and not in the index",
    edit_index(lambda weight_map: weight_map.pop(GATE)),
    "index (1):",
    f"{GATE}: is in",
)
file_kind("index-wrong-shard", "the index names the wrong shard", map_to_another(GATE), "index (1):", f"{GATE}:")
file_kind("index-omits-shard", "the index omits a whole shard", omit_shard(GATE), "missing (", "does not name")
file_kind(
    "scale-lost",
    "the index names a scale that its shard has lost",
    edit_shard(SCALE, lambda tensors: tensors.pop(SCALE)),
    f"{SCALE}: is in no shard",
    "missing (1):",
)
file_kind(
    "stale-index",
    "a shard holds other names than the index says",
    edit_shard(SCALE, renamed("weight_scale_inv", "weight_scale")),
    "does not list it",
    "is in no shard",
    "unexpected (",
)
file_kind("stray-shard", "a shard that the index does not name", stray_shard, "model-00001-of-00001.safetensors: is a")
file_kind("shard-gone", "a shard of the index is not there", shard_gone(GATE), "unreadable (1):", "missing from")
file_kind("in-two-shards", "a tensor in two shards", in_two_shards(GATE), "duplicate (1):", f"{GATE}: is in model-")
file_kind("two-splits", "two splits of the same tensors", two_splits, "duplicate (267):", "is missing")
file_kind("no-index", "several shards and no index", no_index, "index (1):", f"{INDEX}: is missing")
file_kind("pickle", "a pickle instead of safetensors", pickled, "pytorch_model.bin: is no safetensors file")
file_kind("cut-short", "a shard cut short", raw(lambda data: data[:-64]), "unreadable (1):", "is cut short")
file_kind("trailing", "bytes behind the last tensor", raw(lambda data: data + bytes(64)), "has trailing bytes")
file_kind("empty-shard", "a shard of no bytes", raw(lambda data: b""), "has no safetensors header")
file_kind("cut-header", "a shard cut within its header", raw(lambda data: data[:100]), "has no safetensors header")
file_kind(
    "lfs-pointer",
    "a Git LFS pointer in place of a shard",
    raw(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
    "is a Git LFS pointer",
)
file_kind("web-page", "an error page saved as a shard", raw(lambda data: b"<!DOCTYPE html><html>"), "is a web page")
file_kind("two-declarations", "hf_quant_config.json beside config.json", second_declaration, "hf_quant_config.json:")

# --- config.json ------------------------------------------------------------------------------------------------


def quantisation(**changes) -> Callable:
    return lambda config: config["quantization_config"].update(changes)


def ignoring(entry: str) -> Callable:
    return lambda config: config["quantization_config"]["ignored_layers"].append(entry)


def not_ignoring(part: str) -> Callable:
    def mutate(config: dict) -> None:
        names = config["quantization_config"]["ignored_layers"]
        kept = [name for name in names if part not in name]
        assert len(kept) < len(names)
        config["quantization_config"]["ignored_layers"] = kept

    return mutate


def setting(**changes) -> Callable:
    return lambda config: config.update(changes)


def compressed_tensors(config: dict) -> None:
    """The relabelling that would boot: another quant_method over the same tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": config["quantization_config"]["ignored_layers"],
        "config_groups": {"group_0": group},
    }


def config_kind(identifier: str, what: str, mutate: Callable, *says: str) -> None:
    kind(f"config-{identifier}", what, "config", mutate, *says)


config_kind("ue8m0", "scale_fmt ue8m0", quantisation(scale_fmt="ue8m0"), "scale_fmt")
config_kind("e5m2", "fmt e5m2", quantisation(fmt="e5m2"), "fmt")
config_kind("static", "static activation scales", quantisation(activation_scheme="static"), "activation scheme")
config_kind("blocks", "another block size", quantisation(weight_block_size=[64, 128]), "weight_block_size")
config_kind("no-blocks", "no block size", quantisation(weight_block_size=None), "weight_block_size")
config_kind("mxfp8", "mxfp8", quantisation(quant_method="mxfp8", weight_block_size=[1, 32]), "mxfp8")
config_kind("unknown-format-key", "an unknown quantisation key", quantisation(transform_config={"a": 1}), "transform_")
config_kind("cache-scheme", "an FP8 KV cache without scales", quantisation(kv_cache_quant_algo="FP8"), "kv_cache_")
config_kind("no-ignored-layers", "no ignored_layers", quantisation(ignored_layers=None), "ignored_layers")
for identifier, part in {
    "attention": "self_attn.q_proj",
    "value-experts": "v_experts",
    "value-router": "v_router",
    "router": "mlp.gate",
    "shared-experts": "shared_experts",
    "dense-mlp": "layers.0.mlp",
    "norms": "input_layernorm",
    "embedding": "embed_tokens",
    "head": "lm_head",
}.items():
    config_kind(f"omits-{identifier}", f"ignored_layers omits {part}", not_ignoring(part), "does not name")
for identifier, entry in {
    "experts": f"{EXPERTS}",
    "layer": LAYER,
    "component": "experts",
    "number": "4",
    "one-expert": f"{EXPERTS}.3.gate_proj",
}.items():
    words = ("excludes routed experts", f"{entry!r}")
    config_kind(f"excludes-{identifier}", f"ignored_layers has {entry}", ignoring(entry), *words)
for identifier, entry in {
    "typo": "model.layers.4.mlp.gates",
    "regex": "re:.*gate.*",
    "fused": "model.layers.4.self_attn.qkv_proj",
    "short": "self_attn.q_proj",
    "wrapper": "model.language_model.norm",
    "dot": "lm_head.",
}.items():
    words = ("is not the full name", f"{entry!r}")
    config_kind(f"entry-{identifier}", f"ignored_layers has {entry}", ignoring(entry), *words)
config_kind("no-quantisation", "no quantization_config", lambda config: config.pop("quantization_config"), "scale")
config_kind("relabelled", "relabelled as compressed-tensors", compressed_tensors, "is not admitted")
config_kind("tied-with-head", "tied embeddings, and a head in the files", setting(tie_word_embeddings=True), "lm_head")
config_kind("fewer-layers", "fewer layers than the files hold", setting(num_hidden_layers=4), "ignored_layers")
config_kind("more-layers", "more layers than the files hold", setting(num_hidden_layers=6), "ignored_layers")
config_kind("more-experts", "more experts than the files hold", setting(num_experts=20), "missing (48):")
config_kind("fewer-experts", "fewer experts than the files hold", setting(num_experts=12), "unexpected (48):")
config_kind("grouped-router", "a key that the engine would ignore", setting(n_group=4), "'n_group'")
config_kind("softcap", "a softcap that the engine would ignore", setting(final_logit_softcapping=30.0), "softcapping")
config_kind("draft-layers", "draft layers declared", setting(num_nextn_predict_layers=1), "num_nextn_predict_layers")
config_kind("truthy-string", "a string for a boolean", setting(norm_topk_prob="false"), "norm_topk_prob")
config_kind("no-norm-groups", "no norm groups", setting(layernorm_num_groups=0), "layernorm_num_groups")
config_kind("negative-epsilon", "a negative epsilon", setting(rms_norm_eps=-1e-6), "rms_norm_eps")
config_kind("top-k", "more experts per token than there are", setting(num_experts_per_tok=17), "num_experts_per_tok")
config_kind("dtype", "float16 declared", setting(dtype="float16", torch_dtype="float16"), "bfloat16")

# --- streams ----------------------------------------------------------------------------------------------------


def stream_kind(identifier: str, what: str, mutate: Callable, *says: str) -> None:
    kind(f"stream-{identifier}", what, "stream", mutate, *says)


def repeated(tensors: Tensors, *names: str) -> list:
    return [*tensors.items(), *((name, tensors[name]) for name in names)]


def other_checkpoint(tensors: Tensors) -> list:
    return [(name, torch.zeros_like(tensor) if name == FINAL else tensor) for name, tensor in tensors.items()]


stream_kind("duplicate", "a tensor twice", lambda t: [repeated(t, GATE)], "duplicate (1):", f"{GATE}:")
stream_kind(
    "duplicate-differs",
    "a tensor twice with other values",
    lambda t: [[*t.items(), (NORM, torch.zeros_like(t[NORM]))]],
    "duplicate (1):",
    f"{NORM}:",
)
stream_kind("duplicate-scale", "a scale twice", lambda t: [repeated(t, SCALE)], "duplicate (1):", f"{SCALE}:")
stream_kind("second-load", "the same weights again", lambda t: [[*t.items()], [*t.items()]], "second time")
stream_kind("second-checkpoint", "another checkpoint", lambda t: [[*t.items()], other_checkpoint(t)], "second time")
stream_kind("partial-update", "a part of another", lambda t: [[*t.items()], [(NORM, t[NORM])]], "second time")
stream_kind("in-two-halves", "a load in two calls", lambda t: [[*t.items()][:100], [*t.items()][100:]], "missing (")
stream_kind("empty", "an empty stream", lambda t: [[]], "missing (267):")
