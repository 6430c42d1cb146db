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
import bisect
import json
import re
import signal
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import series_diff as diffs
from series_diff import DiffError, FileDiff
from series_tree import CannotRun, Rejected, Tree, Wheel, record_row, sha256, update_record, write_all

#: A hook longer than this many changed lines in one file should have been a module under files/.
THIN = 15
TRAILERS = ("Reason", "Upstream", "Drop-when")
PLACEHOLDER = "FIXME"
_NAME = re.compile(r"\d{4}-[a-z0-9][a-z0-9.-]*\.patch")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Read = Callable[[str], bytes | None]


# -- the series on disk --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One patch file: its name, the text above the first diff, and its diffs by file."""

    name: str
    header: bytes
    diffs: tuple[FileDiff, ...]

    def on(self, path: str) -> FileDiff | None:
        """The diff of this patch for one file."""
        return next((diff for diff in self.diffs if diff.path == path), None)

    def render(self) -> bytes:
        """The text of the patch file."""
        return diffs.render(self.header, self.diffs)


@dataclass
class Series:
    """A series as read: ``patches`` in order, ``raw`` name -> text, ``added`` path -> content of files/."""

    root: Path
    patches: list[Patch]
    raw: dict[str, bytes]
    added: dict[str, bytes]
    unlisted: list[str]
    strays: list[str]

    def touched(self) -> list[str]:
        """Every file that a hook changes, sorted."""
        return sorted({diff.path for patch in self.patches for diff in patch.diffs})

    def digest(self) -> str:
        """SHA-256 over order, patches and files/: independent of checkout, times, modes and other files."""
        lines = ["horizon-images patch series, format 1"]
        lines += [f"patch {sha256(self.raw[patch.name])} {patch.name}" for patch in self.patches]
        lines += [f"file {sha256(data)} {path}" for path, data in sorted(self.added.items())]
        return sha256("".join(line + "\n" for line in lines).encode())


def load_series(root: Path) -> Series:
    """Read a series. Rejected, with every fault, where it cannot be read; style is left to ``check``."""
    if not root.is_dir():
        raise CannotRun(f"there is no series directory {root}")
    order = root / "series"
    if not order.is_file():
        raise Rejected(f"{order} is missing: it lists the patches, one name a line")
    problems: list[str] = []
    lines = (line.strip() for line in order.read_text("utf-8").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    for i, name in enumerate(names):
        if not _NAME.fullmatch(name):
            problems.append(f"series: {name!r} is not a patch name of the form NNNN-what.patch")
        elif name in names[:i]:
            problems.append(f"series: {name} is listed twice")
        elif i and names[i - 1][:4] >= name[:4]:
            problems.append(f"series: {name} stands after {names[i - 1]}: numbers must rise")
    patches, raw = [], {}
    for name in dict.fromkeys(name for name in names if _NAME.fullmatch(name)):
        path = root / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"series: {name} is listed but there is no such file")
            continue
        raw[name] = path.read_bytes()
        try:
            header, parsed = diffs.parse(raw[name])
        except DiffError as error:
            problems.append(f"{name}: {error}")
        else:
            patches.append(Patch(name, header, parsed))
    added = _load_added(root / "files", problems)
    for patch in patches:
        for diff in patch.diffs:
            if diff.path in added:
                problems.append(f"{patch.name}: changes {diff.path}, which is in files/: edit it there")
    if problems:
        raise Rejected(*problems)
    unlisted, strays = [], []
    for entry in sorted(root.iterdir()):
        if entry.name in raw or entry.name in ("series", "upstream.toml", "files") or entry.name[0] == ".":
            continue
        (unlisted if entry.suffix == ".patch" else strays).append(entry.name)
    return Series(root, patches, raw, added, unlisted, strays)


def _load_added(root: Path, problems: list[str]) -> dict[str, bytes]:
    """The content of files/ by path; caches, hidden files and editor backups are no part of it."""
    added: dict[str, bytes] = {}
    pending = [root] if root.is_dir() else []
    while pending:
        for entry in sorted(pending.pop().iterdir()):
            path = entry.relative_to(root).as_posix()
            if entry.name[0] == "." or entry.name == "__pycache__" or entry.name.endswith((".pyc", "~")):
                continue
            if entry.is_symlink():
                problems.append(f"files/{path} is a symbolic link: put the file itself there")
            elif entry.is_dir():
                pending.append(entry)
            elif entry.suffix in (".rej", ".orig"):
                problems.append(f"files/{path} was left behind by a failed merge: remove it")
            else:
                try:
                    added[diffs.check_path(path)] = entry.read_bytes()
                except DiffError as error:
                    problems.append(f"files/{path}: {error}")
    return added


@dataclass(frozen=True)
class Pin:
    """upstream.toml: the wheel the series is for, and (before, after) SHA-256 of every touched file."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    files: dict[str, tuple[str, str]]

    def render(self) -> str:
        """The text of upstream.toml."""
        out = ["# Generated by `patches/series.py export`. Do not edit.\n"]
        for key in ("package", "version", "wheel", "wheel_sha256"):
            out.append(f"{key} = {json.dumps(getattr(self, key))}\n")
        for path, (before, after) in sorted(self.files.items()):
            out.append(
                f"\n[files.{json.dumps(path)}]\npre = {json.dumps(before)}\npost = {json.dumps(after)}\n"
            )
        return "".join(out)


def load_pin(root: Path) -> Pin | None:
    """Read upstream.toml, or None where there is none yet. Rejected where it is not what export writes."""
    path = root / "upstream.toml"
    if not path.is_file():
        return None
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        files = {name: (entry["pre"], entry["post"]) for name, entry in data.get("files", {}).items()}
        pin = Pin(data["package"], data["version"], data["wheel"], data["wheel_sha256"], files)
        hashes = [pin.wheel_sha256, *(value for pair in files.values() for value in pair)]
        if not all(_SHA256.fullmatch(value) for value in hashes):
            raise ValueError("a hash is not 64 hexadecimal digits")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Rejected(f"upstream.toml is damaged ({error}): run export --wheel") from None
    return pin


def complete_pin(series: Series) -> Pin:
    """upstream.toml, which must name exactly the files that the series touches."""
    pin = load_pin(series.root)
    if pin is None:
        raise Rejected("upstream.toml is missing: run export --wheel")
    problems = [
        f"upstream.toml has no entry for {path}: run export --wheel"
        for path in sorted(set(series.touched()) - set(pin.files))
    ]
    problems += [
        f"upstream.toml has a stale entry for {path}, which no patch touches: run export --wheel"
        for path in sorted(set(pin.files) - set(series.touched()))
    ]
    if problems:
        raise Rejected(*problems)
    return pin


def lint(series: Series) -> list[str]:
    """Faults of style and bookkeeping, one sentence each."""
    problems = [f"{name} is not listed in series" for name in series.unlisted]
    problems += [f"{name} is no part of a series: remove it" for name in series.strays]
    for patch in series.patches:
        problems += [f"{patch.name}: {problem}" for problem in _lint_header(patch.header)]
    problems += _uncompilable(series.added, "files/")
    return problems


def _lint_header(header: bytes) -> list[str]:
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError:
        return ["the header is not UTF-8"]
    problems = []
    lines = text.splitlines()
    subject = next((line for line in lines if line.startswith("Subject:")), None)
    if subject is None:
        subject = next((line for line in lines if line.strip()), "")
    if not subject.strip() or subject.startswith(tuple(f"{key}:" for key in TRAILERS)):
        problems.append("the header has no subject line")
    elif re.search(r"\[[^]]*\b\d+/\d+\]", subject):
        problems.append("the subject is numbered ([n/m]): the order is in series alone")
    if PLACEHOLDER in text:
        problems.append(f"the header still says {PLACEHOLDER}")
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip() != "---"]
    last = paragraphs[-1] if len(paragraphs) > 1 else ""
    for key in TRAILERS:
        # A value may run on in lines that start with a space.
        values = re.findall(rf"^{key}:((?:.*)(?:\n[ \t]+.*)*)", last, re.M)
        value = values[0].strip() if values else ""
        if len(values) > 1:
            problems.append(f"the trailer {key}: stands twice")
        elif not value:
            problems.append(f"the trailer {key}: is {'empty' if values else 'missing in the last paragraph'}")
        elif key == "Upstream" and not re.fullmatch(r"none|https://\S+", value):
            problems.append(f"the trailer Upstream: must be an https URL or none, not {value!r}")
    return problems


def _uncompilable(contents: dict[str, bytes], prefix: str = "") -> list[str]:
    problems = []
    for path, data in sorted(contents.items()):
        if not path.endswith(".py"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's own warnings are not ours to report
                compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            problems.append(f"{prefix}{path} does not compile: {error}")
    return problems


# -- laying patches on files ---------------------------------------------------------------------------------


@dataclass
class FileResult:
    """What one patch meets in one file.

    ``state``: clean, moved, already-upstream, conflict, file-gone; against a pinned file instead of clean
    pending, applied or unpinned (the hunks fit, the hash is another).
    """

    path: str
    state: str
    details: list[str] = field(default_factory=list)
    ambiguous: tuple[int, ...] = ()


@dataclass
class PatchResult:
    """What one patch meets in all its files."""

    name: str
    files: list[FileResult]

    @property
    def state(self) -> str:
        """The state of the patch as a whole; a patch that is upstream in part is a conflict."""
        states = {result.state for result in self.files}
        for state in ("file-gone", "conflict", "unpinned"):
            if state in states:
                return state
        if len(states) == 1:
            return states.pop()
        if "already-upstream" in states:
            return "conflict"
        return "moved" if states == {"clean", "moved"} else "half-applied"

    def sentences(self) -> list[str]:
        """What is wrong, one sentence a file."""
        out = []
        for result in self.files:
            if result.state == "already-upstream":
                then = (
                    "drop the patch"
                    if self.state == "already-upstream"
                    else "take this file out of the patch"
                )
                out.append(f"{self.name}: {result.path}: already upstream, {then}")
            elif result.state not in ("clean", "moved", "pending", "applied"):
                out += [f"{self.name}: {result.path}: {detail}" for detail in result.details]
        return out


def lay(
    patches: Iterable[Patch], read: Read, relocate: bool = False, only: set[str] | None = None
) -> tuple[list[PatchResult], dict[str, bytes], list[Patch]]:
    """Apply patches one on another in memory, to the files that ``read`` gives.

    Returns what each patch met, the resulting content of every file that took a patch, and the patches as
    they fitted (with ``relocate``: with new line numbers). A diff without a place leaves its file as it was.
    ``only`` restricts the work to some paths.
    """
    results, contents, fitted = [], {}, []
    for patch in patches:
        outcomes, moved = [], []
        for diff in patch.diffs:
            if only is not None and diff.path not in only:
                continue
            data = contents.get(diff.path)
            if data is None:
                data = read(diff.path)
            if data is None:
                outcomes.append(FileResult(diff.path, "file-gone", ["there is no such file"]))
                moved.append(diff)
                continue
            lines = diffs.split_lines(data)
            placement = diffs.place(diff, lines, relocate)
            outcome = _outcome(diff, lines, placement)
            if outcome.state in ("clean", "moved"):
                contents[diff.path] = b"".join(diffs.apply_at(diff, lines, placement.positions))
                diff = diffs.move(diff, placement.positions)
            outcomes.append(outcome)
            moved.append(diff)
        results.append(PatchResult(patch.name, outcomes))
        fitted.append(Patch(patch.name, patch.header, tuple(moved)))
    return results, contents, fitted


def _outcome(diff: FileDiff, lines: list[bytes], placement: diffs.Placement) -> FileResult:
    fits = not placement.conflicts
    if fits and not any(placement.offsets):
        return FileResult(diff.path, "clean", ambiguous=placement.ambiguous)
    contained = not diffs.place(diff.reversed(), lines, relocate=True).conflicts
    if contained and fits:
        text = "the hook fits at another line, yet its result already stands in the file: decide by hand"
        return FileResult(diff.path, "conflict", [text])
    if contained:
        return FileResult(diff.path, "already-upstream")
    if fits:
        details = [
            f"hunk {number} moved by {offset:+d} lines"
            for number, offset in enumerate(placement.offsets, start=1)
            if offset
        ]
        return FileResult(diff.path, "moved", details, placement.ambiguous)
    return FileResult(diff.path, "conflict", [str(conflict) for conflict in placement.conflicts])


def must_fit(patches: Iterable[Patch], read: Read, relocate: bool = False):
    """``lay``, where anything but a fit is Rejected. Returns (contents, fitted patches, results)."""
    results, contents, fitted = lay(patches, read, relocate)
    problems = [sentence for result in results for sentence in result.sentences()]
    problems += _uncompilable(contents)
    if problems:
        raise Rejected(*problems)
    return contents, fitted, results


@dataclass
class State:
    """How a tree or wheel stands to the series: pending, applied, half-applied or rejected."""

    word: str
    results: list[PatchResult]
    problems: list[str]
    contents: dict[str, bytes]


def classify(series: Series, pin: Pin, read: Read, record: Read | None = None) -> State:
    """Compare every touched and added file with the series, by hash first, then by hunk.

    ``record`` gives the RECORD row of a path in an installed tree. ``contents`` of a pending state are the
    verified post-images, ready to be written.
    """
    data = {path: read(path) for path in series.touched()}
    depth = {path: _depth(series, pin, path, data[path]) for path in data}
    # Files without a patch on them yet: the pristine ones and those we do not know.
    open_paths = {path for path, count in depth.items() if not count}
    laid, contents, _ = lay(series.patches, data.get, only=open_paths)
    results = []
    for patch, found in zip(series.patches, laid, strict=True):
        outcomes = {outcome.path: outcome for outcome in found.files}
        for diff in patch.diffs:
            outcome = outcomes.get(diff.path)
            if outcome is None:
                below = sum(other.on(diff.path) is not None for other in series.patches[: len(results)])
                outcome = FileResult(diff.path, "applied" if below < depth[diff.path] else "pending")
            elif outcome.state == "clean" and depth[diff.path] is None:
                text = "every hunk fits, but the file is not the one pinned in upstream.toml"
                outcome = FileResult(diff.path, "unpinned", [text])
            elif outcome.state == "clean":
                outcome.state = "pending"
            outcomes[diff.path] = outcome
        results.append(PatchResult(patch.name, [outcomes[diff.path] for diff in patch.diffs]))
    problems = [sentence for result in results for sentence in result.sentences()]
    ours, absent = [], []
    for path, content in sorted(series.added.items()):
        there = read(path)
        if there is None:
            absent.append(path)
        elif there == content and record is not None:
            ours.append(path)
        else:
            same = " with the same content" if there == content else ""
            problems.append(f"files/{path}: the package already has a file there{same}")
    if problems:
        return State("rejected", results, problems, {})
    states = {outcome.state for result in results for outcome in result.files}
    states |= ({"applied"} if ours else set()) | ({"pending"} if absent else set())
    if states <= {"pending"}:
        wrong = [path for path in contents if sha256(contents[path]) != pin.files[path][1]]
        problems = [
            f"{path}: the patched file has SHA-256 {sha256(contents[path])}, upstream.toml pins "
            f"{pin.files[path][1]}: run export --wheel"
            for path in wrong
        ]
        problems += _uncompilable(contents)
        return State("rejected" if problems else "pending", results, problems, {**contents, **series.added})
    if states == {"pending", "applied"}:
        done = [f"{r.name} ({f.path})" for r in results for f in r.files if f.state == "applied"] + ours
        left = [f"{r.name} ({f.path})" for r in results for f in r.files if f.state == "pending"] + absent
        text = (
            f"half-applied: present {', '.join(done)}; missing {', '.join(left)}: "
            f"reinstall {pin.package} {pin.version} and apply again"
        )
        return State("half-applied", results, [text], {})
    finals = {**{path: content for path, content in data.items() if content is not None}, **series.added}
    if record is not None:
        stale = [
            path
            for path, content in sorted(finals.items())
            if _row(record(path)) != record_row(path, content)
        ]
        if stale:
            text = (
                f"half-applied: the files are patched but RECORD does not say so for {', '.join(stale)}: "
                f"reinstall {pin.package} {pin.version} and apply again"
            )
            return State("half-applied", results, [text], {})
    return State("applied", results, [], {})


def _row(line: bytes | None) -> str:
    return "" if line is None else line.decode("utf-8").rstrip("\r\n") + "\n"


def _depth(series: Series, pin: Pin, path: str, data: bytes | None) -> int | None:
    """How many of the patches on one file are in it, proved by hash; None where it is no state of ours."""
    if data is None:
        return None
    stack = [diff for patch in series.patches if (diff := patch.on(path))]
    before, after = pin.files[path]
    if sha256(data) == before:
        return 0
    if sha256(data) == after:
        return len(stack)
    for count in range(len(stack) - 1, 0, -1):
        undone: bytes | None = data
        for diff in reversed(stack[:count]):
            undone = diffs.apply_strict(diff.reversed(), undone) if undone is not None else None
        if undone is not None and sha256(undone) == before:
            return count
    return None


# -- commands ------------------------------------------------------------------------------------------------


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
                "files": [{"path": f.path, "state": f.state, "details": f.details} for f in result.files],
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
            report.warnings.append(
                f"{path}: {count} changed lines, over {THIN}: move code into a module in files/"
            )
    pin = complete_pin(series)
    report.data["upstream"] = {
        "package": pin.package,
        "version": pin.version,
        "wheel_sha256": pin.wheel_sha256,
    }
    if args.wheel:
        state = classify(series, pin, pinned_wheel(pin, args.wheel).read)
    elif args.tree:
        tree = Tree(args.tree)
        state = classify(series, pin, tree.read, recorded(tree, pinned_distribution(pin, tree)))
    else:
        report.lines.append("linted only; give --wheel or --tree to prove that the series applies")
        return report
    report.data["state"] = state.word
    report.add_results(state.results)
    report.errors += state.problems
    if not report.errors:
        report.lines.append(f"{pin.package} {pin.version}: {state.word}, zero fuzz, hashes as pinned")
    return report


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
        report.add_results(state.results)
        report.errors += state.problems
        if report.errors:
            return report
        if state.word == "applied":
            report.lines.append(f"{pin.package} {pin.version}: applied already, nothing to do")
            return report
        stale = [name for path in state.contents for name in tree.bytecode(path)]
        record = f"{info}/RECORD"
        changes: dict[Path, bytes | None] = {tree.locate(path): data for path, data in state.contents.items()}
        changes.update({tree.locate(path): None for path in stale})
        # RECORD last: a tree whose RECORD is right is patched completely.
        changes[tree.locate(record)] = update_record(tree.read(record) or b"", state.contents, stale)
        write(changes, "the tree")
        for entry in report.data["patches"]:
            entry["state"] = "applied"
    report.data["state"] = "applied"
    report.lines = [line.replace(": pending", ": applied") for line in report.lines]
    report.lines.append(
        f"{pin.package} {pin.version}: {len(pin.files)} files changed, {len(series.added)} added"
        + (f", {len(stale)} stale bytecode files removed" if stale else "")
    )
    return report


def pinned_wheel(pin: Pin, path: Path) -> Wheel:
    """The wheel at ``path``, which must be the pinned one bit for bit."""
    wheel = Wheel(path)
    if wheel.sha256 != pin.wheel_sha256:
        raise Rejected(
            f"{path} ({wheel}) has SHA-256 {wheel.sha256}, upstream.toml pins {pin.wheel_sha256} "
            f"({pin.package} {pin.version}): download it again, or run refresh for another version"
        )
    return wheel


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
        raise CannotRun(
            f"{error.strerror} while writing {error.filename or what}: {what} is unchanged"
        ) from None


def digest(args: argparse.Namespace) -> Report:
    """Print the digest of the series."""
    value = load_series(args.series).digest()
    return Report(data={"digest": value}, lines=[value])


def make_pin(patches: list[Patch], wheel: Wheel, contents: dict[str, bytes]) -> Pin:
    """upstream.toml for ``patches`` on ``wheel``, whose results are ``contents``."""
    files = {path: (sha256(wheel.read(path) or b""), sha256(data)) for path, data in contents.items()}
    return Pin(wheel.package, wheel.version, wheel.path.name, wheel.sha256, files)


def same_package(root: Path, wheel: Wheel) -> Pin | None:
    """The present upstream.toml, which must be of the wheel's package."""
    pin = load_pin(root)
    if pin is not None and pin.package != wheel.package:
        raise Rejected(f"{wheel.path} is {wheel}, but the series is for {pin.package}")
    return pin


def collisions(series: Series, wheel: Wheel) -> list[str]:
    """Files of files/ that the wheel has too."""
    out = []
    for path, data in sorted(series.added.items()):
        theirs = wheel.read(path)
        if theirs is not None:
            word = (
                "the same file: drop it from files/" if theirs == data else "another file there: rename ours"
            )
            out.append(f"files/{path}: {wheel} has {word}")
    return out


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
        patches = export_patch(series, wheel, Tree(args.tree), args.patch, args.file, report)
        changes[series.root / "series"] = _listed(series, args.patch)
        for patch in patches:
            changes[series.root / patch.name] = patch.render()
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
    changes = {
        path: data for path, data in changes.items() if not (path.is_file() and path.read_bytes() == data)
    }
    write(changes, "the series")
    report.data["written"] = sorted(path.name for path in changes)
    report.lines += [f"wrote {name}" for name in report.data["written"]] or ["nothing changed"]
    return report


def _listed(series: Series, name: str) -> bytes:
    """The order file with ``name`` at its sorted place; comments stay."""
    lines = (series.root / "series").read_text("utf-8").splitlines()
    names = [patch.name for patch in series.patches]
    if name not in names:
        i = bisect.bisect(names, name)
        at = len(lines) if i == len(names) else [line.strip() for line in lines].index(names[i])
        lines.insert(at, name)
    return "".join(line + "\n" for line in lines).encode()


def export_patch(
    series: Series, wheel: Wheel, tree: Tree, name: str, wanted: list[str], report: Report
) -> list[Patch]:
    """The series with the diff of patch ``name`` taken anew from ``tree``, which carries the whole series.

    Files of the patch: ``wanted``, else those it touches now and those that no other patch touches; of a new
    patch all that differ. Later patches on the same files are taken off first and get new line numbers.
    """
    if not _NAME.fullmatch(name):
        raise Rejected(f"{name!r} is not a patch name of the form NNNN-what.patch")
    others = [patch for patch in series.patches if patch.name != name]
    at = bisect.bisect([patch.name for patch in others], name)
    if any(patch.name[:4] == name[:4] for patch in others):
        raise Rejected(f"{name}: the number {name[:4]} is taken by another patch")
    earlier, later = others[:at], others[at:]
    old = _old_patch(series, name)
    below, _, _ = must_fit(earlier, wheel.read)
    foreign = {diff.path for patch in others for diff in patch.diffs}
    _, full, _ = lay(series.patches, wheel.read, relocate=True)
    differing = []
    for path in wheel.paths():
        there = tree.read(path)
        if there is not None and there != full.get(path, wheel.read(path)):
            differing.append(path)
    if wanted:
        paths = list(dict.fromkeys(wanted))
    elif old.diffs:
        paths = [diff.path for diff in old.diffs] + [path for path in differing if path not in foreign]
        paths = list(dict.fromkeys(paths))
    else:
        paths = differing
    parts = [_export_file(path, below, earlier, later, wheel, tree) for path in paths]
    parts = [part for part in parts if part]
    if not parts:
        raise Rejected(
            f"{name}: the tree has no change for it; to drop a patch remove it and its line in series"
        )
    report.warnings += [
        f"{path} differs too but is not part of {name}: name it with --file to include it"
        for path in differing
        if path not in paths
    ]
    report.warnings += _leftovers(series, wheel, tree)
    fresh = Patch(name, old.header, tuple(parts))
    contents, _, _ = must_fit([fresh], lambda path: below.get(path, wheel.read(path)))
    _, fitted, _ = must_fit(
        later, lambda path: contents.get(path, below.get(path, wheel.read(path))), relocate=True
    )
    return [*earlier, fresh, *fitted]


def _old_patch(series: Series, name: str) -> Patch:
    """The patch as it is, listed or not; where it is new a skeleton, which check refuses until filled in."""
    path = series.root / name
    if path.is_file():
        try:
            return Patch(name, *diffs.parse(path.read_bytes()))
        except DiffError as error:
            raise Rejected(f"{name}: {error}") from None
    subject = name[5:].removesuffix(".patch").replace("-", " ").capitalize()
    header = f"{subject}\n\n{PLACEHOLDER}: what the hook does.\n\n"
    header += f"Reason: {PLACEHOLDER}\nUpstream: none\nDrop-when: {PLACEHOLDER}\n\n"
    return Patch(name, header.encode(), ())


def _export_file(
    path: str, below: dict[str, bytes], earlier: list[Patch], later: list[Patch], wheel: Wheel, tree: Tree
) -> FileDiff | None:
    before = below.get(path, wheel.read(path))
    after = tree.read(path)
    if before is None:
        raise Rejected(f"{path} is not in {wheel}: new files belong in files/")
    if after is None:
        raise Rejected(f"{path} is gone from the tree: a hook does not delete files")
    for patch in reversed(later):
        diff = patch.on(path)
        if diff is None:
            continue
        lines = diffs.split_lines(after)
        undo = diffs.place(diff.reversed(), lines, relocate=True)
        if not undo.conflicts:
            after = b"".join(diffs.apply_at(diff.reversed(), lines, undo.positions))
        elif diffs.place(diff, lines, relocate=True).conflicts:
            raise Rejected(
                f"{path}: the change cannot be told apart from {patch.name}, which touches the same lines: "
                f"take {patch.name} out of series, export, then export it again"
            )
    for patch in earlier:
        diff = patch.on(path)
        if diff is None:
            continue
        lines = diffs.split_lines(after)
        absent = diffs.place(diff.reversed(), lines, relocate=True).conflicts
        if absent and not diffs.place(diff, lines, relocate=True).conflicts:
            raise Rejected(
                f"{path}: the tree lacks {patch.name}: apply the series to the tree before editing it"
            )
    return diffs.make(path, before, after)


def _leftovers(series: Series, wheel: Wheel, tree: Tree) -> list[str]:
    """Changes in the tree that no patch can hold: new files, and edits of what comes from files/."""
    out = []
    known = set(wheel.paths())
    for top in sorted({path.split("/")[0] for path in known}):
        for entry in sorted((tree.root / top).rglob("*")):
            path = entry.relative_to(tree.root).as_posix()
            if path in known or "__pycache__" in entry.parts or entry.is_symlink() or not entry.is_file():
                continue
            if path not in series.added:
                out.append(f"{path} is new in the tree: copy it to files/, a patch does not create files")
            elif entry.read_bytes() != series.added[path]:
                out.append(f"{path} differs from files/{path}: files/ is its source, edit it there")
    return out


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
    report.errors += _uncompilable(contents)
    if not args.write:
        return report
    changes: dict[Path, bytes | None] = {}
    for patch, result in zip(fitted, results, strict=True):
        if result.state == "moved":
            changes[series.root / patch.name] = patch.render()
    if report.errors:
        report.lines.append(
            "upstream.toml still pins the old version: solve the rest, then run export --wheel"
        )
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
    sub.add_argument(
        "--file", action="append", default=[], help="a file of the patch (repeat; default: see README)"
    )
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


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # A terminated run must still clean up after itself, as an interrupted one does.
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _stop)
    sys.exit(main())
