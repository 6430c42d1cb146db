"""Declarations of compressed-tensors: config groups, each with targets and the arguments of a scheme.

Source: the published K2-Horizon-7B-FP8 config (version 0.18.0) and the key names of compressed-tensors 0.18.
"""

from __future__ import annotations

from typing import Any

from qualify.checkpoint.declared import Declared, kv_scheme, names_of, pair, unknown_keys
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import FP8, Scheme, mxfp4, mxfp8

_KEYS = {
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
_GROUP_KEYS = {"format", "input_activations", "output_activations", "targets", "weights"}
_ARGUMENTS = {
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


def read(raw: dict[str, Any], declared: Declared, findings: Findings) -> None:
    declared.rule = "compressed-tensors"
    declared.format = "compressed-tensors"
    unknown_keys(raw, _KEYS, "quantization_config", findings)
    declared.ignore = names_of(raw, ("ignore",), findings)
    kv = raw.get("kv_cache_scheme")
    if kv is not None:
        declared.kv_cache = kv_scheme(kv, findings)
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
        formats.append(_group(str(name), group, raw.get("format"), declared, findings))
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


def _group(name: str, group: Any, top: Any, declared: Declared, findings: Findings) -> str:
    """Read one config group into targets; return its format."""
    where = f"config_groups.{show(name)}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        findings.problem("quantization-malformed", where, f"{where} has no weights")
        return "compressed-tensors"
    unknown_keys(group, _GROUP_KEYS, where, findings)
    weights, activations = group["weights"], group.get("input_activations")
    unknown_keys(weights, _ARGUMENTS, f"{where}.weights", findings)
    if isinstance(activations, dict):
        unknown_keys(activations, _ARGUMENTS, f"{where}.input_activations", findings)
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
    label, scheme = _scheme(where, weights, activations, declared, findings)
    for spelled in (group.get("format"), top):
        expected = _SPELLED.get(label)
        if spelled is not None and expected is not None and spelled not in (expected, "mixed-precision"):
            findings.problem("quantization-value", "format", f"format is {show(spelled)}; these weights are {expected}")
    if scheme is not None:
        declared.targets += [(target, scheme) for target in targets]
    return label


_SPELLED = {
    "compressed-tensors-fp8-block": "float-quantized",
    "compressed-tensors-fp8-tensor": "float-quantized",
    "compressed-tensors-fp8-channel": "float-quantized",
    "compressed-tensors-nvfp4": "nvfp4-pack-quantized",
}


def _scheme(where: str, weights: dict, activations: dict | None, declared: Declared, findings: Findings):
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
            return "compressed-tensors-mxfp4", mxfp4("compressed-tensors-mxfp4", "weight_packed")
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
        block = pair(weights.get("block_structure"))
        if block is None:
            findings.problem(
                "quantization-value",
                where,
                f"{where}.weights.block_structure is {show(weights.get('block_structure'))}, not [rows, columns]",
            )
            return "compressed-tensors-fp8-block", None
        _fp8_block(where, weights, activations, block, declared, findings)
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
        return "compressed-tensors-mxfp8", mxfp8("compressed-tensors-mxfp8")
    findings.problem("quantization-value", where, f"{where}.weights.strategy is {show(strategy)}")
    return "compressed-tensors-fp8", None


def _fp8_block(where, weights, activations, block, declared: Declared, findings: Findings) -> None:
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
                f"{where}.input_activations.{key} is {show(activations[key])}; the format has {value}, and engines "
                "ignore the difference in silence",
            )


def _dense_sparsity(value: Any) -> bool:
    return isinstance(value, dict) and set(value) <= {"format", "targets", "ignore"} and value.get("format") == "dense"
