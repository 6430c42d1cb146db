"""The fuzzer's corpus gives the codes it gave, and a fresh run of a few thousand inputs keeps every promise."""

from __future__ import annotations

import random
import signal

from tests.cases import fuzz


def test_the_corpus_gives_the_same_codes(tmp_path):
    outcomes = fuzz.replay(tmp_path)
    assert len(outcomes) > 100
    assert {case["kind"] for case, _ in outcomes} == {"header", "checkpoint"}
    changed = [(case, codes) for case, codes in outcomes if case["codes"] != codes]
    assert changed == []


def test_fresh_inputs_keep_every_promise(tmp_path):
    signal.signal(signal.SIGALRM, fuzz._hang)
    rng = random.Random(20260913)
    accepted = 0
    for _ in range(1500):
        case = fuzz.header_input(rng) if rng.random() < 0.5 else fuzz.checkpoint_input(rng)
        accepted += not fuzz.run(case, tmp_path)
    # Both outcomes occur: an oracle that never meets an accepted input judges nothing.
    assert 50 < accepted < 750


def test_the_oracle_can_fail(tmp_path, monkeypatch):
    """A reader that overlooks overlaps, or an inspection that overlooks tensors, is caught."""
    monkeypatch.setattr(fuzz.headers, "_layout", lambda *arguments, **options: None)
    rng = random.Random(1)
    caught = 0
    for _ in range(400):
        try:
            fuzz.run(fuzz.header_input(rng), tmp_path)
        except fuzz.Failure:
            caught += 1
    assert caught
    monkeypatch.undo()
    monkeypatch.setattr(fuzz.inspection.Checker, "_report_missing", lambda *arguments: None)
    case = {"kind": "checkpoint", "base": "b0", "shards": 1, "operations": [["drop", "model.norm.weight"]]}
    try:
        fuzz.run(case, tmp_path)
    except fuzz.Failure as failure:
        assert "changed tensors" in str(failure)
    else:
        raise AssertionError("the oracle did not notice a dropped tensor")
