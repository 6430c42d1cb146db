"""Progress of a sitting on the screen: stage, seconds, the last line of its log."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from qualify.suite.server import last_line

#: seconds between two lines where nobody watches a terminal
PERIOD = 10


class Screen:
    """One line that is rewritten on a terminal, a line now and then elsewhere, and one line a finished stage."""

    def __init__(self):
        self.terminal, self.last = sys.stdout.isatty(), time.monotonic()

    def progress(self, stage: str, seconds: float, logs: list[Path]) -> None:
        """What the most recently written log says."""
        now = time.monotonic()
        if now - self.last < (0.5 if self.terminal else PERIOD):
            return
        self.last = now
        newest = max((log for log in logs if log.exists()), key=lambda log: log.stat().st_mtime, default=None)
        text = f"{stage:<12} {seconds:6.0f} s  {last_line(newest) if newest else ''}"
        text = "".join(character if character.isprintable() else " " for character in text)
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{text}" if self.terminal else text, end="" if self.terminal else "\n", flush=True)

    def line(self, stage: str, result: str, seconds: float, reason: str) -> None:
        """A finished stage."""
        start = "\r\x1b[K" if self.terminal else ""
        print(f"{start}{stage:<12} {seconds:6.1f} s  {result}{f': {reason}' if reason else ''}", flush=True)
        self.last = time.monotonic()
