"""The comparison and its stage, against stand-in engines that the reference computes, right ones and wrong ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qualify import numerics
from qualify.errors import Rejected
from qualify.serving import Server
from tests.engine.numerics_server import Engine, serving

ROOT = Path(__file__).resolve().parents[2]
LENGTH, WANTED = 96, 3
POLICY = (ROOT / "qualify/policy.toml").read_text()


@pytest.fixture(scope="module")
def model(tiny_mova):
    return tiny_mova


@pytest.fixture
def recorder(tmp_path):
    folder = tmp_path / "modules"
    folder.mkdir()
    return folder


def observed(model, recorder, fault=None, partitions=2, **changes):
    engine = Engine(model, recorder, partitions, fault)
    for name, change in changes.items():
        setattr(engine, name, change)
    ids = numerics.draw(model, engine.reference.config, 1, LENGTH)
    with serving(engine) as url:
        return numerics.observe(Server(url, None, 1), ids, WANTED, recorder)


def compared(model, recorder, fault=None, partitions=2, **changes):
    run = observed(model, recorder, fault, partitions, **changes)
    return numerics.compare(*numerics.references(model, "cpu", 2), run)


@pytest.fixture(scope="module")
def healthy(model, tmp_path_factory):
    return compared(model, tmp_path_factory.mktemp("modules"))


def test_a_right_engine(healthy):
    assert numerics.all_finite(healthy)
    assert (healthy["positions"], healthy["decode"]["positions"]) == (LENGTH, WANTED - 1)
    assert 0 < healthy["mean_abs_logprob_error"] < 0.5 and healthy["tie_aware_agreement"] > 0.97
    modules = healthy["modules"]
    assert set(modules) == {
        "embedding", "norm", "attention", "values", "second_norm", "router", "ffn", "add", "final"
    }  # fmt: skip
    assert modules["embedding"]["max"] == 0 and modules["router"]["unequal_logits"] == 0
    assert modules["router"]["misrouted"] == modules["values"]["misrouted"] == 0
    assert modules["ffn"]["worst_expert"] < 0.004 and modules["attention"]["max"] < 0.004
    assert healthy["recording_difference"] == 0
    assert len(healthy["stream"]) == 5 and healthy["layers"]["router.unequal_logits"] == [None] * 3 + [0, 0]
    json.dumps(healthy, allow_nan=False)


#: fault -> (kind, metric) that sees it
SEEN = {
    "expert-scale-doubled": ("ffn", "worst_expert"),
    "experts-swapped": ("ffn", "worst_expert"),
    "router-provenance": ("router", "unequal_logits"),
    "gate-silu": ("attention", "mean"),
    "norm-groups": ("norm", "mean"),
    "value-expert-zeroed": ("values", "worst_expert"),
    "router-bias-in-weights": ("router", "mixing"),
    "rope-pairing": ("attention", "mean"),
}


@pytest.mark.parametrize(("fault", "number"), SEEN.items(), ids=SEEN)
def test_a_wrong_engine_is_seen_where_it_is_wrong(model, recorder, healthy, fault, number):
    kind, metric = number
    wrong = compared(model, recorder, fault)["modules"][kind][metric]
    assert wrong > 10 * max(healthy["modules"][kind][metric], 1e-4)


def test_the_fault_may_be_in_the_reference_instead(model, recorder, healthy):
    """One engine run gives the margin of every fault."""
    run = observed(model, recorder)
    for fault, (kind, metric) in SEEN.items():
        wrong = numerics.compare(*numerics.references(model, "cpu", 2, fault), run)["modules"][kind][metric]
        assert wrong > 10 * max(healthy["modules"][kind][metric], 1e-4), fault


def ids_of_another(told):
    told["input_token_logprobs"][5][1] += 1


def one_short(told):
    told["output_top_logprobs"].pop()


def not_a_number(told):
    told["input_token_logprobs"][7][0] = float("nan")


def missing(told):
    told["output_token_logprobs"][0][0] = None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (ids_of_another, "of other tokens"), (one_short, "of 98 positions"), (not_a_number, "not finite"),
        (missing, "not finite"),
    ],
)  # fmt: skip
def test_spoilt_answers_are_refused(model, recorder, spoil, said):
    with pytest.raises(Rejected, match=said):
        observed(model, recorder, spoil=spoil)


@pytest.mark.parametrize(
    ("layer", "name", "kind"),
    [
        ("layer-000", "norm.input", "embedding"), ("layer-002", "ffn_norm.input", "add"),
        ("layer-003", "norm.input", "add"), ("final", "final.input", "add"), ("final", "final.output", "final"),
    ],
)  # fmt: skip
def test_every_link_between_modules_is_compared(model, recorder, layer, name, kind):
    """A tensor that is not what the one before made of it, in one element of one token."""

    def touch(written, tensors):
        if written == layer:
            tensors[name] = tensors[name].clone()
            tensors[name][3, 7] += 2

    found = compared(model, recorder, touch=touch)["modules"]
    assert found[kind]["max"] > 0.02


def test_routing_of_the_engine_is_compared(model, recorder):
    """Another expert than its logits say, for one token."""

    def touch(written, tensors):
        if written == "layer-004":
            ids = tensors["router.ids"]
            ids[5, 0] = next(number for number in range(16) if number not in ids[5])

    assert compared(model, recorder, touch=touch)["modules"]["router"]["misrouted"] == 1


def test_nan_in_a_module_is_no_number(model, recorder):
    def touch(written, tensors):
        if written == "layer-001":
            tensors["ffn.output"][0, 0] = torch.nan

    found = compared(model, recorder, touch=touch)
    assert not numerics.all_finite(found) and found["modules"]["ffn"]["mean"] == numerics.NOT_FINITE
    json.dumps(found, allow_nan=False)


def test_an_engine_that_records_nothing(model, recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(numerics, "WAIT", 0.3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    engine = Engine(model, elsewhere)
    with serving(engine) as url, pytest.raises(Rejected, match="recorded none of 3 prefills of 9 tokens"):
        numerics.observe(Server(url, None, 1), list(range(9)), 1, recorder)
    assert list(recorder.iterdir()) == [] and engine.asked == 1 + numerics.TRIES


# --- the stage ----------------------------------------------------------------------------------------------------


def stage(model, out, fault=None, tp=1, length=256, policy="", **changes):
    """What the stage's own process says, with a stand-in engine behind HTTP. ``policy`` replaces the project's file."""
    engine = Engine(model, out / "work/modules", 2, fault)
    for name, change in changes.items():
        setattr(engine, name, change)
    for name in ("work/modules", "stages", "logs"):
        (out / name).mkdir(parents=True)
    arguments = ["--model-path", str(model), "--tp-size", str(tp), "--host", "127.0.0.1"]
    (out / "policy.toml").write_text(policy or POLICY)
    with serving(engine) as url:
        (out / "work/status.json").write_text(json.dumps({"state": "ready", "url": url, "detail": ""}))
        (out / "run.json").write_text(json.dumps({"topology": {"tp": tp, "ep": 1, "pp": 1}}))
        environment = os.environ | {
            "HORIZON_RUN": str(out), "HORIZON_MODEL_DIR": str(model), "ROUTER_PARTITIONS": "2",
            "UNCATALOGUED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "HORIZON_LAUNCH": json.dumps({"artifact": "mova-fp8", "arguments": arguments, "target": "sm90"}),
        }  # fmt: skip
        code = (
            f"from qualify import numerics, policy; numerics.LENGTHS, numerics.DECODED = ({length},), 3; "
            f"from pathlib import Path; policy.PATH = Path({str(out)!r}, 'policy.toml'); "
            "from qualify.suite import stage; stage.main('numerics')"
        )
        subprocess.run(
            [sys.executable, "-B", "-c", code], env=environment, check=True, capture_output=True, timeout=300
        )
    return json.loads((out / "work/stage-numerics.json").read_text())


def test_the_stage(model, tmp_path):
    told = stage(model, tmp_path / "out")
    assert told["result"] == "passed", told["reason"]
    numbers = told["numbers"]
    assert (numbers["positions"], numbers["prompt_tokens"], numbers["reference_device"]) == (256, 256, "cpu")
    assert numbers["expert_tokens"] >= 8
    assert {"modules", "layers", "stream", "decode", "mean_abs_logprob_error"} <= numbers.keys()
    assert list((tmp_path / "out/work/modules").iterdir()) == []


def test_a_bound_fails_the_stage_of_a_wrong_engine(model, tmp_path):
    """The project's policy with one bound in it; the same bound passes the right engine."""
    head = (
        '[thresholds.numerics-expert]\nstage = "numerics"\n'
        'number = "modules.ffn.worst_expert"\nunit = "relative error"\n'
    )
    start = POLICY.index(head) + len(head)
    end = POLICY.index("\n\n", start)
    bounded = f'{POLICY[:start]}max = 0.02\nsource = "a test"{POLICY[end:]}'
    right = stage(model, tmp_path / "right", policy=bounded)
    assert right["result"] == "passed", right["reason"]
    wrong = stage(model, tmp_path / "wrong", policy=bounded, fault="expert-scale-doubled")
    assert wrong["result"] == "failed" and wrong["reason"].endswith("missed: numerics-expert"), wrong["reason"]
    # Its numbers are there all the same.
    assert wrong["numbers"]["modules"]["ffn"]["worst_expert"] > 0.02


def other_embedding(written, tensors):
    if written == "layer-000":
        tensors["norm.input"][0, 0] += 1


def infinite(written, tensors):
    if written == "final":
        tensors["final.output"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"touch": other_embedding}, "test_modules"),
        ({"touch": infinite}, "some number is not finite"),
        ({"spoil": not_a_number}, "are not finite numbers"),
        ({"length": 16}, "an expert got"),
        ({"length": 200}, "200 positions, fewer than 256"),
    ],
    ids=str,
)
def test_what_needs_no_measurement_fails_the_stage(model, tmp_path, change, reason):
    told = stage(model, tmp_path / "out", **change)
    assert told["result"] == "failed" and reason in told["reason"], told["reason"]


def test_the_stage_over_two_ranks_is_not_run(model, tmp_path):
    told = stage(model, tmp_path / "out", tp=2)
    assert (told["result"], "test_modules" in told["reason"]) == ("not-run", True)
    assert told["numbers"]["mean_abs_logprob_error"] > 0 and "modules" not in told["numbers"]
