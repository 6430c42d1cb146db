"""Fake commands for the tests of what drives other programs: bash scripts that keep a log of their calls."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


class Commands:
    """A folder of fake commands, to be put on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.log = folder / ".calls"
        folder.mkdir(parents=True)

    def add(self, name: str, body: str = "exit 0") -> Path:
        """A bash script of that name; ``calls`` sees its arguments."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "${{0##*/}} ${{*//$\'\\n\'/ }}" >>"{self.log}"\n{body}\n')
        path.chmod(0o755)
        return path

    def real(self, *names: str) -> None:
        """The machine's own commands, for a PATH that holds nothing but this folder."""
        for name in names:
            found = sys.executable if name == "python3" else shutil.which(name)
            assert found, f"these tests need {name}"
            # Not a link: a shim that looks at its own name or folder must find them unchanged.
            path = self.folder / name
            path.write_text(f'#!/bin/bash\nexec "{found}" "$@"\n')
            path.chmod(0o755)

    def calls(self, name: str = "") -> list[str]:
        """Every call so far, or those of one command, as "name argument argument"."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if not name or line.split()[0] == name]


@pytest.fixture
def commands(tmp_path) -> Callable[[str], Commands]:
    """Make a folder of fake commands."""
    return lambda name="bin": Commands(tmp_path / name)
