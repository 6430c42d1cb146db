"""The README's table of artifacts, from the same files as the page."""

from __future__ import annotations

import re

from qualify.errors import Rejected
from qualify.suite.targets import TARGETS
from report import grid
from report.sources import Found

BEGIN, END = "<!-- artifacts: made by `make report` -->", "<!-- artifacts: end -->"


def rewrite(text: str, name: str, found: Found) -> str:
    """``text`` with a new table between the two markers. Raises ``Rejected`` where they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise Rejected(f"{name} has no place for the table: it needs one line {BEGIN} and, below it, one line {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{artifacts(found)}{END}{rest.split(END)[1]}"


def artifacts(found: Found) -> str:
    """One row for each artifact that has an image."""
    rows = grid.rows(found)
    lines = ["| ARTIFACT | serves | weight format | receipts | measured |", "|---|---|---|---|---|"]
    for name in sorted(found.images):
        artifact = found.artifacts[name]
        serves = ", ".join(entry.repository or entry.name for entry in artifact.checkpoints)
        formats = ", ".join(f"`{item}`" for item in artifact.formats)
        told = [
            f"{one.verdict} on {target}, {row.topology}: {grid.scope_of(one)} ([receipt]({one.file}))"
            for row in rows if row.entry.artifact == name
            for target in TARGETS
            for one in row.cells[target]
        ]  # fmt: skip
        told += [
            f"{one.verdict}: [receipt]({one.file})" for one in grid.homeless(found) if one.extension["artifact"] == name
        ]
        cells = [(row, target) for row in rows if row.entry.artifact == name for target in TARGETS]
        proven = sum(row.proven(target) for row, target in cells)
        told.append(f"{proven} of {len(cells)} combinations proven on a published checkpoint")
        receipts = {one.file for one in found.receipts}
        files = [one.origin.file for one in [*found.serving, *found.loads] if one.artifact == name]
        measured = ", ".join(f"[{_short(file)}]({file})" for file in files if file not in receipts) or "not-run"
        lines.append(f"| `{name}` | {serves} | {formats} | {'; '.join(told)} | {measured} |")
    return "\n".join(lines) + "\n"


def _short(file: str) -> str:
    return re.sub(r".*/|\.json\Z", "", file)
