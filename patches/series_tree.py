"""The two places a package lives in: a wheel (read only) and an installed tree (read, and written at once).

Paths are relative to site-packages, with forward slashes, in both.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import fcntl
import hashlib
import io
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath


class Rejected(Exception):
    """The input is wrong: a patch, a wheel, a tree. Exit code 1. Each argument is one sentence."""


class CannotRun(Exception):
    """The environment is wrong: a missing file, a full disk. Exit code 2."""


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _metadata(text: str, field: str) -> str:
    match = re.search(rf"^{field}:[ \t]*(\S+)", text, re.M)
    return match[1] if match else ""


class Wheel:
    """A wheel file: package name, version, digest, and its files by their installed path.

    Rejected where it is no whole wheel or, with ``pinned`` (SHA-256, what it is of), where it is another one.
    """

    def __init__(self, path: Path, pinned: tuple[str, str] | None = None):
        self.path = path
        try:
            with path.open("rb") as stream:
                self.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            if pinned and self.sha256 != pinned[0]:
                raise Rejected(
                    f"{path} has SHA-256 {self.sha256}, upstream.toml pins {pinned[0]} ({pinned[1]}): "
                    "download it again, or run refresh for another version"
                )
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise Rejected(f"{path} is not a whole wheel (not a zip file): download it again") from None
        except OSError as error:
            raise CannotRun(f"cannot read the wheel {path}: {error.strerror}") from None
        self._members: dict[str, str] = {}
        metadata = []
        for name in self._zip.namelist():
            parts = PurePosixPath(name).parts
            if name.endswith("/") or not parts:
                continue
            if parts[0].endswith(".data"):  # purelib and platlib are installed into site-packages too
                if len(parts) > 2 and parts[1] in ("purelib", "platlib"):
                    self._members["/".join(parts[2:])] = name
                continue
            self._members[name] = name
            if len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] == "METADATA":
                metadata.append(name)
        if len(metadata) != 1:
            raise Rejected(f"{path} is not a wheel: it holds {len(metadata)} dist-info/METADATA files, not one")
        text = (self.read(metadata[0]) or b"").decode("utf-8", "replace")
        self.package, self.version = _normalise(_metadata(text, "Name")), _metadata(text, "Version")

    def read(self, path: str) -> bytes | None:
        """The content of one file, or None where the wheel has none. Rejected where the zip is damaged."""
        if path not in self._members:
            return None
        try:
            return self._zip.read(self._members[path])
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise Rejected(f"{self.path} is damaged at {path} ({error}): download it again") from None

    def paths(self) -> list[str]:
        """Every file of the package itself, without its metadata."""
        return sorted(path for path in self._members if not PurePosixPath(path).parts[0].endswith(".dist-info"))

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class Tree:
    """A directory laid out like site-packages."""

    def __init__(self, root: Path):
        if not root.is_dir():
            raise CannotRun(f"there is no directory {root}: give the site-packages directory")
        self.root = root

    def locate(self, path: str) -> Path:
        """The place of ``path``. Rejected where a symlink or a non-file lies on the way."""
        place = self.root
        parts = PurePosixPath(path).parts
        for part in parts:
            place = place / part
            try:
                mode = place.lstat().st_mode
            except FileNotFoundError:
                break
            except NotADirectoryError:
                raise Rejected(f"{path}: a parent of it in the tree is a file") from None
            if stat.S_ISLNK(mode):
                raise Rejected(f"{path}: {place} is a symbolic link; the series never writes through links")
        target = self.root.joinpath(*parts)
        if target.exists() and not target.is_file():
            raise Rejected(f"{path}: {target} is not a regular file")
        return target

    def read(self, path: str) -> bytes | None:
        """The content of one file, or None where the tree has none."""
        try:
            return self.locate(path).read_bytes()
        except FileNotFoundError:
            return None

    def distribution(self, package: str) -> tuple[str, str]:
        """(dist-info directory name, version) of the one installed ``package``; CannotRun where none is."""
        found = []
        for info in sorted(self.root.glob("*.dist-info")):
            metadata = info / "METADATA"
            text = metadata.read_text("utf-8", "replace") if metadata.is_file() else ""
            if _normalise(_metadata(text, "Name")) == package:
                found.append((info.name, _metadata(text, "Version")))
        if not found:
            raise CannotRun(f"no {package} is installed in {self.root}")
        if len(found) > 1:
            raise CannotRun(f"{package} is installed twice in {self.root}: {', '.join(name for name, _ in found)}")
        return found[0]

    def bytecode(self, path: str) -> list[str]:
        """The cached bytecode files of a Python source: stale once the source changes."""
        pure = PurePosixPath(path)
        if pure.suffix != ".py":
            return []
        cache = pure.parent / "__pycache__"
        pattern = re.compile(re.escape(pure.stem) + r"\.[\w-]+(\.opt-\w+)?\.pyc")
        folder = self.root / cache
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
        return [str(cache / name) for name in names if pattern.fullmatch(name)]

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second writer out; CannotRun where one is at work."""
        handle = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise CannotRun(f"another run is writing to {self.root}: wait for it") from None
        finally:
            os.close(handle)


def record_row(path: str, data: bytes) -> str:
    """One line of a RECORD file (PEP 376, PEP 427): path, urlsafe base64 SHA-256 without padding, size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([path, f"sha256={digest}", len(data)])
    return out.getvalue()


def update_record(record: bytes, written: Mapping[str, bytes], removed: Iterable[str]) -> bytes:
    """RECORD after files were ``written`` and ``removed``; other rows stay byte for byte."""
    rows = {path: record_row(path, data) for path, data in written.items()}
    gone = set(removed)
    out = []
    for line in io.StringIO(record.decode("utf-8", "surrogateescape"), newline="\n"):
        path = next(iter(next(csv.reader([line]), [])), "")
        if path in gone:
            continue
        if path in rows:
            ending = "\r\n" if line.endswith("\r\n") else "\n"
            line = rows.pop(path).rstrip("\n") + ending
        out.append(line)
    if out and not out[-1].endswith("\n"):
        out[-1] += "\n"
    return "".join(out + sorted(rows.values())).encode("utf-8", "surrogateescape")


def write_all(changes: Mapping[Path, bytes | None]) -> None:
    """Write (or, for None, remove) every file, or leave everything as it was.

    All new contents and all backups are on disk before the first rename, so a full disk is met while nothing
    has changed; a failure during the renames puts the backups back. New files are created 0644, existing ones
    keep mode and owner. Files are replaced by rename, never rewritten: package managers hard-link installed
    files to their cache. Raises the OSError that stopped it, with the name of the file it was for.
    """
    made: list[Path] = []
    done: list[Path] = []
    try:
        for path, data in changes.items():
            try:
                _stage(path, data, made)
            except OSError as error:
                error.filename = str(path)
                raise
        for path, data in changes.items():
            done.append(path)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                _sibling(path, "new").replace(path)
    except BaseException:
        for path in reversed(done):
            _restore(path)
        _clean(changes)
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    _clean(changes)


def _sibling(path: Path, kind: str) -> Path:
    # Fixed names: what a killed run left behind is overwritten by the next one, not added to.
    return path.with_name(f".{path.name}.series-{kind}")


def _stage(path: Path, data: bytes | None, made: list[Path]) -> None:
    """Put the new content and a backup of the old one beside ``path``; ``made`` collects new directories."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        parent.mkdir()
        made.append(parent)
        parent.chmod(0o755)
    new, old = _sibling(path, "new"), _sibling(path, "old")
    new.unlink(missing_ok=True)
    old.unlink(missing_ok=True)
    status = path.stat() if path.exists() else None
    if status:
        shutil.copy2(path, old)
    if data is not None:
        with new.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        new.chmod(stat.S_IMODE(status.st_mode) if status else 0o644)
    if status and os.geteuid() == 0:
        for copy in (new, old):
            if copy.exists():
                os.chown(copy, status.st_uid, status.st_gid)


def _restore(path: Path) -> None:
    old = _sibling(path, "old")
    try:
        if old.exists():
            old.replace(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotRun(
            f"{error.strerror} while putting {path} back: the package is half-written, reinstall it"
        ) from error


def _clean(paths: Iterable[Path]) -> None:
    for path in paths:
        for kind in ("new", "old"):
            with contextlib.suppress(OSError):
                _sibling(path, kind).unlink(missing_ok=True)
