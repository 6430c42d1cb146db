"""The process of one stage: ``python3 -m qualify.suite.stage NAME``; the run directory is in the environment.

Pytest runs the stage's module; what came of it goes to the run directory's scratch, where the sitting takes it from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from qualify import run as tiers
from qualify.suite.rundir import VARIABLE, RunDirectory, write_json


def main(name: str) -> int:
    """Always 0: the verdict is in the file."""
    path = RunDirectory(Path(os.environ[VARIABLE])).result(name)
    write_json(path, tiers.run_stage(name, tiers.module("gpu", name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
