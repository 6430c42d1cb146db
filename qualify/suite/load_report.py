"""Reads what the engine's ranks wrote about their loads (``model_loader/load_report.py`` of the patch series)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from qualify.models.inventory import module_class

SCHEMA = "horizon-images/load-report/v1"
VARIABLE = "HORIZON_LOAD_REPORT"


def read(folder: Path) -> list[dict[str, Any]]:
    """All reports of a folder, by rank. Raises ValueError for one that is not of this schema."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    for report in found:
        if report.get("schema") != SCHEMA:
            raise ValueError(f"a load report of schema {report.get('schema')!r}, expected {SCHEMA}")
    return sorted(found, key=lambda report: report["rank"])


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks together: live parameters and elements per module class and dtype, scales per class, and what failed.

    Classes are those of the inspection (:func:`qualify.models.inventory.module_class`); dtypes are torch's names.
    """
    classes: dict[str, dict[str, dict[str, int]]] = {}
    scales: dict[str, int] = {}
    invalid = 0
    for parameter in (parameter for report in reports for parameter in report["parameters"]):
        klass = module_class(parameter["name"].rpartition(".")[0])
        elements = math.prod(parameter["shape"])
        kind = classes.setdefault(klass, {}).setdefault(parameter["dtype"], {"parameters": 0, "elements": 0})
        kind["parameters"] += 1
        kind["elements"] += elements
        if parameter["scale"]:
            scales[klass] = scales.get(klass, 0) + elements
        invalid += parameter["invalid"]
    expected, consumed = (sum(report["tensors"][key] for report in reports) for key in ("expected", "consumed"))
    return {
        "ranks": len(reports),
        "tensors_expected": expected,
        "tensors_consumed": consumed,
        "missing": expected - consumed,
        "invalid": invalid,
        "classes": classes,
        "scales": scales,
        "load_seconds": max((report["seconds"] for report in reports), default=None),
        "peak_gpu_bytes_of_a_rank": max((report["peak_gpu_bytes"] or 0 for report in reports), default=None),
    }
