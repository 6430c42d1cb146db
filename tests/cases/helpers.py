"""What the inspection tests share: run an inspection, look at its findings."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from qualify.checkpoint import inspection
from qualify.cli import main
from tests.cases.bases import Base


def inspect(base: Base | Path, directory: Path | None = None, **options) -> inspection.Inspection:
    """Write ``base`` below ``directory`` (or take the directory itself) and inspect it."""
    if isinstance(base, Base):
        base = base.write(directory / "checkpoint")
    return inspection.inspect(base, **options)


def codes(result: inspection.Inspection) -> set[str]:
    """Codes of the problems."""
    return {problem.code for problem in result.findings.problems}


def notes(result: inspection.Inspection) -> set[str]:
    """Codes of the notes."""
    return {note.code for note in result.findings.notes}


def subjects(result: inspection.Inspection, code: str) -> list[str]:
    """Subjects of the problems with ``code``."""
    return [problem.subject for problem in result.findings.problems if problem.code == code]


def messages(result: inspection.Inspection, code: str) -> str:
    """Messages of problems and notes with ``code``, in one text."""
    findings = result.findings.problems + result.findings.notes
    return "\n".join(finding.message for finding in findings if finding.code == code)


def command(capsys, *arguments: object) -> tuple[int, dict | str, str]:
    """Run ``qualify``; return the exit code, stdout (parsed with --json) and stderr."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    output = json.loads(captured.out) if "--json" in arguments else captured.out
    return status, output, captured.err


def f32(value: float) -> bytes:
    """One F32 value."""
    return struct.pack("<f", value)


def rewrite_header(path: Path, change) -> None:
    """Apply ``change`` to the header document of a shard and write it back with the same data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    document = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    changed = change(document)
    document = document if changed is None else changed
    body = document if isinstance(document, bytes) else json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
