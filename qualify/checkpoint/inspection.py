"""One inspection from directory to report: the order of the steps, and nothing else."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qualify.checkpoint import contents as contents_module
from qualify.checkpoint import files, formats, headers, quantization, scales, topology
from qualify.checkpoint.checker import Checker
from qualify.checkpoint.contents import Contents
from qualify.checkpoint.declared import Declared, canonical
from qualify.checkpoint.files import Checkpoint
from qualify.checkpoint.problems import Findings, show
from qualify.errors import CannotRun, Rejected
from qualify.models import inventory as inventories
from qualify.synth.layout import MARK

PROVENANCE = "xllm_source_router_gemm_partitions"


@dataclass(slots=True)
class Inspection:
    """Everything known of one checkpoint after one pass."""

    checkpoint: Checkpoint
    findings: Findings
    contents: Contents = field(default_factory=Contents)
    declared: Declared = field(default_factory=Declared)
    headers: list[headers.Header] = field(default_factory=list)
    artifact: str | None = None
    topologies: list[topology.Topology] = field(default_factory=list)
    scales_read: int = 0

    @property
    def verdict(self) -> str:
        """``accepted`` or ``rejected``; ``cannot-run`` is an exception, not an inspection."""
        return "rejected" if self.findings.problems else "accepted"

    @property
    def synthetic(self) -> bool:
        """True when config, a shard or a manifest marks the checkpoint as made up: it can pass for no published one."""
        return (
            MARK in self.config
            or "synthetic.json" in self.checkpoint.files
            or any(MARK in header.metadata for header in self.headers)
        )

    @property
    def config(self) -> Mapping[str, Any]:
        """The config, empty when there is none."""
        return self.checkpoint.config or {}

    @property
    def paths(self) -> dict[str, str]:
        """Readable path of every shard."""
        return {name: self.checkpoint.files[name][0] for name in self.checkpoint.shards}

    def identity(self) -> dict[str, Any]:
        """SHA-256 of config, index, canonical quantization_config and all headers (null: there is none).

        ``headers`` is over the raw headers, each with its length prefix, in the order of shard names: with
        one shard it is that header's own digest. It is null when a header could not be read.
        """
        digest = hashlib.sha256()
        complete = bool(self.headers) and all(header.readable for header in self.headers)
        for header in self.headers:
            digest.update(header.raw)
        declaration = canonical(self.declared.raw)
        return {
            "config": _sha256(self.checkpoint.config_raw),
            "index": _sha256(self.checkpoint.index_raw),
            "quantization_config": _sha256(declaration),
            "headers": digest.hexdigest() if complete and not self.checkpoint.absent else None,
        }

    def as_dict(self) -> dict[str, Any]:
        """The report without catalogue and command: the keys that the documentation lists."""
        tensors = [tensor for header in self.headers for tensor in header.tensors]
        return {
            "verdict": self.verdict,
            "format": self.contents.format,
            "artifact": self.artifact,
            "quantization": {"origin": self.declared.origin, "declared": self.declared.format},
            "scope": {
                klass: self.contents.scope[klass].as_dict()
                for klass in inventories.CLASSES
                if klass in self.contents.scope
            },
            "tensors": len(tensors),
            "bytes": sum(tensor.end - tensor.start for tensor in tensors),
            "shards": len(self.headers),
            "identity": self.identity(),
            "snapshot": self.checkpoint.snapshot,
            "synthetic": self.synthetic,
            "mtp": self.contents.mtp or None,
            "scale_bytes_read": self.scales_read,
            "problems": [problem.as_dict() for problem in self.findings.problems],
            "notes": [note.as_dict() for note in self.findings.notes],
            "topologies": [item.as_dict() for item in self.topologies],
        }


def inspect(
    directory: str | Path, headers_only: bool = False, revision: str | None = None, weights: bool = False
) -> Inspection:
    """Inspect the checkpoint in ``directory``. Raises ``CannotRun`` when it cannot be read at all.

    ``headers_only`` skips the values of scales; ``weights`` also looks for NaN codes in all FP8 weights.
    """
    # Hundreds of thousands of small objects and no cycles: the collector would only walk them, repeatedly.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _inspect(directory, headers_only, revision, weights)
    except OSError as error:
        raise CannotRun(f"cannot read {show(str(error.filename or 'a shard'))}: {error.strerror}") from None
    finally:
        if collecting:
            gc.enable()


def _inspect(directory: str | Path, headers_only: bool, revision: str | None, weights: bool) -> Inspection:
    findings = Findings()
    checkpoint = files.open_checkpoint(directory, findings, revision)
    result = Inspection(checkpoint, findings)
    result.headers = [headers.read(path, name, findings) for name, path in result.paths.items()]
    files.compare_index(checkpoint, result.headers, findings)
    result.declared = quantization.parse(checkpoint.config, checkpoint.hf_quant, findings)
    result.contents = contents_module.group(tensor for header in result.headers for tensor in header.tensors)
    inventory = _inventory(result)
    unreadable = {header.shard for header in result.headers if not header.readable} | set(checkpoint.absent)
    if not result.headers:
        unreadable.add("")  # without any shard nothing is missing in particular
    text = inventories.text_config(result.config)
    counts = [text.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers")]
    layers, nextn = (count if type(count) is int and 0 <= count < 1 << 20 else 0 for count in counts)
    checker = Checker(result.contents, result.declared, inventory, findings)
    experts = inventories.expert_count(result.config)
    checker.run(checkpoint.weight_map, unreadable, layers, nextn, experts)
    if not unreadable:
        _kv_cache(result, inventory)
    if checkpoint.config is not None and result.contents.modules:
        result.artifact = formats.check(result.contents, result.declared, inventory, result.config, findings)
    result.topologies = topology.candidates(result.contents, result.config)
    if headers_only:
        findings.note("scales-not-read", "scales", "scale values were not read (--headers-only)")
    else:
        result.scales_read = scales.check(result.contents, result.declared, result.paths, findings)
        scales.check_kv(result.contents, result.paths, findings)
    if weights:
        scales.scan_weights(result.contents, result.paths, findings)
    _side_notes(result)
    return result


def _inventory(result: Inspection) -> inventories.Inventory | None:
    findings, config = result.findings, result.checkpoint.config
    if config is None:
        return None
    try:
        inventory = inventories.derive(
            config, lambda: {tensor.name: tensor.shape for header in result.headers for tensor in header.tensors}
        )
    except Rejected as error:
        findings.problem("config-value", files.CONFIG, show(str(error), 300))
        return None
    if inventory is None:
        findings.note(
            "no-inventory",
            "model_type",
            f"model_type {show(config.get('model_type'))}: no inventory here, so nobody can say whether a tensor is "
            "missing; index and format were checked",
        )
        return None
    for key, value in inventory.defaulted.items():
        findings.note("config-defaulted", key, f"config.json lacks {key}; the tensor names say {value!r}")
    return inventory


def _kv_cache(result: Inspection, inventory: inventories.Inventory | None) -> None:
    findings, stored = result.findings, result.contents.kv_scales
    if not result.declared.kv_cache:
        if stored:
            findings.problem(
                "tensor-unexpected",
                stored[0].name,
                f"{len(stored)} K/V scales are stored (first {show(stored[0].name)}), and the config declares no FP8 "
                "KV cache",
            )
        return
    findings.note("kv-cache", "kv_cache_scheme", f"the KV cache is declared {result.declared.kv_cache.upper()}")
    if not stored:
        findings.note(
            "kv-scales-missing", "kv_cache_scheme", "no K/V scales are stored: an FP8 KV cache would run with 1.0"
        )
        return
    # All or nothing: a layer without them would silently run with 1.0.
    layers: dict[int | None, set[str]] = {}
    if inventory is not None:
        layers = {inventories.layer_of(name): set() for name in inventory.modules if name.endswith(".k_proj")}
    promised = set(layers)
    for tensor in stored:
        layer, leaf = inventories.layer_of(tensor.name), tensor.name.rpartition(".")[2]
        if inventory is not None and (layer not in promised or ".self_attn." not in tensor.name):
            findings.problem(
                "tensor-unexpected", tensor.name, f"{show(tensor.name)} is a K/V scale of no attention of the config"
            )
            continue
        if tensor.dtype not in ("F32", "BF16"):
            findings.problem("scale-dtype", tensor.name, f"{show(tensor.name)} is stored {tensor.dtype}, not F32")
        found = layers.setdefault(layer, set())
        found.update(("k_scale", "v_scale") if leaf == "kv_scale" else (leaf,))
    for layer, leaves in layers.items():
        for leaf in sorted({"k_scale", "v_scale"} - leaves):
            findings.problem(
                "scale-missing", f"layer {layer}.{leaf}", f"layer {layer} has no {leaf}; other layers have K/V scales"
            )


def _side_notes(result: Inspection) -> None:
    """Notes on the files beside the weights: never a defect."""
    findings, present, config = result.findings, result.checkpoint.files, result.config
    if result.synthetic:
        findings.note("synthetic", "synthetic", "the checkpoint is synthetic: random weights in a published format")
    code = sorted(name for name in present if name.endswith(".py"))
    if code or config.get("auto_map"):
        what = ", ".join(map(show, code[:3])) or "auto_map in config.json"
        findings.note("remote-code", what[:200], f"{what}: never imported, never executed")
    if not any(name in present for name in files.TOKENIZERS):
        findings.note("tokenizer-missing", "tokenizer", "there is no tokenizer")
    if not any(name.startswith("chat_template") for name in present):
        findings.note(
            "template-missing",
            "chat_template",
            "there is no chat_template file (it may be in tokenizer_config.json)",
        )
    if "generation_config.json" not in present:
        findings.note("generation-config-missing", "generation_config.json", "there is no generation_config.json")
    if config.get("model_type") == "k2_horizon" and config.get("mova_num_experts"):
        stated = config.get(PROVENANCE)
        if stated is not None and (type(stated) is not int or stated not in (1, 2)):
            findings.problem("config-value", PROVENANCE, f"{PROVENANCE} is {show(stated)}; it is 1 or 2")
        if stated is None:
            findings.note(
                "router-provenance",
                PROVENANCE,
                f"config.json does not say {PROVENANCE}: how many GEMM partitions the training router used is a "
                "numeric contract; the operator declares it, nobody derives it",
            )
    if result.checkpoint.config is not None:
        declared = config.get("dtype") or config.get("torch_dtype") or inventories.text_config(config).get("dtype")
        if declared != "bfloat16":
            findings.note(
                "dtype-declared",
                "dtype",
                f"config.json declares dtype {show(declared)}; stored is BF16 and engines with dtype auto would pick "
                "another: pass bfloat16 explicitly",
            )
    for name in result.checkpoint.directories:
        findings.note("nested-directory", name[:200], f"the subdirectory {show(name)} is not read")


def _sha256(raw: bytes | None) -> str | None:
    return None if raw is None else hashlib.sha256(raw).hexdigest()
