"""A recipe's plan on this engine beside stock: load time and throughput, one server after the other on one GPU.

    python3 -B -m benchmarks.serve_stock ARTIFACT --model-dir DIR --out FILE [--repetitions 3] [ENGINE FLAG]...

Ours is the recipe itself; stock is a copy of the installed package with the series reversed, started with the same
engine flags. It must be able to serve the checkpoint, which it is not for MoVA FP8: see ``benchmarks.load_mova``.
The page cache is filled first, and each side is started once, ours first, so that compile caches favour stock.
Rates: qualify/serving.py. Load seconds are the engine's own, from its log; ready seconds are from the start of the
process until ``/ready`` answers. Needs a GPU and the engine with the series applied.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import stock
from benchmarks.load_mova import fill_page_cache, series_digest
from benchmarks.serve import machine
from launch import plan, recipe, supervise
from launch.machine import query
from qualify import serving
from qualify.checkpoint import inspection
from qualify.errors import CannotRun, Parser, exit_code

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("strict", "stock")
LOADED = re.compile(r"Load weight end\. elapsed=([0-9.]+) s")
START_SECONDS = 600


def measure(side: str, tree: Path, planned: plan.Plan, vocabulary: int, repetitions: int) -> dict[str, Any]:
    """Start the engine of ``side``, measure it and end it. Raises CannotRun with the end of its log."""
    url = f"http://127.0.0.1:{planned.value('--port')}"
    command: list[str | Path] = [ROOT / "recipes" / f"{planned.artifact}.sh", *planned.arguments]
    # The recipe starts the python3 of the path: the interpreter whose engine stock is a copy of.
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    }
    environment.pop("API_KEY_FILE", None)  # neither side has a key, on the loopback interface
    if side == "stock":
        command = supervise.ENGINE
        environment |= supervise.OFFLINE | {"PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "w+") as log:
        environment["HORIZON_STATUS"] = str(Path(folder, "status.json"))
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            # An engine that ended at once is told apart by its log.
            with (
                contextlib.suppress(BrokenPipeError),
                process.stdin,
            ):  # what the stock engine is told; the recipe does not read it
                process.stdin.write(json.dumps({"arguments": planned.arguments, "api_key": None}).encode())
            ready = until_ready(process, url, began, log)
            if (loaded := LOADED.search(text(log))) is None:
                raise CannotRun(f"the log of {side} has no line like {LOADED.pattern!r}, which tells its load time")
            server = serving.Server(url, None, vocabulary)
            result = {"ready_seconds": ready, "load_seconds": float(loaded[1])}
            result["kv_tokens"] = server.ask("/server_info", method="GET")["max_total_num_tokens"]
            result["sanity"] = serving.sanity(server)
            return result | {"rounds": serving.rounds(server, repetitions)}
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            supervise._end(process.pid)


def until_ready(process: subprocess.Popen, url: str, began: float, log) -> float:
    """Seconds since ``began``, once the engine is ready."""
    while process.poll() is None and time.monotonic() - began < START_SECONDS:
        try:
            supervise.get(f"{url}/ready", None)
        except supervise.UNANSWERED:
            time.sleep(supervise.POLL)
        else:
            return round(time.monotonic() - began, 1)
    raise CannotRun(f"the engine did not get ready:\n{text(log)[-6000:]}")


def text(log) -> str:
    log.flush()
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")


def main() -> int:
    parser = Parser(prog="python3 -m benchmarks.serve_stock", description=__doc__.splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--model-dir", required=True, type=Path, help="the checkpoint; only read")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repetitions", type=int, default=3, help="of each round (default 3)")
    args, passed = parser.parse_known_args()
    if stock.is_stock():
        raise CannotRun("the importable engine is stock; run this inside the image")
    directory = args.model_dir.resolve()
    arguments = ["--model-path", str(directory), "--host", "127.0.0.1", *passed]
    if not (gpus := query().gpus):
        raise CannotRun("no GPU is visible here: run this where the engine can serve")
    planned = plan.build(recipe.load(args.artifact), os.environ, arguments, gpus[0].target)
    config = json.loads((directory / "config.json").read_text())
    facts = inspection.inspect(directory, headers_only=True).as_dict()
    fill_page_cache(directory)
    with tempfile.TemporaryDirectory() as tree:
        stock.pristine_tree(stock.installed_package(), Path(tree))
        sides = {side: measure(side, Path(tree), planned, config["vocab_size"], args.repetitions) for side in SIDES}
    pairs = {name: [sides[side]["rounds"][name]["tokens_per_second"] for side in SIDES] for name in serving.ROUNDS}
    result = {
        "benchmark": "serve_stock",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "checkpoint": {name: facts[name] for name in ("format", "bytes", "tensors", "identity", "synthetic")}
        | {"layers": config["num_hidden_layers"]},
        "series_sha256": series_digest(),
        "command": f"python3 -B -m benchmarks.serve_stock {args.artifact} --model-dir DIR --out FILE "
        f"--repetitions {args.repetitions} {' '.join(passed)}".rstrip(),
        "engine": planned.command.replace(str(directory), "MODEL_DIR"),
        "strict_over_stock": {name: strict / plain for name, (strict, plain) in pairs.items()},
        **sides,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("strict_over_stock",)}))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
