"""Writing a series: the diff of one patch from a modified tree, and upstream.toml."""

from __future__ import annotations

import bisect
from pathlib import Path

import series_diff as diffs
from series_diff import DiffError, FileDiff
from series_files import NAME, PLACEHOLDER, Patch, Pin, Series, load_pin
from series_state import lay, must_fit
from series_tree import Rejected, Tree, Wheel, sha256


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
            word = "the same file: drop it from files/" if theirs == data else "another file there: rename ours"
            out.append(f"files/{path}: {wheel} has {word}")
    return out


def listed(series: Series, name: str) -> bytes:
    """The order file with ``name`` at its sorted place; comments stay."""
    lines = (series.root / "series").read_text("utf-8").splitlines()
    names = [patch.name for patch in series.patches]
    if name not in names:
        i = bisect.bisect(names, name)
        at = len(lines) if i == len(names) else [line.strip() for line in lines].index(names[i])
        lines.insert(at, name)
    return "".join(line + "\n" for line in lines).encode()


def export_patch(
    series: Series, wheel: Wheel, tree: Tree, name: str, wanted: list[str], notes: list[str]
) -> list[Patch]:
    """The series with the diff of patch ``name`` taken anew from ``tree``, which carries the whole series.

    Files of the patch: ``wanted``, else those it touches now and those that no other patch touches; of a new
    patch all that differ. Later patches on the same files are taken off first and get new line numbers.
    """
    if not NAME.fullmatch(name):
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
        raise Rejected(f"{name}: the tree has no change for it; to drop a patch remove it and its line in series")
    notes += [
        f"{path} differs too but is not part of {name}: name it with --file to include it"
        for path in differing
        if path not in paths
    ]
    notes += _leftovers(series, wheel, tree)
    fresh = Patch(name, old.header, tuple(parts))
    contents, _, _ = must_fit([fresh], lambda path: below.get(path, wheel.read(path)))
    _, fitted, _ = must_fit(later, lambda path: contents.get(path, below.get(path, wheel.read(path))), relocate=True)
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
    if before is None:
        raise Rejected(f"{path} is not in {wheel}: new files belong in files/")
    after = tree.read(path)
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
            raise Rejected(f"{path}: the tree lacks {patch.name}: apply the series to the tree before editing it")
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
