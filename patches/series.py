#!/usr/bin/env python3
"""The patch series of the engine: check, apply, export, refresh, digest.

A series is a directory: ``series`` (the order), ``NNNN-what.patch`` (thin hooks in existing files),
``files/`` (new modules at their path in the package) and ``upstream.toml`` (generated: which wheel, and the
SHA-256 of every touched file before and after). Everything is verified in memory before anything is written.

Standard library only: it also runs inside an image build without network, GNU patch or git.
Exit codes: 0 ok, 1 rejected (a patch, wheel or tree is wrong), 2 cannot run (missing file, full disk).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import series_diff as diffs
from series_export import collisions, export_patch, listed, make_pin, same_package
from series_files import Pin, Series, complete_pin, lint, load_series, uncompilable
from series_state import PatchResult, Read, classify, lay, must_fit
from series_tree import CannotRun, Rejected, Tree, Wheel, update_record, write_all

#: A hook longer than this many changed lines in one file should have been a module under files/.
THIN = 15


@dataclass
class Report:
    """What a command has to say: lines for people, the same facts for a machine."""

    data: dict = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add_results(self, results: list[PatchResult]) -> None:
        """Name the state of every patch and, where there is more to say, of its files."""
        self.data["patches"] = [
            {
                "name": result.name,
                "state": result.state,
                "files": [{"path": f.path, "state": f.state, "details": f.details, **f.facts} for f in result.files],
            }
            for result in results
        ]
        for result in results:
            self.lines.append(f"{result.name}: {result.state}")
            for outcome in result.files:
                if outcome.state == "moved":
                    self.lines += [f"  {outcome.path}: {detail}" for detail in outcome.details]
                self.warnings += [
                    f"{result.name}: {outcome.path}: the lines of hunk {number} stand more than once in the "
                    "file, only the line number picks the place: add context"
                    for number in outcome.ambiguous
                ]


def check(args: argparse.Namespace) -> Report:
    """Lint the series and, with a wheel or a tree, prove in memory that it applies with zero fuzz."""
    report = Report()
    series = load_series(args.series)
    report.errors += lint(series)
    counts: dict[str, int] = {}
    for patch in series.patches:
        for diff in patch.diffs:
            counts[diff.path] = counts.get(diff.path, 0) + diff.changed_lines
    report.data.update(digest=series.digest(), changed_lines=counts, added=sorted(series.added))
    for path, count in sorted(counts.items()):
        report.lines.append(f"{path}: {count} changed lines")
        if count > THIN:
            report.warnings.append(f"{path}: {count} changed lines, over {THIN}: move code into a module in files/")
    try:
        _check_upstream(args, series, report)
    except Rejected as error:  # name it together with what the lint found
        report.errors += error.args
    return report


def _check_upstream(args: argparse.Namespace, series: Series, report: Report) -> None:
    pin = complete_pin(series)
    report.data["upstream"] = {
        "package": pin.package,
        "version": pin.version,
        "wheel_sha256": pin.wheel_sha256,
    }
    if args.wheel:
        state = classify(series, pin, Wheel(args.wheel, (pin.wheel_sha256, f"{pin.package} {pin.version}")).read)
        state.rename("pending", "clean")
    elif args.tree:
        tree = Tree(args.tree)
        state = classify(series, pin, tree.read, recorded(tree, pinned_distribution(pin, tree)))
    else:
        report.lines.append("linted only; give --wheel or --tree to prove that the series applies")
        return
    report.data["state"] = state.word
    report.add_results(state.results)
    report.errors += state.problems
    if not report.errors:
        report.lines.append(f"{pin.package} {pin.version}: {state.word}, zero fuzz, hashes as pinned")


def apply(args: argparse.Namespace) -> Report:
    """Patch an installed package: everything, or nothing."""
    report = Report()
    series = load_series(args.series)
    report.warnings += [f"{name} is not listed in series" for name in series.unlisted]
    pin = complete_pin(series)
    tree = Tree(args.tree)
    with tree.lock():
        info = pinned_distribution(pin, tree)
        state = classify(series, pin, tree.read, recorded(tree, info))
        report.data.update(state=state.word, digest=series.digest())
        report.errors += state.problems
        if report.errors:
            report.add_results(state.results)
            return report
        if state.word == "applied":
            report.add_results(state.results)
            report.lines.append(f"{pin.package} {pin.version}: applied already, nothing to do")
            return report
        stale = [name for path in state.contents for name in tree.bytecode(path)]
        record = f"{info}/RECORD"
        changes: dict[Path, bytes | None] = {tree.locate(path): data for path, data in state.contents.items()}
        changes.update({tree.locate(path): None for path in stale})
        # RECORD last: a tree whose RECORD is right is patched completely.
        changes[tree.locate(record)] = update_record(tree.read(record) or b"", state.contents, stale)
        write(changes, "the tree")
    state.rename("pending", "applied")
    report.data["state"] = state.word
    report.add_results(state.results)
    report.lines.append(
        f"{pin.package} {pin.version}: {len(pin.files)} files changed, {len(series.added)} added"
        + (f", {len(stale)} stale bytecode files removed" if stale else "")
    )
    return report


def pinned_distribution(pin: Pin, tree: Tree) -> str:
    """The dist-info directory of the pinned package in a tree, which must be of the pinned version."""
    info, version = tree.distribution(pin.package)
    if version != pin.version:
        raise Rejected(
            f"{tree.root} holds {pin.package} {version}, the series is for {pin.version}: "
            "install that version or run refresh"
        )
    if tree.read(f"{info}/RECORD") is None:
        raise Rejected(f"{info} has no RECORD in {tree.root}: install {pin.package} from its wheel")
    return info


def recorded(tree: Tree, info: str) -> Read:
    """A function from path to its RECORD row in the tree."""
    rows = {}
    for line in diffs.split_lines(tree.read(f"{info}/RECORD") or b""):
        rows[line.split(b",")[0].decode("utf-8", "replace")] = line
    return rows.get


def write(changes: dict[Path, bytes | None], what: str) -> None:
    """``write_all`` with one sentence for a full disk or a read-only place."""
    try:
        write_all(changes)
    except OSError as error:
        raise CannotRun(f"{error.strerror} while writing {error.filename or what}: {what} is unchanged") from None


def digest(args: argparse.Namespace) -> Report:
    """Print the digest of the series."""
    value = load_series(args.series).digest()
    return Report(data={"digest": value}, lines=[value])


def export(args: argparse.Namespace) -> Report:
    """Write upstream.toml anew and, with --patch, the diff of one patch from a modified tree."""
    report = Report()
    if args.patch and not args.tree:
        raise Rejected("export --patch also needs --tree, the modified tree")
    if (args.tree or args.file) and not args.patch:
        raise Rejected("export --tree needs --patch, the patch to write")
    series = load_series(args.series)
    wheel = Wheel(args.wheel)
    same_package(series.root, wheel)
    problems = collisions(series, wheel)
    if problems:
        raise Rejected(*problems)
    patches = series.patches
    changes: dict[Path, bytes | None] = {}
    if args.patch:
        patches = export_patch(series, wheel, Tree(args.tree), args.patch, args.file, report.warnings)
        changes[series.root / "series"] = listed(series, args.patch)
        changes.update({series.root / patch.name: patch.render() for patch in patches if patch not in series.patches})
    report.warnings += [
        f"{name} is not listed in series" for name in series.unlisted if name not in {p.name for p in patches}
    ]
    contents, _, results = must_fit(patches, wheel.read)
    same = [path for path, data in contents.items() if data == wheel.read(path)]
    if same:
        raise Rejected(*(f"{path}: the patches on it cancel out" for path in same))
    report.add_results(results)
    pin = make_pin(patches, wheel, contents)
    changes[series.root / "upstream.toml"] = pin.render().encode()
    changes = {path: data for path, data in changes.items() if not (path.is_file() and path.read_bytes() == data)}
    write(changes, "the series")
    report.data["written"] = sorted(path.name for path in changes)
    report.lines += [f"wrote {name}" for name in report.data["written"]] or ["nothing changed"]
    return report


def refresh(args: argparse.Namespace) -> Report:
    """Report what each patch meets in another version; with --write give moved patches new line numbers."""
    report = Report()
    series = load_series(args.series)
    report.warnings += [f"{name} is not listed in series" for name in series.unlisted]
    wheel = Wheel(args.wheel)
    pin = same_package(series.root, wheel)
    results, contents, fitted = lay(series.patches, wheel.read, relocate=True)
    was = f" (pinned: {pin.version})" if pin else ""
    report.lines.append(f"{wheel}{was}")
    report.data["wheel"] = {"package": wheel.package, "version": wheel.version, "sha256": wheel.sha256}
    report.add_results(results)
    report.errors += [sentence for result in results for sentence in result.sentences()]
    report.errors += collisions(series, wheel)
    report.errors += uncompilable(contents)
    if not args.write:
        return report
    changes: dict[Path, bytes | None] = {}
    for patch, result in zip(fitted, results, strict=True):
        if result.state == "moved":
            changes[series.root / patch.name] = patch.render()
    if report.errors:
        report.lines.append("upstream.toml still pins the old version: solve the rest, then run export --wheel")
    else:
        changes[series.root / "upstream.toml"] = make_pin(fitted, wheel, contents).render().encode()
    write(changes, "the series")
    report.data["written"] = sorted(path.name for path in changes)
    report.lines += [f"wrote {name}" for name in report.data["written"]]
    return report


# -- command line --------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A wrong flag is a wrong input: exit code 1, one sentence."""

    def error(self, message: str):
        raise Rejected(f"{message} (see {self.prog} --help)")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    common = argparse.ArgumentParser(add_help=False)
    default = Path(__file__).resolve().parent / "sglang"
    common.add_argument("--series", type=Path, default=default, help="series directory (patches/sglang)")
    common.add_argument("--json", action="store_true", help="print one JSON object for a machine")
    parser = Parser(prog="series.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Callable) -> argparse.ArgumentParser:
        summary = function.__doc__.splitlines()[0]
        sub = commands.add_parser(
            function.__name__, help=summary, description=summary, parents=[common], allow_abbrev=False
        )
        sub.set_defaults(run=function)
        return sub

    where = command(check).add_mutually_exclusive_group()
    where.add_argument("--wheel", type=Path, help="the pinned wheel")
    where.add_argument("--tree", type=Path, help="site-packages with the pinned version, patched or not")
    command(apply).add_argument("--tree", type=Path, required=True, help="site-packages to patch")
    command(digest)
    sub = command(export)
    sub.add_argument("--wheel", type=Path, required=True, help="the pristine wheel")
    sub.add_argument("--tree", type=Path, help="the modified tree, laid out like site-packages")
    sub.add_argument("--patch", metavar="NNNN-what.patch", help="the patch to write")
    sub.add_argument("--file", action="append", default=[], help="a file of the patch (repeat; default: see README)")
    sub = command(refresh)
    sub.add_argument("--wheel", type=Path, required=True, help="the wheel of another version")
    sub.add_argument("--write", action="store_true", help="give moved patches their new line numbers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 ok, 1 rejected, 2 cannot run."""
    as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    code = 0
    report = Report()
    try:
        args = parse_arguments(argv)
        report = args.run(args)
        code = 1 if report.errors else 0
    except Rejected as error:
        code, report.errors = 1, list(error.args)
    except KeyboardInterrupt:
        code, report.errors = 2, ["interrupted"]
    except CannotRun as error:
        code, report.errors = 2, [str(error)]
    except OSError as error:
        code, report.errors = 2, [f"{error.strerror}: {error.filename}"]
    if as_json:
        facts = {"exit": code, "errors": report.errors, "warnings": report.warnings, **report.data}
        print(json.dumps(facts, indent=1))
        return code
    for line in report.lines:
        print(line)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in report.errors:
        print(f"{'cannot run' if code == 2 else 'rejected'}: {line}", file=sys.stderr)
    return code


def handle_signals() -> None:
    """A terminated run must still clean up after itself, as an interrupted one does."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, stop)


if __name__ == "__main__":
    handle_signals()
    sys.exit(main())
