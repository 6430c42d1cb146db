"""Declarations of ModelOpt: one algorithm for all, or MIXED_PRECISION with a map; flat or nested, in either file.

Source: the layout that ModelOpt 0.47 exports (``config.json`` and ``hf_quant_config.json``).
"""

from __future__ import annotations

from typing import Any

from qualify.checkpoint.declared import Declared, kv_scheme, names_of, slug, unknown_keys
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import FP8, Scheme, mxfp4, mxfp8

_KEYS = {
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
_OTHER = {
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


def read(sources: list[dict[str, Any]], declared: Declared, findings: Findings) -> None:
    declared.rule = "modelopt"
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in flatten(source, findings).items():
            # Absent or null is not a statement; a conflict has been reported.
            if merged.get(key) is None:
                merged[key] = value
    declared.ignore = names_of(merged, ("ignore", "exclude_modules"), findings)
    kv = merged.get("kv_cache_quant_algo") or merged.get("kv_cache_scheme")
    if kv is not None:
        declared.kv_cache = kv_scheme(kv, findings)
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
    declared.format = scheme.name if scheme else f"modelopt-{slug(algorithm)}"
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
        return mxfp8("modelopt-mxfp8")
    if algorithm == "MXFP4":
        return mxfp4("modelopt-mxfp4")
    if type(algorithm) is str and algorithm in _OTHER:
        return None
    findings.problem(
        "algorithm-unknown",
        subject[:200],
        f"the quant_algo of {show(subject)} is {show(algorithm)}, which nobody knows",
    )
    return None


def flatten(source: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """The declaration itself, whether it stands at the top (flat) or under ``quantization`` (nested)."""
    unknown_keys(source, _KEYS, "quantization_config", findings)
    inner = source.get("quantization")
    if inner is None:
        return source
    if not isinstance(inner, dict):
        findings.problem("quantization-malformed", "quantization", f"quantization is {show(inner)}, not an object")
        return source
    if "quantization" in inner:
        findings.problem("quantization-malformed", "quantization", "quantization is nested twice; engines read no map")
        return inner
    unknown_keys(inner, _KEYS, "quantization_config.quantization", findings)
    return {**{key: value for key, value in source.items() if key != "quantization"}, **inner}
