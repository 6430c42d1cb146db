"""What a series meets in a wheel or a tree: where each patch fits, and which of them are in it already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import series_diff as diffs
from series_diff import FileDiff
from series_files import Patch, Pin, Series, uncompilable
from series_tree import Rejected, record_row, sha256

Read = Callable[[str], bytes | None]


@dataclass
class FileResult:
    """What one patch meets in one file.

    ``state``: clean, moved, already-upstream, conflict, file-gone; against a pinned file instead of clean
    pending, applied or unpinned (the hunks fit, the hash is another). ``details`` are sentences,
    ``facts`` the same for a machine: ``offsets`` of moved hunks in lines, ``conflicts``.
    """

    path: str
    state: str
    details: list[str] = field(default_factory=list)
    ambiguous: tuple[int, ...] = ()
    facts: dict = field(default_factory=dict)


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
                then = "drop the patch" if self.state == "already-upstream" else "take this file out of the patch"
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
        facts = {"offsets": list(placement.offsets)}
        return FileResult(diff.path, "moved", details, placement.ambiguous, facts)
    facts = {"conflicts": [conflict.facts() for conflict in placement.conflicts]}
    return FileResult(diff.path, "conflict", [str(c) for c in placement.conflicts], facts=facts)


def must_fit(
    patches: Iterable[Patch], read: Read, relocate: bool = False
) -> tuple[dict[str, bytes], list[Patch], list[PatchResult]]:
    """``lay``, where anything but a fit is Rejected. Returns (contents, fitted patches, results)."""
    results, contents, fitted = lay(patches, read, relocate)
    problems = [sentence for result in results for sentence in result.sentences()]
    problems += uncompilable(contents)
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

    def rename(self, old: str, new: str) -> None:
        """Call a state by another word, in every patch and file."""
        self.word = new if self.word == old else self.word
        for outcome in (outcome for result in self.results for outcome in result.files):
            outcome.state = new if outcome.state == old else outcome.state


def classify(series: Series, pin: Pin, read: Read, record: Read | None = None) -> State:
    """Compare every touched and added file with the series, by hash first, then by hunk.

    ``record`` gives the RECORD row of a path in an installed tree. ``contents`` of a pending state are the
    verified post-images, ready to be written.
    """
    data = {path: read(path) for path in series.touched()}
    depth = {path: _depth(series, pin, path, content) for path, content in data.items()}
    problems = [
        f"{path}: the patches and upstream.toml disagree about the patched file: run export --wheel"
        for path, content in data.items()
        if content is not None and (sha256(content) == pin.files[path][1]) != (depth[path] == len(_stack(series, path)))
    ]
    if problems:
        return State("rejected", [], problems, {})
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
        problems += uncompilable(contents)
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
        stale = [path for path, content in sorted(finals.items()) if _row(record(path)) != record_row(path, content)]
        if stale:
            text = (
                f"half-applied: the files are patched but RECORD does not say so for {', '.join(stale)}: "
                f"reinstall {pin.package} {pin.version} and apply again"
            )
            return State("half-applied", results, [text], {})
    return State("applied", results, [], {})


def _row(line: bytes | None) -> str:
    return "" if line is None else line.decode("utf-8").rstrip("\r\n") + "\n"


def _stack(series: Series, path: str) -> list[FileDiff]:
    return [diff for patch in series.patches if (diff := patch.on(path))]


def _depth(series: Series, pin: Pin, path: str, data: bytes | None) -> int | None:
    """How many of the patches on one file are in it, proved by hash; None where it is no state of ours."""
    stack = _stack(series, path)
    for count in range(len(stack) + 1):
        undone = data
        for diff in reversed(stack[:count]):
            undone = diffs.apply_strict(diff.reversed(), undone) if undone is not None else None
        if undone is not None and sha256(undone) == pin.files[path][0]:
            return count
    return None
