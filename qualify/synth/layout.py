"""Which tensors a synthetic checkpoint has, and in which shard. Standard library only."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from qualify.checkpoint.matching import Names, match
from qualify.errors import Rejected
from qualify.models import k2_horizon
from qualify.models.k2_horizon import ITEMSIZE, Tensor

#: Key in ``config.json`` (and in the metadata of each shard) that marks a checkpoint as synthetic.
MARK = "horizon_images_synthetic"

#: Reduced dimensions of ``--tiny``. No two extents of one matrix are equal where the published ones differ,
#: so that a transposed or swapped tensor cannot fit; all expert extents are whole blocks of 128, also over
#: two tensor-parallel ranks, and heads and experts divide by four.
TINY = {
    "hidden_size": 384,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "mova_num_experts": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}

#: Where attention is quantised as well, a KV head is a whole block, so that its heads divide by four too.
TINY_QUANTISED_ATTENTION = TINY | {"head_dim": 128}

#: Sparse layers that ``--tiny`` keeps after the dense prefix (a dense model keeps this many in all).
TINY_LAYERS = 2

#: Largest payload of one shard in bytes: the Hugging Face default, and small enough to give a tiny
#: checkpoint several shards.
SHARD_BYTES, TINY_SHARD_BYTES = 5_000_000_000, 4_000_000

#: The same for compressed-tensors: the default of the library that wrote the published 7B, 11.05 GB in one shard.
SHARD_BYTES_COMPRESSED_TENSORS = 50_000_000_000


def derive_config(source: Mapping[str, Any], *, tiny: bool, layers: int | None) -> dict[str, Any]:
    """Return the config of the synthetic checkpoint: ``source`` with reduced dimensions and nothing else
    changed.

    ``tiny`` replaces the extents by :data:`TINY`; ``layers`` sets the number of layers (the dense prefix is
    kept whole). ``ignored_layers`` is written anew for the layers and experts that are left, by the published
    rule: every module outside the routed experts; entries of ``ignore`` that name nothing any more are dropped.
    Raises ``Rejected`` for a source that is not a published K2-Horizon config, or for fewer layers than its
    structure needs.
    """
    if MARK in source:
        raise Rejected("--config is itself a synthetic config; start from the published one")
    k2_horizon.tensors(source)  # refuses a config that this project does not know
    config = copy.deepcopy(dict(source))
    sparse = config["num_experts"] > 0
    prefix = len(config["mlp_only_layers"]) if sparse else 0
    quantisation = config.get("quantization_config") or {}
    if tiny:
        rotated = config["rope_head_dim"] / config["head_dim"]
        extents = TINY_QUANTISED_ATTENTION if "config_groups" in quantisation else TINY
        for key, extent in extents.items():
            if config.get(key):
                config[key] = extent
        config["rope_head_dim"] = int(config["head_dim"] * rotated)
        config["num_hidden_layers"] = prefix + TINY_LAYERS
    if layers is not None:
        config["num_hidden_layers"] = layers
    if config["num_hidden_layers"] <= prefix:
        raise Rejected(
            f"--layers {layers} leaves no sparse layer: the config has {prefix} dense layers in front, "
            f"so ask for at least {prefix + 1}"
        )
    if config["num_hidden_layers"] > source["num_hidden_layers"]:
        raise Rejected(f"--layers {layers} is more than the {source['num_hidden_layers']} of the config")
    if not sparse:
        config["mlp_only_layers"] = list(range(config["num_hidden_layers"]))
    if "ignore" in quantisation:
        names = Names(module.name for module in k2_horizon.modules(config))
        quantisation["ignore"] = [e for e in quantisation["ignore"] if match(e, names, "compressed-tensors").modules]
    if "ignored_layers" in quantisation:
        if quantisation["ignored_layers"] != k2_horizon.bf16_modules(source):
            raise Rejected(
                "quantization_config.ignored_layers of --config is not the published list (every module "
                "outside the routed experts, sorted); start from the published config.json"
            )
        quantisation["ignored_layers"] = k2_horizon.bf16_modules(config)
    config[MARK] = True
    return config


def plan_shards(inventory: Mapping[str, Tensor], limit: int) -> dict[str, list[str]]:
    """Distribute the tensors over shards of at most ``limit`` bytes: file name -> tensor names in file order.

    Tensors fill the shards in name order; inside a shard wider dtypes come first, then names, as the
    safetensors library writes them, so that every payload is aligned to its element size.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name in sorted(inventory):
        size = inventory[name].nbytes
        if used and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": sorted(
            names, key=lambda name: (-ITEMSIZE[inventory[name].dtype], name)
        )
        for number, names in enumerate(shards, start=1)
    }


def shard_bytes(config: Mapping[str, Any], tiny: bool) -> int:
    """Largest payload of one shard in bytes."""
    if tiny:
        return TINY_SHARD_BYTES
    compressed = "config_groups" in (config.get("quantization_config") or {})
    return SHARD_BYTES_COMPRESSED_TENSORS if compressed else SHARD_BYTES
