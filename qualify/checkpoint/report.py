"""The human report: one line of verdict, the scope, problems by kind, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qualify.checkpoint.problems import PROBLEMS, Finding, show

#: subjects that a group of problems names
_FIRST = 3


def render(report: dict[str, Any], problems: Iterable[Finding], notes: Iterable[Finding]) -> str:
    """The report (``Inspection.as_dict`` with ``catalogue``) as text."""
    lines = [
        f"{report['verdict'].upper()}  {report['format']}  "
        f"{report['tensors']:,} tensors, {_size(report['bytes'])}, {_count(report['shards'], 'shard')}",
        f"  catalogue  {report['catalogue']['status']}: {report['catalogue']['reason']}",
        f"  declared   {report['quantization']['origin']}",
    ]
    if report["scope"]:
        lines += ["", *_scope(report["scope"])]
    if report["topologies"]:
        lines += ["", *_topologies(report["topologies"])]
    problems = list(problems)
    if problems:
        lines += ["", *grouped(problems)]
    notes = list(notes)
    if notes:
        lines += ["", "notes"]
        lines += [f"  {note.code}: {_line(note.message)}" for note in notes[:40]]
        if len(notes) > 40:
            lines.append(f"  ... and {len(notes) - 40} more (--json lists all)")
    return "\n".join(lines)


def grouped(problems: list[Finding]) -> list[str]:
    """Problems by kind: how many, the first subjects, what to do."""
    groups: dict[str, list[Finding]] = {}
    for problem in problems:
        groups.setdefault(problem.code, []).append(problem)
    lines = [f"problems: {len(problems):,} of {_count(len(groups), 'kind')}"]
    for code, members in groups.items():
        lines.append(f"  {code}" + (f" x {len(members):,}" if len(members) > 1 else ""))
        lines += [f"    {_line(member.message)}" for member in members[:_FIRST]]
        if len(members) > _FIRST:
            lines.append(f"    ... and {len(members) - _FIRST:,} more, to {show(members[-1].subject)}")
        lines.append(f"    -> {PROBLEMS[code]}")
    return lines


def _scope(scope: dict[str, dict[str, Any]]) -> list[str]:
    rows = [("modules", "quantised", "plain", "weights stored as", "scales")]
    for klass, entry in scope.items():
        dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in entry["dtypes"].items())
        scales = ""
        if "block" in entry:
            scales = f"block {'x'.join(map(str, entry['block']))}"
        if "group" in entry:
            scales += f"{', ' if scales else ''}group {entry['group']}"
        if not scales and entry.get("schemes"):
            scales = ", ".join(entry["schemes"])
        rows.append((klass.replace("_", " "), f"{entry['quantised']:,}", f"{entry['unquantised']:,}", dtypes, scales))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:<{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in rows
    ]


def _topologies(topologies: list[dict[str, Any]]) -> list[str]:
    works = [f"TP{item['tp']}" + (f"+EP{item['ep']}" if item["ep"] > 1 else "") for item in topologies if item["works"]]
    lines = [f"  topologies  {', '.join(works) or 'none'}"]
    for item in topologies:
        # EP only helps or hurts relative to plain TP: the plain pairs say why.
        if not item["works"] and item["ep"] == 1:
            lines.append(f"    not TP{item['tp']}: {_line(item['why'].split('; ')[0])}")
            break
    return lines


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} bytes"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _line(text: str) -> str:
    return show(text, 400)
