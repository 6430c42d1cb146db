"""Run ``test_mutations.py`` on the patched engine and on stock, and print how many kinds of faults each detects.

    python3 -B -m tests.engine.mutation_count [--stock TREE] [--json FILE]

``sglang`` must be importable with the series applied. Stock is TREE (a directory that holds the package of the
pinned wheel), or else a copy of the installed package with the series reversed, proven by the wheel's hashes.
A kind counts once, however many checkpoints (MoVA, dense, routed experts) and places it is tried at, and it counts
as detected where every one of these rows is. For a row, stock needs to detect the fault on one route, the patched
engine on each. Exit code 0 when the patched engine detects every fault and both load the intact checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import stock
from qualify.errors import CannotRun, Rejected, exit_code

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "control"


class Recorder:
    """Pytest plugin: row -> whether every route of it passed (for stock: any route)."""

    def __init__(self, is_stock: bool):
        self.combine = any if is_stock else all
        self.passed: dict[str, list[bool]] = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            name, _, case = report.nodeid.partition("[")
            row = case.rstrip("]").rpartition("-by-")[0] if "detected" in name else CONTROL
            self.passed.setdefault(row, []).append(report.passed)

    def result(self) -> dict[str, bool]:
        control = all(self.passed.pop(CONTROL, [False]))
        return {CONTROL: control} | {row: self.combine(routes) for row, routes in self.passed.items()}


def kinds(rows: dict[str, bool]) -> dict[str, list[bool]]:
    """Kind -> whether each of its rows (``model:kind`` or ``model:kind:place``) was detected."""
    found: dict[str, list[bool]] = {}
    for row, detected in rows.items():
        found.setdefault(row.split(":")[1], []).append(detected)
    return found


def child(out: Path) -> int:
    """Run the suite on whichever engine is importable and write row -> detected."""
    import pytest

    recorder = Recorder(stock.is_stock())
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "--tb=no", "-r", "N"]
    pytest.main([*options, str(ROOT / "tests/engine/test_mutations.py")], plugins=[recorder])
    out.write_text(json.dumps(recorder.result()))
    return 0


def run_on(tree: Path | None, label: str) -> dict[str, bool]:
    """Run the child process with ``tree`` first on its path; None means the engine that is importable here."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "result.json")
        path = [str(tree)] if tree else []
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*path, str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "tests.engine.mutation_count", "--child", str(out)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if not out.is_file():
            raise CannotRun(f"the suite did not run on {label}: {done.stderr.strip().splitlines()[-1:]}")
        result = json.loads(out.read_text())
    if not result.pop(CONTROL):
        raise CannotRun(f"{label} does not load the intact checkpoints, so its count means nothing")
    return result


def word(rows: list[bool]) -> str:
    """What is printed of a kind."""
    return "detects" if all(rows) else f"{sum(rows)} of {len(rows)}" if any(rows) else "-"


def run(args: argparse.Namespace) -> int:
    if args.child:
        return child(args.child)
    if stock.is_stock():
        raise CannotRun("the importable engine is stock; put the patched one on PYTHONPATH")
    with tempfile.TemporaryDirectory() as directory:
        tree = args.stock
        if tree is None:
            tree = Path(directory)
            stock.pristine_tree(stock.installed_package(), tree)
        ours, theirs = run_on(None, "this image"), run_on(tree, "stock")
    if ours.keys() != theirs.keys():
        raise CannotRun("the two runs did not try the same faults")
    ours_by_kind, theirs_by_kind = kinds(ours), kinds(theirs)
    for kind, rows in theirs_by_kind.items():
        print(f"{kind:36} stock {word(rows):12} this image {word(ours_by_kind[kind])}")
    whole, total = sum(map(all, theirs_by_kind.values())), len(theirs_by_kind)
    line = f"stock detects {whole} of {total}, this image {sum(map(all, ours_by_kind.values()))} of {total}"
    partly = sum(any(rows) for rows in theirs_by_kind.values()) - whole
    print(f"{len(ours):,} rows; stock detects another {partly} kinds on some checkpoints or at some places only")
    print(line)
    if args.json:
        rows = {row: {"stock": theirs[row], "this_image": ours[row]} for row in ours}
        args.json.write_text(json.dumps({"summary": line, "stock_in_part": partly, "rows": rows}, indent=2) + "\n")
    if not all(ours.values()):
        raise Rejected("this image misses faults: " + ", ".join(row for row in ours if not ours[row]))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", type=Path, metavar="TREE", help="directory that holds the stock sglang package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
