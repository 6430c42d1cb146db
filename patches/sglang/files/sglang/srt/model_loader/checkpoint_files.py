"""Does the index of a checkpoint directory agree with the headers of its shards? Reads headers only."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable

INDEX = "model.safetensors.index.json"

#: A second declaration of the quantisation beside config.json, which the engine would not read.
STRAY_DECLARATION = "hf_quant_config.json"

Defect = tuple[str, str, str]


def examine(folder: str, files: Iterable[str], safetensors: bool) -> tuple[list[Defect], bool]:
    """Return the defects of a checkpoint directory as (kind, tensor or file name, text), and whether every shard
    can be read.

    ``files`` are the paths that the engine is about to load, ``safetensors`` whether it takes them for such.
    """
    files = sorted(files)
    if not safetensors:
        names = ", ".join(map(os.path.basename, files[:3]))
        return [("unreadable", names, "are no safetensors files, the only ones that are loaded")], False
    defects: list[Defect] = []
    readable = True
    shards: dict[str, list[str]] = {}
    for path in files:
        shard = os.path.basename(path)
        try:
            header = read_header(path)
        except ValueError as error:
            defects.append(("unreadable", shard, str(error)))
            readable = False
            continue
        for name in header:
            shards.setdefault(name, []).append(shard)
    defects += [
        ("duplicate", name, f"is in {' and '.join(holders)}") for name, holders in shards.items() if len(holders) > 1
    ]
    if os.path.exists(os.path.join(folder, STRAY_DECLARATION)):
        defects.append(("index", STRAY_DECLARATION, "declares a quantisation beside config.json: remove one of them"))
    # With an unreadable shard nearly every tensor would be reported as missing.
    if readable:
        defects += _index_defects(folder, files, shards)
    return defects, readable


def read_header(path: str) -> dict[str, dict]:
    """Return tensor name -> header entry of a safetensors file whose size is what the header promises.

    The format: 8 bytes of header length (little endian), a JSON object, the payloads without gaps. Raises
    ``ValueError`` with the rest of a sentence that begins with the file's name.
    """
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
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
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"has no safetensors header ({size:,} bytes): download it again") from error
    if size != 8 + length + end:
        kind = "is cut short" if size < 8 + length + end else "has trailing bytes"
        raise ValueError(f"{kind}: {size:,} bytes, its header promises {8 + length + end:,}: download it again")
    return header


def _index_defects(folder: str, files: list[str], shards: dict[str, list[str]]) -> Iterable[Defect]:
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        if len(files) > 1:
            yield "index", INDEX, f"is missing, and there are {len(files)} shards"
        return
    with open(path, encoding="utf-8") as file:
        weight_map = json.load(file)["weight_map"]
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
    for found in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        if os.path.basename(found) not in listed:
            yield "index", os.path.basename(found), "is a shard that the index does not name: remove it"
