"""docs/e2m1-k32.md against the measured file behind it, and what the page claims of that file."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
RESULT = json.loads((RESULTS / "e2m1-k32-h200.json").read_text())
PAGE = (ROOT / "docs/e2m1-k32.md").read_text()


def expected_table() -> list[list[str]]:
    """The cells of every row, rounded as the page rounds them."""
    return [
        [r["shape"], str(r["tokens"])]
        + [f"{r[f'{key}_ms']:.4f}" for key in ("w4a16", "triton", "fp8", "humming", "humming_fp8", "bf16")]
        + [f"{r['humming_ms'] / r['w4a16_ms']:.2f}", f"{r['copy_share']:.2f}" if r["tokens"] <= 64 else ""]
        for r in RESULT["rows"]
    ]


def table_of(text: str) -> list[list[str]]:
    """The cells of the rows below the header that starts with shape and tokens."""
    body = re.search(r"^\| shape \| tokens \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)[1]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()]


def test_the_page_shows_the_measured_table():
    assert table_of(PAGE) == expected_table()


def test_the_table_file_shows_the_measured_table():
    assert table_of((RESULTS / "e2m1-k32-h200.md").read_text()) == expected_table()


def test_the_page_names_the_machine_of_the_run():
    environment = RESULT["environment"]
    for key, prefix in {"gpu": "", "driver": "driver ", "cuda": "CUDA ", "triton": "Triton "}.items():
        assert f"{prefix}{environment[key]}" in PAGE, key
    assert f"PyTorch {environment['torch'].split('+')[0]}" in PAGE
    assert f"humming-kernels {environment['humming-kernels']}" in PAGE
    assert f"copy bandwidth {RESULT['copy_gbps']:,.0f} GB/s" in PAGE


def test_every_row_meets_the_bars_the_page_states():
    assert RESULT["samples"] >= 90
    for row in RESULT["rows"]:
        assert row["humming_ms"] >= 0.95 * row["w4a16_ms"], row
        assert row["fp8_ms"] > row["w4a16_ms"], row  # FP8 activations win nowhere, so they are off on sm_90
        if row["shape"] == "published" and 16 <= row["tokens"] <= 64:
            assert row["copy_share"] >= 0.75, row


def test_the_decode_shares_in_the_text_are_the_measured_ones():
    shares = [r["copy_share"] for r in RESULT["rows"] if r["shape"] == "published" and r["tokens"] in (16, 32, 64)]
    text = re.search(r"16, 32 and 64 tokens: (\d+), (\d+) and (\d+) % of copy bandwidth", PAGE)
    assert [int(n) for n in text.groups()] == [int(100 * s + 0.5) for s in shares]


def span(over: str, under: str, shapes: tuple[str, ...] = ("published", "mova-like", "glm-like"), skip=()) -> list[str]:
    """Least and greatest ratio of two columns over the rows of ``shapes`` (less ``skip``), as the page rounds them."""
    rows = [r for r in RESULT["rows"] if r["shape"] in shapes and (r["shape"], r["tokens"]) not in skip]
    ratios = sorted(r[f"{over}_ms"] / r[f"{under}_ms"] for r in rows)
    return [f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"]


def said(pattern: str) -> list[str]:
    """The groups of ``pattern`` on the page, where a space matches any white space."""
    found = re.search(pattern.replace(" ", r"\s+"), PAGE)
    assert found, f"the page no longer says: {pattern}"
    return list(found.groups())


NUMBER = r"(\d+\.\d+)"


def test_the_ratios_in_the_text_are_the_measured_ones():
    behind = ("mova-like", 4096)
    assert said(f"{NUMBER} to {NUMBER} times as fast on \\*published\\*") == span("humming", "w4a16", ("published",))
    assert said(f"{NUMBER} to {NUMBER} on \\*glm-like\\*") == span("humming", "w4a16", ("glm-like",))
    mova = span("humming", "w4a16", ("mova-like",), {behind})
    rest = next(r for r in RESULT["rows"] if (r["shape"], r["tokens"]) == behind)
    slower = f"{rest['humming_ms'] / rest['w4a16_ms']:.2f}"
    assert said(f"{NUMBER} to {NUMBER} on \\*mova-like\\* except {NUMBER} at 4,096 tokens") == [*mova, slower]
    assert said(f"W4A16 is {NUMBER} \\(\\*published\\*, 2,048 tokens\\) to {NUMBER} times") == span("fp8", "w4a16")
    assert said(f"lose to this W4A16 too, {NUMBER} to {NUMBER} times") == span("humming_fp8", "w4a16")
    assert said(f"are behind W4A16 everywhere, {NUMBER} to {NUMBER} times") == span("bf16", "w4a16")
    ahead = sum(r["humming_fp8_ms"] < r["fp8_ms"] for r in RESULT["rows"])
    assert said(r"at (\d+) of (\d+) sizes, and slower than this W4A16 at all") == [str(ahead), str(len(RESULT["rows"]))]


def test_the_repack_costs_and_the_neighbours_in_the_text_are_the_measured_ones():
    repack = {shape: cost["humming"] for shape, cost in RESULT["humming_repack"].items()}
    published, mova = repack["published"], repack["mova-like"]
    assert said(f"\\({NUMBER} GB per layer of \\*published\\*, {NUMBER} GB of \\*mova-like\\*") == [
        f"{cost['bytes'] / 1e9:.2f}" for cost in (published, mova)
    ]
    assert said(f"repacked in {NUMBER} and {NUMBER} ms per layer") == [f"{c['ms']:.1f}" for c in (published, mova)]
    beside = {(r["shape"], r["tokens"]): r for r in RESULT["neighbours"]}
    ahead = [
        beside[place] for place in (("published", 8192), ("mova-like", 4096), ("mova-like", 8192), ("glm-like", 8192))
    ]
    text = said(
        f"{NUMBER} ms for {NUMBER} \\(\\*published\\* 8,192\\), {NUMBER} for {NUMBER} and {NUMBER} for {NUMBER} "
        f"\\(\\*mova-like\\* 4,096 and 8,192\\), {NUMBER} for {NUMBER} \\(\\*glm-like\\* 8,192\\)"
    )
    assert text == [f"{r[key]:.2f}" for r in ahead for key in ("triton_ms", "smaller_ms")]
    glm = beside["glm-like", 256]
    assert said(f"decode kernel, {NUMBER} ms for {NUMBER};") == [
        f"{glm['smaller_ms']:.3f}", f"{glm['triton_ms']:.3f}"
    ]  # fmt: skip
