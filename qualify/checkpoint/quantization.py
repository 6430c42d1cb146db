"""The declared quantisation: what ``quantization_config`` and ``hf_quant_config.json`` say, by content.

Nothing here looks at the tensors. This module finds the declarations, holds them against each other and has the
module of their family read them.
"""

from __future__ import annotations

from typing import Any

from qualify.checkpoint import compressed_tensors, fp8, modelopt
from qualify.checkpoint.declared import Declared, canonical, kv_scheme, names_of, slug
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import mxfp4


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
        compressed_tensors.read(raw, declared, findings)
    elif method == "fp8":
        fp8.read(raw, declared, findings)
    elif method.startswith("modelopt"):
        modelopt.read([value for _, value in candidates], declared, findings)
    elif method == "mxfp4":
        declared.format, declared.rule = "mxfp4", "modelopt"
        declared.ignore = names_of(raw, ("modules_to_not_convert", "ignored_layers", "exclude"), findings)
        declared.targets = [("Linear", mxfp4("mxfp4"))]
        declared.unserved = "MXFP4 (exponent-only scales)"
    else:
        # The name is the checkpoint's own: "bf16" must not pass for weights that are not quantised.
        declared.format = f"unknown-{slug(method)}" if slug(method) in ("bf16", "fp16", "fp32") else slug(method)
        declared.unserved = f"quant_method {show(method)}"
    return declared


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
    (first, one), *others = [(where, modelopt.flatten(value, silent)) for where, value in candidates]
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
                f"{first} and {where} disagree about {label}: {detail}; SGLang reads hf_quant_config.json for "
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
            return kv_scheme(value, Findings()) or "none"
        return value
    return None
