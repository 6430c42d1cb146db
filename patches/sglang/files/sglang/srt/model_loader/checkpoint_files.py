"""Does the index of a checkpoint directory agree with the headers of its shards? Reads headers only."""

from __future__ import annotations

import contextlib
import gc
import json
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path

INDEX = "model.safetensors.index.json"

#: A second declaration of the quantisation beside config.json, which the engine would not read.
STRAY_DECLARATION = "hf_quant_config.json"

Defect = tuple[str, str, str]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the cyclic garbage collector out of code that makes many objects and no cycles.

    Tens of thousands of new entries would start a full collection, which goes through all objects of the engine:
    0.6 s, several times the work itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collection()
def examine(folder: str, files: Iterable[str], safetensors: bool) -> tuple[list[Defect], bool]:
    """Return the defects of a checkpoint directory as (kind, tensor or file name, text), and whether every shard
    can be read.

    ``files`` are the paths that the engine is about to load, ``safetensors`` whether it takes them for such.
    """
    paths = sorted(map(Path, files))
    if not safetensors:
        names = ", ".join(path.name for path in paths[:3])
        return [("unreadable", names, "is no safetensors file, and nothing else is loaded")], False
    defects: list[Defect] = []
    readable = True
    shards: dict[str, list[str]] = {}
    for path in paths:
        try:
            header = read_header(path)
        except ValueError as error:
            defects.append(("unreadable", path.name, str(error)))
            readable = False
            continue
        for name in header:
            shards.setdefault(name, []).append(path.name)
    defects += [
        ("duplicate", name, f"is in {' and '.join(holders)}") for name, holders in shards.items() if len(holders) > 1
    ]
    if Path(folder, STRAY_DECLARATION).exists():
        defects.append(("index", STRAY_DECLARATION, "declares a quantisation beside config.json: remove one of them"))
    # With an unreadable shard nearly every tensor would be reported as missing.
    if readable:
        defects += _index_defects(Path(folder), len(paths), shards)
    return defects, readable


def declared(folder: str) -> dict | None:
    """The config of a checkpoint directory without what says nothing of the model; None if it cannot be read."""
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        return {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    except (OSError, ValueError, AttributeError):
        return None


def read_header(path: Path) -> dict[str, dict]:
    """Return tensor name -> header entry of a safetensors file whose size is what the header promises.

    The format: 8 bytes of header length (little endian), a JSON object, the payloads without gaps. Raises
    ``ValueError`` with the rest of a sentence that begins with the file's name.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            text = file.read(length) if 8 + length <= size else b""
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if start == b"version ":
        raise ValueError("is a Git LFS pointer, not the file itself: fetch it with git lfs pull")
    if start.lstrip()[:1] == b"<":
        raise ValueError("is a web page, not a shard: download it again")
    try:
        header = json.loads(text)
        # Asking for the pairs of every object takes as long as all the rest: only where an entry seems to be lost.
        if text.count(b'"data_offsets"') != len(header.keys() - {"__metadata__"}):
            header = json.loads(text, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        # Integers only, or the library refuses the file later and does not say which one it is.
        spans = [map(operator.index, entry["data_offsets"]) for entry in header.values()]
        end = 8 + length + max((stop for _, stop in spans), default=0)
    except _Repeated as error:
        raise ValueError(f"has {error.args[0]!r} twice in its header: download it again") from error
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"has no safetensors header ({size:,} bytes): download it again") from error
    if size != end:
        kind = "is cut short" if size < end else "has trailing bytes"
        raise ValueError(f"{kind}: {size:,} bytes, its header promises {end:,}: download it again")
    return header


class _Repeated(Exception):
    """A JSON object has a key twice."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return result


def _index_defects(folder: Path, files: int, shards: dict[str, list[str]]) -> Iterable[Defect]:
    path = folder / INDEX
    if not path.is_file():
        if files > 1:
            yield "index", INDEX, f"is missing, and there are {files} shards"
        return
    # The engine has parsed this file before, in order to choose the shards.
    try:
        weight_map = json.loads(path.read_bytes(), object_pairs_hook=_unique)["weight_map"]
    except _Repeated as error:
        yield "index", INDEX, f"lists {error.args[0]!r} twice"
        return
    for name, shard in weight_map.items():
        holders = shards.get(name)
        if holders is None:
            yield "index", name, f"is in no shard, and the index says {shard}"
        elif shard not in holders:
            yield "index", name, f"is in {holders[0]}, and the index says {shard}"
    for name, holders in shards.items():
        if name not in weight_map:
            yield "index", name, f"is in {holders[0]}, and the index does not list it"
    listed = set(weight_map.values())
    for found in sorted(folder.glob("*.safetensors")):
        # The engine takes neither hidden files nor folders for shards.
        if found.name not in listed and not found.name.startswith(".") and found.is_file():
            yield "index", found.name, "is a shard that the index does not name: remove it"
