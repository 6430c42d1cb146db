"""How fast ``verify-checkpoint`` hashes, beside parallel ``sha256sum`` on the same files.

    python3 benchmarks/verify_checkpoint.py [--files 8] [--megabytes 512] [--output FILE] [--directory DIR]

Writes shards of random bytes, reads them once to warm the page cache, then times ``sha256sum`` run by xargs on all
CPUs and the hashing of ``verify-checkpoint`` (``qualify.checkpoint.hashing``, a process of its own), alternating, best
of N. The files are in memory: what is measured is hashing, not the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HASH = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from qualify.checkpoint.hashing import Journal, digests
files = {path.name: str(path) for path in pathlib.Path(sys.argv[2]).iterdir()}
for name, digest in sorted(digests(files, Journal(None)).items()):
    print(digest, "", name)
"""


def main() -> int:
    """Run the benchmark; 1 when verify-checkpoint is below 85% of sha256sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        block = os.urandom(1 << 20)
        for number in range(args.files):
            with (Path(folder) / f"{number:05d}.safetensors").open("wb") as file:
                for _ in range(args.megabytes):
                    file.write(block)
        shell = f"ls | xargs -P {cpus} -n 1 sha256sum | sort -k2"
        best, outputs = {"sha256sum": float("inf"), "verify": float("inf")}, {}
        for _ in range(args.runs):
            for name, command in (
                ("sha256sum", ["bash", "-c", shell]),
                ("verify", [sys.executable, "-c", HASH, str(ROOT), folder]),
            ):
                began = time.perf_counter()
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
                best[name] = min(best[name], time.perf_counter() - began)
                outputs[name] = [line.split() for line in done.stdout.splitlines()]
        if outputs["sha256sum"] != outputs["verify"]:
            raise SystemExit("the digests differ")
    size = args.files * args.megabytes * (1 << 20)
    result = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "python3 benchmarks/verify_checkpoint.py",
        "machine": f"{platform.machine()}, {cpus} CPUs, Python {platform.python_version()}",
        "load_average": round(os.getloadavg()[0], 1),
        "files": args.files,
        "bytes": size,
        "gb_per_second": {name: round(size / 1e9 / seconds, 3) for name, seconds in best.items()},
        "share_of_sha256sum": round(best["sha256sum"] / best["verify"], 3),
    }
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["share_of_sha256sum"] >= 0.85 else 1


if __name__ == "__main__":
    sys.exit(main())
