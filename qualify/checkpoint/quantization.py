"""The declared quantisation: what ``quantization_config`` and ``hf_quant_config.json`` say, by content.

Nothing here looks at the tensors. A declaration names a *format*, and gives each module a *scheme*: how its
weight and the companions of the weight (scales) are stored.

Sources of the format facts: the two published K2-Horizon configs (compressed-tensors 0.18 block FP8; ``fp8``
with
``weight_block_size``), ModelOpt's export layout (NVFP4, W4A16_NVFP4, FP8, FP8_PB_WO, MIXED_PRECISION), the
OCP MX specification for exponent-only scales.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from qualify.checkpoint.matching import Match, Names, match
from qualify.checkpoint.problems import Findings, show

FP8 = "F8_E4M3"
#: dtypes that only a quantised weight has
NARROW = frozenset({FP8, "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one module is stored.

    ``kind`` is ``fp8-block``, ``fp8-tensor``, ``fp8-channel``, ``fp4`` or ``mxfp8``.

    ``block`` is (rows, columns) per scale of fp8-block; ``group`` the columns per scale of fp4 and mxfp8.
    ``scalars`` are companions with one F32 value: (leaf, whether it must be there).
    """

    name: str
    kind: str
    weight: str = "weight"
    dtype: str = FP8
    scale: str = "weight_scale"
    scale_dtypes: tuple[str, ...] = ("F32",)
    block: tuple[int, int] | None = None
    group: int | None = None
    scalars: tuple[tuple[str, bool], ...] = ()
    #: other leaf a scale may legally have
    scale_alias: str | None = None

    def __hash__(self) -> int:
        # Asked once a module, tens of thousands of times; the name tells nearly all schemes apart.
        return hash(self.name)


@dataclass(slots=True)
class Declared:
    """The effective declaration of a checkpoint.

    ``format`` is always a string; ``raw`` is what was declared.
    """

    format: str = "bf16"
    origin: str = "nothing: no quantization_config"
    raw: dict[str, Any] | None = None
    rule: str = "compressed-tensors"
    #: entry -> scheme: "Linear" covers every linear module, other entries name modules
    targets: list[tuple[str, Scheme]] = field(default_factory=list)
    #: ModelOpt's map, module or parent -> scheme (None: an algorithm that is no scheme here)
    layer_map: dict[str, Scheme | None] | None = None
    ignore: list[str] = field(default_factory=list)
    kv_cache: str | None = None
    #: why no artifact can serve the declaration although it is well-formed
    unserved: str | None = None
    # filled by bind()
    ignored: set[str] = field(default_factory=set)
    matches: list[Match] = field(default_factory=list)
    named: dict[str, Scheme | None] = field(default_factory=dict)
    linear: Scheme | None = None

    def bind(self, names: Names, findings: Findings) -> None:
        """Resolve ignore entries, targets and map keys against ``names``; report what names nothing."""
        for entry in dict.fromkeys(self.ignore):
            found = match(entry, names, self.rule)
            self.matches.append(found)
            self.ignored.update(found.modules)
        for entry, scheme in self.targets:
            if entry == "Linear":
                self.linear = scheme
                continue
            found = match(entry, names, "compressed-tensors")
            if found.bad:
                findings.problem("ignore-regex", entry[:200], f"target {show(found.bad)}")
            elif not found.modules:
                findings.problem("target-unmatched", entry[:200], f"the target {show(entry)} names no module")
            self.named.update(dict.fromkeys(found.modules, scheme))
        for key, scheme in (self.layer_map or {}).items():
            found = match(key, names, "modelopt")
            if found.bad or not found.modules:
                findings.problem(
                    "quantized-layer-unmatched",
                    key[:200],
                    f"quantized_layers names {show(key)}, which is no module of the checkpoint" + _nearby(key, names),
                )
            self.named.update(dict.fromkeys(found.modules, scheme))

    def scheme(self, module: str, linear: bool) -> Scheme | None:
        """The scheme declared for ``module``, or None: unquantised.

        ``linear``: the class target covers it.
        """
        if module in self.ignored:
            return None
        if module in self.named:
            return self.named[module]
        return self.linear if linear else None


def _nearby(key: str, names: Names) -> str:
    last = key.rpartition(".")[2]
    others = names.containing(f".{last}.")[:1]
    return f"; {show(others[0])} is one" if others else ""


def parse(config: dict[str, Any] | None, hf_quant: dict[str, Any] | None, findings: Findings) -> Declared:
    """Read the declaration from the two files.

    Every defect of it is reported; the result is always usable.
    """
    declared = Declared()
    config = config or {}
    candidates = []
    for key in ("quantization_config", "compression_config"):
        for where, holder in (
            ("config.json", config),
            ("config.json text_config", config.get("text_config")),
        ):
            value = holder.get(key) if isinstance(holder, dict) else None
            if value is None:
                continue
            if isinstance(value, dict):
                if value:
                    candidates.append((f"{where} {key}", value))
            else:
                findings.problem("quantization-malformed", key, f"{key} in {where} is {show(value)}, not an object")
    if hf_quant is not None:
        candidates.append(("hf_quant_config.json", hf_quant))
    if not candidates:
        return declared
    origin, raw = candidates[0]
    declared.origin, declared.raw = origin, raw
    if len(candidates) > 1:
        _conflicts(candidates, findings)
        declared.origin = " and ".join(where for where, _ in candidates)
    method = raw.get("quant_method")
    if method is None and ("producer" in raw or "quantization" in raw or "quant_algo" in raw):
        method = "modelopt"
    if type(method) is not str:
        declared.format = "unknown"
        findings.problem("quantization-malformed", "quant_method", f"quant_method is {show(method)}, not a name")
        return declared
    if method in ("compressed-tensors", "compressed_tensors"):
        _compressed_tensors(raw, declared, findings)
    elif method == "fp8":
        _fp8(raw, declared, findings)
    elif method.startswith("modelopt"):
        _modelopt([value for _, value in candidates], declared, findings)
    elif method == "mxfp4":
        declared.format, declared.rule = "mxfp4", "modelopt"
        declared.ignore = _strings(raw, ("modules_to_not_convert", "ignored_layers", "exclude"), findings)
        declared.targets = [("Linear", _mxfp4("mxfp4"))]
        declared.unserved = "MXFP4 (exponent-only scales)"
    else:
        declared.format = _slug(method)
        declared.unserved = f"quant_method {show(method)}"
    return declared


def canonical(raw: dict[str, Any] | None) -> bytes | None:
    """The quantisation config in one spelling, for its digest: sorted keys, no spaces, ASCII."""
    if raw is None:
        return None
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode("ascii")


# ---------------------------------------------------------------- compressed-tensors

_CT_KEYS = {
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "version",
}
_CT_GROUP_KEYS = {"format", "input_activations", "output_activations", "targets", "weights"}
_CT_ARGS = {
    "actorder",
    "block_structure",
    "dynamic",
    "group_size",
    "num_bits",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "strategy",
    "symmetric",
    "type",
    "zp_dtype",
}


def _compressed_tensors(raw: dict[str, Any], declared: Declared, findings: Findings) -> None:
    declared.rule = "compressed-tensors"
    declared.format = "compressed-tensors"
    _unknown(raw, _CT_KEYS, "quantization_config", findings)
    declared.ignore = _strings(raw, ("ignore",), findings)
    kv = raw.get("kv_cache_scheme")
    if kv is not None:
        declared.kv_cache = _kv_scheme(kv, findings)
    for key in ("transform_config", "sparsity_config"):
        value = raw.get(key)
        if value not in (None, {}) and not (key == "sparsity_config" and _dense_sparsity(value)):
            findings.problem("quantization-value", key, f"{key} is {show(value)}; the engine would ignore it")
    status = raw.get("quantization_status", "compressed")
    if status not in ("compressed", None):
        findings.problem("quantization-value", "quantization_status", f"quantization_status is {show(status)}")
    groups = raw.get("config_groups")
    if groups in (None, {}) and declared.kv_cache:
        declared.format = "bf16"
        return
    if not isinstance(groups, dict) or not groups:
        findings.problem("quantization-malformed", "config_groups", "config_groups is no mapping of groups")
        return
    formats = []
    for name, group in groups.items():
        formats.append(_ct_group(str(name), group, raw.get("format"), declared, findings))
    if sum(target == "Linear" for target, _ in declared.targets) > 1:
        findings.problem(
            "quantization-value",
            "config_groups",
            'two groups have the target "Linear"; engines take the last',
        )
    declared.format = formats[0] if len(set(formats)) == 1 else "compressed-tensors-mixed"
    if declared.format == "compressed-tensors-mixed":
        declared.unserved = "groups of different formats"
    elif declared.format != "compressed-tensors-fp8-block":
        declared.unserved = declared.format


def _ct_group(name: str, group: Any, top: Any, declared: Declared, findings: Findings) -> str:
    """Read one config group into targets; return its format."""
    where = f"config_groups.{show(name)}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        findings.problem("quantization-malformed", where, f"{where} has no weights")
        return "compressed-tensors"
    _unknown(group, _CT_GROUP_KEYS, where, findings)
    weights, activations = group["weights"], group.get("input_activations")
    _unknown(weights, _CT_ARGS, f"{where}.weights", findings)
    if isinstance(activations, dict):
        _unknown(activations, _CT_ARGS, f"{where}.input_activations", findings)
    elif activations is not None:
        findings.problem("quantization-malformed", where, f"{where}.input_activations is {show(activations)}")
        activations = None
    if group.get("output_activations") is not None:
        findings.problem("quantization-value", where, f"{where}.output_activations is set; no engine honours it")
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        findings.problem("quantization-malformed", where, f"{where}.targets is {show(targets)}, not a list of names")
        targets = []
    if group.get("format") is None and top is None:
        findings.problem("quantization-value", "format", f"neither quantization_config nor {where} has a format")
    label, scheme = _ct_scheme(where, weights, activations, declared, findings)
    for spelled in (group.get("format"), top):
        expected = _CT_FORMATS.get(label)
        if spelled is not None and expected is not None and spelled not in (expected, "mixed-precision"):
            findings.problem("quantization-value", "format", f"format is {show(spelled)}; these weights are {expected}")
    if scheme is not None:
        declared.targets += [(target, scheme) for target in targets]
    return label


_CT_FORMATS = {
    "compressed-tensors-fp8-block": "float-quantized",
    "compressed-tensors-fp8-tensor": "float-quantized",
    "compressed-tensors-fp8-channel": "float-quantized",
    "compressed-tensors-nvfp4": "nvfp4-pack-quantized",
}


def _ct_scheme(where: str, weights: dict, activations: dict | None, declared: Declared, findings: Findings):
    """(format, scheme or None) of one group."""
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    group = weights.get("group_size")
    if kind == "int":
        return f"compressed-tensors-int{bits if type(bits) is int else ''}", None
    if kind != "float" or bits not in (4, 8) or type(bits) is not int:
        findings.problem(
            "quantization-value", where, f"{where}.weights has type {show(kind)} and num_bits {show(bits)}"
        )
        return "compressed-tensors", None
    if bits == 4:
        if group == 32 and strategy == "group":
            return "compressed-tensors-mxfp4", _mxfp4("compressed-tensors-mxfp4", "weight_packed")
        scheme = Scheme(
            "compressed-tensors-nvfp4",
            "fp4",
            weight="weight_packed",
            dtype="U8",
            scale_dtypes=(FP8,),
            group=group if type(group) is int and group > 0 else 16,
            scalars=(("weight_global_scale", True), ("input_global_scale", False)),
        )
        return "compressed-tensors-nvfp4", scheme
    if strategy == "block":
        block = _pair(weights.get("block_structure"))
        if block is None:
            findings.problem(
                "quantization-value",
                where,
                f"{where}.weights.block_structure is {show(weights.get('block_structure'))}, not [rows, columns]",
            )
            return "compressed-tensors-fp8-block", None
        _ct_fp8_block(where, weights, activations, block, declared, findings)
        return "compressed-tensors-fp8-block", Scheme(
            "compressed-tensors-fp8-block", "fp8-block", scale_dtypes=("BF16", "F32"), block=block
        )
    static = isinstance(activations, dict) and activations.get("dynamic") is False
    scalars = (("input_scale", True),) if static else ()
    if strategy == "tensor":
        scheme = Scheme("compressed-tensors-fp8-tensor", "fp8-tensor", scale_dtypes=("BF16", "F32"), scalars=scalars)
        return "compressed-tensors-fp8-tensor", scheme
    if strategy == "channel":
        scheme = Scheme("compressed-tensors-fp8-channel", "fp8-channel", scale_dtypes=("BF16", "F32"), scalars=scalars)
        return "compressed-tensors-fp8-channel", scheme
    if strategy == "group" and group == 32:
        return "compressed-tensors-mxfp8", _mxfp8("compressed-tensors-mxfp8")
    findings.problem("quantization-value", where, f"{where}.weights.strategy is {show(strategy)}")
    return "compressed-tensors-fp8", None


def _ct_fp8_block(where, weights, activations, block, declared: Declared, findings: Findings) -> None:
    """Values of a compressed-tensors FP8 group that the kernels are built for, each by name."""
    wanted = {"dynamic": False, "symmetric": True, "actorder": None, "zp_dtype": None, "scale_dtype": None}
    for key, value in wanted.items():
        if weights.get(key, value) not in (value, None):
            findings.problem(
                "quantization-value",
                where,
                f"{where}.weights.{key} is {show(weights[key])}; the format has {value}",
            )
    if activations is None:
        declared.unserved = "block FP8 weights without FP8 activations (input_activations is null)"
        return
    wanted = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": block[1],
        "dynamic": True,
        "symmetric": True,
    }
    for key, value in wanted.items():
        if activations.get(key, value) != value or type(activations.get(key, value)) is not type(value):
            findings.problem(
                "quantization-value",
                where,
                f"{where}.input_activations.{key} is {show(activations[key])}; the format has {value}, and "
                "engines "
                "ignore the difference in silence",
            )


def _dense_sparsity(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"format", "targets", "ignore"} and value.get("format") == "dense"


# ---------------------------------------------------------------- fp8

_FP8_KEYS = {
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "ignored_layers",
    "modules_to_not_convert",
}
_FP8_MEANING = {
    "scale_fmt": "how scales are rounded",
    "fmt": "which codes the weights are read with",
}


def _fp8(raw: dict[str, Any], declared: Declared, findings: Findings) -> None:
    declared.rule = "fp8"
    for key, effect in _FP8_MEANING.items():
        if key in raw:
            findings.problem(
                "quantization-key",
                key,
                f"quantization_config has {key} {show(raw[key])}: it changes {effect}",
            )
    _unknown(raw, _FP8_KEYS | set(_FP8_MEANING), "quantization_config", findings)
    declared.ignore = _strings(raw, ("ignored_layers", "modules_to_not_convert"), findings)
    scheme = raw.get("activation_scheme")
    if "weight_block_size" not in raw or raw["weight_block_size"] is None:
        declared.format = "fp8-tensor"
        declared.unserved = "per-tensor FP8 (no weight_block_size)"
        scalars = (("input_scale", True),) if scheme == "static" else ()
        declared.targets = [
            ("Linear", Scheme("fp8-tensor", "fp8-tensor", scalars=scalars, scale_dtypes=("F32", "BF16")))
        ]
        return
    declared.format = "fp8-block"
    if scheme != "dynamic":
        findings.problem(
            "quantization-value",
            "activation_scheme",
            f"activation_scheme is {show(scheme)}; block FP8 has dynamic",
        )
    block = _pair(raw["weight_block_size"])
    if block is None:
        findings.problem(
            "quantization-value",
            "weight_block_size",
            f"weight_block_size is {show(raw['weight_block_size'])}, not [rows, columns]",
        )
        return
    declared.targets = [
        (
            "Linear",
            Scheme("fp8-block", "fp8-block", scale="weight_scale_inv", scale_dtypes=("F32", "BF16"), block=block),
        )
    ]


# ---------------------------------------------------------------- ModelOpt

_MODELOPT_KEYS = {
    "config_groups",
    "exclude_modules",
    "group_size",
    "has_zero_point",
    "ignore",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "packed_modules_mapping",
    "pre_quant_scale",
    "producer",
    "quant_algo",
    "quant_method",
    "quantization",
    "quantized_layers",
}
#: algorithms that ModelOpt writes and nothing here reads further
_MODELOPT_OTHER = {
    "FP8_PER_CHANNEL_PER_TOKEN",
    "INT4_AWQ",
    "INT8_SQ",
    "INT8_WO",
    "NVFP4_AWQ",
    "NVFP4_SVDQUANT",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W4A8_MXFP4_FP8",
    "W4A8_NVFP4_FP8",
}


def _modelopt(sources: list[dict[str, Any]], declared: Declared, findings: Findings) -> None:
    declared.rule = "modelopt"
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in _flatten(source, findings).items():
            # Absent or null is not a statement; a conflict has been reported.
            if merged.get(key) is None:
                merged[key] = value
    declared.ignore = _strings(merged, ("ignore", "exclude_modules"), findings)
    kv = merged.get("kv_cache_quant_algo") or merged.get("kv_cache_scheme")
    if kv is not None:
        declared.kv_cache = _kv_scheme(kv, findings)
    algorithm = merged.get("quant_algo")
    groups = merged.get("config_groups") if isinstance(merged.get("config_groups"), dict) else {}
    if algorithm is None:
        if declared.kv_cache:
            declared.format = "bf16"
        else:
            findings.problem("quantization-malformed", "quant_algo", "there is no quant_algo")
            declared.format = "modelopt"
        return
    if algorithm == "MIXED_PRECISION":
        _mixed(merged, groups, declared, findings)
        return
    group = merged.get("group_size")
    if group is None:
        sizes = [
            value["weights"]["group_size"]
            for value in groups.values()
            if isinstance(value, dict)
            and isinstance(value.get("weights"), dict)
            and value["weights"].get("group_size") is not None
        ]
        if sizes and any(size != sizes[0] for size in sizes):
            findings.problem("quantization-value", "config_groups", f"groups differ in group_size: {show(sizes)}")
        group = sizes[0] if sizes else None
    scheme = _algorithm(algorithm, group, "quant_algo", findings)
    declared.targets = [("Linear", scheme)] if scheme else []
    declared.format = scheme.name if scheme else f"modelopt-{_slug(algorithm)}"
    if declared.format != "e2m1-k32":
        declared.unserved = declared.format


def _mixed(merged: dict, groups: dict, declared: Declared, findings: Findings) -> None:
    layers = merged.get("quantized_layers")
    if layers is None:
        # The same map, spelt the other way round.
        layers = {}
        for value in groups.values():
            weights = value.get("weights") if isinstance(value, dict) else None
            if not isinstance(weights, dict) or not isinstance(value.get("targets"), list):
                continue
            algorithm = {8: "FP8", 4: "W4A16_NVFP4" if value.get("input_activations") is None else "NVFP4"}
            for target in value["targets"]:
                if isinstance(target, str) and target != "Linear":
                    bits = weights.get("num_bits")
                    entry = {"quant_algo": algorithm.get(bits) if type(bits) is int else None}
                    if weights.get("group_size"):
                        entry["group_size"] = weights["group_size"]
                    layers[target] = entry
        if not layers:
            declared.format = "modelopt-w4afp8"
            declared.unserved = "MIXED_PRECISION without a per-layer map, which engines read as w4afp8"
            return
    declared.format = "modelopt-mixed"
    if not isinstance(layers, dict):
        findings.problem("quantization-malformed", "quantized_layers", f"quantized_layers is {show(layers)}")
        return
    if not layers:
        findings.problem("quantized-layers-empty", "quantized_layers", "quantized_layers is empty")
        return
    declared.layer_map = {}
    for key, value in layers.items():
        algorithm = value.get("quant_algo") if isinstance(value, dict) else value
        group = value.get("group_size") if isinstance(value, dict) else None
        declared.layer_map[key] = _algorithm(algorithm, group or merged.get("group_size"), key, findings)


def _algorithm(algorithm: Any, group: Any, subject: str, findings: Findings) -> Scheme | None:
    """The scheme of a ModelOpt ``quant_algo``; unknown names are a defect, known other ones give None."""
    if group is not None and (type(group) is not int or not 0 < group <= 1024):
        findings.problem("quantization-value", subject[:200], f"group_size of {show(subject)} is {show(group)}")
        group = None
    if algorithm == "FP8":
        return Scheme("modelopt-fp8", "fp8-tensor", scalars=(("input_scale", True),))
    if algorithm == "FP8_PB_WO":
        return Scheme(
            "modelopt-fp8-block",
            "fp8-block",
            block=(group or 128, group or 128),
            scale_dtypes=("F32", "BF16"),
            scale_alias="weight_scale_inv",
        )
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        weight_only = algorithm == "W4A16_NVFP4"
        group = group or 16
        if weight_only and group == 32:
            name = "e2m1-k32"
        else:
            name = ("modelopt-w4a16-nvfp4" if weight_only else "modelopt-nvfp4") + ("" if group == 16 else f"-k{group}")
        # Weight-only FP4 has no use for an input scale; the E2M1 exporter writes 1.0 all the same.
        scalars = (("weight_scale_2", True), ("input_scale", not weight_only or name == "e2m1-k32"))
        return Scheme(name, "fp4", dtype="U8", scale_dtypes=(FP8,), group=group, scalars=scalars)
    if algorithm == "MXFP8":
        return _mxfp8("modelopt-mxfp8")
    if algorithm == "MXFP4":
        return _mxfp4("modelopt-mxfp4")
    if type(algorithm) is str and algorithm in _MODELOPT_OTHER:
        return None
    findings.problem(
        "algorithm-unknown",
        subject[:200],
        f"the quant_algo of {show(subject)} is {show(algorithm)}, which nobody knows",
    )
    return None


def _flatten(source: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The declaration itself, whether it stands at the top (flat) or under ``quantization`` (nested)."""
    _unknown(source, _MODELOPT_KEYS, "quantization_config", findings)
    inner = source.get("quantization")
    if inner is None:
        return source
    if not isinstance(inner, dict):
        findings.problem("quantization-malformed", "quantization", f"quantization is {show(inner)}, not an object")
        return source
    if "quantization" in inner:
        findings.problem("quantization-malformed", "quantization", "quantization is nested twice; engines read no map")
        return inner
    _unknown(inner, _MODELOPT_KEYS, "quantization_config.quantization", findings)
    return {**{key: value for key, value in source.items() if key != "quantization"}, **inner}


def _conflicts(candidates: list[tuple[str, dict]], findings: Findings) -> None:
    """Report values that two places state differently. Absent or null is not a statement."""
    families = {where: _family(value) for where, value in candidates}
    if len(set(families.values())) > 1:
        told = ", ".join(f"{where} {family}" for where, family in families.items())
        findings.problem("quantization-conflict", "quant_method", f"two places declare different formats: {told}")
        return
    if "modelopt" not in families.values():
        if len({canonical(value) for _, value in candidates}) > 1:
            told = " and ".join(families)
            findings.problem("quantization-conflict", "quantization_config", f"{told} differ")
        return
    silent = Findings()
    (first, one), *others = [(where, _flatten(value, silent)) for where, value in candidates]
    for where, two in others:
        for label, keys in _STATEMENTS.items():
            left, right = (_statement(source, keys) for source in (one, two))
            if left is None or right is None or left == right:
                continue
            if isinstance(left, (set, dict)):
                differing = sorted(set(left) ^ set(right)) or sorted(k for k in left if left[k] != right[k])
                detail = f"they differ in {len(differing)} entries (first {show(differing[0])})"
            else:
                detail = f"{show(left)} against {show(right)}"
            findings.problem(
                "quantization-conflict",
                label,
                f"{first} and {where} disagree about {label}: {detail}; SGLang reads hf_quant_config.json "
                "for "
                "ModelOpt only where config.json is silent, TensorRT-LLM and vLLM read it first",
            )


def _family(raw: dict[str, Any]) -> str:
    method = raw.get("quant_method")
    if method is None and ("producer" in raw or "quantization" in raw or "quant_algo" in raw):
        return "modelopt"
    return "modelopt" if type(method) is str and method.startswith("modelopt") else show(method)


_STATEMENTS = {
    "quant_algo": ("quant_algo",),
    "quant_method": ("quant_method",),
    "group_size": ("group_size",),
    "KV cache": ("kv_cache_quant_algo", "kv_cache_scheme"),
    "exclusions": ("exclude_modules", "ignore"),
    "quantized_layers": ("quantized_layers",),
}


def _statement(source: dict[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = source.get(key)
        if value is None:
            continue
        if key in ("exclude_modules", "ignore"):
            return {item for item in value if isinstance(item, str)} if isinstance(value, list) else None
        if key == "quantized_layers":
            return {k: canonical({"": v}) for k, v in value.items()} if isinstance(value, dict) else None
        if key in ("kv_cache_quant_algo", "kv_cache_scheme"):
            return _kv_scheme(value, Findings()) or "none"
        return value
    return None


# ---------------------------------------------------------------- shared


def _mxfp4(name: str, weight: str = "weight") -> Scheme:
    return Scheme(name, "fp4", weight=weight, dtype="U8", scale_dtypes=("U8", "F8_E8M0"), group=32)


def _mxfp8(name: str) -> Scheme:
    return Scheme(name, "mxfp8", scale_dtypes=("U8", "F8_E8M0"), group=32)


def _kv_scheme(value: Any, findings: Findings) -> str | None:
    """``fp8`` for any spelling of an FP8 KV cache; other schemes are reported and named."""
    if isinstance(value, str):
        if value.upper() in ("FP8", "FP8_E4M3"):
            return "fp8"
        if value.upper() in ("NONE", "AUTO", ""):
            return None
    elif isinstance(value, dict):
        if not value:
            return None
        if value.get("num_bits") == 8 and value.get("type") == "float":
            return "fp8"
    findings.problem(
        "quantization-value",
        "kv_cache_scheme",
        f"the KV cache scheme is {show(value)}; engines would read it as FP8",
    )
    return "unknown"


def _unknown(mapping: dict[str, Any], known: set[str], where: str, findings: Findings) -> None:
    for key in mapping:
        if key not in known:
            findings.problem(
                "quantization-key",
                key[:200],
                f"{where} has the unknown key {show(key)} {show(mapping[key], 60)}",
            )


def _strings(raw: dict[str, Any], keys: tuple[str, ...], findings: Findings) -> list[str]:
    entries: list[str] = []
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            findings.problem("quantization-malformed", key, f"{key} is {show(value)}, not a list of names")
            continue
        if entries and set(entries) != set(value):
            findings.problem("quantization-conflict", key, f"{' and '.join(keys)} differ")
        entries = entries or value
    return entries


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(item) is int and 0 < item <= 1 << 20 for item in value):
        return value[0], value[1]
    return None


def _slug(text: str) -> str:
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in str(text).lower()).strip("-")
    return slug[:64] or "unknown"
