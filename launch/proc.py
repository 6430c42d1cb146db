"""Reads /proc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, group, session, ... Raises OSError."""
    # pid (comm) state ...; comm may hold spaces and brackets
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def processes() -> Iterator[tuple[int, list[str]]]:
    """(pid, :func:`stat`) of every process that is still there when it is looked at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), stat(int(entry.name))
            except OSError:
                continue
