"""Structure-aware fuzzing of the inspection: no crash, no hang, no wrong "accepted".

    python3 -m tests.cases.fuzz --inputs 1000000 --seed 1 [--workdir /dev/shm] [--corpus tests/cases/corpus.jsonl]

Two kinds of input, both made from the tiny bases:

* *headers*: the bytes of one shard header, mutated as JSON (dtypes, shapes, offsets, names, keys) and as bytes. The
  oracle is a second, independent statement of what a legal header is (:func:`legal`); a header that the reader finds
  no fault with must be legal.
* *checkpoints*: a whole directory, with mutated tensors, config, declaration, index and files. The oracle compares the
  mutated description with the base: when only the tensors differ, or only a meaningful part of the config does, the
  verdict must be "rejected".

Inputs are data (JSON), so that each can be replayed. With ``--corpus``, the first input of every new set of problem
codes is appended to that file, with the codes it gave; :func:`replay` runs them again.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qualify.checkpoint import headers, inspection, report
from qualify.checkpoint.problems import Findings
from qualify.errors import CannotRun
from tests.cases import bases
from tests.cases.bases import BITS, Base, T

#: seconds that one input may take
LIMIT = 20
CORPUS = Path(__file__).resolve().parent / "corpus.jsonl"
BASES = ("b0", "b1", "b0_moe", "b2", "e2m1")
DTYPES = ["F8_E4M3", "BF16", "F32", "U8", "F16", "F8_E5M2", "F8_E8M0", "I8", "I32", "F64"]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    1 << 31,
    1 << 63,
    10**30,
    8.0,
    128.0,
    1e308,
    "",
    "x",
    "8",
    "float",
    "int",
    "block",
    "tensor",
    "channel",
    "group",
    "Linear",
    "re:.*",
    "re:(a+)+$",
    "re:(",
    "lm_head",
    "experts",
    "model.layers.0",
    "FP8",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
    "fp8",
    "modelopt",
    "compressed-tensors",
    "\ud800",
    "\x1b[2J",
    [],
    [1],
    [128, 128],
    [64, 64],
    ["lm_head"],
    ["re:.*"],
    [None],
    [[]],
    {},
    {"a": 1},
    {"quant_algo": "FP8"},
    {"weights": {"num_bits": 8}},
]
#: keys whose value may change without changing what the checkpoint is
BENIGN = {
    "observer",
    "observer_kwargs",
    "version",
    "global_compression_ratio",
    "producer",
    "dtype",
    "num_experts_per_tok",
    "mova_num_experts_per_tok",
    # read from the tensor names where absent or not decisive for the tensors
    "input_activations",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
}


class Failure(AssertionError):
    """The inspection broke one of its promises on an input."""


# ---------------------------------------------------------------- headers


def legal(raw: bytes, size: int) -> bool:
    """Whether ``raw`` (length prefix and body) is a legal header of a file of ``size`` bytes; written on its own."""
    body = raw[8:]
    if int.from_bytes(raw[:8], "little") != len(body) or not body.startswith(b"{"):
        return False
    repeated = []

    def pairs(items):
        repeated.extend(key for i, (key, _) in enumerate(items) if any(key == other for other, _ in items[:i]))
        return dict(items)

    try:
        document = json.loads(body, object_pairs_hook=pairs)
        text = json.dumps(document, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    if repeated or not text:
        return False
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        return False
    spans = []
    for entry in document.values():
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            return False
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in headers.BITS:
            return False
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            return False
        if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in [*shape, *offsets]):
            return False
        bits = headers.BITS[dtype]
        for extent in shape:
            bits *= extent
        if (offsets[1] - offsets[0]) * 8 != bits:
            return False
        spans.append(tuple(offsets))
    position = 0
    for start, end in sorted(spans):
        if start != position and end > start:
            return False
        if start > position:
            return False
        position = max(position, end)
    return position == size - len(raw)


def header_input(rng: random.Random) -> dict[str, Any]:
    """A mutated header, as data."""
    base = _base(rng.choice(BASES))
    document: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = 0
    for name, tensor in rng.sample(list(base.tensors.items()), min(len(base.tensors), 12)):
        end = data + _bytes(tensor)
        document[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [data, end]}
        data = end
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _mutate_header(document, rng)
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    body = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.2 and len(document) > 1:
        name = rng.choice(list(document))
        extra = json.dumps(name) + ":" + json.dumps(document[name])
        body = body[:-1] + b"," + extra.encode() + b"}"
    body = _mutate_bytes(body, rng) if rng.random() < 0.3 else body
    end = max((e["data_offsets"][1] for e in document.values() if _has_end(e)), default=data)
    length = len(body) if rng.random() < 0.95 else rng.choice((0, 1, len(body) + 1, 1 << 40, 99_999_999))
    size = 8 + len(body) + end + rng.choice((0, 0, 0, 0, 0, 1, -1, 64, -64))
    return {
        "kind": "header",
        "raw": base64.b64encode(struct.pack("<Q", length) + body).decode(),
        "size": max(size, 8),
    }


def _has_end(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int and 0 <= offsets[1] < 1 << 40


def _mutate_header(document: dict[str, Any], rng: random.Random) -> None:
    names = [name for name in document if name != "__metadata__"]
    if not names:
        return
    name = rng.choice(names)
    entry = document[name]
    kind = rng.randrange(10)
    if kind == 0:
        del document[name]
    elif kind == 1:
        document[rng.choice(("", "__metadata__", "x" * 600, "\ud800", "a\x00b", name + "2"))] = document.pop(name)
    elif kind == 2:
        document[name] = copy.deepcopy(rng.choice(VALUES))
    elif not isinstance(entry, dict) or not entry:
        return
    elif kind == 3:
        entry["dtype"] = rng.choice([*DTYPES, "F4", "BOOL", "C64", "", None, 3])
    elif kind == 4:
        entry["shape"] = [
            rng.choice((0, 1, 2, 127, 128, 256, 1 << 40, -1, 1.5, True)) for _ in range(rng.randrange(10))
        ]
    elif kind == 5 and isinstance(entry.get("shape"), list) and entry["shape"]:
        entry["shape"][rng.randrange(len(entry["shape"]))] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 6 and isinstance(entry.get("data_offsets"), list) and len(entry["data_offsets"]) == 2:
        shift = rng.choice((-64, -4, -1, 1, 4, 64, 1 << 40))
        which = rng.choice(((0,), (1,), (0, 1)))
        for index in which:
            if type(entry["data_offsets"][index]) is int:
                entry["data_offsets"][index] += shift
    elif kind == 7:
        entry[rng.choice(list(entry))] = copy.deepcopy(rng.choice(VALUES))
    elif kind == 8:
        entry.pop(rng.choice(list(entry)))
    else:
        other = document[rng.choice(names)]
        document[name] = dict(other) if isinstance(other, dict) else other


def _mutate_bytes(body: bytes, rng: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(4)
        if kind == 0 and data:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place:place] = rng.choice(
                (b"[", b"{", b'"', b"\\", b",", b"\x00", b"\xff", b"9" * 5000, b"[" * 2000, b"NaN")
            )
        elif kind == 2:
            del data[place : place + rng.randrange(1, 9)]
        else:
            del data[place:]
    return bytes(data)


def run_header(case: dict[str, Any]) -> list[str]:
    """Run one header input; return its problem codes. Raises ``Failure`` when an illegal header passes."""
    raw, size = base64.b64decode(case["raw"]), case["size"]
    findings = Findings()
    header = headers.Header("s.safetensors", size)
    length = int.from_bytes(raw[:8], "little")
    if headers._plausible(raw[:64], length, header, findings):
        raw = raw[: 8 + length].ljust(8 + length, b"\0")  # a longer header reaches into the data
        headers.parse(raw, header, findings)
    codes = sorted({problem.code for problem in findings.problems})
    if not codes and not legal(raw, size):
        raise Failure("an illegal header passes")
    report.grouped(findings.problems)
    return codes


# ---------------------------------------------------------------- checkpoints


def checkpoint_input(rng: random.Random) -> dict[str, Any]:
    """A mutated checkpoint, as data: a base and operations on it."""
    name = rng.choice(BASES)
    base = _base(name)
    operations = [_operation(base, rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 4)))]
    return {"kind": "checkpoint", "base": name, "shards": rng.choice((1, 1, 2, 3)), "operations": operations}


def _operation(base: Base, rng: random.Random) -> list[Any]:
    names = list(base.tensors)
    kind = rng.randrange(14)
    tensor = rng.choice(names)
    if kind == 0:
        return ["drop", tensor]
    if kind == 1:
        return ["dtype", tensor, rng.choice(DTYPES)]
    if kind == 2:
        shape = list(base.tensors[tensor].shape)
        if shape and rng.random() < 0.8:
            place = rng.randrange(len(shape))
            shape[place] = rng.choice((1, shape[place] * 2, max(1, shape[place] // 2), shape[place] + 1, 0))
        else:
            shape = rng.choice(([], [1], [1, *shape], [*shape, 1], shape[::-1]))
        return ["shape", tensor, shape]
    if kind == 3:
        new = rng.choice(
            (
                tensor.replace("weight_scale", "weight_scale_inv"),
                tensor.replace("weight_scale_inv", "weight_scale"),
                tensor.replace(".layers.", ".layers.9"),
                tensor.replace("experts.", "experts.9"),
                tensor.replace("model.", "model.language_model."),
                "mtp." + tensor,
                tensor.replace("_proj", ""),
            )
        )
        return ["rename", tensor, new]
    if kind == 4:
        leaf = rng.choice(
            ("bias", "weight_scale", "weight_scale_inv", "input_scale", "k_scale", "qweight", "weight_packed")
        )
        return [
            "add",
            f"{tensor.rpartition('.')[0]}.{leaf}",
            rng.choice(DTYPES),
            rng.choice(([], [1], [2, 2], [256])),
        ]
    if kind == 5:
        scales = [n for n in names if "scale" in n.rpartition(".")[2]]
        return [
            "scale",
            rng.choice(scales),
            rng.choice(("nan", "inf", "-inf", "zero", "negative", "-zero")),
            rng.random(),
        ]
    if kind in (6, 7, 8):
        document = rng.choice(("config", "quantization", "quantization", "hf"))
        path = _random_path(_document(base, document), rng)
        return (
            ["set", document, path, copy.deepcopy(rng.choice(VALUES))]
            if rng.random() < 0.75
            else ["unset", document, path]
        )
    if kind == 9:
        key = rng.choice(
            (
                "scale_fmt",
                "fmt",
                "surprise",
                "quantized_layers",
                "ignore",
                "ignored_layers",
                "kv_cache_scheme",
            )
        )
        return ["set", rng.choice(("quantization", "hf")), [key], copy.deepcopy(rng.choice(VALUES))]
    if kind == 10:
        entry = rng.choice((tensor.rpartition(".")[0], tensor, "lm_head", "", "re:.*", "model", "0", "x.", "*"))
        return ["ignore", entry]
    if kind == 11:
        return ["unignore", rng.random()]
    if kind == 12:
        return ["index", rng.choice(("drop", "move", "phantom", "absent", "total", "garbage")), tensor]
    return [
        "file",
        rng.choice(("bin", "stray", "truncate", "extend", "lfs", "html", "empty", "config-bytes", "index-bytes")),
        rng.random(),
    ]


def _document(base: Base, name: str) -> Any:
    if name == "quantization":
        return base.config.get("quantization_config")
    return base.config if name == "config" else base.hf_quant


def _random_path(document: Any, rng: random.Random) -> list[Any]:
    path = []
    while isinstance(document, dict) and document and (not path or rng.random() < 0.8):
        key = rng.choice(list(document))
        path.append(key)
        document = document[key]
    return path


def _apply(base: Base, operation: list[Any], files: list[list[Any]]) -> None:
    """Apply one operation to ``base``; what concerns files and index is left in ``files``."""
    kind, *arguments = operation
    tensors = base.tensors
    if kind in ("index", "file"):
        files.append(operation)
    elif kind == "drop":
        tensors.pop(arguments[0], None)
    elif kind == "dtype" and arguments[0] in tensors:
        tensors[arguments[0]] = T(arguments[1], tensors[arguments[0]].shape)
    elif kind == "shape" and arguments[0] in tensors:
        tensors[arguments[0]] = T(tensors[arguments[0]].dtype, arguments[1])
    elif kind == "rename" and arguments[0] in tensors:
        tensors[arguments[1]] = tensors.pop(arguments[0])
    elif kind == "add":
        tensors.setdefault(arguments[0], T(arguments[1], arguments[2]))
    elif kind == "scale" and arguments[0] in tensors:
        _bad_scale(arguments[0], tensors[arguments[0]], arguments[1], arguments[2])
    elif kind in ("set", "unset"):
        document = _document(base, arguments[0])
        *parents, last = arguments[1] or [None]
        for key in parents:
            document = document.get(key) if isinstance(document, dict) else None
        if isinstance(document, dict) and last is not None:
            if kind == "set":
                document[last] = arguments[2]
            else:
                document.pop(last, None)
    elif kind in ("ignore", "unignore"):
        for quantization in (
            base.config.get("quantization_config"),
            (base.hf_quant or {}).get("quantization"),
        ):
            if not isinstance(quantization, dict):
                continue
            for key in ("ignore", "ignored_layers", "exclude_modules"):
                entries = quantization.get(key)
                if isinstance(entries, list) and kind == "ignore":
                    entries.append(arguments[0])
                elif isinstance(entries, list) and entries:
                    entries.pop(int(arguments[0] * len(entries)))


_BAD = {
    "F32": {
        "nan": "0000c07f",
        "inf": "0000807f",
        "-inf": "000080ff",
        "zero": "00000000",
        "negative": "000080bf",
        "-zero": "00000080",
    },
    "BF16": {
        "nan": "c07f",
        "inf": "807f",
        "-inf": "80ff",
        "zero": "0000",
        "negative": "80bf",
        "-zero": "0080",
    },
    "F8_E4M3": {"nan": "7f", "inf": "ff", "-inf": "ff", "zero": "00", "negative": "b8", "-zero": "80"},
}


def _bad_scale(name: str, tensor: T, kind: str, where: float) -> None:
    codes = _BAD.get(tensor.dtype)
    if codes is None or not _count(tensor.shape):
        return
    raw = bytearray(tensor.payload(name))
    bad = bytes.fromhex(codes[kind])
    place = int(where * _count(tensor.shape)) * len(bad)
    raw[place : place + len(bad)] = bad
    tensor.data = bytes(raw)


def _count(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _bytes(tensor: T) -> int:
    return _count(tensor.shape) * BITS[tensor.dtype] // 8


_BASES: dict[str, Base] = {}


def _base(name: str) -> Base:
    if name not in _BASES:
        _BASES[name] = getattr(bases, name)()
    return _BASES[name]


def _write(base: Base, directory: Path, files: list[list[Any]]) -> bool:
    """Write the mutated checkpoint; return True when a file operation certainly made it defective."""
    (directory / "config.json").write_bytes(_dumps(base.config))
    if base.hf_quant is not None:
        (directory / "hf_quant_config.json").write_bytes(_dumps(base.hf_quant))
    shards = base.split()
    index = {
        "metadata": {"total_size": sum(_bytes(t) for t in base.tensors.values())},
        "weight_map": {name: shard for shard, tensors in shards.items() for name in tensors},
    }
    defective, write_index = False, base.shards > 1
    true_index = copy.deepcopy(index)
    for name, tensors in shards.items():
        with (directory / name).open("wb") as file:
            file.write(bases.header_bytes(tensors))
            for tensor, t in tensors.items():
                if "scale" in tensor.rpartition(".")[2]:
                    file.write(t.payload(tensor))
                else:
                    file.seek(_bytes(t), 1)  # a hole: weights are not read
            file.truncate()
    for kind, what, *arguments in files:
        if kind == "index":
            write_index = True
            _mutate_index(index, what, arguments[0], sorted(shards))
        else:
            defective |= _mutate_files(directory, what, arguments[0], sorted(shards), index)
    defective |= index != true_index
    if write_index and not (directory / "model.safetensors.index.json").exists():
        (directory / "model.safetensors.index.json").write_bytes(_dumps(index))
    return defective


def _dumps(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _mutate_index(index: dict[str, Any], what: str, tensor: str, shards: list[str]) -> None:
    mapping = index["weight_map"] if isinstance(index.get("weight_map"), dict) else {}
    if what == "drop":
        mapping.pop(tensor, None)
    elif what == "move" and tensor in mapping:
        mapping[tensor] = next((shard for shard in shards if shard != mapping[tensor]), mapping[tensor])
    elif what == "phantom":
        mapping["phantom.weight"] = shards[0]
    elif what == "absent" and tensor in mapping:
        mapping[tensor] = "model-00009-of-00009.safetensors"
    elif what == "total":
        index["metadata"] = {"total_size": 7}
    elif what == "garbage":
        index["weight_map"] = [mapping]


def _mutate_files(directory: Path, what: str, where: float, shards: list[str], index: dict[str, Any]) -> bool:
    shard = directory / shards[int(where * len(shards))]
    if what == "bin":
        (directory / "pytorch_model.bin").write_bytes(b"")
        return True
    if what == "stray":
        (directory / "stray.safetensors").write_bytes(bases.header_bytes({}))
        return True
    if what == "truncate":
        size = shard.stat().st_size
        with shard.open("r+b") as file:
            file.truncate(int(where * size))
        return int(where * size) != size
    if what == "extend":
        with shard.open("ab") as file:
            file.write(b"x")
        return True
    if what in ("lfs", "html", "empty"):
        content = {
            "lfs": b"version https://git-lfs.github.com/spec/v1\n",
            "html": b"<html></html>",
            "empty": b"",
        }
        shard.write_bytes(content[what])
        return True
    name = "config.json" if what == "config-bytes" else "model.safetensors.index.json"
    if what == "index-bytes":
        (directory / name).write_bytes(_dumps(index))
    raw = (directory / name).read_bytes()
    mutated = _mutate_bytes(raw, random.Random(where))
    (directory / name).write_bytes(mutated)
    try:
        json.loads(mutated, parse_constant=lambda name: 1 / 0)
    except (ValueError, RecursionError, ZeroDivisionError):
        return True
    return False


def _states(base: Base) -> tuple[Any, Any]:
    """(tensors, meaningful config) in a form that two checkpoints can be compared in."""
    tensors = {name: (t.dtype, t.shape, t.data) for name, t in base.tensors.items()}
    return tensors, (_meaning(base.config), _meaning(base.hf_quant))


def _meaning(value: Any) -> Any:
    """The document without benign keys and nulls; lists of names as sets."""
    if isinstance(value, dict):
        return {
            key: _meaning(item)
            for key, item in value.items()
            if key not in BENIGN and item is not None and item != {} and item is not False
        }
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(set(value))
    return value


def run_checkpoint(case: dict[str, Any], workdir: Path) -> list[str]:
    """Run one checkpoint input; return its problem codes. Raises ``Failure`` on a wrong "accepted"."""
    original = _base(case["base"])
    base = original.copy()
    base.shards = case["shards"]
    files: list[list[Any]] = []
    for operation in case["operations"]:
        _apply(base, json.loads(json.dumps(operation)), files)
    directory = workdir / "checkpoint"
    directory.mkdir()
    try:
        defective = _write(base, directory, files)
        try:
            result = inspection.inspect(directory)
        except CannotRun:
            raise Failure("cannot-run on a readable directory") from None
        facts = result.as_dict()
        json.dumps(facts)
        report.render(
            facts | {"catalogue": {"status": "unknown", "reason": ""}},
            result.findings.problems,
            result.findings.notes,
        )
        if result.verdict == "accepted":
            _judge(original, base, defective, case)
        return sorted({problem.code for problem in result.findings.problems})
    finally:
        shutil.rmtree(directory)


def _judge(original: Base, base: Base, defective: bool, case: dict[str, Any]) -> None:
    if defective:
        raise Failure("a file defect is accepted")
    (tensors, config), (old_tensors, old_config) = _states(base), _states(original)
    if config == old_config and tensors != old_tensors and not _harmless_tensors(tensors, old_tensors, case):
        raise Failure("changed tensors are accepted")
    if tensors == old_tensors and config != old_config and not _harmless_config(base, original, case):
        raise Failure("a changed config is accepted")


def _harmless_tensors(new: dict[str, Any], old: dict[str, Any], case: dict[str, Any]) -> bool:
    """Differences in tensors that the formats allow."""
    for name in new.keys() | old.keys():
        one, two = new.get(name), old.get(name)
        if one == two:
            continue
        leaf = name.rpartition(".")[2]
        if name.startswith("mtp.") and case["base"] in ("b2", "e2m1"):
            continue  # a draft layer may hold anything that is complete in itself
        if one is None and any(n.startswith("mtp.") for n in new) and case["base"] == "e2m1":
            continue  # without an inventory nobody knows that a whole module moved
        if case["base"] == "e2m1" and _e2m1_unknowable(new, old, name):
            continue
        both = one is not None and two is not None and one[2] is None
        if both and leaf.startswith(("weight_scale", "input_scale")):
            fine_dtype = {one[0], two[0]} <= {"BF16", "F32"} and case["base"] != "b1"
            scalar = _count(one[1]) == _count(two[1]) == 1
            if (one[1] == two[1] or scalar) and (fine_dtype or one[0] == two[0]):
                continue
        small = leaf in ("A_log", "dt_bias") or "norm" in name or "conv1d" in name
        if both and small and case["base"] == "b2" and one[1] == two[1] and one[0] in ("BF16", "F32"):
            continue
        if case["base"] == "b2" and leaf == "input_scale" and one is not None and two is None:
            continue  # weight-only FP4 may carry an input scale
        return False
    return True


def _e2m1_unknowable(new: dict[str, Any], old: dict[str, Any], name: str) -> bool:
    """Changes that no one can notice without an inventory: plain tensors, and modules that moved as a whole."""
    module = name.rpartition(".")[0]
    one, two = new.get(name), old.get(name)
    plain = all(item is None or item[0] not in ("U8", "F8_E4M3") for item in (one, two))
    if plain and "experts" not in name and "scale" not in name.rpartition(".")[2]:
        return True
    gone = not any(other.startswith(f"{module}.") for other in new)
    fresh = not any(other.startswith(f"{module}.") for other in old)
    return gone or fresh


def _harmless_config(base: Base, original: Base, case: dict[str, Any]) -> bool:
    """Changes of the config that leave the promises what they were."""
    old, new = dict(original.config), dict(base.config)
    if case["base"] == "e2m1":
        return True  # no inventory: only the declaration is judged, and it may be spelt in several ways
    old.pop("quantization_config", None)
    new.pop("quantization_config", None)
    if _meaning(old) != _meaning(new):
        return _same_promise(original, base)
    return _same_declaration(original, base)


def _same_promise(original: Base, base: Base) -> bool:
    """True when both configs promise the same tensors."""
    from qualify.models import inventory

    shapes = {name: tuple(t.shape) for name, t in original.tensors.items()}
    try:
        return (
            inventory.derive(original.config, lambda: shapes).modules
            == inventory.derive(base.config, lambda: shapes).modules
        )
    except Exception:  # a config that promises nothing usable cannot be the same
        return False


def _same_declaration(original: Base, base: Base) -> bool:
    """True when every module of the original gets the same scheme from both declarations."""
    from qualify.checkpoint import quantization
    from qualify.checkpoint.matching import Names
    from qualify.models import inventory

    schemes = []
    for one in (original, base):
        declared = quantization.parse(one.config, one.hf_quant, Findings())
        modules = inventory.derive(
            original.config, lambda: {n: tuple(t.shape) for n, t in original.tensors.items()}
        ).modules
        declared.bind(Names(modules), Findings())
        schemes.append({n: declared.scheme(n, p[0].linear and p[0].klass != "router") for n, p in modules.items()})
    return schemes[0] == schemes[1]


# ---------------------------------------------------------------- driver


def run(case: dict[str, Any], workdir: Path) -> list[str]:
    """Run one input under the time limit; return its problem codes."""
    signal.alarm(LIMIT)
    try:
        return run_header(case) if case["kind"] == "header" else run_checkpoint(case, workdir)
    finally:
        signal.alarm(0)


def replay(workdir: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """Run every input of the committed corpus; return (input with the codes it gave when kept, codes now)."""
    signal.signal(signal.SIGALRM, _hang)
    cases = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    return [(case, run(case, workdir)) for case in cases]


def _hang(*_: object) -> None:
    raise Failure(f"took more than {LIMIT} s")


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzer; 0 when every promise held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--headers", type=float, default=0.5, help="share of header inputs")
    parser.add_argument("--workdir", type=Path, help="where checkpoints are written (default: a temporary directory)")
    parser.add_argument("--corpus", type=Path, help="append the first input of every new set of codes")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failing inputs go")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGALRM, _hang)
    rng = random.Random(args.seed)
    seen: set[tuple[str, ...]] = set()
    counts = {"header": 0, "checkpoint": 0, "accepted": 0, "failed": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=args.workdir) as folder:
        for number in range(args.inputs):
            case = header_input(rng) if rng.random() < args.headers else checkpoint_input(rng)
            counts[case["kind"]] += 1
            try:
                codes = run(case, Path(folder))
            except Exception as error:
                counts["failed"] += 1
                args.failures.mkdir(parents=True, exist_ok=True)
                case["error"] = f"{type(error).__name__}: {error}"[:500]
                (args.failures / f"{args.seed}-{number}.json").write_text(json.dumps(case))
                print(f"input {number}: {case['error']}", file=sys.stderr, flush=True)
                if counts["failed"] >= 50:
                    break
                continue
            counts["accepted"] += not codes
            key = (case["kind"], *codes)
            if args.corpus is not None and key not in seen and len(seen) < 400:
                with args.corpus.open("a") as file:
                    file.write(json.dumps(case | {"codes": codes}) + "\n")
            seen.add(key)
            if number % 50_000 == 49_999:
                rate = (number + 1) / (time.monotonic() - began)
                print(f"{number + 1:,} inputs, {rate:.0f} a second, {len(seen)} sets of codes", flush=True)
    counts["sets_of_codes"] = len(seen)
    counts["seconds"] = round(time.monotonic() - began)
    print(json.dumps(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
