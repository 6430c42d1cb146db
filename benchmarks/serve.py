"""Rates and latencies of a running server: decode at several concurrencies, prefill, and two sanity checks beside them.

    python3 -B -m benchmarks.serve --out FILE [--url http://127.0.0.1:30000] [--repetitions 3] [--note TEXT]

How it is measured: qualify/serving.py. Start-up and flags come from the launcher's status file.

Sanity: all log-probabilities of a 512-token prompt are finite, and a greedy answer is the same token for token after
a flush of the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launch import status
from qualify import serving
from qualify.errors import CannotRun, Parser, exit_code


def machine() -> dict[str, Any]:
    """GPU, driver and versions."""
    query = "--query-gpu=name,driver_version,memory.used,memory.total"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return {
        "gpu": [line.split(", ") for line in done.stdout.splitlines()],
        "versions": {name: metadata.version(name) for name in ("sglang", "torch", "triton", "sglang-kernel")},
        "cpus": os.cpu_count(),
    }


def without_paths(launch: dict[str, Any] | None) -> dict[str, Any] | None:
    """The launcher's record without the place of the checkpoint on this machine."""
    if launch is None:
        return None
    path = launch["plan"]["flags"]["--model-path"]["value"]
    return json.loads(json.dumps(launch).replace(json.dumps(path)[1:-1], "MODEL_DIR"))


def main() -> int:
    parser = Parser(prog="python3 -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--url", help="default: that of the launcher's status file")
    parser.add_argument("--vocabulary", type=int, default=250624, help="ids are drawn below this (default 250624)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    found = status.read()
    if args.url is None and found["state"] != "ready":
        raise CannotRun(f"no server is ready ({found['detail']}): start one, or give --url")
    key = None
    if os.environ.get("API_KEY_FILE"):
        from launch.plan import read_key

        key = read_key(os.environ["API_KEY_FILE"])
    server = serving.Server(args.url or found["url"], key, args.vocabulary)
    result = {
        "benchmark": "serve",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "launch": without_paths(found.get("launch")),
        "ready": found["detail"],
        "command": f"python3 -B -m benchmarks.serve --out FILE --repetitions {args.repetitions}",
        "note": args.note,
        "kv_tokens": server.ask("/server_info", method="GET")["max_total_num_tokens"],
        "sanity": serving.sanity(server),
        "rounds": serving.rounds(server, args.repetitions),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
