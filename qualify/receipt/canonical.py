"""The bytes of receipts: canonical JSON, the digest that a receipt holds of itself, reading and writing."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from qualify.checkpoint import strictjson
from qualify.errors import CannotRun, Rejected
from qualify.receipt import EXTENSION


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII: what digests are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def render(value: Any) -> bytes:
    """The same document for files and people; equal documents give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def content_sha256(statement: dict[str, Any]) -> str:
    """SHA-256 of the canonical statement without its own ``content_sha256``."""
    bare = copy.deepcopy(statement)
    bare["predicate"][EXTENSION].pop("content_sha256", None)
    return hashlib.sha256(canonical(bare)).hexdigest()


def manifest_sha256(files: dict[str, tuple[int, str]]) -> str:
    """SHA-256 of a checkpoint's canonical manifest.

    ``files``: name -> (size in bytes, SHA-256). The manifest is the canonical JSON of [{"name", "sha256", "size"}] by
    name.
    """
    entries = [{"name": name, "size": size, "sha256": digest} for name, (size, digest) in sorted(files.items())]
    return hashlib.sha256(canonical(entries)).hexdigest()


def parse(raw: bytes, what: str) -> Any:
    """One strict JSON document. Raises ``Rejected``."""
    try:
        document, duplicates = strictjson.parse(raw)
    except strictjson.JsonDefect as error:
        raise Rejected(f"{what} is not a usable file: {error}") from None
    if duplicates:
        raise Rejected(f"{what} has the key {duplicates[0]!r} twice")
    return document


def read(path: Path, what: str) -> bytes:
    """The bytes of an input file. Raises ``Rejected`` where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(strictjson.MAX_BYTES + 1)
    except OSError as error:
        raise Rejected(f"{what} cannot be read: {error.strerror}") from None


def write(path: Path, content: bytes) -> None:
    """The whole file or nothing of it. Raises ``CannotRun``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CannotRun(f"cannot write {path}: {error.strerror}") from None
