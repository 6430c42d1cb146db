"""Load time of a MoVA FP8 checkpoint: this tree, strict, beside stock with its two gates relaxed.

    python3 -B -m benchmarks.load_mova --model-dir DIR --out FILE [--repetitions 5] [--stock TREE] [--device cpu]

Both sides load DIR through the engine's ``DefaultModelLoader`` on one GPU, router provenance given, each load in a
fresh process. After the page cache is filled and one load of each side is thrown away, the sides alternate, and
who goes first alternates too. Imports, process groups and the CUDA context are outside the measured interval: on a GPU
all processes get so far at once, and then load one after the other, each gone before the next begins. Building the
model, reading, checking, copying and post-processing are in the interval. One more strict load, outside the
comparison, says what its checks take: single loads differ by more than that.

Needs no network and no particular user. ``sglang`` must be importable with the series applied; stock is TREE, or
a copy of the installed package with the series reversed. ``--device cpu`` exercises everything on a tiny checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import stock
from qualify.errors import CannotRun, Rejected, exit_code

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("strict", "stock")


# --- one load, in its own process ------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> int:
    """Load once and write what was measured."""
    overrides = {"xllm_source_router_gemm_partitions": args.router_partitions}
    start = start_cpu if args.device == "cpu" else start_cuda
    model_config, device_config, torch = start(args.model_dir, overrides)
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora import layers  # noqa: F401 - the loader imports it on its way
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.model_loader.utils import get_model_architecture

    if stock.is_stock():
        stock.relax_gates()
    get_model_architecture(model_config)  # imports every model there is
    cuda = args.device == "cuda"
    parts = time_checks(torch.cuda.synchronize if cuda else lambda: None) if args.parts else None
    if cuda:
        torch.zeros(1, device="cuda")
    if sys.stdin.readline() != "go\n":
        return 2
    before = memory("RssAnon")
    peak = AnonymousPeak()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model = DefaultModelLoader(LoadConfig()).load_model(model_config=model_config, device_config=device_config)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    anonymous = peak.stop()
    result = {
        "seconds": seconds,
        "strict": getattr(model, "checkpoint_ledger", None) is not None,
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "host_peak_anonymous_bytes": anonymous - before,
        "host_peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "machine": machine(torch, cuda),
    }
    if parts is not None:
        result["check_seconds"] = {
            **parts,
            "sum": sum(parts[part] for part in ("admission", "files", "stream", "seal")),
        }
    args.child.write_text(json.dumps(result))
    return 0


def time_checks(wait) -> dict[str, float]:
    """Put clocks around all that the strict loader does beside the engine; ``wait`` waits for the device.

    Returns seconds by part, to be read after the load. ``stream`` is the time inside the ledger's generator that its
    source does not take; ``inventory``, ``poison`` and ``values`` (the scan of all parameters at the end) are parts of
    it, the rest is one look at every tensor and some 20 ms for the clocks.
    """
    from sglang.srt.layers.quantization import mova_fp8
    from sglang.srt.model_loader import checkpoint_ledger

    whole, parts = ("admission", "files", "stream", "seal"), ("inventory", "poison", "values")
    seconds = dict.fromkeys(whole + parts, 0.0)

    def clocked(owner, name: str, part: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments, **named):
            began = time.perf_counter()
            result = inner(*arguments, **named)
            wait()
            seconds[part] += time.perf_counter() - began
            return result

        setattr(owner, name, timed)

    def steps(iterator, sign: float):
        while True:
            began = time.perf_counter()
            item = next(iterator, None)
            seconds["stream"] += sign * (time.perf_counter() - began)
            if item is None:
                return
            yield item

    watch = checkpoint_ledger.Ledger.watch
    clocked(mova_fp8.MovaFp8Format, "inventory", "inventory")
    clocked(checkpoint_ledger, "_poison", "poison")
    clocked(checkpoint_ledger.Ledger, "_check_values", "values")
    checkpoint_ledger.Ledger.watch = lambda self, model, weights: steps(watch(self, model, steps(iter(weights), -1)), 1)
    clocked(mova_fp8, "admit", "admission")
    clocked(checkpoint_ledger.Ledger, "check_files", "files")
    clocked(checkpoint_ledger.Ledger, "seal", "seal")
    return seconds


def start_cpu(directory: Path, overrides: dict):
    """The engine's world without a GPU; see ``qualify.engine_cpu``."""
    from qualify import engine_cpu

    engine_cpu.start()
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(str(directory), dtype="bfloat16", model_override_args=json.dumps(overrides))
    return config, DeviceConfig("cpu"), torch


def start_cuda(directory: Path, overrides: dict):
    """One rank on GPU 0, in the order in which the engine's own single-purpose loader process does it."""
    from qualify import engine_cpu

    engine_cpu.prepare_environment()
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # no network: NCCL would find no interface
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    torch.cuda.set_device(0)
    arguments = ServerArgs(
        model_path=str(directory),
        dtype="bfloat16",
        json_model_override_args=json.dumps(overrides),
        skip_tokenizer_init=True,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    model_config = ModelConfig.from_server_args(arguments)
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        backend="nccl",
        distributed_init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments)
    init_dp_gathered_buffer(model_config)
    return model_config, DeviceConfig("cuda", 0), torch


class AnonymousPeak:
    """Samples this process's anonymous memory ten times a second: a second copy of the weights on the host would
    show there, which mapped checkpoint files do not."""

    def __init__(self):
        self._peak, self._done = memory("RssAnon"), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        while not self._done.wait(0.1):
            self._peak = max(self._peak, memory("RssAnon"))

    def stop(self) -> int:
        """Return the peak in bytes."""
        self._done.set()
        self._thread.join()
        return max(self._peak, memory("RssAnon"))


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(match[1]) * 1024


def machine(torch, cuda: bool) -> dict:
    """What the numbers depend on; nothing that names the host."""
    from importlib import metadata

    facts = {
        "python": sys.version.split()[0],
        "sglang": metadata.version("sglang"),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if cuda:
        version = Path("/proc/driver/nvidia/version")
        driver = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", version.read_text()) if version.exists() else None
        facts |= {
            "gpu": torch.cuda.get_device_name(0),
            "compute_capability": list(torch.cuda.get_device_capability(0)),
            "cuda": torch.version.cuda,
            "driver": driver[1] if driver else None,
        }
    return facts


# --- the comparison --------------------------------------------------------------------------------------------


class Load:
    """One load in a process of its own, which gets ready and then waits for :meth:`go`."""

    def __init__(self, side: str, tree: Path, args: argparse.Namespace, parts: bool = False):
        """``tree`` is the stock one, ``parts`` asks for the seconds of the checks."""
        self.side, self._folder = side, tempfile.TemporaryDirectory()
        self._out, self._log = Path(self._folder.name, "result.json"), Path(self._folder.name, "log")
        path = [str(tree)] if side == "stock" else []
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [*path, str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1" if side == "strict" else "",
        }
        command = [sys.executable, "-m", "benchmarks.load_mova", "--child", str(self._out)]
        command += ["--model-dir", str(args.model_dir), "--device", args.device]
        command += ["--router-partitions", str(args.router_partitions)] + (["--parts"] if parts else [])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def go(self) -> dict:
        """Load, wait for the end of the process, and return what it measured. Raises ``CannotRun`` with its output."""
        self._process.communicate(b"go\n")
        if self._process.returncode or not self._out.is_file():
            raise CannotRun(f"the {self.side} load failed:\n{self._log.read_text(errors='replace')[-6000:]}")
        result = json.loads(self._out.read_text())
        self._folder.cleanup()
        if result.pop("strict") != (self.side == "strict"):
            raise CannotRun(f"the {self.side} load did not run on the {self.side} engine")
        print(f"{self.side:7} {result['seconds']:8.3f} s", flush=True)
        return result

    def stop(self) -> None:
        """End a process that nobody needs any more."""
        self._process.kill()
        self._process.wait()


def in_turn(loads: list[Callable[[], Load]], ahead: int) -> Iterator[dict]:
    """Yield the results of ``loads``, one at a time, with the processes of ``ahead`` of them started before."""
    left, started = list(loads), []
    try:
        while left or started:
            while left and len(started) < ahead:
                started.append(left.pop(0)())
            yield started.pop(0).go()
    finally:
        for load in started:
            load.stop()


def fill_page_cache(directory: Path) -> int:
    """Read every shard once and return their size in bytes."""
    size, block = 0, memoryview(bytearray(1 << 26))
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                size += count
    if not size:
        raise Rejected(f"--model-dir {directory} holds no safetensors file")
    return size


def describe(directory: Path, size: int) -> dict:
    """What was loaded, without saying where it lay."""
    raw = (directory / "config.json").read_bytes()
    config = json.loads(raw)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return {
        "bytes": size,
        "tensors": len(index["weight_map"]),
        "layers": config["num_hidden_layers"],
        "synthetic": bool(config.get("horizon_images_synthetic")),
        "config_sha256": hashlib.sha256(raw).hexdigest(),
    }


def summarise(loads: dict[str, list[dict]]) -> dict:
    """Medians, their ratio, and the worst memory peaks."""
    seconds = {side: [load["seconds"] for load in loads[side]] for side in SIDES}
    median = {side: statistics.median(seconds[side]) for side in SIDES}
    pairs = [strict / plain for strict, plain in zip(seconds["strict"], seconds["stock"], strict=True)]
    peaks = {
        side: {
            key: max(load[key] for load in loads[side]) for key, value in loads[side][0].items() if is_peak(key, value)
        }
        for side in SIDES
    }
    return {
        "seconds": seconds,
        "median_seconds": median,
        "ratio_of_medians": median["strict"] / median["stock"],
        "median_of_paired_ratios": statistics.median(pairs),
        "peak": peaks,
    }


def is_peak(key: str, value) -> bool:
    """Whether a field of a load is a memory figure; those of the GPU are None on a CPU."""
    return key.endswith("_bytes") and value is not None


def run(args: argparse.Namespace) -> int:
    if args.child:
        return child(args)
    if stock.is_stock():
        raise CannotRun("the importable engine is stock; put the patched one on PYTHONPATH")
    if args.repetitions < 1:
        raise Rejected("--repetitions must be at least 1")
    args.model_dir = args.model_dir.resolve()
    size = fill_page_cache(args.model_dir)
    with tempfile.TemporaryDirectory() as directory:
        tree = args.stock
        if tree is None:
            tree = Path(directory)
            stock.pristine_tree(stock.installed_package(), tree)
        order = list(SIDES)
        for repetition in range(args.repetitions):
            order += SIDES if repetition % 2 else reversed(SIDES)
        starts = [functools.partial(Load, side, tree, args) for side in order]
        starts.append(functools.partial(Load, "strict", tree, args, parts=True))
        # On a GPU a process is 13 s of imports and 12 s of loading; more than all at once do not fit a small machine.
        results = in_turn(starts, ahead=len(starts) if args.device == "cuda" else 1)
        for _ in SIDES:
            next(results)
        print("warm; measuring", flush=True)
        loads: dict[str, list[dict]] = {side: [] for side in SIDES}
        for side in order[len(SIDES) :]:
            loads[side].append(next(results))
        (parts,) = results
    facts = [load.pop("machine") for side in SIDES for load in loads[side]]
    result = {
        "benchmark": "load_mova",
        "date": datetime.now(UTC).date().isoformat(),
        "device": args.device,
        "machine": facts[0],
        "checkpoint": describe(args.model_dir, size),
        "series_sha256": series_digest(),
        "repetitions": args.repetitions,
        **summarise(loads),
        "check_seconds": parts["check_seconds"],
    }
    ratio = result["ratio_of_medians"]
    print(f"median strict / median stock = {ratio:.4f} ({(ratio - 1) * 100:+.2f} %)")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    else:
        print(json.dumps(result, indent=2))
    return 0


def series_digest() -> str:
    """The digest of the patch series of this checkout."""
    command = [sys.executable, "-B", str(stock.PATCHES / "series.py"), "digest"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, metavar="DIR", help="the checkpoint; only read")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result here; default: print it")
    parser.add_argument("--stock", type=Path, metavar="TREE", help="directory that holds the stock sglang package")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="measured loads a side (default 5)")
    parser.add_argument("--router-partitions", type=int, choices=(1, 2), default=2, help="declared provenance")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
