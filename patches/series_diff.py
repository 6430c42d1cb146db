"""Unified diffs, strictly: parse, place, apply, reverse, write.

Everything here works on bytes, so that CRLF, tabs and a missing final newline are compared as they are.
A *line* is a ``bytes`` object including its ``\\n``; only the last line of a file may lack it.

Why not ``patch`` or ``git apply``: neither need exist where the image is built, ``patch`` guesses (fuzz,
offsets, reversed patches), and we want to say *applied*, *already upstream* and *conflict* ourselves.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

CONTEXT = 3
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)\n?\Z", re.S)
_REFUSED = (
    (b"GIT binary patch", "is a binary patch; put the file under files/"),
    (b"Binary files ", "is a binary patch; put the file under files/"),
    (b"new file mode", "creates a file; new files belong in files/"),
    (b"deleted file mode", "deletes a file; a hook only changes existing files"),
    (b"rename ", "renames a file; a hook only changes existing files"),
    (b"copy ", "copies a file; new files belong in files/"),
    (b"old mode", "changes a file mode; a hook only changes lines"),
    (b"new mode", "changes a file mode; a hook only changes lines"),
)


class DiffError(Exception):
    """The text is not a diff that a series may hold; the message is one sentence without the patch name."""


@dataclass(frozen=True)
class Hunk:
    """One hunk. Start lines count from 1; ``lines`` are pairs of a tag (b" ", b"-", b"+") and a line."""

    old_start: int
    new_start: int
    lines: tuple[tuple[bytes, bytes], ...]
    section: bytes = b""

    @property
    def old(self) -> list[bytes]:
        """The lines that must stand in the file before the hunk is applied."""
        return [line for tag, line in self.lines if tag != b"+"]

    @property
    def new(self) -> list[bytes]:
        """The lines that stand in the file afterwards."""
        return [line for tag, line in self.lines if tag != b"-"]

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {b"+": b"-", b"-": b"+", b" ": b" "}
        return replace(
            self,
            old_start=self.new_start,
            new_start=self.old_start,
            lines=tuple((swap[tag], line) for tag, line in self.lines),
        )


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one patch in one file; ``path`` is relative to site-packages, with forward slashes."""

    path: str
    hunks: tuple[Hunk, ...]

    @property
    def changed_lines(self) -> int:
        """Added plus removed lines."""
        return sum(tag != b" " for hunk in self.hunks for tag, _ in hunk.lines)

    def reversed(self) -> FileDiff:
        """The diff that undoes this one."""
        return FileDiff(self.path, tuple(hunk.reversed() for hunk in self.hunks))


@dataclass(frozen=True)
class Conflict:
    """Why a hunk has no place. ``line`` counts from 1 in the file; ``found`` is None past its end."""

    hunk: int
    line: int
    expected: bytes
    found: bytes | None
    matches: tuple[int, ...] = ()
    nearest: int | None = None

    def __str__(self) -> str:
        if self.expected == self.found:
            text = f"hunk {self.hunk} fits only at line {self.line}, above the end of the hunk before it"
        else:
            found = "the end of the file" if self.found is None else show(self.found)
            text = f"hunk {self.hunk}, line {self.line}: expected {show(self.expected)}, found {found}"
        if len(self.matches) == 1:
            text += f"; the hunk's lines stand at line {self.matches[0]}: it moved, run refresh"
        elif self.matches:
            text += f"; the hunk's lines stand at lines {', '.join(map(str, self.matches))}: add context"
        elif self.nearest is not None:
            text += f"; the most similar place is line {self.nearest}"
        return text

    def facts(self) -> dict:
        """The same for a machine; lines as text, undecodable bytes escaped."""
        texts = [
            None if line is None else line.decode("utf-8", "backslashreplace") for line in (self.expected, self.found)
        ]
        return {
            "hunk": self.hunk,
            "line": self.line,
            "expected": texts[0],
            "found": texts[1],
            "matches": list(self.matches),
            "nearest": self.nearest,
        }


@dataclass(frozen=True)
class Placement:
    """Where each hunk of a file goes: ``positions`` are 0-based line indices, ``conflicts`` the rest.

    ``ambiguous`` are the numbers of hunks whose lines stand more than once, so that only the line number
    picks the place.
    """

    positions: tuple[int, ...]
    conflicts: tuple[Conflict, ...] = ()
    offsets: tuple[int, ...] = ()
    ambiguous: tuple[int, ...] = ()


def show(line: bytes) -> str:
    """A line as a quoted string in which tabs, CR and a missing newline can be seen."""
    text = line.decode("utf-8", "backslashreplace")
    if text.endswith("\n"):
        return repr(text[:-1])
    return f"{text!r} without a newline at the end of the file"


def split_lines(data: bytes) -> list[bytes]:
    """Split at LF only: a CR, form feed or Unicode separator inside a line stays inside it."""
    lines = data.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def check_path(path: str) -> str:
    """Return ``path`` if it is a plain relative path below a package; raise DiffError otherwise."""
    pure = PurePosixPath(path)
    plain = re.fullmatch(r"[A-Za-z0-9_.+/-]+", path) and str(pure) == path
    if not plain or pure.is_absolute() or ".." in pure.parts or len(pure.parts) < 2:
        raise DiffError(f"path {path!r} is not a plain path inside the package")
    if pure.parts[0].endswith((".dist-info", ".data")):
        raise DiffError(f"path {path!r} is package metadata, which a series never changes")
    return path


# -- reading -------------------------------------------------------------------------------------------------


def parse(data: bytes) -> tuple[bytes, tuple[FileDiff, ...]]:
    """Split a patch file into its header text and its file diffs.

    Raises DiffError (one sentence, with the line number of the patch file) for anything but plain changes of
    existing text files.
    """
    lines = split_lines(data)
    start = next((i for i in range(len(lines)) if _starts_diff(lines, i)), len(lines))
    header = b"".join(lines[:start])
    if start == len(lines):
        raise DiffError("holds no diff")
    diffs: list[FileDiff] = []
    i = start
    while i < len(lines):
        line = lines[i]
        if line == b"-- \n":  # the signature of git format-patch ends the patch
            break
        if line.startswith(b"--- "):
            diff, i = _parse_file(lines, i)
            if any(diff.path == other.path for other in diffs):
                raise DiffError(f"line {i}: {diff.path} has two diffs in one patch; merge them")
            diffs.append(diff)
            continue
        if line.endswith(b"\r\n"):
            raise DiffError(f"line {i + 1}: the patch file has CRLF line endings; convert it to LF")
        for prefix, why in _REFUSED:
            if line.startswith(prefix):
                raise DiffError(f"line {i + 1}: {why}")
        if line.strip() and not line.startswith((b"diff ", b"index ", b"similarity ", b"dissimilarity ")):
            raise DiffError(f"line {i + 1}: {show(line)} is neither a diff header nor part of a hunk")
        i += 1
    if not diffs:
        raise DiffError("holds no diff")
    return header, tuple(diffs)


def _starts_diff(lines: list[bytes], i: int) -> bool:
    if lines[i].startswith(b"diff --git "):
        return True
    return lines[i].startswith(b"--- ") and i + 1 < len(lines) and lines[i + 1].startswith(b"+++ ")


def _parse_file(lines: list[bytes], i: int) -> tuple[FileDiff, int]:
    if i + 1 >= len(lines) or not lines[i + 1].startswith(b"+++ "):
        raise DiffError(f"line {i + 2}: a `+++` line must follow `---`")
    names = []
    for n, mark in ((i, b"a/"), (i + 1, b"b/")):
        if lines[n].endswith(b"\r\n"):
            raise DiffError(f"line {n + 1}: the patch file has CRLF line endings; convert it to LF")
        name = lines[n][4:].rstrip(b"\n").split(b"\t")[0]
        if name == b"/dev/null":
            why = "creates a file; new files belong in files/"
            if n > i:
                why = "deletes a file; a hook only changes existing files"
            raise DiffError(f"line {n + 1}: {why}")
        if not name.startswith(mark):
            raise DiffError(f"line {n + 1}: the path must start with {mark.decode()}")
        names.append(name[2:].decode("utf-8", "backslashreplace"))
    if names[0] != names[1]:
        raise DiffError(f"line {i + 1}: {names[0]} and {names[1]} differ; a hook does not rename")
    path = check_path(names[0])
    i += 2
    hunks: list[Hunk] = []
    delta = 0
    while i < len(lines) and lines[i].startswith(b"@@"):
        at = i + 1
        hunk, i = _parse_hunk(lines, i)
        expected = hunk.old_start + delta
        if hunk.new_start != expected:
            raise DiffError(f"line {at}: the new start line must be {expected}, not {hunk.new_start}")
        if hunks and hunk.old_start < hunks[-1].old_start + len(hunks[-1].old):
            raise DiffError(f"line {at}: the hunk overlaps the one before it")
        delta += len(hunk.new) - len(hunk.old)
        hunks.append(hunk)
    if not hunks:
        raise DiffError(f"line {i + 1}: {path} has no hunk")
    return FileDiff(path, tuple(hunks)), i


def _parse_hunk(lines: list[bytes], i: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[i])
    if not match:
        raise DiffError(f"line {i + 1}: {show(lines[i])} is not a hunk header")
    at = i + 1
    old_start, new_start = int(match[1]), int(match[3])
    old_left = int(match[2]) if match[2] is not None else 1
    new_left = int(match[4]) if match[4] is not None else 1
    body: list[tuple[bytes, bytes]] = []
    i += 1
    while old_left > 0 or new_left > 0:
        if i >= len(lines):
            raise DiffError(f"line {i}: the hunk of line {at} is cut short")
        tag, rest = lines[i][:1], lines[i][1:]
        if tag not in (b" ", b"+", b"-"):
            raise DiffError(
                f"line {i + 1}: a line of the hunk of line {at} starts with neither space, + nor - "
                "(did an editor strip trailing space?)"
            )
        if not rest.endswith(b"\n"):
            raise DiffError(f"line {i + 1}: the patch file is cut in the middle of a line")
        if i + 1 < len(lines) and lines[i + 1].startswith(b"\\ "):
            rest = rest[:-1]
            i += 1
        old_left -= tag != b"+"
        new_left -= tag != b"-"
        body.append((tag, rest))
        i += 1
    if old_left or new_left:
        raise DiffError(f"line {at}: the line counts of the hunk header do not fit its lines")
    hunk = Hunk(old_start, new_start, tuple(body), match[5].strip())
    for side in (hunk.old, hunk.new):
        if any(not line.endswith(b"\n") for line in side[:-1]):
            raise DiffError(f"line {at}: only the last line of a file may lack its newline")
    # Both ways: the old lines pin the place, the new ones tell a patched file from an unpatched one.
    if not any(line.strip() for line in hunk.old) or not any(line.strip() for line in hunk.new):
        raise DiffError(f"line {at}: the hunk has no context that could pin it: use three lines of context")
    if old_start < 1:
        raise DiffError(f"line {at}: line numbers start at 1")
    if hunk.old == hunk.new:
        raise DiffError(f"line {at}: the hunk changes nothing")
    return hunk, i


# -- placing and applying ------------------------------------------------------------------------------------


def find(block: list[bytes], lines: list[bytes]) -> list[int]:
    """Every 0-based index at which ``block`` stands in ``lines``."""
    size = len(block)
    return [
        i
        for i in range(len(lines) - size + 1)
        if lines[i] == block[0] and lines[i : i + size] == block  # first line first: files are long
    ]


def place(diff: FileDiff, lines: list[bytes], relocate: bool = False) -> Placement:
    """Find where each hunk goes: at its exact line or, with ``relocate``, at the one other exact match."""
    positions, conflicts, offsets, ambiguous = [], [], [], []
    end = 0
    for number, hunk in enumerate(diff.hunks, start=1):
        start, block = hunk.old_start - 1, hunk.old
        matches = find(block, lines)
        if len(matches) > 1:
            ambiguous.append(number)
        if start in matches:
            at = start
        elif relocate and len(matches) == 1:
            at = matches[0]
        else:
            conflicts.append(_conflict(number, start, block, lines, matches, relocate))
            continue
        if at < end:  # two hunks changed places: each fits, the pair does not
            conflicts.append(Conflict(number, at + 1, block[0], lines[at]))
            continue
        positions.append(at)
        offsets.append(at - start)
        end = at + len(block)
    return Placement(tuple(positions), tuple(conflicts), tuple(offsets), tuple(ambiguous))


def _conflict(
    number: int, start: int, block: list[bytes], lines: list[bytes], matches: list[int], relocate: bool
) -> Conflict:
    nearest = None
    if not matches:
        scored = [
            (
                sum(a == b and bool(a.strip()) for a, b in zip(block, lines[i:], strict=False)),
                -abs(i - start),
                i,
            )
            for i in range(len(lines))
        ]
        score, _, best = max(scored, default=(0, 0, 0))
        nearest = best if score else None
    # Where a hunk may move, the first difference at the most similar place says more than at the old line.
    origin = nearest if relocate and nearest is not None else start
    for i, expected in enumerate(block):
        found = lines[origin + i] if origin + i < len(lines) else None
        if found != expected:
            break
    return Conflict(
        hunk=number,
        line=origin + i + 1,
        expected=expected,
        found=found,
        matches=tuple(m + 1 for m in matches),
        nearest=None if nearest is None else nearest + 1,
    )


def apply_at(diff: FileDiff, lines: list[bytes], positions: tuple[int, ...]) -> list[bytes]:
    """Replace each hunk's old lines by its new ones at ``positions`` (from ``place``, without conflicts)."""
    result = list(lines)
    for hunk, at in reversed(list(zip(diff.hunks, positions, strict=True))):
        result[at : at + len(hunk.old)] = hunk.new
    return result


def apply_strict(diff: FileDiff, data: bytes) -> bytes | None:
    """The file after ``diff`` at its exact lines, or None where it does not fit."""
    lines = split_lines(data)
    placement = place(diff, lines)
    if placement.conflicts:
        return None
    return b"".join(apply_at(diff, lines, placement.positions))


def move(diff: FileDiff, positions: tuple[int, ...]) -> FileDiff:
    """The same diff with the line numbers of ``positions``."""
    hunks, delta = [], 0
    for hunk, at in zip(diff.hunks, positions, strict=True):
        hunks.append(replace(hunk, old_start=at + 1, new_start=at + 1 + delta))
        delta += len(hunk.new) - len(hunk.old)
    return FileDiff(diff.path, tuple(hunks))


# -- writing -------------------------------------------------------------------------------------------------


def make(path: str, before: bytes, after: bytes) -> FileDiff | None:
    """The diff from ``before`` to ``after`` with three lines of context, or None where they are equal."""
    if before == after:
        return None
    old, new = split_lines(before), split_lines(after)
    # Trimming what is common keeps difflib fast and its choice local to the change.
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    matcher = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    changes = [
        (head + i1, head + i2, head + j1, head + j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    ]
    groups = [changes[:1]]
    for change in changes[1:]:
        if change[0] - groups[-1][-1][1] > 2 * CONTEXT:
            groups.append([])
        groups[-1].append(change)
    hunks = []
    for group in groups:
        start = at = max(0, group[0][0] - CONTEXT)
        new_start = group[0][2] - (group[0][0] - start)
        body: list[tuple[bytes, bytes]] = []
        for i1, i2, j1, j2 in group:
            body += [(b" ", line) for line in old[at:i1]]
            body += [(b"-", line) for line in old[i1:i2]] + [(b"+", line) for line in new[j1:j2]]
            at = i2
        body += [(b" ", line) for line in old[at : at + CONTEXT]]
        hunks.append(Hunk(start + 1, new_start + 1, tuple(body), _section(old, start)))
    return FileDiff(path, tuple(hunks))


def _section(lines: list[bytes], start: int) -> bytes:
    """The nearest line above that starts a definition, as a help for the reader."""
    for line in reversed(lines[:start]):
        if re.match(rb"(async def|def|class) ", line):
            return line.strip().decode("utf-8", "ignore")[:80].encode()
    return b""


def render(header: bytes, diffs: tuple[FileDiff, ...]) -> bytes:
    """A patch file; ``parse`` reads it back to the same header and diffs."""
    out = [header]
    if header and not header.endswith(b"\n\n"):
        out.append(b"\n" if header.endswith(b"\n") else b"\n\n")
    for diff in diffs:
        path = diff.path.encode()
        out.append(b"diff --git a/%b b/%b\n--- a/%b\n+++ b/%b\n" % (path, path, path, path))
        for hunk in diff.hunks:
            section = b" " + hunk.section if hunk.section else b""
            spans = [
                b"%d" % start if len(side) == 1 else b"%d,%d" % (start, len(side))
                for start, side in ((hunk.old_start, hunk.old), (hunk.new_start, hunk.new))
            ]
            out.append(b"@@ -%b +%b @@%b\n" % (*spans, section))
            for tag, line in hunk.lines:
                out.append(tag + line)
                if not line.endswith(b"\n"):
                    out.append(b"\n\\ No newline at end of file\n")
    return b"".join(out)
