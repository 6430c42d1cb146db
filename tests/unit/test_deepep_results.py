"""The table of docs/deepep.md is that of the result files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODES = {"normal": "normal", "low latency": "low_latency"}


def test_table_is_that_of_the_results():
    measured = {}
    for model in ("375b-a23b", "mova"):
        for row in json.loads((ROOT / f"benchmarks/results/deepep-{model}-h200.json").read_text())["rows"]:
            pair = [f"{row['triton_ms']:.2f}", f"{row['deep_gemm_ms']:.2f}"]
            measured.setdefault((row["tokens"], row["mode"]), []).extend(pair)
    lines = re.findall(r"^\| ([\d,]+) \| ([a-z ]+) \| (.*) \|$", (ROOT / "docs/deepep.md").read_text(), re.M)
    assert len(lines) == 8
    for tokens, mode, cells in lines:
        assert cells.split(" | ") == measured[int(tokens.replace(",", "")), MODES[mode]], (tokens, mode)
