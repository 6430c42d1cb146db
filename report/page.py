"""The page: every number on it comes from a file, and every file that was read stands on it."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from qualify.policy import STAGES
from qualify.suite.targets import TARGETS
from report import figures, floors, grid
from report.pieces import Markup, note, source, table, verdict
from report.sources import Found, Receipt, Serving

STYLE = Path(__file__).resolve().parent / "style.css"
_BOUNDS = {"max": "at most", "min": "at least", "equals": "exactly"}
_WORDS = """
<p><strong>PASSED</strong>: every stage passed within measured bounds, on the published checkpoint; it can stand behind
a release. <strong>WARNED</strong>: every stage passed, and something else stands in the way, such as a synthetic
checkpoint or a bound that nobody has measured. <strong>FAILED</strong>: a stage failed or a required one did not run.
<strong>REFUSED</strong>: the file contradicts itself, was changed after it was sealed, or was sealed under a policy
that is not at hand; nothing in it is shown. <strong>not-run</strong>: no receipt.</p>
<p>A synthetic checkpoint has random weights in the published layout. It proves loader, recipe and arithmetic, and
nothing of a published checkpoint; rates depend on how evenly its router spreads tokens.</p>
"""
_FLOORS = """
<p>Measurements outside a qualification: they are no verdict. The floor is computed from the model's config: a decode
step reads each weight that its tokens need once, and the KV cache; prefill is arithmetic. Experts are taken to be
chosen evenly; where a router prefers some, fewer are read, and the true floor is lower.</p>
"""


def render(found: Found) -> str:
    """The whole page. The same files give the same bytes: no time of writing."""
    table_ = grid.rows(found)
    style = STYLE.read_text()
    body = "".join([
        _header(found, table_), "<main>", _refused(found), _grid(found, table_), _receipts(found), _benchmarks(found),
        _files(found), "</main>",
        "<footer><p>horizon-images. Made by <code>make report</code>: every number comes from a file.</p></footer>",
    ])  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>horizon-images: qualification report</title><style>{style}</style></head><body>{body}</body></html>\n"
    )


def _header(found: Found, rows: list[grid.Row]) -> str:
    verdicts = [receipt.verdict for receipt in found.receipts]
    cells = [(row, target) for row in rows for target in TARGETS]
    proven = sum(row.proven(target) for row, target in cells)
    dates = sorted(filter(None, (file.date for file in found.files)))
    facts = [
        ("proven on a published checkpoint", f"{proven} of {len(cells)}"),
        *((f"receipts {word}", verdicts.count(word)) for word in ("PASSED", "WARNED", "FAILED", "REFUSED")),
        ("newest measurement", dates[-1] if dates else "none"),
    ]
    told = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>" for name, value in facts)
    return (
        "<header><h1>Qualification report</h1><p class='soft'>Engine images of horizon-images: what is proven, on "
        "which GPU and topology, how exact and how fast. A combination is one checkpoint, topology and target.</p>"
        f"<dl class='facts'>{told}</dl><nav aria-label='Sections'><a href='#verdicts'>Verdicts</a><a href='#receipts'>"
        "Receipts</a><a href='#benchmarks'>Benchmarks</a><a href='#files'>Files</a></nav></header>"
    )


def _refused(found: Found) -> str:
    if not found.refused:
        return ""
    told = [f"{receipt.file}: {receipt.refused}" for receipt in found.refused]
    return note("Refused receipts: nothing in these files is shown or counted", told, bad=True)


def _grid(found: Found, rows: list[grid.Row]) -> str:
    heads = "".join(
        f'<th scope="col">{escape(name if name == target.arch else f"{name} ({target.arch})")}</th>'
        for name, target in TARGETS.items()
    )
    bodies = []
    for entry, listed in grid.groups(rows):
        image = "" if entry.artifact in found.images else "; no image yet"
        name = escape(entry.repository or entry.name)
        lines = [
            f'<tr><th scope="rowgroup" colspan="{len(TARGETS) + 1}">{name} '
            f'<span class="soft"><code>{escape(entry.artifact)}</code>{image}</span></th></tr>'
        ]
        for row in listed:
            cells = "".join(f"<td>{_cell(row, target)}</td>" for target in TARGETS)
            lines.append(f'<tr><th scope="row">{escape(row.topology)}</th>{cells}</tr>')
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    lost = grid.homeless(found)
    more = note("Of a checkpoint that no recipe names, so not in the table", [one.file for one in lost]) if lost else ""
    return (
        f'<h2 id="verdicts">Verdicts</h2><table class="grid"><thead class="top"><tr><th scope="col">topology</th>'
        f"{heads}</tr></thead>{''.join(bodies)}</table>{more}{_WORDS}"
    )


def _cell(row: grid.Row, target: str) -> str:
    receipts = row.cells[target]
    if not receipts:
        if row.statuses[target] == "verified":
            return f"{verdict('not-run')} <span class='soft'>the recipe claims it, without a receipt</span>"
        return verdict(row.statuses[target])
    told = [
        f'{verdict(one.verdict, anchor(one))} <span class="soft">{escape(grid.scope_of(one))}</span>'
        for one in receipts
    ]
    if not any(one.extension["scope"] == "published" for one in receipts):
        told.append(f'{verdict("not-run")} <span class="soft">published checkpoint</span>')
    return "<br>".join(told)


def anchor(receipt: Receipt) -> str:
    """The id of a receipt's section."""
    return "receipt-" + re.sub(r"[^a-z0-9]+", "-", Path(receipt.file).stem.lower())


def _receipts(found: Found) -> str:
    told = "".join(_receipt(found, receipt) for receipt in found.receipts)
    return f'<h2 id="receipts">Receipts</h2>{told or "<p>None: nothing was qualified.</p>"}'


def _receipt(found: Found, receipt: Receipt) -> str:
    head = f'<section id="{anchor(receipt)}"><h3>{escape(receipt.file)} {verdict(receipt.verdict)}</h3>'
    if receipt.refused:
        return f"{head}{note('Refused', [receipt.refused], bad=True)}</section>"
    extension, model = receipt.extension, receipt.model
    name = model.name if model else extension["checkpoint"]["format"]
    what = f"{extension['artifact']} {name}, {grid.scope_of(receipt)}"
    stages = "".join(f"<li>{escape(name)} {verdict(_stage(receipt, name))}</li>" for name in STAGES)
    reasons = [
        f"stage {name}: {extension['stages'][name]['reason']}"
        for name in STAGES
        if extension["stages"][name]["result"] != "passed"
    ]
    warn = note("What stands in the way of a release", [*reasons, *receipt.warnings]) if receipt.warnings else ""
    plots = figures.numerics(receipt)
    for one in found.serving:
        if one.origin.file == receipt.file:
            plots += figures.serving(one)
    return (
        f"{head}<p>{escape(what)}; {escape(extension['target_name'])}, {escape(grid.topology_of(receipt))}</p>"
        f"{source(receipt.origin)}<ul class='stages'>{stages}</ul>{warn}"
        f"<div class='plots'>{''.join(plots)}</div>{_thresholds(receipt)}</section>"
    )


def _stage(receipt: Receipt, name: str) -> str:
    stage = receipt.extension["stages"][name]
    return "warned" if stage["result"] == "passed" and stage["unmeasured"] else stage["result"]


def _thresholds(receipt: Receipt) -> str:
    """Every threshold of the policy that the receipt was sealed under, with the number that was measured."""
    body = []
    for item in receipt.extension["policy"]["thresholds"]:
        value: Any = receipt.extension["stages"][item["stage"]]["numbers"]
        for part in item["number"].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        bounds = [f"{word} {item[key]}" for key, word in _BOUNDS.items() if key in item]
        told = bounds[0] if bounds else Markup(f"{verdict('warned')} unmeasured")
        body.append(
            [item["stage"], item["number"], value if isinstance(value, (int, float, str)) else None, told, item["unit"]]
        )
    title = "Thresholds of the policy"
    head = ["stage", "number", "measured", "bound", "unit"]
    return f"<details><summary>{title}: {len(body)}</summary>{table(f'{title}, {receipt.file}', head, body)}</details>"


def _benchmarks(found: Found) -> str:
    receipts = {receipt.file for receipt in found.receipts}
    plots = []
    for one in [*found.serving, *found.loads]:
        if one.origin.file not in receipts:
            of = f", {one.artifact} {one.model or ''}".rstrip(" ,")
            plots += figures.serving(one, of) if isinstance(one, Serving) else figures.load(one, of)
    kernels = [plot for one in found.kernels for plot in figures.kernels(one)]
    parts = [("Serving and loading", plots), ("Kernels for E2M1-K32 routed experts", kernels)]
    told = "".join(f"<h3>{title}</h3><div class='plots'>{''.join(listed)}</div>" for title, listed in parts if listed)
    rates = table("Rates that the floors divide by", ["GPU", "bytes/s", "from", "BF16 flop/s", "FP8 flop/s", "from"], [
        [name, rate.bytes_per_second, rate.bytes_source, rate.bf16_flops, rate.fp8_flops, rate.flops_source]
        for name, rate in floors.rates().items()
    ])  # fmt: skip
    return f'<h2 id="benchmarks">Benchmarks</h2>{_FLOORS}{rates}{told or "<p>None.</p>"}'


def _files(found: Found) -> str:
    body = [
        [file.name, file.date or "not recorded", Markup(f"<code>{file.sha256[:16]}</code>"), file.use]
        for file in found.files
    ]
    listed = table("Every file that was read", ["file", "date", "SHA-256, first 16 digits", "use"], body)
    return f'<h2 id="files">Files</h2><div class="card">{listed}</div>'
