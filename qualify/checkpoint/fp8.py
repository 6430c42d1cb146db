"""Declarations of ``quant_method: fp8``: block or per-tensor FP8, as DeepSeek-style exporters and MoVA write them.

Source: the published K2-Horizon-MoVA-36B-A4B-FP8 config.
"""

from __future__ import annotations

from typing import Any

from qualify.checkpoint.declared import Declared, names_of, pair, unknown_keys
from qualify.checkpoint.problems import Findings, show
from qualify.checkpoint.schemes import Scheme

_KEYS = {
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "ignored_layers",
    "modules_to_not_convert",
}
_MEANING = {
    "scale_fmt": "how scales are rounded",
    "fmt": "which codes the weights are read with",
}


def read(raw: dict[str, Any], declared: Declared, findings: Findings) -> None:
    declared.rule = "fp8"
    for key, effect in _MEANING.items():
        if key in raw:
            findings.problem(
                "quantization-key",
                key,
                f"quantization_config has {key} {show(raw[key])}: it changes {effect}",
            )
    unknown_keys(raw, _KEYS | set(_MEANING), "quantization_config", findings)
    declared.ignore = names_of(raw, ("ignored_layers", "modules_to_not_convert"), findings)
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
    block = pair(raw["weight_block_size"])
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
