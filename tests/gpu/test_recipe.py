"""The mova-fp8 recipe on a GPU, inside the image: a six-layer true-width cut, served, drained, and killed.

Needs the engine's environment, a GPU, and 10 GB where TMPDIR or /dev/shm is. Run it in the image:
python3 -m pytest tests/gpu/test_recipe.py
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from launch import supervise

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "qualify/models/published/K2-Horizon-MoVA-36B-A4B-FP8.config.json"
KEY = "0123456789abcdef-secret"
URL = "http://127.0.0.1:30011"
HEAD = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

pynvml = pytest.importorskip("pynvml")
try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    pytest.skip(f"no GPU: {error}", allow_module_level=True)


def used() -> int:
    """Bytes in use on the first GPU."""
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = (
        Path(os.environ["MODEL_6_LAYERS"]) if "MODEL_6_LAYERS" in os.environ else tmp_path_factory.mktemp("m") / "cut"
    )
    if not folder.exists():
        command = [sys.executable, "-m", "qualify", "synth", "--config", CONFIG, "--out", folder, "--layers", "6"]
        subprocess.run([*command, "--device", "cuda"], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def server(model, tmp_path):
    """The recipe's process, ready; afterwards nothing of it is left on the GPU."""
    before = used()
    (tmp_path / "key").write_text(KEY)
    status = tmp_path / "status.json"
    environment = os.environ | {
        "MODEL_DIR": str(model), "ROUTER_PARTITIONS": "2", "UNCATALOGUED": "1", "PORT": "30011",
        "API_KEY_FILE": str(tmp_path / "key"), "HOST": "127.0.0.1", "HORIZON_STATUS": str(status), "MAX_RUNNING": "8",
        "CUDA_GRAPH_MAX_BS": "8", "DRAIN_SECONDS": "60",
    }  # fmt: skip
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [ROOT / "recipes/mova-fp8.sh"], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path
    )
    process.log, process.status, process.environment = Path(log.name), status, environment
    try:
        while not status.exists() or json.loads(status.read_text())["state"] == "loading":
            assert process.poll() is None, process.log.read_text()[-4000:]
            time.sleep(0.5)
        assert json.loads(status.read_text())["state"] == "ready", process.log.read_text()[-4000:]
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            supervise._end(json.loads(status.read_text())["engine"])
    deadline = time.time() + 20
    while used() > before + (64 << 20):
        assert time.time() < deadline, "GPU memory has not come back"
        time.sleep(0.5)
    assert supervise.session(json.loads(status.read_text())["engine"]) == []
    assert KEY not in process.log.read_text()


def ask(path: str, body: dict | None = None, headers: dict = HEAD):
    request = urllib.request.Request(URL + path, headers=headers, data=json.dumps(body).encode() if body else None)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def health(server) -> str:
    command = [sys.executable, "-I", ROOT / "launch/health.py"]
    return subprocess.run(command, env=server.environment, capture_output=True, text=True).stdout


def generate(count: int) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    return ask("/generate", {"input_ids": list(range(300, 340)), "sampling_params": sampling})


def test_serves_with_its_key_and_drains(server):
    assert health(server).startswith("ready")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask("/server_info", headers={})
    info = ask("/server_info")
    assert (info["attention_backend"], info["trust_remote_code"]) == ("fa3", False)
    for pid in supervise.session(json.loads(server.status.read_text())["engine"]):
        with contextlib.suppress(FileNotFoundError):
            assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert generate(16)["meta_info"]["completion_tokens"] == 16
    answers = []
    asking = threading.Thread(target=lambda: answers.append(generate(3000)))
    asking.start()
    time.sleep(1)
    server.send_signal(signal.SIGTERM)
    asking.join()
    assert answers[0]["meta_info"]["completion_tokens"] == 3000
    assert server.wait(timeout=90) == 0, server.log.read_text()[-4000:]


@pytest.mark.parametrize("title", supervise.WORKERS)
def test_a_dead_worker_ends_the_recipe(server, title):
    engine = json.loads(server.status.read_text())["engine"]
    [victim] = [pid for pid, name in supervise.workers(engine).items() if name.startswith(title)]
    os.kill(victim, signal.SIGKILL)
    assert server.wait(timeout=60) == 2
    assert health(server).startswith("broken")
