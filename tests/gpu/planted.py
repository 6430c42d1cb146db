"""Engines that are wrong on purpose: a copy of a checkpoint with a fault in it, or a fault in the engine's own code.

The names are those of :mod:`qualify.reference.faults`, which plants the same errors in the reference. ``checkpoint``
writes what is a fault of weights; ``code`` is Python that the engine's processes run when they import the model, for
the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

from qualify.errors import Rejected

#: as the reference's faults: of the first sparse layer, expert 1, and 2 where two are needed
ONE, OTHER = 1, 2

_SITE = '''
"""Runs fault() on the engine's model when a process imports it."""
import importlib.abc
import importlib.util
import sys

NAME = "sglang.srt.models.xllm"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            fault(module)
            print("planted:", FAULT, flush=True)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''

#: fault -> body of ``fault(xllm)``, which changes the engine's module
CODE = {
    "gate-silu": """
    import torch
    xllm._XllmMoVAAttentionBase._activate_gate = lambda self, gate: torch.nn.functional.silu(gate)
""",
    "norm-groups": """
    stock = xllm.XllmDecoderLayer.__init__
    def init(self, config, layer_id, *args, **kwargs):
        stock(self, config, layer_id, *args, **kwargs)
        if layer_id == len(config.mlp_only_layers):
            for norm in (self.input_layernorm, self.post_attention_layernorm):
                norm.n_groups = 1 if norm.n_groups > 1 else 2
    xllm.XllmDecoderLayer.__init__ = init
""",
    "router-bias-in-weights": """
    import torch
    def biased(logits, bias, ids, normalise, scaling):
        weights = (logits.float().sigmoid() + bias.float()).gather(1, ids.long())
        return (weights / weights.sum(-1, keepdim=True) if normalise else weights) * scaling
    topk = xllm.mova_router_topk
    def values(logits, bias, **options):
        weights, ids = topk(logits, bias, **options)
        return biased(logits, bias, ids, options["renormalize"], options["scaling_factor"]).to(weights), ids
    xllm.mova_router_topk = values
    def experts(self, hidden_states):
        logits = self.gate(hidden_states)
        chosen = self.topk.forward_native(hidden_states, logits)
        weights = biased(logits, self.gate.bias, chosen.topk_ids, True, self.router_scaling_factor)
        return self.experts(hidden_states, chosen._replace(topk_weights=weights.to(chosen.topk_weights)))
    xllm.XllmSparseMoeBlock._forward_router_experts = experts
""",
    # Full rotation pairs neighbours; partial rotation turns the first rope_head_dim dimensions as if they were a head.
    "rope-pairing": """
    import torch
    stock = xllm.get_rope
    def get_rope(head_size, rotary_dim, *args, **options):
        return stock(head_size, rotary_dim, *args, **{**options, "is_neox_style": False})
    def partial(self, positions, q, k):
        parts = [x.view(len(x), -1, self.head_dim) for x in (q, k)]
        turned = [x[..., : self.rope_head_dim].reshape(len(x), -1) for x in parts]
        turned = self.rotary_emb(positions, *turned)
        whole = [
            torch.cat([t.view(len(t), -1, self.rope_head_dim), x[..., self.rope_head_dim :]], -1).flatten(1)
            for t, x in zip(turned, parts)
        ]
        return whole[0], whole[1]
    xllm.XllmAttention._apply_partial_rope = partial
    mova = xllm._XllmMoVAAttentionBase.__init__
    def init(self, *args, **kwargs):
        xllm.get_rope = get_rope
        try:
            mova(self, *args, **kwargs)
        finally:
            xllm.get_rope = stock
    xllm._XllmMoVAAttentionBase.__init__ = init
""",
}
WEIGHTS = ("expert-scale-doubled", "experts-swapped", "value-expert-zeroed")
#: declared to the engine as the other number of partitions than the reference knows
DECLARED = "router-provenance"
FAULTS = (*WEIGHTS, DECLARED, *CODE)


def code(fault: str, folder: Path) -> Path:
    """Write ``sitecustomize.py`` to ``folder`` and return that, for the front of the engine's PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{_SITE}\nFAULT = {fault!r}\n\n\ndef fault(xllm):{CODE[fault]}"
    (folder / "sitecustomize.py").write_text(text)
    return folder


def checkpoint(fault: str, source: Path, target: Path) -> Path:
    """Write a copy of checkpoint ``source`` with ``fault`` in its weights to ``target``, which must not exist.

    Files without the fault are hard links. Raises Rejected for a checkpoint that has no such weight.
    """
    layer = len(json.loads((source / "config.json").read_text())["mlp_only_layers"])
    prefix = f"model.layers.{layer}"
    target.mkdir()
    places = dict(_places(source))

    def bytes_of(name: str) -> memoryview:
        if name not in places:
            raise Rejected(f"fault {fault}: the checkpoint has no {name}")
        shard, begin, end = places[name]
        with (source / shard).open("rb") as file:
            file.seek(begin)
            return memoryview(file.read(end - begin))

    expert = f"{prefix}.mlp.experts"
    changed: dict[str, bytes | memoryview] = {}
    if fault == "expert-scale-doubled":
        leaf = next(
            (leaf for leaf in ("weight_scale_inv", "weight_scale") if f"{expert}.{ONE}.down_proj.{leaf}" in places),
            "scale",
        )
        name = f"{expert}.{ONE}.down_proj.{leaf}"
        dtype = torch.float32 if places.get(name) and _dtype(source, name) == "F32" else torch.bfloat16
        scale = torch.frombuffer(bytearray(bytes_of(name)), dtype=dtype) * 2
        changed[name] = scale.view(torch.uint8).numpy().tobytes()
    elif fault == "experts-swapped":
        for name in places:
            for one, other in ((ONE, OTHER), (OTHER, ONE)):
                if name.startswith(f"{expert}.{one}."):
                    changed[name] = bytes_of(name.replace(f"{expert}.{one}.", f"{expert}.{other}."))
        if not changed:
            raise Rejected(f"fault {fault}: the checkpoint has no {expert}.{ONE}")
    elif fault == "value-expert-zeroed":
        name = f"{prefix}.self_attn.v_experts.{ONE}.weight"
        changed[name] = bytes(len(bytes_of(name)))
    else:
        raise Rejected(f"fault {fault!r} is none of weights; those are {', '.join(WEIGHTS)}")
    spoilt = {places[name][0] for name in changed}
    for path in source.iterdir():
        if path.name in spoilt:
            shutil.copyfile(path, target / path.name)
        else:
            os.link(path, target / path.name)
    for name, content in changed.items():
        shard, begin, _ = places[name]
        with (target / shard).open("r+b") as file:
            file.seek(begin)
            file.write(content)
    return target


def _headers(folder: Path) -> Iterator[tuple[str, int, dict]]:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            yield path.name, 8 + length, json.loads(file.read(length))


def _places(folder: Path) -> Iterator[tuple[str, tuple[str, int, int]]]:
    """Tensor name -> shard, first byte, byte after the last."""
    for shard, base, header in _headers(folder):
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, (shard, base + begin, base + end)


def _dtype(folder: Path, name: str) -> str:
    return next(header[name]["dtype"] for _, _, header in _headers(folder) if name in header)
