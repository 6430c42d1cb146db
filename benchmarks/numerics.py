"""How far a right engine is from the reference, over checkpoint seeds and prompts, and how far planted faults are.

    python3 -B -m benchmarks.numerics --work FOLDER --out FILE [--layers 6 | --full] [--seeds 0 1 2] [--prompts 2]
        [--faults all|none|NAME ...] [--fault-seeds N] [--model mova|375b-a23b]
    python3 -B -m benchmarks.numerics --margins FILE     # of a result file, under the policy as it is now

Needs the engine's environment, a GPU, and room for one checkpoint in FOLDER. For every seed a synthetic checkpoint is
written and served by the recipe's own flags (context, batch and CUDA graph sizes reduced); every prompt is one line of
JSON on standard output. Faults are planted in the reference and compared with the first prompt's recorded run, so that
one engine gives the margin of all: margin = largest of error / bound over the policy's numbers. The bound of a number
is the policy's and, where that has none, HEADROOM times the worst of all right runs. Fix it in qualify/policy.toml,
citing FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.serve import machine
from launch import plan, recipe, supervise
from launch.direct import OPENER
from qualify import numerics, policy
from qualify.errors import CannotRun, Parser, Rejected, exit_code
from qualify.models import MOVA_CONFIG
from qualify.reference import faults
from qualify.serving import Server

ROOT = Path(__file__).resolve().parents[1]
#: model -> (artifact, variables of its recipe, source of its synthetic checkpoints, router partitions)
MODELS = {
    "mova": ("mova-fp8", {"ROUTER_PARTITIONS": "2"}, ["--config", str(MOVA_CONFIG)], 2),
    "375b-a23b": ("k2-horizon-fp8", {"MODEL": "375b-a23b"}, ["--assumed", "375b-a23b"], 1),
}
#: what a cut is served with beside the recipe's flags: little, so that it starts fast
SMALL = {"MEM_FRACTION": "0.4", "CONTEXT_LENGTH": "8192", "MAX_RUNNING": "4", "CUDA_GRAPH_MAX_BS": "4"}
#: one prefill graph, for all prompts of the usual length
GRAPHS = ["--cuda-graph-bs-prefill", "640"]
HEADROOM = 2.0
#: numbers of which more is better: their error is what is missing to 1
SHARES = ("top5_overlap", "tie_aware_agreement")
#: last word of a number -> its smallest bound, where right engines can happen to show no error: a thousandth of the
#: logits, a few roundings of float32, one token, one of the decoded positions; and of any other, a part of a rounding
FLOORS = {
    "unequal_logits": 1e-3, "mixing": 1e-5, "misrouted": 1.0, "tie_aware_agreement": 0.02, "non_tie_mismatch": 0.02,
}  # fmt: skip
FLOOR = 1e-4
START_SECONDS = 400


# --- an engine ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(
    model: str, checkpoint: Path, work: Path, *, full: bool = False, flags=(), site: Path | None = None, **variables
):
    """Serve ``checkpoint`` by the recipe's flags, its modules recorded to ``work/modules``; yields a Server.

    ``site`` goes to the front of the engine's PYTHONPATH, ``variables`` to the recipe's. Raises CannotRun when the
    engine ends, or is not ready in time. Nothing of it is left afterwards.
    """
    artifact, own, _, _ = MODELS[model]
    port = os.environ.get("PORT", "30077")
    environment = {"UNCATALOGUED": "1", "PORT": port} | own | ({} if full else SMALL) | variables
    arguments = ["--model-path", str(checkpoint), "--tp-size", "1", "--ep-size", "1", "--host", "127.0.0.1", *flags]
    planned = plan.build(recipe.load(artifact), environment, arguments, "sm90")
    modules = work / "modules"
    shutil.rmtree(modules, ignore_errors=True)
    modules.mkdir(parents=True)
    paths = [*([str(site)] if site else []), str(ROOT)]
    log = work / "engine.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launch.engine"], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=work,
            env=os.environ | supervise.OFFLINE
            | {"PYTHONPATH": os.pathsep.join(paths), numerics.MODULE_OUTPUTS: str(modules)},
        )  # fmt: skip
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            words = [*planned.arguments, "--skip-server-warmup"]
            process.stdin.write(json.dumps({"arguments": words, "api_key": None}).encode())
        url = f"http://127.0.0.1:{port}"
        _until_ready(process, url, log)
        config = json.loads((checkpoint / "config.json").read_text())
        yield Server(url, None, config["vocab_size"])
    finally:
        supervise._end(process.pid)
        process.wait()


def _until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with OPENER.open(urllib.request.Request(f"{url}/health"), timeout=30) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-3000:]
            raise CannotRun(f"the engine ended, or is not ready after {START_SECONDS} s: ...{tail}")
        time.sleep(0.25)


def synthesise(model: str, folder: Path, layers: int | None, seed: int) -> None:
    """Write a synthetic checkpoint on the GPU; ``layers`` None is all of them."""
    size = ["--full"] if layers is None else ["--layers", str(layers)]
    command = [sys.executable, "-B", "-m", "qualify", "synth", *MODELS[model][2], "--out", str(folder), *size]
    subprocess.run([*command, "--seed", str(seed), "--device", "cuda"], cwd=ROOT, check=True, stdout=sys.stderr)


# --- margins ----------------------------------------------------------------------------------------------------------


def errors(numbers: dict[str, Any], thresholds: list[policy.Threshold]) -> dict[str, float]:
    """Error of every number of the policy that a run has: threshold's number -> error, infinite where it is not finite.

    Conditions that are no error (a smallest number of positions or of tokens) are left out.
    """
    found = {}
    for item in thresholds:
        if item.bound == "min" and item.number.rpartition(".")[2] not in SHARES:
            continue
        value: Any = numbers
        for part in item.number.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            value = float("inf") if value == numerics.NOT_FINITE else value
            found[item.number] = 1 - value if item.number.rpartition(".")[2] in SHARES else value
    return found


def bounds(healthy: list[dict[str, float]], thresholds: list[policy.Threshold]) -> dict[str, float]:
    """Bound of every error: the policy's, or HEADROOM times the worst of the right runs."""
    found = {}
    for item in thresholds:
        leaf = item.number.rpartition(".")[2]
        values = [errors[item.number] for errors in healthy if item.number in errors]
        if not values:
            continue
        if item.bound:
            found[item.number] = 1 - item.value if leaf in SHARES else item.value
        else:
            found[item.number] = max(HEADROOM * max(values), FLOORS.get(leaf, FLOOR))
    return found


def margin(wrong: dict[str, float], limits: dict[str, float]) -> dict[str, Any]:
    """The number that sees a fault best: {"margin": error / bound, "number", "error", "bound"}."""

    def ratio(name: str) -> float:
        if wrong[name] == 0:
            return 0.0
        return wrong[name] / limits[name] if limits[name] else float("inf")

    best = max(limits.keys() & wrong.keys(), key=ratio)
    return {"margin": ratio(best), "number": best, "error": wrong[best], "bound": limits[best]}


def evaluate(result: dict[str, Any]) -> dict[str, Any]:
    """The distribution over right runs, the bounds, and each fault's margin over all its runs (the smallest)."""
    thresholds = policy.load().section(MODELS[result["model"]][0], "sm90").of_stage("numerics")
    healthy = [errors(run["numbers"], thresholds) for run in result["runs"]]
    limits = bounds(healthy, thresholds)
    told = {}
    for name, limit in limits.items():
        values = [run[name] for run in healthy if name in run]
        told[name] = {
            "least": min(values), "median": statistics.median(values), "worst": max(values), "runs": len(values),
            "bound": limit, "met": max(values) <= limit,
        }  # fmt: skip
    margins: dict[str, dict[str, Any]] = {}
    for run in result["faults"]:
        found = margin(errors(run["numbers"], thresholds), limits)
        if run["fault"] not in margins or found["margin"] < margins[run["fault"]]["margin"]:
            margins[run["fault"]] = found
    return {"errors": told, "margins": margins}


# --- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = Parser(prog="python3 -m benchmarks.numerics", description=__doc__.splitlines()[0])
    parser.add_argument("--margins", type=Path, metavar="FILE", help="evaluate a result file anew, measure nothing")
    parser.add_argument(
        "--work", type=Path, help="scratch folder with room for one checkpoint, such as /dev/shm/numerics"
    )
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--model", choices=sorted(MODELS), default="mova")
    parser.add_argument("--layers", type=int, default=6, help="layers of the true-width cut (default 6)")
    parser.add_argument("--full", action="store_true", help="all layers, served as the recipe says")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the checkpoints")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each checkpoint (default 2)")
    parser.add_argument("--length", type=int, default=numerics.LENGTHS[0], help="tokens of a prompt")
    parser.add_argument("--faults", nargs="+", default=["all"], help="all, none, or names of the reference's faults")
    parser.add_argument(
        "--fault-seeds", type=int, default=1, help="checkpoints of which faults are planted (default 1)"
    )
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    if args.margins:
        print(json.dumps(evaluate(json.loads(args.margins.read_text())), indent=1))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # of `timeout`: the engine is ended in order
    if not (args.work and args.out):
        raise Rejected("say --work and --out, or --margins")
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Measure, writing the result file anew after every checkpoint; exit code 1 where a fault's margin is under 3."""
    if shutil.which("nvidia-smi") is None:
        raise CannotRun("there is no nvidia-smi here: this measures on a GPU")
    planted = {"all": list(faults.FAULTS), "none": []}.get(args.faults[0], args.faults)
    result: dict[str, Any] = {
        "benchmark": "numerics", "date": datetime.now(UTC).date().isoformat(), "machine": machine(),
        "model": args.model,
        "layers": "all" if args.full else args.layers, "prompt_tokens": args.length, "decoded": numerics.DECODED,
        "headroom": HEADROOM, "note": args.note, "runs": [], "faults": [],
    }  # fmt: skip
    args.work.mkdir(parents=True, exist_ok=True)
    for position, seed in enumerate(args.seeds):
        folder = args.work / f"seed-{seed}"
        if not (folder / "config.json").exists():
            synthesise(args.model, folder, None if args.full else args.layers, seed)
        one_checkpoint(args, result, folder, seed, planted if position < args.fault_seeds else [])
        if len(args.seeds) > 1:
            shutil.rmtree(folder)
        result |= evaluate(result)
        write(args.out, result)
    print(json.dumps({"result": str(args.out.name), "margins": result["margins"]}), flush=True)
    return 1 if any(found["margin"] < 3 for found in result["margins"].values()) else 0


def one_checkpoint(
    args: argparse.Namespace, result: dict[str, Any], folder: Path, seed: int, planted: list[str]
) -> None:
    """The prompts of one checkpoint, and the faults against the first of them."""
    partitions = MODELS[args.model][3]
    began = time.monotonic()
    first = None
    with engine(args.model, folder, args.work, full=args.full, flags=[] if args.full else GRAPHS) as server:
        started = time.monotonic() - began
        device = numerics.device()
        pair = numerics.references(folder, device, partitions)
        for number in range(args.prompts):
            began = time.monotonic()
            ids = numerics.draw(folder, pair[0].config, 1000 * seed + number, args.length)
            run = numerics.observe(server, ids, numerics.DECODED, args.work / "modules")
            seen = time.monotonic()
            numbers = numerics.compare(*pair, run)
            line = {
                "seed": seed, "prompt": number, "numbers": numbers, "device": device,
                "start_seconds": round(started, 1),
                "engine_seconds": round(seen - began, 1), "reference_seconds": round(time.monotonic() - seen, 1),
            }  # fmt: skip
            result["runs"].append(line)
            print(json.dumps({**line, "numbers": brief(numbers)}), flush=True)
            if first is None:
                kept = args.work / "first"
                shutil.rmtree(kept, ignore_errors=True)
                run.recorded.rename(kept)
                first = numerics.Run(run.prompt, run.answer, kept, run.recording_difference)
    for fault in planted:
        began = time.monotonic()
        try:
            wrong = numerics.references(folder, numerics.device(), partitions, fault)
        except Rejected as error:
            print(json.dumps({"seed": seed, "fault": fault, "not_run": str(error)}), flush=True)
            continue
        # The log-probabilities once; every fault is seen better in the modules.
        numbers = numerics.compare(*wrong, first, whole=seed == args.seeds[0])
        result["faults"].append({"seed": seed, "fault": fault, "numbers": brief(numbers)})
        line = {"seed": seed, "fault": fault, "seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(line | evaluate(result)["margins"][fault]), flush=True)
    shutil.rmtree(args.work / "first", ignore_errors=True)


def brief(numbers: dict[str, Any]) -> dict[str, Any]:
    """Without the arrays of the layers."""
    return {name: value for name, value in numbers.items() if name not in ("layers", "stream")}


def write(path: Path, result: dict[str, Any]) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(numerics.finite(result), indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(exit_code(main))
