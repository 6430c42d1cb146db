"""A patch series on disk: its patches, files/ and upstream.toml, and what is good form in them."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import series_diff as diffs
from series_diff import DiffError, FileDiff
from series_tree import CannotRun, Rejected, sha256

TRAILERS = ("Reason", "Upstream", "Drop-when")
PLACEHOLDER = "FIXME"
NAME = re.compile(r"\d{4}-[a-z0-9][a-z0-9.-]*\.patch")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    try:
        lines = [line.strip() for line in order.read_text("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise Rejected(f"{order} is not UTF-8 text") from None
    names = [line for line in lines if line and not line.startswith("#")]
    for i, name in enumerate(names):
        if not NAME.fullmatch(name):
            problems.append(f"series: {name!r} is not a patch name of the form NNNN-what.patch")
        elif name in names[:i]:
            problems.append(f"series: {name} is listed twice")
        elif i and names[i - 1][:4] >= name[:4]:
            problems.append(f"series: {name} stands after {names[i - 1]}: numbers must rise")
    patches, raw = [], {}
    for name in dict.fromkeys(name for name in names if NAME.fullmatch(name)):
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
            out.append(f"\n[files.{json.dumps(path)}]\npre = {json.dumps(before)}\npost = {json.dumps(after)}\n")
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
    problems += [
        f"files/{path} is outside the package {pin.package}: a series adds modules to that package alone"
        for path in sorted(series.added)
        if path.split("/")[0] != pin.package
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
    problems += uncompilable(series.added, "files/")
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


def uncompilable(contents: dict[str, bytes], prefix: str = "") -> list[str]:
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
