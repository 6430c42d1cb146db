"""Capability: which artifact's loader and kernels can serve what was found.

From config and headers, never a name.

One function per served format; each states the facts of its format itself and refuses the others. The loaders
in the engine state them again, independently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qualify.checkpoint.contents import Contents
from qualify.checkpoint.declared import Declared
from qualify.checkpoint.problems import Findings, show
from qualify.models.inventory import Inventory

K2_ARCHITECTURE = "K2HorizonForCausalLM"
QWEN_ARCHITECTURES = (
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
)
PLAIN_FORMATS = ("bf16", "fp16", "fp32")


def check(
    contents: Contents,
    declared: Declared,
    inventory: Inventory | None,
    config: Mapping[str, Any],
    findings: Findings,
) -> str | None:
    """Run the check of the format; return the artifact that serves it, or None with the reason reported."""
    if declared.unserved is None and contents.format in PLAIN_FORMATS:
        findings.note(
            "no-artifact",
            contents.format,
            f"the weights are {contents.format}; every artifact serves FP8 or FP4",
        )
        return None
    before = len(findings.problems)
    capability = CAPABILITIES.get(contents.format)
    if declared.unserved is not None or capability is None:
        if not contents.format.endswith("-undeclared"):
            findings.problem(
                "unsupported-format",
                contents.format,
                f"the format is {contents.format}"
                + (f" ({show(declared.unserved)})" if declared.unserved not in (None, contents.format) else "")
                + "; no artifact serves it",
            )
        return None
    artifact = capability(contents, declared, inventory, config, findings)
    return artifact if len(findings.problems) == before else None


def k2_compressed_tensors(
    contents: Contents,
    declared: Declared,
    inventory: Inventory | None,
    config: Mapping[str, Any],
    findings: Findings,
) -> str:
    """compressed-tensors FP8 in blocks of 128x128, K2-Horizon dense or MoE.

    Linears are quantised as the config declares: all but the head, or the routed experts alone. Value experts
    (MoVA) are not part of this format.
    """
    _architecture(config, (K2_ARCHITECTURE,), contents, findings, inventory is not None)
    _blocks(contents, declared, findings)
    if inventory is not None and inventory.architecture == "k2_horizon":
        if "value_expert" in contents.scope:
            findings.problem(
                "unsupported-format",
                contents.format,
                "the model has value experts (MoVA); the artifacts serve them as fp8-block only",
            )
        _unquantised(contents, ("router", "norm", "embedding", "value_expert"), findings)
        head = contents.scope.get("lm_head")
        if head is not None and head.quantised:
            findings.problem(
                "head-quantised",
                "lm_head.weight",
                "lm_head is stored quantised; K2-Horizon's loader has an unquantised head and would drop "
                "lm_head.weight_scale",
            )
        if not contents.stored_quantised:
            findings.problem("unsupported-scope", contents.format, "no module is quantised")
    return "k2-horizon-fp8"


def mova_fp8(
    contents: Contents,
    declared: Declared,
    inventory: Inventory | None,
    config: Mapping[str, Any],
    findings: Findings,
) -> str:
    """``quant_method: fp8`` in blocks of 128x128: MoVA, routed experts and nothing else.

    Value experts must stay BF16: the engine stacks them before it could dequantise them.
    """
    if inventory is None or inventory.architecture != "k2_horizon":
        _architecture(config, (K2_ARCHITECTURE,), contents, findings, inventory is not None)
        return "mova-fp8"
    _architecture(config, (K2_ARCHITECTURE,), contents, findings, inventory is not None)
    if not inventory.experts or "value_expert" not in contents.scope:
        kind = "a dense model" if not inventory.experts else "a model without value experts"
        findings.problem(
            "unsupported-format",
            contents.format,
            f"the format is fp8-block on {kind}; the artifacts serve fp8-block on MoVA's routed experts, and "
            "other K2-Horizon models as compressed-tensors",
        )
        return "mova-fp8"
    _blocks(contents, declared, findings)
    for klass, scope in contents.scope.items():
        if klass == "routed_expert":
            if scope.unquantised:
                findings.problem(
                    "unsupported-scope",
                    "routed_expert",
                    f"{scope.unquantised:,} projections of routed experts are not quantised; MoVA FP8 quantises all",
                )
        elif scope.quantised and klass != "mtp":
            findings.problem(
                "unsupported-scope",
                klass,
                f"{scope.quantised:,} modules of class {klass} are quantised; MoVA FP8 quantises routed "
                "experts only" + (", and value experts must stay BF16" if klass == "value_expert" else ""),
            )
    return "mova-fp8"


def qwen_mixed(
    contents: Contents,
    declared: Declared,
    inventory: Inventory | None,
    config: Mapping[str, Any],
    findings: Findings,
) -> str:
    """ModelOpt MIXED_PRECISION with a per-layer map on Qwen3.6-MoE: FP8 and W4A16 NVFP4, groups of 16."""
    _architecture(config, QWEN_ARCHITECTURES, contents, findings, inventory is not None)
    for key, scheme in (declared.layer_map or {}).items():
        if scheme is None or scheme.name not in _MIXED_SCHEMES:
            name = scheme.name if scheme else "an algorithm of another kind"
            findings.problem(
                "unsupported-scope", key[:200], f"{show(key)} is {name}; the artifact serves FP8 and NVFP4"
            )
    return "qwen3.6-nvfp4"


_MIXED_SCHEMES = ("modelopt-fp8", "modelopt-nvfp4", "modelopt-w4a16-nvfp4", "modelopt-fp8-block")


def e2m1_k32(
    contents: Contents,
    declared: Declared,
    inventory: Inventory | None,
    config: Mapping[str, Any],
    findings: Findings,
) -> str:
    """ModelOpt W4A16 E2M1 weights with E4M3 scales per 32, routed experts only."""
    for klass, scope in contents.scope.items():
        if klass not in ("routed_expert", "mtp") and scope.quantised:
            findings.problem(
                "unsupported-scope",
                klass,
                f"{scope.quantised:,} modules of class {klass} are E2M1; the artifact serves routed experts",
            )
    biased = [name for name, leaves in contents.modules.items() if name in contents.schemes and "bias" in leaves]
    if biased:
        findings.problem(
            "unsupported-scope",
            f"{biased[0]}.bias",
            f"{len(biased):,} E2M1 projections have a bias (first {show(biased[0])}); the kernels add none",
        )
    if inventory is not None:
        _architecture(config, (), contents, findings, True)
    return "e2m1-k32"


#: format -> its capability check
CAPABILITIES: dict[str, Callable[..., str]] = {
    "compressed-tensors-fp8-block": k2_compressed_tensors,
    "fp8-block": mova_fp8,
    "modelopt-mixed": qwen_mixed,
    "e2m1-k32": e2m1_k32,
}


def _architecture(
    config: Mapping[str, Any],
    served: tuple[str, ...],
    contents: Contents,
    findings: Findings,
    inventoried: bool,
) -> None:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in served:
        if not inventoried and not any(problem.code == "config-value" for problem in findings.problems):
            findings.problem(
                "unsupported-architecture",
                "model_type",
                f"config.json has model_type {show(config.get('model_type'))}, which is not that of "
                f"{show(names[0])}: nobody can say which tensors it promises",
            )
        return
    quantised = next((name for name in contents.modules if name in contents.schemes), None)
    path = f", so {show(quantised)} and its scale may find no parameter" if quantised else ""
    findings.problem(
        "unsupported-architecture",
        "architectures",
        f"config.json has architectures {show(names)}; this format is served for {' or '.join(served) or 'others'}. "
        f"Another class may have no quantised path{path}",
    )


def _blocks(contents: Contents, declared: Declared, findings: Findings) -> None:
    for block in sorted({scheme.block for _, scheme in declared.targets if scheme.block}):
        if block != (128, 128):
            findings.problem(
                "unsupported-format",
                contents.format,
                f"the format is {contents.format} in blocks of {block[0]}x{block[1]}; the artifacts serve 128x128",
            )


def _unquantised(contents: Contents, classes: tuple[str, ...], findings: Findings) -> None:
    for klass in classes:
        scope = contents.scope.get(klass)
        if scope is not None and scope.quantised:
            findings.problem(
                "unsupported-scope",
                klass,
                f"{scope.quantised:,} modules of class {klass} are quantised; none may be",
            )
