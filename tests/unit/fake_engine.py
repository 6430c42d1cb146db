"""Stands in for launch.engine: reads the same request, answers the endpoints that supervision and suite use, has two
workers, and reports its load. What stages ask is answered by fake_openai.py, which lists more ways to misbehave.

FAKE_ENGINE (JSON) makes it misbehave: ``die`` (exit code) before serving, ``info`` (overrides of /server_info),
``print`` and ``stderr`` (text, with KEY for the API key), ``stubborn`` (ignores SIGTERM), ``workers`` (titles),
``slow`` (seconds), ``answers`` ({path: text} in place of the right one), ``code`` (exit code after SIGTERM),
``kill``: {"who": engine, launcher or scheduler, "at": which request for tokens, 0 is while loading; "model": of those
that name this one}, ``orphan`` (leaves a process of another session), ``scribble`` (writes into the
checkpoint at its end), ``leak`` (bytes of GPU memory that stay).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from fake_openai import CHAT, COMPLETIONS, GENERATE, Engine

from launch import arguments
from launch.engine_flags import table

ASK = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
#: safetensors' dtypes by torch's names
DTYPES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F32": "float32"}
LOCK, ASKED, WORKERS = threading.Lock(), [0], []
#: as the engine measures its start
STARTUP = {"load_weight": 0.01, "kv_cache_allocation": 0.01, "cuda_graph": {"decode": 0.02}, "scheduler_e2e": 0.05}


def report(folder: Path, model: Path) -> None:
    """What one rank would say that loaded this checkpoint, every tensor a parameter."""
    parameters = []
    for shard in sorted(model.glob("*.safetensors")):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    parameters.append({"name": name, "dtype": DTYPES[entry["dtype"]], "shape": entry["shape"],
                                       "scale": "scale" in name, "invalid": 0})  # fmt: skip
    count = len(parameters)
    told = {"schema": "horizon-images/load-report/v1", "format": "fake", "rank": 0, "ranks": 1,
            "tensors": {"expected": count, "consumed": count}, "parameters": parameters, "seconds": 0.1,
            "peak_gpu_bytes": 1 << 30}  # fmt: skip
    (folder / "rank-0.json").write_text(json.dumps(told))


def maybe_kill(asked: int) -> None:
    """Kill whom the test wants killed at this request."""
    if ASK.get("kill", {}).get("at") != asked:
        return
    who = {"engine": os.getpid(), "launcher": os.getppid(), "scheduler": WORKERS and WORKERS[0]}
    os.kill(who[ASK["kill"]["who"]], signal.SIGKILL)
    if ASK["kill"]["who"] == "scheduler":
        time.sleep(600)  # nobody computes any more


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # as launch.engine: it does not outlive its supervisor
    request = json.load(sys.stdin)
    key = request["api_key"]
    if sees := os.environ.get("FAKE_ENGINE_SEES"):
        Path(sees).write_text(json.dumps({"argv": sys.argv, **request}))
    if gpu := os.environ.get("FAKE_GPU"):
        Path(gpu).write_text(json.dumps({"pid": os.getpid(), "bytes": 60 << 30, "leak": ASK.get("leak", 0)}))
    print(ASK.get("print", "").replace("KEY", key or ""), flush=True)
    print(ASK.get("stderr", "").replace("KEY", key or ""), file=sys.stderr, flush=True)
    time.sleep(ASK.get("slow", 0))
    if "die" in ASK:
        sys.exit(ASK["die"])
    given = arguments.parse(request["arguments"])
    info = {table()[name].field: value for name, value in given.items()}
    info |= {"trust_remote_code": False, "device": "cuda", "api_key": key, "startup_time": STARTUP}
    info |= ASK.get("info", {})
    # Tests of the launcher alone have no checkpoint, and ask for no tokens.
    config = Path(info["model_path"], "config.json")
    vocabulary = json.loads(config.read_text())["vocab_size"] if config.exists() else 0
    engine = Engine(info.get("served_model_name"), vocabulary, info["context_length"], ASK)
    titles = ASK.get("workers", ["sglang::scheduler", "sglang::detokenizer"])
    if folder := os.environ.get("HORIZON_LOAD_REPORT"):
        report(Path(folder), Path(info["model_path"]))
    if ASK.get("orphan"):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    maybe_kill(0)
    children = [subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 600"]) for title in titles]
    WORKERS.extend(child.pid for child in children)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/server_info" and key and self.headers.get("Authorization") != f"Bearer {key}":
                self.send_error(401)
                return
            told = info if self.path == "/server_info" else engine.get(self.path)
            body = json.dumps(told) if told is not None else ""
            self.answer(200, ASK.get("answers", {}).get(self.path, body))

        def do_POST(self):
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path in (GENERATE, COMPLETIONS, CHAT):
                with LOCK:
                    # Of all requests, or of those for the model that the test names.
                    if f'"model": "{ASK["kill"]["model"]}"'.encode() in raw if "model" in ASK.get("kill", {}) else True:
                        ASKED[0] += 1
                        maybe_kill(ASKED[0])
            status, told = engine.post(self.path, raw)
            if isinstance(told, dict):
                self.answer(status, json.dumps(told))
                return
            self.send_response(status)
            self.end_headers()
            try:
                for piece in told:
                    self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            except OSError as error:
                with contextlib.suppress(OSError):
                    told.throw(error)  # its client has gone
            else:
                self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, status, text):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer((info["host"], info["port"]), Answer)

    def stop(*_):
        if not ASK.get("stubborn"):
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever()
    for child in children:
        child.kill()
    if ASK.get("scribble"):
        with Path(info["model_path"], "config.json").open("a") as file:
            file.write(" ")
    sys.exit(ASK.get("code", 0))


if __name__ == "__main__":
    main()
