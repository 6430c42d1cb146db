"""Plans with an all-to-all backend: what it changes, and what it needs."""

from __future__ import annotations

import pytest

from launch import plan, recipe
from qualify import catalogue
from qualify.errors import CannotRun, Rejected

RECIPES = recipe.RECIPES


def build(artifact: str, *passed: str, target: str = "sm90", **environment: str) -> plan.Plan:
    """The printed plan: no checkpoint is read."""
    declared = {"ROUTER_PARTITIONS": "2"} if artifact == "mova-fp8" else {"MODEL": "375b-a23b"}
    return plan.build(recipe.load(artifact), declared | environment, passed, target, placeholders=True)


def test_the_plan_spans_all_ranks_and_runs_what_takes_its_tokens():
    for made in (build("k2-horizon-fp8", A2A="deepep"), build("k2-horizon-fp8", "--moe-a2a-backend", "deepep")):
        assert (made.tp, made.ep, made.value("--moe-a2a-backend")) == (8, 8, "deepep")
        assert made.value("--moe-runner-backend") == "deep_gemm"
    made = build("mova-fp8", A2A="deepep", TP="4")
    assert (made.tp, made.ep, made.value("--moe-runner-backend")) == (4, 4, "deep_gemm")
    assert "deepep spans" in made.choices["--ep-size"].source
    assert build("mova-fp8", A2A="deepep", TP="2", EP="2").ep == 2


def test_without_one_nothing_changes():
    for artifact in ("mova-fp8", "k2-horizon-fp8"):
        made = build(artifact)
        assert made.value("--moe-runner-backend") == "triton"
        assert "--moe-a2a-backend" not in made.arguments
        assert build(artifact, A2A="none").value("--moe-runner-backend") == "triton"


@pytest.mark.parametrize(
    ("artifact", "environment", "says"),
    [
        ("mova-fp8", {"A2A": "mooncake", "TP": "2"}, "A2A=mooncake: mova-fp8 is served with none, deepep"),
        ("mova-fp8", {"A2A": "deep_ep"}, "must be one of"),
        ("mova-fp8", {"A2A": "deepep"}, "with TP=1: it needs TP 2 or 4, GPUs of one host"),
        ("mova-fp8", {"A2A": "deepep", "TP": "8"}, "with TP=8"),
        ("mova-fp8", {"A2A": "deepep", "TP": "4", "EP": "2"}, "EP=2 .environment EP.: it spans all ranks"),
        ("mova-fp8", {"A2A": "deepep", "TP": "2", "target": "sm120"}, "on sm120: DeepGEMM takes .* served on sm90"),
        ("mova-fp8", {"A2A": "deepep", "TP": "2", "MAX_RUNNING": "257"}, "MAX_RUNNING=257 .* room for 256 tokens, 128"),
        ("k2-horizon-fp8", {"A2A": "deepep", "MODEL": "7b", "TP": "2"}, "7b has no routed experts"),
    ],
)
def test_what_it_needs(artifact, environment, says):
    with pytest.raises(Rejected, match=says):
        build(artifact, **environment)


def test_the_runner_of_the_other_way_is_refused():
    with pytest.raises(Rejected, match="needs deep_gemm on sm90: the only runner"):
        build("mova-fp8", "--moe-runner-backend", "triton", A2A="deepep", TP="2")
    with pytest.raises(Rejected, match="needs triton"):
        build("mova-fp8", "--moe-runner-backend", "deep_gemm", TP="2")


def test_the_ranks_share_the_tokens_of_a_batch():
    """Each rank sends its slice of a batch, so the room of all is TP times that of one."""
    for tp, running in (("2", "256"), ("4", "512")):
        assert build("mova-fp8", A2A="deepep", TP=tp, MAX_RUNNING=running).tp == int(tp)
    assert build("k2-horizon-fp8", A2A="deepep", MAX_RUNNING="1024").tp == 8
    whole = ("--disable-attn-tp-gather",)
    build("mova-fp8", *whole, A2A="deepep", TP="2", MAX_RUNNING="128")
    with pytest.raises(Rejected, match="room for 128 tokens"):
        build("mova-fp8", *whole, A2A="deepep", TP="2", MAX_RUNNING="129")


def test_low_latency_alone_has_room_for_short_prefills_only():
    mode = ("--deepep-mode", "low_latency")
    for chunk in ({}, {"CHUNKED_PREFILL": "257"}, {"CHUNKED_PREFILL": "-1"}):
        with pytest.raises(Rejected, match=r"CHUNKED_PREFILL=\S+ with --deepep-mode low_latency: .* room for 256"):
            build("mova-fp8", *mode, A2A="deepep", TP="2", **chunk)
    assert build("mova-fp8", *mode, A2A="deepep", TP="2", CHUNKED_PREFILL="256").tp == 2
    assert build("mova-fp8", "--deepep-mode", "auto", A2A="deepep", TP="2").value("--chunked-prefill-size") == 8192


@pytest.mark.parametrize("dtype", ["auto", "fp8", "bf16", "int8", "nvfp4"])
def test_tokens_are_sent_in_fp8(dtype):
    flag = ("--deepep-dispatcher-output-dtype", dtype)
    if dtype in ("auto", "fp8"):
        assert build("mova-fp8", *flag, A2A="deepep", TP="2").value(flag[0]) == dtype
        return
    with pytest.raises(Rejected, match=f"{flag[0]} {dtype} with A2A=deepep"):
        build("mova-fp8", *flag, A2A="deepep", TP="2")


def test_no_flag_brings_the_backend_by_itself():
    with pytest.raises(Rejected, match="--enable-waterfill: it changes the all-to-all backend"):
        build("mova-fp8", "--enable-waterfill", TP="2")


def test_normal_mode_has_room_for_more():
    made = build("mova-fp8", "--deepep-mode", "normal", A2A="deepep", TP="2", MAX_RUNNING="512")
    assert made.value("--max-running-requests") == 512


@pytest.mark.parametrize("artifact", ["mova-fp8", "k2-horizon-fp8"])
def test_the_catalogue_lists_every_topology_of_a_backend(artifact):
    """Preflight refuses a pair that is not listed, and a receipt of it makes no tag."""
    for entry in recipe.load(artifact).all_to_all:
        listed = catalogue.load()[artifact].checkpoints
        served = [known for known in listed if not entry.models or known.name in entry.models]
        assert served
        for known in served:
            assert {(tp, tp) for tp in entry.tp} <= set(known.topologies)


def test_a_flag_for_a_backend_that_is_not_there_is_our_fault(tmp_path):
    text = (RECIPES / "mova-fp8.toml").read_text()
    (tmp_path / "mova-fp8.toml").write_text(text.replace('a2a = ["deepep"]', 'a2a = ["deep_ep"]'))
    with pytest.raises(CannotRun, match="no all-to-all backend deep_ep"):
        recipe.load("mova-fp8", tmp_path)
