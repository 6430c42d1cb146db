"""How long ``inspect --headers-only`` takes on full-size checkpoints, beside the safetensors library.

    python3 benchmarks/inspect_headers.py [--runs N] [--output benchmarks/results/inspect_headers.json]

Writes two header-only checkpoints (true headers, sparse data: no disk space) into a temporary directory: MoVA
36B-A4B from its published config, and one of the 375B's size (dimensions of the public table, config not
published here). Each row is one process on one core, from start to exit, best of N; the safetensors row opens
every shard and reads name, dtype and shape of every tensor, nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from qualify.models import k2_horizon  # noqa: E402
from tests.cases.bases import T, write_headers_only  # noqa: E402

LIBRARY = """
import sys, pathlib
from safetensors import safe_open
count = 0
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():
            part = file.get_slice(name)
            part.get_shape(), part.get_dtype()
            count += 1
print(count)
"""


def size_375b() -> dict:
    """A config of the 375B's size: the public dimensions, one shared expert assumed."""
    config = json.loads((ROOT / "tests/data/K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_text())
    config |= {
        "hidden_size": 6144,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 48,
        "num_experts": 192,
        "moe_intermediate_size": 1792,
        "mova_num_experts": 0,
        "mova_num_experts_per_tok": 0,
        "attention_gate_func": None,
        "layernorm_num_groups": 1,
    }
    dense = json.loads((ROOT / "tests/data/K2-Horizon-7B-FP8.config.json").read_text())
    config["quantization_config"] = dense["quantization_config"] | {
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:model\.layers\.[012]\.mlp\..*_proj",
            r"re:.*mlp\.gate$",
        ]
    }
    return config


def write(directory: Path, config: dict, raw: bytes, shards: int) -> int:
    """Write a header-only checkpoint of ``config``; return its number of tensors."""
    tensors = {name: T(t.dtype, list(t.shape)) for name, t in k2_horizon.tensors(config).items()}
    names = list(tensors)
    step = -(-len(names) // shards)
    write_headers_only(
        directory,
        {
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors": {n: tensors[n] for n in names[i * step : (i + 1) * step]}
            for i in range(shards)
        },
        raw,
    )
    return len(tensors)


def measure(command: list[str], runs: int) -> dict:
    """Best wall and CPU seconds of ``runs`` runs, and the largest resident set in MB."""
    best, cpu, peak = float("inf"), float("inf"), 0
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, preexec_fn=_one_core)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        elapsed = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{command} exits {process.returncode}: {output[-2000:].decode()}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, elapsed)
        cpu = min(cpu, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        peak = max(peak, usage.ru_maxrss / 1024)
    return {"seconds": round(best, 3), "cpu_seconds": round(cpu, 3), "peak_rss_mb": round(peak, 1)}


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main() -> int:
    """Run the benchmark, print a table, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    mova_raw = (ROOT / "tests/data/K2-Horizon-MoVA-36B-A4B-FP8.config.json").read_bytes()
    large = size_375b()
    cases = [
        ("mova-36b-a4b", json.loads(mova_raw), mova_raw, 10, 1.0),
        ("375b-size", large, json.dumps(large).encode(), 80, 3.0),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, config, raw, shards, limit in cases:
            directory = Path(folder) / name
            count = write(directory, config, raw, shards)
            row = {"checkpoint": name, "tensors": count, "shards": shards, "limit_seconds": limit}
            inspect = [sys.executable, "-m", "qualify", "inspect", "--headers-only", "--json", str(directory)]
            row["inspect"] = measure(inspect, args.runs)
            if importlib.util.find_spec("safetensors") and importlib.util.find_spec("numpy"):
                row["safetensors"] = measure([sys.executable, "-c", LIBRARY, str(directory)], args.runs)
            rows.append(row)
            print(json.dumps(row))
    if args.output:
        result = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": "python3 benchmarks/inspect_headers.py",
            "machine": f"{_cpu()}, one core, {platform.python_implementation()} {platform.python_version()}",
            "load_average": round(os.getloadavg()[0], 1),
            "runs": args.runs,
            "rows": rows,
        }
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    slow = [row["checkpoint"] for row in rows if row["inspect"]["seconds"] > row["limit_seconds"]]
    fat = [row["checkpoint"] for row in rows if row["inspect"]["peak_rss_mb"] > 300]
    return 1 if slow or fat else 0


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
