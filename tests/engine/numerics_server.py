"""A stand-in for a served model: answers /generate and records its modules as the engine does, by the reference.

Between modules it rounds to BF16, as an engine does; a fault of the reference makes it a wrong engine.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save_file

from qualify.reference.model import Reference

TOP = 5


class Engine:
    """One model. ``spoil`` changes an answer's meta_info before it is sent, ``touch`` a layer's recorded tensors."""

    def __init__(self, folder: Path, recorder: Path, partitions: int = 2, fault: str | None = None):
        self.reference, self.recorder = Reference(folder, "cpu", partitions, fault=fault, bf16=True), recorder
        self.spoil = lambda told: None
        self.touch = lambda name, tensors: None
        self.asked = 0

    @torch.no_grad()
    def forward(self, ids: list[int], folder: Path | None) -> torch.Tensor:
        """Log-probabilities (T, V); every module's output rounded, records below ``folder``."""
        one = self.reference
        stream = one.embed(ids).bfloat16()
        for number in range(one.layer_count):
            kept = {"norm.input": stream}
            x = kept["attention.input"] = one.module(number, "norm", {"input": stream})["output"].bfloat16()
            if one.has(number, "values"):
                self._route(kept, number, "values", "value_router", x)
                values = one.module(number, "values", {"input": x})
                kept["values.output"] = values["output"].bfloat16()
            kept["attention.output"] = one.module(number, "attention", {"input": x})["output"].bfloat16()
            stream = kept["ffn_norm.input"] = stream + kept["attention.output"]
            y = kept["ffn.input"] = one.module(number, "second_norm", {"input": stream})["output"].bfloat16()
            if one.has(number, "router"):
                self._route(kept, number, "router", "router", y)
            kept["ffn.output"] = one.module(number, "ffn", {"input": y})["output"].bfloat16()
            stream = stream + kept["ffn.output"]
            self._write(folder, f"layer-{number:03}", kept)
        final = one.module(0, "final", {"input": stream})["output"].bfloat16()
        self._write(folder, "final", {"final.input": stream, "final.output": final})
        return one.logits(stream).bfloat16().float().log_softmax(-1)

    def _route(self, kept, number, kind, name, x):
        routed = self.reference.routing(number, kind, {"input": x})
        for field, key in (("logits", "logits"), ("ids", "chosen"), ("weights", "weights")):
            kept[f"{name}.{field}"] = routed[key]

    def _write(self, folder, name, kept):
        self.touch(name, kept)
        if folder:
            # Two names of one tensor are two tensors in the engine's file.
            save_file(
                {key: tensor.clone().contiguous() for key, tensor in kept.items()}, folder / f"{name}.safetensors"
            )

    def generate(self, body: dict) -> dict:
        self.asked += 1
        ids, wanted = list(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        armed, folder = self.recorder / "armed.json", None
        if armed.exists() and json.loads(armed.read_text())["input_ids"] == ids:
            folder = self.recorder / ".pass"
            folder.mkdir()
        count = len(ids)
        logs = self.forward(ids, folder)
        if folder:
            folder.rename(self.recorder / "pass")
            armed.unlink()
        rows, decoded = list(logs[:-1]), []
        for _ in range(wanted):
            rows.append(logs[-1])
            decoded.append(int(logs[-1].argmax()))
            logs = self.forward(ids + decoded, None) if len(decoded) < wanted else logs
        entries = [[row[token].item(), token, None] for row, token in zip(rows, ids[1:] + decoded, strict=True)]
        tops = [[[value.item(), int(token), None] for value, token in zip(*row.topk(TOP), strict=True)] for row in rows]
        told = {
            "prompt_tokens": count, "completion_tokens": wanted,
            "input_token_logprobs": [[None, ids[0], None], *entries[: count - 1]],
            "output_token_logprobs": entries[count - 1 :],
            "input_top_logprobs": [None, *tops[: count - 1]], "output_top_logprobs": tops[count - 1 :],
        }  # fmt: skip
        self.spoil(told)
        return {"text": "", "meta_info": told}


@contextmanager
def serving(engine: Engine):
    """The URL of an HTTP server on the loopback interface."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            told = json.dumps(engine.generate(body)).encode() if self.path == "/generate" else b""
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
