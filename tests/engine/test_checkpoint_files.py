"""What is said about shards, headers, index and directory before the first tensor, one line for each defect."""

import json
import os
import struct
from types import SimpleNamespace

import pytest
import torch

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE
from tests.engine.mutations import INDEX

GOOD, BAD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GARBLED = "has no safetensors header ({size:,} bytes): download it again"


def write_shard(path, header, payload=bytes(16)):
    """Write a shard with that header, which is JSON text or what json.dumps takes, and return its size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path.stat().st_size


def tensor(begin=0, end=16):
    return {"dtype": "U8", "shape": [16], "data_offsets": [begin, end]}


@pytest.fixture
def directory(tmp_path):
    """Two shards, ``a`` in the good one and ``b`` in the bad one, and an index that agrees."""
    write_shard(tmp_path / GOOD, {"__metadata__": {"format": "pt"}, "a": tensor()})
    write_shard(tmp_path / BAD, {"b": tensor()})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": GOOD, "b": BAD}}))
    return tmp_path


def examine(directory):
    from sglang.srt.model_loader import checkpoint_files

    return checkpoint_files.examine(str(directory), [str(directory / GOOD), str(directory / BAD)], True)


def refused(directory, refusal):
    """The lines after the first with which the ledger ends a load before its first tensor."""
    from sglang.srt.model_loader.checkpoint_ledger import Ledger

    ledger = Ledger(SimpleNamespace(name="strict"))
    return refusal(ledger.check_files, str(directory), [str(directory / GOOD), str(directory / BAD)], True).split("\n")[
        1:
    ]


def test_files_that_agree_have_no_defect(directory):
    assert examine(directory) == ([], True)


# --- headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offsets",
    [
        "16",
        ["0", "16"],
        [0, "16"],
        ["0", 16],
        [0, 16.0],
        [0.0, 16],
        [0, None],
        [None, 16],
        [0],
        [],
        None,
        {"0": 16},
        16,
    ],
    ids=str,
)
def test_offsets_of_the_wrong_type_are_refused(directory, refusal, offsets):
    size = write_shard(directory / BAD, {"b": {"dtype": "U8", "shape": [16], "data_offsets": offsets}})
    assert refused(directory, refusal) == ["unreadable (1):", f"  {BAD}: {GARBLED.format(size=size)}"]


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b"[]",
        b'"b"',
        b"null",
        b"3",
        b'{"b": 3}',
        b'{"b": []}',
        b'{"b": {}}',
        b'{"\xff": 1}',
        b"9" * 5000,
    ],
    ids=lambda header: f"{header[:8]!r}-{len(header)}",
)
def test_a_header_that_is_none_is_refused(directory, refusal, header):
    size = write_shard(directory / BAD, header)
    assert refused(directory, refusal) == ["unreadable (1):", f"  {BAD}: {GARBLED.format(size=size)}"]


def test_a_tensor_twice_in_one_header_is_refused(directory, refusal):
    entry = json.dumps(tensor())
    write_shard(directory / BAD, f'{{"b": {entry}, "c": {entry}, "b": {entry}}}'.encode())
    assert refused(directory, refusal) == [
        "unreadable (1):",
        f"  {BAD}: has 'b' twice in its header: download it again",
    ]


def test_a_key_twice_in_one_entry_is_refused(directory, refusal):
    write_shard(
        directory / BAD, b'{"b": {"dtype": "U8", "shape": [16], "data_offsets": [0, 8], "data_offsets": [0, 16]}}'
    )
    assert refused(directory, refusal) == [
        "unreadable (1):",
        f"  {BAD}: has 'data_offsets' twice in its header: download it again",
    ]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
    ids=["dangling link", "directory", "loop"],
)
def test_a_shard_that_cannot_be_opened_is_refused_with_the_reason(directory, refusal, make, reason):
    (directory / BAD).unlink()
    make(directory / BAD)
    assert refused(directory, refusal) == ["unreadable (1):", f"  {BAD}: cannot be read: {reason}"]


def test_the_engine_says_which_shard_it_cannot_read(linked, refusal):
    """Through the loader, before anything else opens the file."""
    shard = max(linked.glob("*.safetensors"))
    shard.unlink()
    size = write_shard(shard, {"b": {"dtype": "U8", "shape": [16], "data_offsets": ["0", "16"]}})
    report = refusal(engine_cpu.load_model, linked, overrides=PROVENANCE)
    assert report.split("\n")[1:] == ["unreadable (1):", f"  {shard.name}: {GARBLED.format(size=size)}"]


# --- index and directory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{{"weight_map": {{"a": "{good}", "b": "{bad}", "a": "{good}"}}}}', "a"),
        ('{{"weight_map": {{"a": "{bad}", "b": "{bad}", "a": "{good}"}}}}', "a"),
        ('{{"weight_map": {{}}, "weight_map": {{"a": "{good}", "b": "{bad}"}}}}', "weight_map"),
    ],
    ids=["same", "other", "map"],
)
def test_a_key_twice_in_the_index_is_a_defect(directory, text, key):
    (directory / INDEX).write_text(text.format(good=GOOD, bad=BAD))
    assert examine(directory) == ([("index", INDEX, f"lists '{key}' twice")], True)


def test_hidden_files_and_folders_are_no_shards(directory):
    (directory / f"._{GOOD}").write_bytes(b"\0\5\26\7 what a Mac leaves beside a file")
    (directory / "old.safetensors").mkdir()
    assert examine(directory) == ([], True)
    write_shard(directory / "stray.safetensors", {"a": tensor()})
    assert examine(directory)[0] == [
        ("index", "stray.safetensors", "is a shard that the index does not name: remove it")
    ]


@pytest.fixture
def linked(tiny_mova, tmp_path):
    """The tiny checkpoint as hard links: whoever changes a file unlinks it first."""
    directory = tmp_path / "linked"
    directory.mkdir()
    for path in tiny_mova.iterdir():
        os.link(path, directory / path.name)
    return directory


def test_a_checkpoint_with_hidden_files_and_folders_loads(linked):
    shard = min(linked.glob("*.safetensors"))
    (linked / f"._{shard.name}").write_bytes(b"\0\5\26\7 what a Mac leaves beside a file")
    (linked / "old.safetensors").mkdir()
    assert "forward" not in vars(engine_cpu.load_model(linked, overrides=PROVENANCE))


# --- the report -------------------------------------------------------------------------------------------------


def test_a_tensor_name_cannot_fake_a_line_of_the_report(empty, refusal):
    name = "a\nvalue (7):\n  model.norm.weight: is fine\r\u2028\x1b[2J"
    lines = refusal(empty.load_weights, [(name, torch.ones(1))]).split("\n")
    (position,) = [index for index, line in enumerate(lines) if "is no tensor of this model" in line]
    assert lines[position - 1] == "unexpected (1):"
    assert lines[position].isprintable()
    assert "a\\nvalue (7):\\n  model.norm.weight: is fine\\r\\u2028\\x1b[2J" in lines[position]
    assert "value (7):" not in lines


def test_a_file_name_cannot_fake_a_line_of_the_report(directory):
    from sglang.srt.model_loader import checkpoint_files, checkpoint_ledger

    bad = directory / "b\nvalue (7):\n.safetensors"
    write_shard(bad, {"a": tensor()})
    defects, _ = checkpoint_files.examine(str(directory), [str(directory / GOOD), str(bad)], True)
    assert ("duplicate", "a", f"is in {bad.name} and {GOOD}") in defects
    lines = checkpoint_ledger.report("strict", {(kind, name): text for kind, name, text in defects}).split("\n")
    assert f"  a: is in b\\nvalue (7):\\n.safetensors and {GOOD}" in lines
    assert "value (7):" not in lines


def test_an_error_of_the_reader_cannot_fake_a_line_of_the_report(empty, refusal):
    def stream():
        yield from ()
        raise OSError("first\nvalue (7):")

    lines = refusal(empty.load_weights, stream()).split("\n")
    assert lines[1:] == ["unreadable (1):", "  the checkpoint: cannot be read on: OSError: first\\nvalue (7):"]


def test_other_scripts_are_printed_as_they_are():
    from sglang.srt.model_loader.checkpoint_ledger import report

    lines = report("strict", {("value", "ключ.重み"): "ist größer", ("value", "ключ\n"): "ist größer"}).split("\n")
    assert lines[2:] == ["  ключ.重み: ist größer", "  ключ\\n: ist größer"]
