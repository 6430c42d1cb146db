"""The four tiny base checkpoints that the cases mutate, written with struct and json alone.

A :class:`Base` is a config, tensors by name, and what to write beside them. Change it, then
:meth:`Base.write` it.
"""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
BITS = {
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U8": 8,
    "I8": 8,
    "BF16": 16,
    "F16": 16,
    "F32": 32,
    "I32": 32,
    "F64": 64,
}
#: one element of each dtype, for scales that are fine
ONE = {
    "F32": struct.pack("<f", 1.0),
    "BF16": b"\x80\x3f",
    "F16": b"\x00\x3c",
    "F8_E4M3": b"\x38",
    "F8_E8M0": b"\x7f",
    "U8": b"\x7f",
    "F64": struct.pack("<d", 1.0),
}


@dataclass
class T:
    """One tensor: dtype, shape, and its bytes (None: ones for a scale, zeros otherwise)."""

    dtype: str
    shape: list[int]
    data: bytes | None = None

    def payload(self, name: str) -> bytes:
        count = 1
        for extent in self.shape:
            count *= extent
        if self.data is not None:
            assert len(self.data) == count * BITS[self.dtype] // 8, name
            return self.data
        scale = "scale" in name.rpartition(".")[2]
        return (
            ONE.get(self.dtype, b"\x01" * (BITS[self.dtype] // 8)) if scale else bytes(BITS[self.dtype] // 8)
        ) * count


def header_bytes(tensors: dict[str, T], metadata: dict[str, str] | None = None) -> bytes:
    """The header (with its length prefix) of a shard that holds ``tensors`` in this order."""
    document: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        size = BITS[tensor.dtype] // 8
        for extent in tensor.shape:
            size *= extent
        document[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [position, position + size],
        }
        position += size
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def shard_bytes(tensors: dict[str, T]) -> bytes:
    """A whole shard."""
    return header_bytes(tensors) + b"".join(tensor.payload(name) for name, tensor in tensors.items())


@dataclass
class Base:
    """A checkpoint to be written: change ``config``, ``tensors`` or the rest, then write it."""

    config: dict[str, Any]
    tensors: dict[str, T]
    shards: int = 1
    hf_quant: dict[str, Any] | None = None

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @quantization.setter
    def quantization(self, value: dict[str, Any]) -> None:
        self.config["quantization_config"] = value

    def copy(self) -> Base:
        tensors = {name: T(t.dtype, list(t.shape), t.data) for name, t in self.tensors.items()}
        config, hf_quant = json.loads(json.dumps([self.config, self.hf_quant]))
        return Base(config, tensors, self.shards, hf_quant)

    def split(self) -> dict[str, dict[str, T]]:
        names = list(self.tensors)
        if self.shards == 1:
            return {"model.safetensors": dict(self.tensors)}
        step = -(-len(names) // self.shards)
        return {
            f"model-{i + 1:05d}-of-{self.shards:05d}.safetensors": {
                name: self.tensors[name] for name in names[i * step : (i + 1) * step]
            }
            for i in range(self.shards)
        }

    def index(self) -> dict[str, Any]:
        shards = self.split()
        total = sum(len(tensor.payload(name)) for name, tensor in self.tensors.items())
        return {
            "metadata": {"total_size": total},
            "weight_map": {name: shard for shard, tensors in shards.items() for name in tensors},
        }

    def write(self, directory: Path, index: bool | dict[str, Any] | None = None) -> Path:
        """Write it; ``index``: None for "with several shards", True, False, or the document itself."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.hf_quant is not None:
            (directory / "hf_quant_config.json").write_text(json.dumps(self.hf_quant))
        for name, tensors in self.split().items():
            (directory / name).write_bytes(shard_bytes(tensors))
        if index is None:
            index = self.shards > 1
        if index:
            document = index if isinstance(index, dict) else self.index()
            (directory / "model.safetensors.index.json").write_text(json.dumps(document))
        return directory


def fp8(tensors: dict[str, T], name: str, rows: int, columns: int, leaf: str = "weight_scale", dtype: str = "F32"):
    """Add one block-quantised linear."""
    tensors[f"{name}.weight"] = T("F8_E4M3", [rows, columns])
    tensors[f"{name}.{leaf}"] = T(dtype, [-(-rows // 128), -(-columns // 128)])


def bf16(tensors: dict[str, T], name: str, *shape: int):
    """Add one plain tensor ``name.weight``."""
    tensors[f"{name}.weight"] = T("BF16", list(shape))


def b0() -> Base:
    """Dense K2-Horizon, compressed-tensors block FP8."""
    config = {
        "model_type": "k2_horizon",
        "architectures": ["K2HorizonForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "block",
                        "block_structure": [128, 128],
                        "dynamic": False,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "group",
                        "group_size": 128,
                        "dynamic": True,
                    },
                }
            },
        },
    }
    tensors: dict[str, T] = {}
    bf16(tensors, "model.embed_tokens", 256, 256)
    layer = "model.layers.0"
    bf16(tensors, f"{layer}.input_layernorm", 256)
    bf16(tensors, f"{layer}.post_attention_layernorm", 256)
    for name, rows, columns in (
        ("self_attn.q_proj", 256, 256),
        ("self_attn.k_proj", 128, 256),
        ("self_attn.v_proj", 128, 256),
        ("self_attn.o_proj", 256, 256),
        ("mlp.gate_proj", 512, 256),
        ("mlp.up_proj", 512, 256),
        ("mlp.down_proj", 256, 512),
    ):
        fp8(tensors, f"{layer}.{name}", rows, columns)
    bf16(tensors, "model.norm", 256)
    bf16(tensors, "lm_head", 256, 256)
    return Base(config, tensors)


def b1(width: int = 256, experts: int = 4) -> Base:
    """MoVA, native block FP8: routed experts only. ``width`` is moe_intermediate_size."""
    config = {
        "model_type": "k2_horizon",
        "architectures": ["K2HorizonForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": width,
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "mova_num_experts": 4,
        "mova_num_experts_per_tok": 2,
        "moe_gate_bias": True,
        "attention_gate_func": "softplus",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32,
        "tie_word_embeddings": False,
    }
    tensors: dict[str, T] = {}
    bf16(tensors, "model.embed_tokens", 32, 256)
    for index in range(2):
        layer = f"model.layers.{index}"
        bf16(tensors, f"{layer}.input_layernorm", 256)
        bf16(tensors, f"{layer}.post_attention_layernorm", 256)
        for name, rows in (("q_proj", 256), ("k_proj", 128), ("gate_proj", 256), ("o_proj", 256)):
            bf16(tensors, f"{layer}.self_attn.{name}", rows, 256)
        if index == 0:
            bf16(tensors, f"{layer}.self_attn.v_proj", 128, 256)
            bf16(tensors, f"{layer}.mlp.gate_proj", 512, 256)
            bf16(tensors, f"{layer}.mlp.up_proj", 512, 256)
            bf16(tensors, f"{layer}.mlp.down_proj", 256, 512)
            continue
        bf16(tensors, f"{layer}.self_attn.v_router", 4, 256)
        tensors[f"{layer}.self_attn.v_router.bias"] = T("BF16", [4])
        for expert in range(4):
            bf16(tensors, f"{layer}.self_attn.v_experts.{expert}", 128, 256)
        bf16(tensors, f"{layer}.mlp.gate", experts, 256)
        tensors[f"{layer}.mlp.gate.bias"] = T("BF16", [experts])
        bf16(tensors, f"{layer}.mlp.shared_experts.gate_proj", width, 256)
        bf16(tensors, f"{layer}.mlp.shared_experts.up_proj", width, 256)
        bf16(tensors, f"{layer}.mlp.shared_experts.down_proj", 256, width)
    bf16(tensors, "model.norm", 256)
    bf16(tensors, "lm_head", 32, 256)
    ignored = sorted({name.rpartition(".")[0] for name in tensors})
    for expert in range(experts):
        name = f"model.layers.1.mlp.experts.{expert}"
        fp8(tensors, f"{name}.gate_proj", width, 256, "weight_scale_inv")
        fp8(tensors, f"{name}.up_proj", width, 256, "weight_scale_inv")
        fp8(tensors, f"{name}.down_proj", 256, width, "weight_scale_inv")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ignored,
    }
    return Base(config, tensors)


def b1_dense(dtype: str = "F32") -> Base:
    """The dense model of B0 in the native format of B1."""
    base = b0()
    base.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ["lm_head", "model.embed_tokens"],
    }
    base.tensors = {
        name.replace("weight_scale", "weight_scale_inv"): T(dtype, t.shape) if "weight_scale" in name else t
        for name, t in base.tensors.items()
    }
    return base


def b0_moe(width: int = 256, experts: int = 4) -> Base:
    """The shape of the 375B: compressed-tensors, routed experts only, first layer dense."""
    base = b1(width, experts)
    keep = {
        name: t
        for name, t in base.tensors.items()
        if not any(x in name for x in (".v_router", ".v_experts", "self_attn.gate_proj"))
    }
    tensors = {
        name.replace("weight_scale_inv", "weight_scale"): T("BF16", t.shape) if "weight_scale" in name else t
        for name, t in keep.items()
    }
    bf16(tensors, "model.layers.1.self_attn.v_proj", 128, 256)
    base.tensors = tensors
    base.config |= {"mova_num_experts": 0, "mova_num_experts_per_tok": 0, "attention_gate_func": None}
    base.config["quantization_config"] = b0().quantization | {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:model\.layers\.0\.mlp\..*",
            r"re:.*mlp\.gate$",
        ]
    }
    return base


def nvfp4(tensors: dict[str, T], name: str, rows: int, columns: int, group: int = 16, input_scale: bool = True):
    """Add one ModelOpt FP4 linear."""
    tensors[f"{name}.weight"] = T("U8", [rows, columns // 2])
    tensors[f"{name}.weight_scale"] = T("F8_E4M3", [rows, columns // group])
    tensors[f"{name}.weight_scale_2"] = T("F32", [])
    if input_scale:
        tensors[f"{name}.input_scale"] = T("F32", [])


def fp8_tensor(tensors: dict[str, T], name: str, rows: int, columns: int):
    """Add one ModelOpt per-tensor FP8 linear."""
    tensors[f"{name}.weight"] = T("F8_E4M3", [rows, columns])
    tensors[f"{name}.weight_scale"] = T("F32", [])
    tensors[f"{name}.input_scale"] = T("F32", [])


def b2(experts: int = 2) -> Base:
    """Qwen3.6-MoE in MIXED_PRECISION: attention FP8, experts and head NVFP4; one layer of each kind."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": experts,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "vocab_size": 256,
    }
    tensors: dict[str, T] = {}
    layers: dict[str, Any] = {}
    fp8_entry, fp4_entry = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    root = "model.language_model"
    bf16(tensors, f"{root}.embed_tokens", 256, 256)
    for index in range(2):
        layer = f"{root}.layers.{index}"
        bf16(tensors, f"{layer}.input_layernorm", 256)
        bf16(tensors, f"{layer}.post_attention_layernorm", 256)
        if index == 0:
            attention = f"{layer}.linear_attn"
            for name, rows in (("in_proj_qkv", 512), ("in_proj_z", 256), ("out_proj", 256)):
                fp8_tensor(tensors, f"{attention}.{name}", rows, 256)
                layers[f"{attention}.{name}"] = fp8_entry
            bf16(tensors, f"{attention}.in_proj_a", 4, 256)
            bf16(tensors, f"{attention}.in_proj_b", 4, 256)
            bf16(tensors, f"{attention}.conv1d", 512, 1, 4)
            tensors[f"{attention}.A_log"] = T("F32", [4])
            tensors[f"{attention}.dt_bias"] = T("BF16", [4])
            bf16(tensors, f"{attention}.norm", 64)
        else:
            attention = f"{layer}.self_attn"
            for name, rows in (("q_proj", 512), ("k_proj", 128), ("v_proj", 128), ("o_proj", 256)):
                fp8_tensor(tensors, f"{attention}.{name}", rows, 256)
                layers[f"{attention}.{name}"] = fp8_entry
            bf16(tensors, f"{attention}.q_norm", 64)
            bf16(tensors, f"{attention}.k_norm", 64)
        bf16(tensors, f"{layer}.mlp.gate", experts, 256)
        bf16(tensors, f"{layer}.mlp.shared_expert_gate", 1, 256)
        for block in (*(f"experts.{expert}" for expert in range(experts)), "shared_expert"):
            for name in ("gate_proj", "up_proj", "down_proj"):
                nvfp4(tensors, f"{layer}.mlp.{block}.{name}", 256, 256, input_scale=False)
                if block == "shared_expert":
                    layers[f"{layer}.mlp.{block}.{name}"] = fp4_entry
        layers[f"{layer}.mlp.experts"] = fp4_entry
    bf16(tensors, f"{root}.norm", 256)
    nvfp4(tensors, "lm_head", 256, 256, input_scale=False)
    layers["lm_head"] = fp4_entry
    declaration = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
        "exclude_modules": [f"{root}.layers.0.mlp.gate", f"{root}.layers.1.mlp.gate"],
    }
    config = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {"quant_method": "modelopt", **copy.deepcopy(declaration)},
    }
    return Base(config, tensors, hf_quant={"producer": {"name": "modelopt"}, "quantization": declaration})


def b3(scale: str = "F8_E8M0", exponents: bytes = bytes((120, 125, 127, 130, 140))) -> Base:
    """MXFP4 experts of a model without an inventory here."""
    tensors: dict[str, T] = {}
    bf16(tensors, "model.embed_tokens", 32, 256)
    pattern = (exponents * 2048)[: 256 * 8]
    for expert in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            tensors[f"{module}.weight"] = T("U8", [256, 128])
            tensors[f"{module}.weight_scale"] = T(scale, [256, 8], pattern)
    bf16(tensors, "lm_head", 32, 256)
    config = {
        "model_type": "other_moe",
        "architectures": ["OtherMoeForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "num_experts": 2,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    return Base(config, tensors)


def e2m1(layers: int = 1, experts: int = 2) -> Base:
    """ModelOpt W4A16 with groups of 32 on routed experts: the e2m1-k32 artifact's format."""
    tensors: dict[str, T] = {}
    root = "model.language_model"
    bf16(tensors, f"{root}.embed_tokens", 32, 256)
    for layer in range(layers):
        bf16(tensors, f"{root}.layers.{layer}.input_layernorm", 256)
        bf16(tensors, f"{root}.layers.{layer}.self_attn.q_proj", 256, 256)
        bf16(tensors, f"{root}.layers.{layer}.mlp.gate", experts, 256)
        for expert in range(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                nvfp4(tensors, f"{root}.layers.{layer}.mlp.experts.{expert}.{name}", 256, 256, group=32)
    bf16(tensors, "lm_head", 32, 256)
    config = {
        "model_type": "glm_moe",
        "architectures": ["GlmMoeForConditionalGeneration"],
        "dtype": "bfloat16",
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": 32,
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "group_size": 32,
                        "dynamic": False,
                        "symmetric": True,
                    },
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head", "*embed_tokens*", "*self_attn*", "*mlp.gate", "*input_layernorm"],
            "producer": {"name": "modelopt", "version": "0.47.0"},
        },
    }
    return Base(config, tensors)


def published(name: str) -> dict[str, Any]:
    """A published config, as it stands in tests/data."""
    return json.loads((DATA / f"{name}.config.json").read_text())


def write_headers_only(directory: Path, shards: dict[str, dict[str, T]], config: bytes, index: bool = True) -> Path:
    """Shards with true headers and sparse, unwritten data: full-size checkpoints in no space."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(config)
    weight_map, total = {}, 0
    for shard, tensors in shards.items():
        raw = header_bytes(tensors)
        size = sum(BITS[t.dtype] // 8 * _count(t.shape) for t in tensors.values())
        with (directory / shard).open("wb") as file:
            file.write(raw)
            file.truncate(len(raw) + size)
        total += size
        weight_map |= dict.fromkeys(tensors, shard)
    if index:
        document = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(document))
    return directory


def _count(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
