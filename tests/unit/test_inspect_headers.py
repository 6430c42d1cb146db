"""Headers as hostile input: every defect has its code; none is a crash, a hang or a large allocation."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from qualify.checkpoint import headers, strictjson
from qualify.checkpoint.problems import Findings, show
from tests.cases import bases
from tests.cases.helpers import codes, inspect, messages, rewrite_header, subjects

Q = "model.layers.0.self_attn.q_proj.weight"


def _changed(tmp_path, change):
    directory = bases.b0().write(tmp_path)
    rewrite_header(directory / "model.safetensors", change)
    return inspect(directory)


def _entry(**values):
    def change(document):
        document[Q].update(values)

    return change


def test_the_7b_header_is_bit_for_bit_the_published_one():
    document = json.loads((bases.DATA / "K2-Horizon-7B-FP8.header.json").read_text())
    metadata = document.pop("__metadata__")
    ordered = {"__metadata__": metadata}
    for name, entry in sorted(document.items(), key=lambda item: item[1]["data_offsets"]):
        ordered[name] = {key: entry[key] for key in ("dtype", "shape", "data_offsets")}
    body = json.dumps(ordered, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    end = max(entry["data_offsets"][1] for entry in document.values())
    header = headers.Header("model.safetensors", 8 + len(body) + end)
    findings = Findings()
    headers.parse(struct.pack("<Q", len(body)) + body, header, findings)
    assert findings.problems == []
    assert len(header.tensors) == 579
    assert header.sha256 == "773dfd292ab69e54cad8f058ecbcbbc32b5d9c6fbd870204008af7011a70596d"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_entry(dtype="F8_E9M9"), "tensor-dtype-unknown"),
        (_entry(dtype=None), "tensor-dtype-unknown"),
        (_entry(dtype=["F32"]), "tensor-dtype-unknown"),
        (_entry(dtype="f8_e4m3"), "tensor-dtype-unknown"),
        (_entry(shape=[-256, 256]), "tensor-shape-absurd"),
        (_entry(shape=[256.0, 256]), "tensor-shape-absurd"),
        (_entry(shape=[True, 65536]), "tensor-shape-absurd"),
        (_entry(shape=["256", 256]), "tensor-shape-absurd"),
        (_entry(shape="256"), "tensor-shape-absurd"),
        (_entry(shape=None), "tensor-shape-absurd"),
        (_entry(shape=[1 << 60, 1 << 60]), "tensor-shape-absurd"),
        (_entry(shape=[1 << 40, 1 << 40]), "tensor-shape-absurd"),
        (_entry(shape=[1] * 64 + [65536]), "tensor-shape-absurd"),
        (_entry(shape=[256, 255]), "tensor-size"),
        (_entry(dtype="F4"), "tensor-size"),
        (_entry(data_offsets=[0]), "tensor-entry"),
        (_entry(data_offsets=[0, 1, 2]), "tensor-entry"),
        (_entry(data_offsets=[5, 1]), "tensor-entry"),
        (_entry(data_offsets=[-1, 65535]), "tensor-entry"),
        (_entry(data_offsets=[0.0, 65536.0]), "tensor-entry"),
        (_entry(data_offsets=None), "tensor-entry"),
        (_entry(extra=1), "tensor-entry"),
        (lambda d: d[Q].pop("shape") and None, "tensor-entry"),
        (lambda d: d.update({Q: None}), "tensor-entry"),
        (lambda d: d.update({Q: []}), "tensor-entry"),
        (lambda d: d.update({"": d.pop(Q)}), "tensor-entry"),
        (lambda d: d.update({"x" * 5000: d.pop(Q)}), "tensor-entry"),
        (lambda d: d.update({"__metadata__": {"a": 1}}), "header-malformed"),
        (lambda d: d.update({"__metadata__": []}), "header-malformed"),
        (lambda d: b"[]", "header-malformed"),
        (lambda d: b"", "header-malformed"),
        (lambda d: b'{"a":', "header-malformed"),
        (lambda d: b" " + json.dumps(d).encode(), "header-malformed"),
        (lambda d: b'{"a":NaN}', "header-malformed"),
        (lambda d: b'{"\xff":1}', "header-malformed"),
        (lambda d: b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", "header-malformed"),
        (lambda d: b'{"a":' + b"9" * 10000 + b"}", "header-malformed"),
    ],
)
def test_a_bad_entry_has_its_code(tmp_path, change, code):
    result = _changed(tmp_path, change)
    assert code in codes(result)
    assert result.verdict == "rejected"


def test_duplicate_keys_are_found_at_every_level(tmp_path):
    def twice(document):
        text = json.dumps(document, separators=(",", ":"))
        return (text[:-1] + f',"{Q}":' + json.dumps(document[Q]) + "}").encode()

    assert subjects(_changed(tmp_path / "name", twice), "header-duplicate-key") == ["model.safetensors"]

    def inner(document):
        text = json.dumps(document, separators=(",", ":"))
        return text.replace('{"dtype":"F8_E4M3"', '{"dtype":"BF16","dtype":"F8_E4M3"', 1).encode()

    assert "header-duplicate-key" in codes(_changed(tmp_path / "inner", inner))


def test_overlap_and_gap_name_the_tensor(tmp_path):
    scale = Q + "_scale"

    def overlap(document):
        start, end = document[scale]["data_offsets"]
        document[scale]["data_offsets"] = [start - 4, end - 4]

    result = _changed(tmp_path / "overlap", overlap)
    assert subjects(result, "tensor-overlap") == [scale]
    assert Q in messages(result, "tensor-overlap")
    # The four bytes it left belong to nobody.
    assert "tensor-gap" in codes(result)

    def gap(document):
        document.pop(scale)

    assert "tensor-gap" in codes(_changed(tmp_path / "gap", gap))

    def same(document):
        document["copy"] = dict(document[Q])

    assert "tensor-overlap" in codes(_changed(tmp_path / "same", same))


def test_a_hole_at_the_start_is_a_gap(tmp_path):
    def shift(document):
        for name, entry in document.items():
            if name != "__metadata__":
                entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]

    assert {"tensor-gap", "shard-truncated"} <= codes(_changed(tmp_path, shift))


def test_empty_tensors_are_legal_in_a_header():
    findings = Findings()
    entry = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    body = json.dumps({"a": entry, "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    header = headers.Header("s", 8 + len(body) + 2)
    headers.parse(struct.pack("<Q", len(body)) + body, header, findings)
    assert findings.problems == []
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "socket"])
def test_a_shard_that_is_no_regular_file_does_not_hang(tmp_path, kind):
    directory = bases.b0().write(tmp_path)
    shard = directory / "model.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "directory":
        shard.mkdir()
    elif kind == "device":
        shard.symlink_to("/dev/zero")
    else:
        import socket

        server = socket.socket(socket.AF_UNIX)
        here = Path.cwd()
        os.chdir(directory)
        try:
            server.bind("model.safetensors")
        finally:
            os.chdir(here)
            server.close()
    result = inspect(directory)
    assert codes(result) == {"link-escape" if kind == "device" else "not-a-regular-file"}


def test_a_claimed_length_is_not_allocated(tmp_path):
    directory = bases.b0().write(tmp_path)
    shard = directory / "model.safetensors"
    with shard.open("wb") as file:
        file.write(struct.pack("<Q", 39_000_000))
        file.truncate(1 << 40)
    tracemalloc.start()
    result = inspect(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes(result) == {"header-malformed"}
    assert peak < 150_000_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * 4_000_000 + b"[]]}",
        b'{"a":[' + b"1," * 6_000_000 + b"1]}",
        b'{"a":{' + b",".join(b'"%d":{}' % i for i in range(600_000)) + b"}}",
    ],
)
def test_punctuation_bombs_are_refused_before_they_grow(body):
    tracemalloc.start()
    with pytest.raises(strictjson.JsonDefect, match="brackets"):
        strictjson.parse(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(body)


def test_a_large_legal_document_is_no_bomb():
    document = {f"model.layers.{i}.mlp.experts.7.gate_proj.weight": "model-00001.safetensors" for i in range(60_000)}
    parsed, duplicates = strictjson.parse(json.dumps({"weight_map": document}, separators=(",", ":")).encode())
    assert parsed["weight_map"] == document and duplicates == []


def test_names_cannot_rewrite_the_terminal(tmp_path):
    evil = "model.\x1b[2J\x07\u202e\ud800.weight"
    assert show(evil).isprintable()
    directory = bases.b0().write(tmp_path)

    def rename(document):
        document[evil] = document.pop(Q)

    rewrite_header(directory / "model.safetensors", rename)
    result = inspect(directory)
    from qualify.checkpoint import report

    text = "\n".join(report.grouped(result.findings.problems))
    assert all(line.isprintable() for line in text.split("\n"))
    assert json.dumps(result.as_dict())


def test_one_pass_reports_every_defect(tmp_path):
    def several(document):
        document[Q]["dtype"] = "NOPE"
        document["model.norm.weight"]["shape"] = [1, -1]
        document["lm_head.weight"]["data_offsets"] = [0, 3]

    result = _changed(tmp_path, several)
    assert {"tensor-dtype-unknown", "tensor-shape-absurd", "tensor-size"} <= codes(result)
    # And an unusable entry is one problem, not also a missing tensor.
    assert "tensor-missing" not in codes(result) and "head-missing" not in codes(result)
