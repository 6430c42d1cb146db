"""Stands in for launch.engine: reads the same request, answers the endpoints that supervision uses, has two workers.

FAKE_ENGINE (JSON) makes it misbehave: ``die`` (exit code) before serving, ``info`` (overrides of /server_info),
``print`` and ``stderr`` (text, with KEY for the API key), ``stubborn`` (ignores SIGTERM), ``workers`` (titles),
``slow`` (seconds), ``answers`` ({path: text} in place of the right one), ``code`` (exit code after SIGTERM).
"""

from __future__ import annotations

import json
import os
import signal
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


def main() -> None:
    request = json.load(sys.stdin)
    key = request["api_key"]
    Path(os.environ["FAKE_ENGINE_SEES"]).write_text(json.dumps({"argv": sys.argv, **request}))
    print(ASK.get("print", "").replace("KEY", key or ""), flush=True)
    print(ASK.get("stderr", "").replace("KEY", key or ""), file=sys.stderr, flush=True)
    time.sleep(ASK.get("slow", 0))
    if "die" in ASK:
        sys.exit(ASK["die"])
    given = arguments.parse(request["arguments"])
    info = {table()[name].field: value for name, value in given.items()}
    info |= {"trust_remote_code": False, "device": "cuda", "api_key": key, **ASK.get("info", {})}
    titles = ASK.get("workers", ["sglang::scheduler", "sglang::detokenizer"])
    children = [subprocess.Popen(["bash", "-c", f"exec -a {title} sleep 600"]) for title in titles]

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

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer((info["host"], info["port"]), Answer)

    def stop(*_):
        if not ASK.get("stubborn"):
            threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever()
    for child in children:
        child.kill()
    sys.exit(ASK.get("code", 0))


if __name__ == "__main__":
    main()
