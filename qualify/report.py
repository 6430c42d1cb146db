"""``report``: all receipts and benchmark files on one HTML page, and the README's table of artifacts."""

from __future__ import annotations

import argparse
from pathlib import Path

from qualify.errors import CannotRun

ROOT = Path(__file__).resolve().parent.parent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--evidence", type=Path, default=ROOT / "evidence", metavar="DIR",
                        help="folder of receipts (default: evidence/)")  # fmt: skip
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results", metavar="DIR",
                        help="folder of benchmark files (default: benchmarks/results/)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="the HTML page to write")
    parser.add_argument("--readme", nargs="?", type=Path, const=ROOT / "README.md", metavar="FILE",
                        help="rewrite the table of artifacts in this file (default: README.md)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write what was asked for; 0 written, 1 a file is unusable, 2 cannot run."""
    try:
        from report import command
    except ImportError:
        raise CannotRun("the report is made in a checkout of this project, not inside its image") from None
    return command.run(args)
