"""The stages "requests" and "performance" before a stand-in that does one thing wrong: each is found, by name."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path[:0] = [str(ROOT), str(HERE)]
from test_suite import Suite, free_port  # noqa: E402

from qualify.receipt import sanitise, schema  # noqa: E402
from qualify.requests import canary, malformed  # noqa: E402

COMPLETION, CHAT, COLD, MANY, GONE, TOO_LONG, MALFORMED, PARSERS, LONG, INFO = (
    "test_a_completion_and_its_log_probabilities", "test_chat", "test_a_cold_repeat", "test_many_at_once",
    "test_a_client_that_goes", "test_a_prompt_that_is_too_long", "test_malformed_bodies", "test_parsers",
    "test_a_long_prompt", "test_server_info_equals_the_plan",
)  # fmt: skip
ALL = {COMPLETION, CHAT, COLD, MANY, GONE, TOO_LONG, MALFORMED, PARSERS, LONG, INFO}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A run directory whose server got ready once."""
    one = Suite(tmp_path_factory.mktemp("loaded"))
    done = one.run("--only", "load")
    assert one.results() == {"load": "passed", "cleanup": "passed"}, done.stdout + done.stderr
    yield one
    assert one.left() == []


def stage(one: Suite, name: str, wrong: dict, **more: str) -> dict:
    """What a stage says of the stand-in, started as the launcher had started it."""
    path = one.out / "work/status.json"
    status = json.loads(path.read_text())
    plan = status["launch"]["plan"]
    arguments = []
    for flag, choice in plan["flags"].items():
        value = free_port() if flag == "--port" else choice["value"]
        if flag == "--port":
            choice["value"], status["url"] = int(value), f"http://127.0.0.1:{value}"
        arguments += [flag] if value is True else [flag, str(value)]
    environment = one.environment(wrong, PORT=str(plan["flags"]["--port"]["value"]))
    engine = subprocess.Popen(
        [sys.executable, "-B", str(HERE / "fake_engine.py")], env=environment, stdin=subprocess.PIPE, text=True
    )
    try:
        engine.stdin.write(json.dumps({"arguments": arguments, "api_key": None}))
        engine.stdin.close()
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{status['url']}/server_info", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        began = json.loads((one.out / "work/server.json").read_text())["began"]
        path.write_text(json.dumps(status | {"state": "ready", "began": began}))
        launch = {"artifact": "mova-fp8", "arguments": ["--model-path", str(one.model), "--host", "127.0.0.1"]}
        environment |= {
            "HORIZON_RUN": str(one.out), "HORIZON_MODEL_DIR": str(one.model), **more,
            "HORIZON_LAUNCH": json.dumps(launch | {"target": "sm90"}),
        }  # fmt: skip
        command = [sys.executable, "-B", "-P", "-m", "qualify.suite.stage", name]
        done = subprocess.run(command, cwd=one.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads((one.out / f"work/stage-{name}.json").read_text())
    finally:
        engine.terminate()
        engine.wait()


def failed(told: dict) -> set[str]:
    return {test.rpartition("::")[2] for test, outcome in told["tests"].items() if outcome != "passed"}


def fits_a_receipt(numbers: dict) -> bool:
    return (schema.defect(numbers, "numbers"), sanitise.find({"numbers": numbers})) == (None, None)


def test_a_right_server_passes(loaded):
    told = stage(loaded, "requests", {})
    assert (told["result"], failed(told)) == ("passed", set()), told["reason"]
    assert {test.rpartition("::")[2] for test in told["tests"]} == ALL
    numbers = told["numbers"]
    assert (numbers["crossed_answers"], numbers["canary_near_ties"], numbers["canary_tokens"]) == (0, 0, 64 * 32)
    assert (numbers["malformed_bodies"], numbers["malformed_accepted"]) == (len(malformed.bodies("x")), 0)
    assert (numbers["requests_left"], numbers["errors"], numbers["long_prompt_tokens"]) == (0, 0, 16384)
    assert fits_a_receipt(numbers)


#: what the stand-in does wrong -> the tests that fail for it, and words of the first reason
WRONG = [
    ({"nan": True}, {COMPLETION, CHAT, COLD, MANY, GONE, TOO_LONG, MALFORMED, LONG}, "0 of 511"),
    ({"null": True}, {COMPLETION, CHAT, COLD, MANY, GONE, TOO_LONG, MALFORMED, LONG}, "0 of 511"),
    ({"short": 1}, ALL - {INFO, PARSERS}, "47 out"),
    ({"moody": True}, {COMPLETION, CHAT, COLD, MANY, GONE, TOO_LONG, MALFORMED}, ""),
    ({"swap": True}, {MANY}, "2 of 64 got what is not theirs: request"),
    ({"echo": True}, {COMPLETION, MANY}, ""),
    ({"drift": 0.4}, {COMPLETION, MANY}, ""),
    ({"loaded": 0.4}, {MANY}, "differ by 0.400 nat"),
    ({"lost": True}, {COMPLETION, CHAT}, ""),
    ({"usage": 1}, {COMPLETION, CHAT}, ""),
    ({"chat": True}, {CHAT}, ""),
    ({"keep": True}, {GONE, TOO_LONG, MALFORMED, LONG}, "1 requests run and 0 wait"),
    ({"refuses": 500}, {TOO_LONG, MALFORMED}, ""),
    ({"refuses": 200}, {TOO_LONG, MALFORMED}, ""),
    ({"spoiled": True}, {TOO_LONG, MALFORMED}, "the known answer has changed"),
    ({"truncate": True}, {TOO_LONG, MALFORMED}, "DID NOT RAISE"),
    ({"future": 0.4}, {LONG}, "differs by 0.400 nat"),
    ({"deaf": True}, {PARSERS}, ""),
    ({"info": {"max_running_requests": 63}}, {INFO}, "planned 64, the engine runs 63"),
]


@pytest.mark.parametrize(("wrong", "fails", "says"), WRONG, ids=[json.dumps(case[0]) for case in WRONG])
def test_what_is_wrong_is_found(loaded, wrong, fails, says):
    told = stage(loaded, "requests", wrong)
    assert (told["result"], failed(told)) == ("failed", fails), told["reason"]
    assert says in told["reason"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, ""),
        ({"short": 1}, "a stream gave 64 and 15"),
        ({"usage": 1}, "a stream gave 64 and 15"),
    ],
    ids=str,
)
def test_streams_are_counted(loaded, wrong, says):
    told = stage(loaded, "performance", wrong)
    assert (told["result"], says in told["reason"]) == ("failed" if wrong else "passed", True), told["reason"]
    assert failed(told) == ({"test_rounds"} if wrong else set())


def test_the_cookbooks_workload_runs_on_two_launches(tmp_path):
    one = Suite(tmp_path)
    done = one.run("--only", "performance", "--full")
    assert set(one.results().values()) == {"passed"}, done.stdout + done.stderr
    assert fits_a_receipt(one.stages()["performance"]["numbers"])
    told = one.stages()["performance"]["numbers"]["cookbook"]
    assert set(told) == {"launch-1", "launch-2"}
    for launch in told.values():
        assert {name: (found["requests"], found["at_once"]) for name, found in launch.items()} == {
            "at-once-1": (4, 1), "at-once-4": (8, 4)
        }  # fmt: skip
    log = (one.out / "logs/server.log").read_text()
    assert "stopped" in log
    # Kept with the workload, and run again where it was not measured.
    assert "kept: passed" in one.run("--only", "performance", "--full").stdout
    path = one.out / "stages/performance.json"
    stage_file = json.loads(path.read_text())
    del stage_file["numbers"]["cookbook"]
    path.write_text(json.dumps(stage_file))
    assert "kept: passed" in one.run("--only", "performance").stdout
    assert "kept: passed" not in one.run("--only", "performance", "--full", fake={"die": 1}).stdout
    assert one.left() == []


def test_one_launch_is_not_two(loaded):
    told = stage(loaded, "performance", {}, HORIZON_FULL="2")
    (loaded.out / "work/cookbook.json").unlink()
    assert failed(told) == {"test_cookbook"}
    assert "an earlier launch has not measured" in told["reason"]


# --- canaries -----------------------------------------------------------------------------------------------------

ALONE = canary.Answer([7, 8, 9], [-0.5, -1.0, -0.7], [{7: -0.5, 1: -3.0}, {8: -1.0, 2: -1.2}, {9: -0.7, 3: -4.0}])


@pytest.mark.parametrize(
    ("ids", "logprobs", "wrong", "compared", "tie"),
    [
        ([7, 8, 9], [-0.5, -1.0, -0.7], "", 3, None),
        ([7, 8, 9, 4], [-0.5, -1.0, -0.7, -9.0], "", 3, None),  # longer: the rest is not known
        ([7, 8, 9], [-0.7, -0.8, -0.9], "", 3, None),  # 0.2 nat each
        ([7, 8, 9], [-0.8, -1.3, -1.0], "differ by 0.300 nat", 3, None),
        ([7, 2, 5], [-0.5, -1.1, -9.0], "", 1, 0.2),  # the two best of place 1 are tied; then the text is another
        ([1, 8, 9], [-3.0, -1.0, -0.7], "token 0 is another one, and no near tie", 0, None),
        ([7, 5, 9], [-0.5, -1.0, -0.7], "token 1 is another one", 1, None),
        ([7, 8], [-0.5, -1.0], "2 tokens", 0, None),
        ([7, 8, 9], [-0.5, -1.0], "2 log-probabilities", 0, None),
        ([7, 8, 9], [-0.5, float("nan"), -0.7], "token 1 is no finite number", 1, None),
        ([7, 8, 9], [-0.5, None, -0.7], "token 1 is no finite number", 1, None),
    ],
)
def test_compare(ids, logprobs, wrong, compared, tie):
    found = canary.compare(ALONE, canary.Answer(ids, logprobs), bound=0.25, margin=0.25)
    assert (wrong in found.wrong, bool(found.wrong)) == (True, bool(wrong)), found.wrong
    assert len(found.differences) == compared
    assert found.tie is None if tie is None else found.tie == pytest.approx(tie)


def test_answers_that_cannot_be_told_apart():
    other = canary.Answer([1, 8, 9], [-0.5, -1.0, -0.7], [{1: -0.5}, {8: -1.0}, {9: -0.7}])
    fork = canary.Answer([7, 2, 9], [-0.5, -1.2, -0.7], [{7: -0.5}, {2: -1.2}, {9: -0.7}])
    assert canary.alike([ALONE, other], 0.25, 0.25) == []
    # Where ALONE is nearly tied, the fork could be taken for it; the fork itself has no tie.
    assert canary.alike([ALONE, other, fork], 0.25, 0.25) == [(0, 2)]
