"""Stands in for launch.engine: reads the same request, answers the endpoints that supervision and suite use, has two
workers, and reports its load.

FAKE_ENGINE (JSON) makes it misbehave: ``die`` (exit code) before serving, ``info`` (overrides of /server_info),
``print`` and ``stderr`` (text, with KEY for the API key), ``stubborn`` (ignores SIGTERM), ``workers`` (titles),
``slow`` (seconds), ``answers`` ({path: text} in place of the right one), ``code`` (exit code after SIGTERM),
``nan`` and ``short`` (answers), ``moody`` (answers that change), ``kill``: {"who": engine, launcher or scheduler, "at":
which /generate, 0 is while loading}, ``orphan`` (leaves a process of another session), ``scribble`` (writes into the
checkpoint at its end), ``leak`` (bytes of GPU memory that stay).
"""

from __future__ import annotations

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
from launch import arguments
from launch.engine_flags import table

ASK = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
#: safetensors' dtypes by torch's names
DTYPES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F32": "float32"}
LOCK, ASKED, WORKERS = threading.Lock(), [0], []


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


def answer(body: dict) -> dict:
    """The answer to /generate: the same ids for the same prompt."""
    given, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
    seed = sum(given) + (ASKED[0] if ASK.get("moody") else 0)
    ids = [(seed * 31 + step) % 32 for step in range(wanted)]
    value = float("nan") if ASK.get("nan") else -1.5
    told = {"prompt_tokens": len(given), "completion_tokens": wanted - ASK.get("short", 0)}
    if body.get("return_logprob"):
        told["input_token_logprobs"] = [[None, given[0]], *([value, one] for one in given[1:])]
        told["output_token_logprobs"] = [[-0.5, one] for one in ids]
    return {"text": "", "meta_info": told}


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
    info |= {"trust_remote_code": False, "device": "cuda", "api_key": key, **ASK.get("info", {})}
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
            body = json.dumps(info).encode() if self.path == "/server_info" else b""
            body = ASK.get("answers", {}).get(self.path, body.decode()).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            told = b""
            if self.path == "/generate":
                with LOCK:
                    ASKED[0] += 1
                    maybe_kill(ASKED[0])
                    told = json.dumps(answer(body)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told)

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
