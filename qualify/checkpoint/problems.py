"""Defects and notes of one inspection, each with a stable code.

A *problem* makes the verdict ``rejected``; a *note* never does. Codes are part of the interface: scripts
match them, ``docs/inspect.md`` lists them, tests assert them. Add codes freely, never reuse or rename one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: code -> what the user should do about it
PROBLEMS = {
    # the directory and its files
    "config-missing": "Point at the directory that holds config.json, or download it again.",
    "config-malformed": "Download config.json again: it is not a usable JSON object.",
    "config-value": "Compare config.json with the published one; the named key cannot be right.",
    "revision": "Use the full 40-hex commit of the model repository, as snapshots/<commit> names it.",
    "no-weights": "Download the *.safetensors files.",
    "pickle-weights": "Remove pickle files (.bin, .pt, ...): they can run code; use the safetensors release.",
    "not-a-regular-file": "Replace the named entry with a regular file.",
    "link-dangling": "Mount the whole hub cache (the directory with blobs/ and snapshots/), or copy with "
    "links resolved.",
    "link-escape": "Replace the link by the file itself: it leaves the checkpoint.",
    "lfs-pointer": "Fetch the real file: this is a Git LFS pointer (`git lfs pull`, or `hf download`).",
    "html-page": "Download the file again: a web page was saved in its place (often a login or error page).",
    # the index and the shard set
    "index-missing": "Download model.safetensors.index.json: several shards need it.",
    "index-malformed": "Download model.safetensors.index.json again.",
    "index-path": "Do not use this index: it names a file outside the checkpoint.",
    "index-stale": "Download the index that belongs to these shards: it names files of another split.",
    "index-tensor-missing": "Download the named shard again, or the index: the index lists tensors its shards lack.",
    "index-tensor-unlisted": "Download the index again: the shards hold tensors it does not list.",
    "index-wrong-shard": "Download the index again: it puts tensors in the wrong shard.",
    "index-total-size": "Download index and shards of one revision: their sizes disagree.",
    "shard-missing": "Download the named shards.",
    "shard-stray": "Remove the named files, or move them out of the checkpoint.",
    "shard-two-sets": "Keep one shard set: files of two splits lie side by side.",
    "tensor-duplicate": "Keep one shard set: a tensor is stored twice.",
    # one shard
    "shard-empty": "Download the shard again.",
    "shard-truncated": "Download the shard again: bytes are missing at its end.",
    "shard-trailing": "Download the shard again: it has bytes after its last tensor.",
    "header-truncated": "Download the shard again: the file ends inside its header.",
    "header-oversized": "Download the shard again: it claims a header larger than any real one.",
    "header-malformed": "Download the shard again: its header is not the JSON of a safetensors file.",
    "header-duplicate-key": "Do not use this shard: a name occurs twice in its header.",
    "tensor-entry": "Do not use this shard: a header entry is not {dtype, shape, data_offsets}.",
    "tensor-dtype-unknown": "Do not use this shard: it names a dtype that safetensors does not have.",
    "tensor-shape-absurd": "Do not use this shard: a tensor has an impossible shape.",
    "tensor-size": "Do not use this shard: byte range and shape of a tensor disagree.",
    "tensor-overlap": "Do not use this shard: two tensors share bytes.",
    "tensor-gap": "Do not use this shard: bytes between two tensors belong to none.",
    # the declared quantisation
    "quantization-malformed": "Compare quantization_config with the published one: it cannot be read.",
    "quantization-key": "Remove the key or get the published config: it changes meaning or nobody knows it.",
    "quantization-value": "Compare quantization_config with the published one: the value is not the format's.",
    "quantization-conflict": "Make config.json and hf_quant_config.json agree: engines read different ones.",
    "algorithm-unknown": "Nobody knows this quant_algo: get the checkpoint of a released exporter.",
    "quantized-layers-empty": "A per-layer map without layers quantises nothing: get the published config.",
    "quantized-layer-unmatched": "Correct the key of quantized_layers: it names no module.",
    "target-unmatched": "Correct the target: it names no module.",
    "ignore-unmatched": "Correct or remove the entry: it names no module.",
    "ignore-parent": "List the children: the format matches modules, not parents.",
    "ignore-in-scope": "Remove the entry: the module it names is stored quantised.",
    "ignore-regex": "Simplify the regular expression: it is invalid or can take for ever.",
    "declared-not-stored": "Remove quantization_config or get the quantised weights: none are here.",
    "stored-not-declared": "Get the config that belongs to these weights: it declares no quantisation.",
    "linear-not-ignored": "Name the module in the ignore list, or get its quantised weight.",
    "quantised-outside-scope": "Get the matching config: the module is stored quantised, but not declared so.",
    "fused-mixed": "Quantise all parts of a fused projection alike.",
    "experts-mixed": "Quantise all experts of a layer alike.",
    "mtp-not-excluded": "Exclude the draft (MTP) layer: it is stored unquantised.",
    # tensors against the config and the format
    "weight-dtype": "The weight is not stored in the format's dtype.",
    "scale-missing": "Download the shard again; without the scale the weight is off by orders of magnitude.",
    "scale-leaf": "Config and tensors are of two formats: the scale has the other format's name.",
    "scale-dtype": "The scale is not stored in the format's dtype.",
    "scale-shape": "The scale does not fit the weight's blocks.",
    "scale-orphan": "A scale without its quantised weight: get a complete checkpoint.",
    "tensor-missing": "Download the shard again: a tensor that the config promises is in no shard.",
    "tensor-unexpected": "Get config and weights of one revision: the config does not promise this tensor.",
    "tensor-dtype": "Get the published weights: the tensor is not stored in the declared dtype.",
    "tensor-shape": "Get config and weights of one revision: the tensor's shape is not the config's.",
    "layer-missing": "Download the shards again: a whole layer is absent.",
    "layer-beyond-config": "Get config and weights of one revision: more layers than num_hidden_layers.",
    "expert-missing": "Download the shards again: an expert is absent.",
    "expert-beyond-config": "Get config and weights of one revision: more experts than the config has.",
    "expert-layout": "Get the per-expert release: experts are stacked or packed in another layout.",
    "head-missing": "Get the complete weights: tie_word_embeddings is false and lm_head.weight is absent.",
    "head-tied-present": "Get config and weights of one revision: tied embeddings, yet lm_head.weight is stored.",
    "head-quantised": "Get the release with an unquantised lm_head: its scale would be dropped.",
    # values of scales
    "scale-nan": "The scale tensor is damaged: download the shard again.",
    "scale-infinite": "The scale tensor is damaged: download the shard again.",
    "scale-zero": "A scale of zero erases its block: the conversion went wrong.",
    "scale-negative": "A negative scale is an initialiser or damage: the conversion went wrong.",
    "scale-pair": "gate and up of one expert need one global scale: the fused kernel takes only one.",
    "scale-not-one": "The format fixes this scale at 1.0.",
    "kv-scale-shape": "A K/V scale has one value.",
    "kv-scale-overflow": "The K/V scale overflows when doubled (fnuz conversion).",
    "weight-nan": "The weights hold NaN codes: the conversion divided by zero.",
    # what no artifact serves
    "unsupported-format": "The checkpoint is well-formed; no artifact of this project serves its format.",
    "unsupported-architecture": "No artifact serves this architecture in this format.",
    "unsupported-scope": "No artifact serves this selection of quantised modules.",
    # preflight
    "artifact-unknown": "Use an artifact that recipes/ has a file for.",
    "artifact-format": "Use the artifact that serves this format.",
    "bf16-only": "Get the FP8 release: this checkpoint has BF16 weights.",
    "fp8-kv-only": "Get the FP8 release: only the KV cache is FP8 here, the weights are BF16.",
    "topology": "Choose a pair that `inspect` lists as working.",
    "arch-unsupported": "Use a GPU architecture that the artifact lists.",
    "router-provenance": "Declare it: --router-partitions N or ROUTER_PARTITIONS=N, as the model's makers say.",
    "not-catalogued": "Use a catalogued revision, or pass --uncatalogued and know that nobody vouches for it.",
    "cache-dir": "Give a writable cache directory outside the checkpoint.",
    # verify-checkpoint
    "file-missing": "Download the file.",
    "file-digest": "Download the file again: its SHA-256 is not the catalogue's.",
    "file-uncatalogued": "Remove the file: the catalogue does not list it.",
    "catalogue-incomplete": "Run `pin` on the published files and have the proposal reviewed.",
}

#: note code -> what it means
NOTES = {
    "remote-code": "Python files or auto_map: never imported, never executed.",
    "tokenizer-missing": "No tokenizer files.",
    "template-missing": "No chat template.",
    "generation-config-missing": "No generation_config.json.",
    "router-provenance": "The config does not say how many GEMM partitions the training router used.",
    "config-defaulted": "The config lacks a key; its value was read off the tensor names.",
    "dtype-declared": "The declared dtype is not an explicit bfloat16.",
    "ignore-normalised": "An ignore entry matches only after a wrapper prefix, a fused name or a trailing "
    "dot is resolved.",
    "ignore-ambiguous": "An ignore entry matches different modules under different engines' rules.",
    "ignore-repeated": "An ignore entry occurs twice.",
    "router-not-ignored": "The ignore list does not name the routers.",
    "scale-dtype": "Scales are stored in BF16.",
    "partial-block": "A weight ends in a partial block: legal in the file, a risk when sharded.",
    "fused-scalar": "One scalar scale covers a fused projection.",
    "kv-cache": "The KV cache is declared FP8.",
    "kv-scales-missing": "FP8 KV cache without stored K/V scales: engines use 1.0.",
    "vision-skipped": "Vision tensors are counted, not checked.",
    "mtp": "The checkpoint holds a draft (MTP) layer.",
    "synthetic": "The checkpoint is marked as synthetic: it passes for no published one.",
    "no-inventory": "No inventory for this architecture: headers were compared with the index and the format only.",
    "no-artifact": "No artifact serves unquantised weights.",
    "scales-not-read": "Scale values were not read.",
    "catalogue": "What the catalogue says of this identity.",
    "hub-root": "The directory is a hub cache; its one snapshot was inspected.",
    "nested-directory": "A subdirectory that no engine reads.",
    "mount-writable": "The checkpoint is on a writable mount.",
    "arch-not-run": "The artifact lists this architecture as not-run.",
    "no-native-fp4": "The GPU has no FP4 arithmetic: weights are expanded (W4A16).",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect or note: a stable ``code``, the tensor, file or key it is about, and one sentence."""

    code: str
    subject: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """The finding as it stands in the JSON report."""
        return {"code": self.code, "subject": self.subject, "message": self.message}


@dataclass(slots=True)
class Findings:
    """Everything one inspection found, in the order it was found."""

    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def problem(self, code: str, subject: str, message: str) -> None:
        """Add a defect. ``code`` must be one of :data:`PROBLEMS`."""
        if code not in PROBLEMS:
            raise KeyError(code)
        self.problems.append(Finding(code, subject, message))

    def note(self, code: str, subject: str, message: str) -> None:
        """Add a note. ``code`` must be one of :data:`NOTES`."""
        if code not in NOTES:
            raise KeyError(code)
        self.notes.append(Finding(code, subject, message))


def show(value: object, limit: int = 120) -> str:
    """``value`` as it may stand in a sentence: printable characters only, at most ``limit`` of them.

    Names in headers and configs are hostile input; control characters in them could rewrite a terminal.
    """
    text = value if isinstance(value, str) else repr(value)
    if not (text.isascii() and text.isprintable()):
        text = text.encode("unicode_escape", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
