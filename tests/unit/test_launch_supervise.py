"""Supervision of a stand-in engine: real processes, signals and HTTP on the loopback interface."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import effective, plan, recipe, supervise

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_engine.py")
KEY = "0123456789abcdef-secret"
#: One launch: plan and supervise as launch.cli does, without checkpoint and GPU.
LAUNCH = """
import os, sys
from launch import plan, recipe, supervise
from qualify.errors import exit_code
made = plan.build(recipe.load("mova-fp8"), os.environ, sys.argv[2:], "sm90")
record, engine = {"launch": {"plan": made.as_dict()}}, [sys.executable, sys.argv[1]]
start = float(os.environ.get("START", 40))
sys.exit(exit_code(lambda: supervise.serve(made, record, start, 3, engine)))
"""


class Launched:
    """A supervisor in a process of its own."""

    def __init__(self, folder: Path, fake: dict, passed: tuple[str, ...] = (), **environment: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.status, self.sees = folder / "status.json", folder / "sees.json"
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT), "MODEL_DIR": "/models/m", "ROUTER_PARTITIONS": "2", "PORT": str(port),
            "HORIZON_STATUS": str(self.status), "FAKE_ENGINE": json.dumps(fake), "FAKE_ENGINE_SEES": str(self.sees),
            **environment,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, FAKE, *passed], env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def state(self) -> dict:
        return json.loads(self.status.read_text()) if self.status.exists() else {}

    def until(self, *states: str) -> Launched:
        deadline = time.time() + 60
        while self.state().get("state") not in states:
            assert time.time() < deadline, f"{self.state()} {self.process.poll()}"
            time.sleep(0.05)
        return self

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def health(self) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-I", ROOT / "launch/health.py"], env=self.environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    def left(self) -> list[int]:
        """Processes of the engine that still live."""
        return supervise.session(self.state()["engine"])


@pytest.fixture
def launch(tmp_path):
    """Start one; whatever happens, nothing of it is left."""
    started = []

    def start(fake=None, *passed, **environment):
        started.append(Launched(tmp_path, fake or {}, passed, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        pid = one.state().get("engine")
        if pid:
            supervise._end(pid)


def test_serves_and_stops_in_order(launch):
    one = launch({"slow": 0.3}).until("loading")
    assert one.health() == (1, "loading: mova-fp8 from /models/m\n")
    one.until("ready")
    code, says = one.health()
    assert (code, says[:6]) == (0, "ready:")
    assert one.state()["launch"]["plan"]["flags"]["--dtype"]["value"] == "bfloat16"
    one.process.send_signal(signal.SIGTERM)
    code, output = one.end()
    assert code == 0, output
    assert one.state()["state"] == "stopped"
    assert one.health()[0] == 1
    assert not one.left()


def test_the_key_is_in_no_argument_and_no_output(launch, tmp_path):
    (tmp_path / "key").write_text(KEY)
    one = launch(
        {"print": f"api_key='KEY' {'x' * 70000} KEY", "stderr": "KEY again"}, API_KEY_FILE=str(tmp_path / "key")
    ).until("ready")
    seen = json.loads(one.sees.read_text())
    assert seen["api_key"] == KEY
    assert KEY not in json.dumps([seen["argv"], seen["arguments"]])
    for pid in supervise.session(one.state()["engine"]):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    assert KEY not in one.status.read_text()
    one.process.terminate()
    code, output = one.end()
    assert code == 0
    assert KEY not in output
    assert output.count("<api key>") == 3


def test_relay_hides_a_secret_on_every_border():
    text = f"a {KEY}\rb {KEY} c\n{KEY}".encode()

    class Dribble(io.BytesIO):
        def read1(self, size=-1):
            return super().read1(self.step)

    for step in range(1, len(text)):
        source, out = Dribble(text), io.BytesIO()
        source.step = step
        supervise.relay(source, out, KEY.encode())
        assert out.getvalue() == text.replace(KEY.encode(), b"<api key>")


@pytest.mark.parametrize(
    ("info", "says"),
    [
        ({"attention_backend": "triton"}, "--attention-backend: planned fa3, the engine runs triton"),
        ({"max_running_requests": 48}, "--max-running-requests: planned 64, the engine runs 48"),
        ({"dtype": None}, "--dtype: planned bfloat16, the engine runs None"),
        ({"trust_remote_code": True}, "trust_remote_code: expected False, the engine runs True"),
        ({"device": "cpu"}, "device: expected cuda, the engine runs cpu"),
        ({"json_model_override_args": "{}"}, "--json-model-override-args"),
        ({"enable_metrics": False}, "--enable-metrics: planned True"),
    ],
)
def test_a_flag_without_effect_is_not_served(launch, info, says):
    one = launch({"info": info})
    code, output = one.end()
    assert code == 1
    assert f"rejected: not served, because the plan did not take effect: {says}" in output
    assert one.state()["state"] == "broken"
    assert not one.left()


def test_server_info_without_the_field():
    made = plan.build(recipe.load("mova-fp8"), {"MODEL_DIR": "/m", "ROUTER_PARTITIONS": "1"}, [], "sm90")
    assert "--dtype: /server_info has no dtype" in effective.differences(made, {})


def test_true_is_not_one():
    made = plan.build(recipe.load("mova-fp8"), {"MODEL_DIR": "/m", "ROUTER_PARTITIONS": "1"}, [], "sm90")
    info = {choice.flag.field: choice.value for choice in made.choices.values()} | made.expect
    assert effective.differences(made, info) == []
    assert effective.differences(made, info | {"tp_size": True}) == ["--tp-size: planned 1, the engine runs True"]
    spaced = json.dumps(json.loads(info["json_model_override_args"]), indent=2)
    assert effective.differences(made, info | {"json_model_override_args": spaced}) == []


def test_engine_that_dies_while_loading(launch):
    code, output = launch({"print": "no such expert", "die": 3}).end()
    assert code == 2
    assert "no such expert" in output
    assert "cannot run: the engine ended while loading (exit code 3)" in output


@pytest.mark.parametrize("title", supervise.WORKERS)
def test_a_dead_worker_ends_everything(launch, title):
    one = launch().until("ready")
    [victim] = [pid for pid, name in supervise.workers(one.state()["engine"]).items() if name.startswith(title)]
    os.kill(victim, signal.SIGKILL)
    code, output = one.end()
    assert code == 2
    assert f"{title} (pid {victim}) ended" in output
    assert one.state()["state"] == "broken"
    assert not one.left()


def test_an_engine_without_workers_is_not_trusted(launch):
    one = launch({"workers": ["sglang::scheduler"]})
    code, output = one.end()
    assert code == 2
    assert "0 sglang::detokenizer processes, and 1 are needed" in output
    assert not one.left()


def test_every_rank_has_a_scheduler(launch):
    code, output = launch({}, TP="2").end()
    assert code == 2
    assert "1 sglang::scheduler processes, and 2 are needed" in output


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/server_info": "<html>"}, "/server_info does not answer"),
        ({"/server_info": "[]"}, "/server_info answers no JSON object"),
        ({"/server_info": "null"}, "/server_info answers no JSON object"),
    ],
)
def test_an_answer_that_is_none_ends_the_launch(launch, answers, says):
    one = launch({"answers": answers})
    code, output = one.end()
    assert (code, one.state()["state"]) == (2, "broken")
    assert says in output
    assert "Traceback" not in output
    assert not one.left()


def test_a_server_that_never_gets_ready(launch):
    one = launch({"answers": {"/ready": "<html>"}}, START="2")
    code, output = one.end()
    assert code == 2
    assert "START_SECONDS" in output


def test_a_dripping_answer_does_not_hang_the_launch(monkeypatch):
    class Drip(io.BytesIO):
        def read1(self, size=-1):
            time.sleep(0.05)
            return b" "

    monkeypatch.setattr(supervise.OPENER, "open", lambda *_, **__: Drip(b"x"))
    with pytest.raises(TimeoutError):
        supervise.get("http://127.0.0.1:1/", None, seconds=0.3)


def test_a_proxy_sees_neither_key_nor_probe(launch, tmp_path):
    (tmp_path / "key").write_text(KEY)
    dead = "http://127.0.0.1:9"
    one = launch({}, API_KEY_FILE=str(tmp_path / "key"), http_proxy=dead, HTTP_PROXY=dead, no_proxy="").until("ready")
    assert one.health()[0] == 0
    environment = Path(f"/proc/{one.state()['engine']}/environ").read_bytes()
    assert b"no_proxy=127.0.0.1" in environment
    assert b"NO_PROXY=127.0.0.1" in environment


def test_no_proxy_names_the_address_that_the_engine_asks_itself_at(launch, tmp_path):
    (tmp_path / "key").write_text(KEY)
    one = launch({}, API_KEY_FILE=str(tmp_path / "key"), HOST="127.0.0.2").until("ready")
    variables = Path(f"/proc/{one.state()['engine']}/environ").read_bytes().split(b"\0")
    [direct] = [variable for variable in variables if variable.startswith(b"no_proxy=")]
    assert b"127.0.0.2" in direct.split(b",")


@pytest.mark.parametrize("state", ["loading", "ready", "draining"])
def test_the_status_of_a_dead_launch_is_taken_over(launch, tmp_path, state):
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "detail": "x", "launcher": [1, -5]}))
    one, deadline = launch(), time.time() + 60
    while one.state()["launcher"][0] == 1:
        assert time.time() < deadline
        time.sleep(0.05)
    one.until("ready")


def test_the_engine_gets_no_foreign_modules_and_stays_offline(launch):
    one = launch({}, PYTHONPATH=f"{ROOT}:/elsewhere", HF_HUB_OFFLINE="0").until("ready")
    environment = Path(f"/proc/{one.state()['engine']}/environ").read_bytes().split(b"\0")
    assert f"PYTHONPATH={ROOT}".encode() in environment
    assert b"HF_HUB_OFFLINE=1" in environment


def test_a_second_launch_does_not_take_the_status_of_a_first(launch):
    one = launch().until("ready")
    code, output = launch().end()
    assert code == 2
    assert "set HORIZON_STATUS to another" in output
    assert one.state()["state"] == "ready"


def test_a_status_file_that_cannot_be_written(launch):
    code, output = launch({}, HORIZON_STATUS="/nowhere/status.json").end()
    assert code == 2
    assert "/nowhere/status.json cannot be written" in output
    assert "Traceback" not in output


def test_a_closed_log_does_not_end_the_server(launch):
    one = launch().until("ready")
    one.process.stdout.close()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(timeout=60) == 0
    assert one.state()["state"] == "stopped"


def test_an_engine_that_ends_in_disorder(launch):
    one = launch({"code": 5}).until("ready")
    one.process.terminate()
    code, output = one.end()
    assert code == 2
    assert "in disorder (exit code 5)" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_ways_to_stop(launch, number):
    one = launch().until("ready")
    one.process.send_signal(number)
    assert one.end()[0] == 0


def test_how_it_ended():
    assert supervise._how(-9) == "signal SIGKILL"
    assert supervise._how(-35) == "signal 35"


def test_a_killed_engine_takes_its_workers_along(launch):
    one = launch().until("ready")
    os.kill(one.state()["engine"], signal.SIGKILL)
    code, output = one.end()
    assert code == 2
    assert "the engine ended (signal SIGKILL)" in output
    assert not one.left()


def test_stopped_while_loading(launch):
    one = launch({"slow": 30}).until("loading")
    time.sleep(0.3)
    one.process.terminate()
    code, output = one.end()
    assert code == 0, output
    assert not one.left()


def test_requests_that_do_not_end_are_cut_off(launch):
    one = launch({"stubborn": True}).until("ready")
    one.process.terminate()
    code, output = one.end()
    assert code == 2
    assert "DRAIN_SECONDS" in output
    assert not one.left()


def test_told_twice_means_at_once(launch):
    one = launch({"stubborn": True}).until("ready")
    one.process.terminate()
    one.until("draining")
    one.process.terminate()
    code, output = one.end()
    assert code == 2
    assert "told to stop twice" in output
    assert not one.left()


@pytest.mark.parametrize(
    ("host", "says"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.3"), ("::", "[::1]"), ("::1", "[::1]")],
)
def test_local_address(host, says):
    assert supervise.local(host) == says


def test_health_where_nothing_was_launched_or_the_server_is_gone(launch, tmp_path):
    one = launch().until("ready")
    one.process.terminate()
    one.end()
    one.status.write_text(json.dumps({"state": "ready", "detail": "on", "url": "http://127.0.0.1:9"}))
    code, says = one.health()
    assert (code, says[:7]) == (1, "broken:")
    one.status.write_text("{")
    assert one.health()[1].startswith("broken:")
    for text in ("[]", "null", "{}", json.dumps({"state": "ready", "detail": "on"})):
        one.status.write_text(text)
        assert one.health()[1].startswith("broken:"), text
    one.status.unlink()
    assert one.health() == (1, "broken: no server has been launched here\n")
