"""Side-by-side times of the E2M1-K32 MoE paths: W4A16, FP8 activations, humming-kernels, stored BF16 weights.

    python benchmarks/e2m1_k32.py run  --output results/e2m1-k32-h200.json --table t.md --plot p.png
    python benchmarks/e2m1_k32.py tune --output results/e2m1-k32-tuning.json

A sample is one whole MoE layer (routing, both GEMMs, activation, sum over routes) as a CUDA graph replay
between two events, queued behind a short spin so that the host is never waited for.  Providers alternate in
every round, the order is reversed every other round, and each round takes the next of several routings, so
that small batches find their experts in device memory and not in the L2 cache.  Reported: medians.

``run`` also times the tile table's entries beside the dispatched one ("neighbours"), ``compile`` only fills
Triton's cache.  ``prebuild`` compiles humming's kernels for an H200, without a GPU but with nvcc, into
``--humming-cache``; ``run`` with the same option takes them from there:

    python benchmarks/e2m1_k32.py prebuild --humming-cache humming-h200

Rows: {"shape", "tokens", "w4a16_ms", "triton_ms", "fp8_ms", "humming_ms", "bf16_ms"} and the share of the
measured copy bandwidth; ``w4a16_ms`` is the W4A16 path that the image dispatches.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "patches/sglang/files/sglang/srt/layers/moe"))

from e2m1_k32 import E2M1Experts, dequantize, fused_experts  # noqa: E402
from e2m1_k32.decode import decode_gemm_kernel  # noqa: E402
from e2m1_k32.gemm import grouped_gemm_ahead_kernel, grouped_gemm_kernel  # noqa: E402
from e2m1_k32.layout import K_ALIGN  # noqa: E402
from e2m1_k32.moe import DECODE_K, _arch, _gemm  # noqa: E402
from e2m1_k32.quantize import quantize_rows  # noqa: E402
from e2m1_k32.reference import random_experts, relative_error  # noqa: E402
from e2m1_k32.routing import group_routes, permute_activations, sum_routes  # noqa: E402
from e2m1_k32.tiles import DecodeTile, MoeTiles, Tile, pick_tiles, tile_table  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """One MoE layer: experts, hidden size, intermediate size, routes per token, and the batches to time."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: tuple[int, ...]


SHAPES = {
    # 288 experts, hidden 4096, intermediate 1024, top-8: the shape of the published SM120 measurement.
    "published": Shape(288, 4096, 1024, 8, (1, 8, 16, 32, 64, 256, 1024, 2048, 4096, 8192)),
    # The routed experts of K2-Horizon-MoVA-36B-A4B.
    "mova-like": Shape(100, 2560, 768, 8, (1, 16, 64, 256, 1024, 4096, 8192)),
    # GLM-5.3-Flash's routed experts on one GPU.
    "glm-like": Shape(288, 4096, 2048, 8, (1, 16, 64, 256, 1024, 4096, 8192)),
}


# ---- stored BF16 weights: the layer as it runs when the checkpoint is dequantised at load ----
@triton.jit
def _bf16_gemm_kernel(
    a_ptr, w_ptr, c_ptr, topk_w_ptr, sorted_ids_ptr, expert_ids_ptr, num_post_pad_ptr, num_valid, N, K,
    TOP_K: tl.constexpr, MUL_WEIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m, pid_n = pid // num_n, pid % num_n
    if pid_m * BLOCK_M >= tl.load(num_post_pad_ptr):
        return
    e = tl.load(expert_ids_ptr + pid_m).to(tl.int64)
    offs_t = tl.load(sorted_ids_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    mask = (offs_t < num_valid)[:, None]
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (offs_t // TOP_K * K)[:, None] + offs_k[None, :]
    w_ptrs = w_ptr + e * N * K + offs_k[:, None] + (offs_n * K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a_ptrs, mask=mask, other=0.0), tl.load(w_ptrs), acc=acc)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    if MUL_WEIGHT:
        acc = acc * tl.load(topk_w_ptr + offs_t, mask=offs_t < num_valid, other=0.0)[:, None]
    tl.store(c_ptr + (offs_t * N)[:, None] + offs_n[None, :], acc.to(tl.bfloat16), mask=mask)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + row * 2 * WIDTH + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + cols, mask=cols < WIDTH, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + cols, (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=cols < WIDTH)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """BF16 [R, 2 I] -> silu(gate) * up, BF16 [R, I]."""
    rows, i = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, i), dtype=x.dtype, device=x.device)
    _silu_mul_kernel[(rows, triton.cdiv(i, 1024))](x, out, WIDTH=i, BLOCK=1024)
    return out


class Bf16:
    """Weights dequantised once to BF16 (3.8 times the bytes), Triton grouped GEMMs."""

    def __init__(self, experts: E2M1Experts):
        self.num_experts = experts.num_experts

        def bf16(w, s, g):
            out = torch.empty(*w.shape[:2], w.shape[2] * 2, dtype=torch.bfloat16, device=w.device)
            for e in range(w.shape[0]):
                out[e] = dequantize(w[e], s[e], g[e], torch.float32)
            return out

        self.w13 = bf16(experts.w13, experts.w13_scale, experts.w13_global)
        self.w2 = bf16(experts.w2, experts.w2_scale, experts.w2_global)

    def _gemm(self, a, w, weights, r, routes, top_k, mul, tile):
        bm, bn, bk, warps, stages = tile
        n, k = w.shape[1:]
        out = torch.empty((routes, n), dtype=torch.bfloat16, device=a.device)
        _bf16_gemm_kernel[(r.num_blocks * triton.cdiv(n, bn),)](
            a, w, out, weights, r.sorted_ids, r.expert_ids, r.num_post_pad, routes, n, k,
            TOP_K=top_k, MUL_WEIGHT=mul, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out

    def __call__(self, x, topk_weights, topk_ids):
        routes, top_k = topk_ids.numel(), topk_ids.shape[1]
        mean = routes / self.num_experts
        tile = (16, 64, 128, 4, 4) if mean <= 12 else (64, 128, 64, 4, 4) if mean <= 48 else (128, 128, 64, 8, 4)
        r, _ = group_routes(topk_ids, self.num_experts, tile[0])
        h = silu_mul(self._gemm(x, self.w13, topk_weights, r, routes, top_k, False, tile))
        y = self._gemm(h, self.w2, topk_weights, r, routes, 1, True, tile)
        out = torch.empty_like(x)
        sum_routes(y, topk_ids, self.num_experts, out)
        return out


def humming_layer(experts: int, n: int, k: int, fp8: bool):
    """humming's description of one projection [experts, n, k] of this format."""
    from humming import dtypes
    from humming.config import LayerConfig

    return LayerConfig(
        shape_n=n, shape_k=k, num_experts=experts,
        a_dtype=dtypes.float8e4m3 if fp8 else dtypes.bfloat16, b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e4m3, c_dtype=dtypes.bfloat16, weight_scale_group_size=32, weight_scale_2_type="tensor",
    )  # fmt: skip


def humming_tuning(layer, routes: int) -> tuple[dict, dict]:
    """(compute config, tuning config) of humming's own heuristics for this many rows."""
    from humming.tune import get_heuristics_config

    tuning = dict(get_heuristics_config(layer, routes, gemm_type="indexed"))
    compute = {"gemm_type": "indexed"}
    if "use_f16_accum" in tuning:
        compute["use_f16_accum"] = tuning.pop("use_f16_accum")
    return compute, tuning


def use_humming_cache(directory: Path) -> None:
    """humming takes kernels from ``directory`` and adds what is missing (nvcc).

    Its own cache answers only to the same paths, file times and compiler version, so it cannot be filled on another
    machine.  Here a kernel's name depends on humming's version, its source and the architecture.
    """
    from humming.jit.compiler import NVCCCompiler
    from humming.jit.runtime import KernelRuntime

    class Cached(NVCCCompiler):
        @classmethod
        def compile(cls, code, sm_version, kernel_expr, disable_fast_math=False, postprocess_cubin=None):
            identity = (version("humming-kernels"), sm_version, kernel_expr, disable_fast_math, code)
            path = directory / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.cubin"
            if not path.exists():
                built = super().compile(code, sm_version, kernel_expr, disable_fast_math, postprocess_cubin)
                path.with_suffix(".partial").write_bytes(Path(built).read_bytes())
                path.with_suffix(".partial").replace(path)
            return path.as_posix()

    directory.mkdir(parents=True, exist_ok=True)
    KernelRuntime._get_compiler = staticmethod(lambda: Cached)


def prebuild(args: argparse.Namespace) -> int:
    """Compile every kernel of humming that ``run`` asks for on an H200; returns their number.  No GPU is needed."""
    from humming.jit.runtime import KernelRuntime
    from humming.kernel.humming import HummingKernel
    from humming.kernel.repack_weight import RepackWeightKernel

    h200 = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, clock_rate=1980000,
    )  # fmt: skip
    cuda = {
        "get_device_properties": h200, "get_device_capability": (9, 0), "get_device_name": "NVIDIA H200",
        "current_device": 0, "set_device": None,
    }  # fmt: skip
    patches = [mock.patch.object(torch.cuda, name, return_value=value) for name, value in cuda.items()]
    patches += [mock.patch.object(KernelRuntime, "current_context", staticmethod(lambda: 0))]
    patches += [mock.patch.object(c, "load_cubin", lambda self: None) for c in (KernelRuntime, HummingKernel)]
    for patch in patches:
        patch.start()
    for fp8 in (False, True):
        RepackWeightKernel(weight_bits=4, activation_bits=8 if fp8 else 16, is_weight_packed=True, use_wgmma=True)
        for shape in (SHAPES[name] for name in args.shapes):
            for n, k in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
                layer = humming_layer(shape.experts, n, k, fp8)
                for tokens in args.tokens or shape.tokens:
                    compute, tuning = humming_tuning(layer, tokens * shape.top_k)
                    tuning.pop("num_sms", None)
                    HummingKernel(**json.loads(layer.to_str()), **compute, **tuning)
    return len(list(args.humming_cache.glob("*.cubin")))


class Humming:
    """humming-kernels: indexed grouped GEMMs with its own repacked weights and its own tile heuristics."""

    def __init__(self, experts: E2M1Experts, fp8: bool = False):
        from humming.transform import transform_humming_tensors

        self.num_experts = experts.num_experts
        self.locks = torch.zeros(1024, dtype=torch.int32, device=experts.w13.device)

        def prepare(w, s, g):
            config = humming_layer(w.shape[0], w.shape[1], w.shape[2] * 2, fp8)
            tensors = {
                "weight": w.view(torch.int32),
                "weight_scale": s.view(torch.float8_e4m3fn),
                "weight_scale_2": g,
            }
            return config, transform_humming_tensors(config, tensors)

        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepare(experts.w2, experts.w2_scale, experts.w2_global)  # builds and loads the repack kernel
        start.record()
        self.up = prepare(experts.w13, experts.w13_scale, experts.w13_global)
        self.down = prepare(experts.w2, experts.w2_scale, experts.w2_global)
        stop.record()
        stop.synchronize()
        self.repack_ms = start.elapsed_time(stop)
        self.repacked_bytes = sum(t.nbytes for _, d in (self.up, self.down) for t in d.values())

    @functools.cache  # noqa: B019 (a handful of instances, each for the whole run)
    def config(self, layer: str, routes: int) -> tuple[dict, dict]:
        return humming_tuning(getattr(self, layer)[0], routes)

    def gemm(self, layer: str, a, r, routes: int, top_k: int):
        from humming.forward import humming_forward

        config, tensors = getattr(self, layer)
        compute, tuning = self.config(layer, routes)
        return humming_forward(  # quantises the activations per row itself if the layer says FP8
            config, inputs=a, sorted_ids=r.sorted_ids, expert_ids=r.expert_ids, num_tokens_padded=r.num_post_pad,
            locks=self.locks, top_k=top_k, compute_config=compute, tuning_config=tuning, **tensors,
        )  # fmt: skip

    def __call__(self, x, topk_weights, topk_ids):
        from humming.ops import moe_fused_mul_sum

        routes, top_k = topk_ids.numel(), topk_ids.shape[1]
        up_m, down_m = (self.config(layer, routes)[1]["block_shape"][0] for layer in ("up", "down"))
        r, _ = group_routes(topk_ids, self.num_experts, up_m)
        h = silu_mul(self.gemm("up", x, r, routes, top_k))
        if down_m != up_m:
            r, _ = group_routes(topk_ids, self.num_experts, down_m)
        y = self.gemm("down", h, r, routes, 1)
        return moe_fused_mul_sum(y.view(x.shape[0], top_k, -1), topk_weights)


# ---- measuring ----
def make_inputs(shape: Shape, tokens: int, variants: int, seed: int = 0):
    """``variants`` inputs (x, weights, ids): normal activations, uniform routing without repeats in a token."""
    g = torch.Generator("cuda").manual_seed(seed)
    inputs = []
    for _ in range(variants):
        x = torch.randn(tokens, shape.hidden, device="cuda", generator=g).bfloat16()
        ids = torch.rand(tokens, shape.experts, device="cuda", generator=g).topk(shape.top_k, -1).indices.int()
        weights = torch.rand(tokens, shape.top_k, device="cuda", generator=g)
        inputs.append((x, weights / weights.sum(-1, keepdim=True), ids))
    return inputs


def capture(call: Callable, inputs: list) -> list:
    """One CUDA graph per input (after a warm-up call, which compiles)."""
    graphs = []
    for args in inputs:
        call(*args)
    torch.cuda.synchronize()
    for args in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(*args)
        graphs.append(graph)
    return graphs


def interleaved_medians(graphs: dict[str, list], samples: int) -> dict[str, float]:
    """Median milliseconds of ``samples`` event pairs per provider, in alternating order."""
    names = list(graphs)
    for name in names:
        for graph in graphs[name]:
            graph.replay()
    torch.cuda.synchronize()
    events = {name: [] for name in names}
    for i in range(samples):
        for name in names if i % 2 == 0 else reversed(names):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(60_000)
            start.record()
            graphs[name][i % len(graphs[name])].replay()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written."""
    src = torch.randint(0, 256, (1 << 32,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        dst.copy_(src)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 2 * src.nbytes / statistics.median(times) / 1e6


def layer_bytes(shape: Shape, inputs: list) -> float:
    """Mean bytes of the distinct experts that the inputs touch (weights and scales, read once)."""
    expert = 3 * shape.hidden * shape.intermediate * 17 / 32
    return statistics.mean(ids.unique().numel() for _, _, ids in inputs) * expert


def environment(argv: list[str]) -> dict:
    """GPU, driver, versions and command: what a reader needs to repeat the run (no names, no paths)."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    gpu, driver, clock = (
        subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
    )
    try:
        humming = version("humming-kernels")
    except Exception:
        humming = None
    return {
        "gpu": gpu, "driver": driver, "max_sm_clock": clock, "cuda": torch.version.cuda, "torch": torch.__version__,
        "triton": triton.__version__, "humming-kernels": humming, "python": sys.version.split()[0],
        "command": shlex.join(["python", "benchmarks/e2m1_k32.py", *argv]),
    }  # fmt: skip


def _candidates(shape: Shape, tokens: int) -> dict[str, MoeTiles]:
    """The tiles dispatched for a batch, W4A16 and FP8, and the W4A16 table's entries beside them."""
    decode = shape.hidden % DECODE_K == 0 and shape.intermediate % DECODE_K == 0
    arch = _arch(torch.device("cuda", 0))
    routes = tokens * shape.top_k
    picks = {path: pick_tiles(routes, shape.experts, path == "fp8", decode, arch) for path in ("triton", "fp8")}
    table = [tiles for _, tiles in tile_table(False, decode, arch)]
    place = table.index(picks["triton"])
    if place > 0:
        picks["smaller"] = table[place - 1]
    if place + 1 < len(table):
        picks["larger"] = table[place + 1]
    return picks


def compile_all(args: argparse.Namespace) -> list[str]:
    """Compile every tile that the run will use in parallel; returns the failures."""
    jobs = set()
    for shape in (SHAPES[name] for name in args.shapes):
        for tokens in args.tokens or shape.tokens:
            for path, tiles in _candidates(shape, tokens).items():
                for gated, tile in ((True, tiles.up), (False, tiles.down)):
                    jobs.add((shape, path == "fp8", gated, tiles.m, tile))
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        return [error for error in pool.map(_compile_one, sorted(jobs, key=str), chunksize=1) if error]


def run(args: argparse.Namespace, argv: list[str]) -> dict:
    failed = compile_all(args)
    if failed:
        raise RuntimeError("\n".join(failed))
    result = {"environment": environment(argv), "copy_gbps": round(copy_bandwidth(), 1), "samples": args.samples}
    result |= {"rows": [], "errors": [], "neighbours": [], "tiles": [], "humming_repack": {}}
    for name in args.shapes:
        shape = SHAPES[name]
        g = torch.Generator("cuda").manual_seed(1)
        experts = random_experts(shape.experts, shape.hidden, shape.intermediate, "cuda", g)
        calls = {"bf16": Bf16(experts)}
        if args.humming:
            calls["humming"] = Humming(experts)
            calls["humming_fp8"] = Humming(experts, fp8=True)
            result["humming_repack"][name] = {
                key: {"ms": round(calls[key].repack_ms, 2), "bytes": calls[key].repacked_bytes}
                for key in ("humming", "humming_fp8")
            }
            x, weights, ids = make_inputs(shape, 16, 1)[0]
            try:
                calls["humming_fp8"](x, weights, ids)
            except Exception as error:  # an optional column: say why it is empty
                result["humming_repack"][name]["humming_fp8_failed"] = f"{type(error).__name__}: {error}"[:300]
                del calls["humming_fp8"]
        for tokens in args.tokens or shape.tokens:
            inputs = make_inputs(shape, tokens, 6 if tokens <= 64 else 2)
            candidates = _candidates(shape, tokens)
            calls |= {key: functools.partial(_ours, experts, key == "fp8", tiles) for key, tiles in candidates.items()}
            active = {key: call for key, call in calls.items() if key in candidates or not _is_ours(key)}
            outputs = {key: call(*inputs[0]) for key, call in active.items()}
            errors = {
                key: round(relative_error(o, outputs["triton"]), 6) for key, o in outputs.items() if key != "triton"
            }
            result["errors"].append({"shape": name, "tokens": tokens, "against": "triton", **errors})
            graphs = {key: capture(call, inputs) for key, call in active.items()}
            ms = interleaved_medians(graphs, args.samples)
            row = {"shape": name, "tokens": tokens, "w4a16_ms": round(ms["triton"], 5)}
            for key in ("triton", "fp8", "humming", "bf16", "humming_fp8"):
                row[f"{key}_ms"] = round(ms[key], 5) if key in ms else None
            share = layer_bytes(shape, inputs) / ms["triton"] / 1e6 / result["copy_gbps"]
            row["copy_share"] = round(share, 3)
            result["rows"].append(row)
            beside = {f"{key}_ms": round(ms[key], 5) for key in ("smaller", "larger") if key in ms}
            result["neighbours"].append({"shape": name, "tokens": tokens, "triton_ms": row["triton_ms"], **beside})
            tiles = {key: t.as_dict() for key, t in candidates.items()}
            result["tiles"].append({"shape": name, "tokens": tokens, **tiles})
            print(json.dumps(row), json.dumps(beside), json.dumps(errors), flush=True)
            del graphs
        del experts, calls, active
        torch.cuda.empty_cache()
        write(args.output, json.dumps(result, indent=1) + "\n")  # a later shape may fail
    return result


def _is_ours(key: str) -> bool:
    return key in ("triton", "fp8", "smaller", "larger")


def _ours(experts, fp8, tiles, x, weights, ids):
    return fused_experts(x, experts, weights, ids, fp8=fp8, tiles=tiles)


# ---- tuning: each GEMM on its own, over a grid of tiles ----
def _t(n, k, warps, stages, *regs):
    return [Tile(n, k, warps, stages, r) for r in (regs or (0,))]


W4A16_GRID = {
    8: [
        DecodeTile(*t)
        for t in ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4), (128, 4), (128, 8))
    ],
    16: [DecodeTile(*t) for t in ((64, 2), (64, 4), (128, 4), (128, 8))]
    + _t(64, 256, 4, 3, 0, 96) + _t(128, 128, 4, 3) + _t(128, 128, 4, 4) + _t(128, 256, 8, 3),
    32: [DecodeTile(*t) for t in ((64, 4), (128, 8))]
    + _t(64, 256, 4, 3, 0, 96) + _t(128, 128, 4, 3, 0, 128) + _t(128, 256, 8, 2),
    64: _t(64, 256, 4, 3) + _t(128, 128, 4, 2) + _t(128, 128, 4, 3, 0, 168) + _t(128, 256, 8, 2) + _t(128, 256, 8, 3),
    128: _t(128, 128, 8, 3, 128) + _t(256, 128, 8, 3) + _t(256, 128, 8, 4) + _t(256, 128, 16, 3)
    + _t(128, 256, 8, 2, 0, 128) + _t(128, 128, 4, 3),
    256: _t(128, 128, 8, 2) + _t(128, 128, 8, 3) + _t(128, 128, 8, 4) + _t(128, 128, 16, 3) + _t(256, 128, 16, 3),
}  # fmt: skip
FP8_GRID = {
    16: _t(64, 128, 4, 4) + _t(128, 128, 4, 3) + _t(128, 128, 4, 4),
    32: _t(64, 128, 4, 3) + _t(64, 128, 4, 4) + _t(128, 128, 4, 3) + _t(128, 128, 8, 4),
    64: _t(64, 128, 4, 2, 128) + _t(64, 128, 4, 3, 104, 128) + _t(64, 128, 4, 4, 128),
    128: _t(64, 128, 4, 2, 168) + _t(64, 128, 4, 3, 0, 160, 168, 200) + _t(64, 128, 4, 4) + _t(128, 128, 8, 3),
}  # fmt: skip
BLOCKS = {
    1: (8, 16), 16: (8, 16), 64: (8, 16), 128: (8, 16), 256: (8, 16, 32), 512: (16, 32), 1024: (32, 64),
    2048: (64, 128), 4096: (64, 128), 8192: (128, 256),
}  # fmt: skip


def _compile_one(job) -> str | None:
    """Compile one tile in a worker process, so that the parent finds it in Triton's cache."""
    shape, fp8, gated, m, tile = job
    n, k = (2 * shape.intermediate, shape.hidden) if gated else (shape.hidden, shape.intermediate)
    block_n = tile.n if n % tile.n == 0 else K_ALIGN
    bf16, f32, u8, i32 = torch.bfloat16, torch.float32, torch.uint8, torch.int32
    common = {
        "N": n,
        "K": k,
        "TOP_K": shape.top_k if gated else 1,
        "GATED": gated,
        "BLOCK_M": m,
        "BLOCK_N": block_n,
    }
    common |= {"num_warps": tile.warps, "grid": (1,)}
    strides = (8, k, n // 2 if gated else n)
    try:
        if isinstance(tile, DecodeTile):
            decode_gemm_kernel.warmup(bf16, u8, u8, f32, bf16, f32, i32, i32, i32, *strides, **common)
        else:
            common |= {"num_stages": tile.stages} | ({"maxnreg": tile.regs} if tile.regs else {})
            act = torch.float8_e4m3fn if fp8 else bf16
            kernel = grouped_gemm_ahead_kernel if tile.ahead else grouped_gemm_kernel
            kernel.warmup(
                act, f32, u8, u8, f32, bf16, f32, i32, i32, i32, *strides,
                FP8=fp8, PERMUTED=gated and not fp8, BLOCK_K=tile.k if k % tile.k == 0 else K_ALIGN, USE_ASM=True,
                **common,
            )  # fmt: skip
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[:200]}"
    return None


def _tune_up(w: E2M1Experts, top_k: int, tile, orders, weights, r):
    routes = weights.numel()
    out = torch.empty(routes, w.intermediate_size, device="cuda", dtype=torch.bfloat16)
    a = orders[isinstance(tile, DecodeTile)]
    _gemm(*a, w.w13, w.w13_scale, w.w13_global, out, weights, r, routes, top_k, True, tile)


def _tune_down(w: E2M1Experts, h, tile, _orders, weights, r):
    routes = weights.numel()
    out = torch.empty(routes, w.hidden_size, device="cuda", dtype=torch.bfloat16)
    _gemm(*h, w.w2, w.w2_scale, w.w2_global, out, weights, r, routes, 1, False, tile)


def tune(args: argparse.Namespace, argv: list[str]) -> dict:
    """Milliseconds of each GEMM for every tile of the grid, per batch and rows per block."""
    result = {"environment": environment(argv), "rows": [], "failed": []}
    for name in args.shapes:
        shape = SHAPES[name]
        sizes = {t: BLOCKS[t] for t in (args.tokens or BLOCKS)}
        grids = [(p, g) for p, g in (("w4a16", W4A16_GRID), ("fp8", FP8_GRID)) if p in args.paths]
        jobs = {
            (shape, path == "fp8", gated, m, tile)
            for blocks in sizes.values()
            for m in blocks
            for path, grid in grids
            for tile in grid.get(m, ())
            for gated in (True, False)
        }
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
            result["failed"] += [e for e in pool.map(_compile_one, sorted(jobs, key=str), chunksize=1) if e]
        g = torch.Generator("cuda").manual_seed(1)
        w = random_experts(shape.experts, shape.hidden, shape.intermediate, "cuda", g)
        for tokens, blocks in sizes.items():
            inputs = make_inputs(shape, tokens, 6 if tokens <= 64 else 1)
            routes = tokens * shape.top_k
            h = torch.randn(routes, shape.intermediate, device="cuda").bfloat16()
            for m in blocks:
                for path, grid in grids:
                    fp8 = path == "fp8"
                    routed = []
                    for x, weights, ids in inputs:
                        r, _ = group_routes(ids, shape.experts, m)
                        orders = (permute_activations(x), permute_activations(x, decode=True))
                        routed.append(((quantize_rows(x),) if fp8 else [(o, None) for o in orders], weights, r))
                    b = quantize_rows(h) if fp8 else (h, None)
                    for tile in grid.get(m, ()):
                        up = functools.partial(_tune_up, w, shape.top_k, tile)
                        down = functools.partial(_tune_down, w, b, tile)
                        row = {"shape": name, "tokens": tokens, "path": path, "m": m}
                        row |= {"tile": list(astuple(tile))}
                        for key, call in (("up_ms", up), ("down_ms", down)):
                            try:
                                graphs = {"g": capture(call, routed)}
                                samples = 12 if tokens > 512 else 24
                                row[key] = round(interleaved_medians(graphs, samples)["g"], 5)
                            except Exception as error:
                                message = f"{row} {key}: {type(error).__name__}: {str(error)[:200]}"
                                result["failed"].append(message)
                        result["rows"].append(row)
            for path in ("w4a16", "fp8"):
                for key in ("up_ms", "down_ms"):
                    rows = [q for q in result["rows"] if q["tokens"] == tokens and q["path"] == path and key in q]
                    rows = sorted((q for q in rows if q["shape"] == name), key=lambda q: q[key])[:4]
                    print(name, tokens, path, key, [(q["m"], *q["tile"], q[key]) for q in rows], flush=True)
    return result


# ---- reporting ----
def table(result: dict) -> str:
    """Markdown table of the rows."""
    columns = ("w4a16_ms", "triton_ms", "fp8_ms", "humming_ms", "humming_fp8_ms", "bf16_ms")
    lines = [
        "| shape | tokens | W4A16 | Triton | FP8 | humming | humming FP8 | BF16 | W4A16 / humming speed "
        "| share of copy bandwidth |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        cells = ["-" if row[c] is None else f"{row[c]:.4f}" for c in columns]
        ratio = "-" if row["humming_ms"] is None else f"{row['humming_ms'] / row['w4a16_ms']:.2f}"
        share = f"{row['copy_share']:.2f}" if row["tokens"] <= 64 else ""
        lines.append(f"| {row['shape']} | {row['tokens']} | {' | '.join(cells)} | {ratio} | {share} |")
    return "\n".join(lines) + "\n"


def plot(result: dict, path: Path) -> None:
    """Speed relative to humming per shape (or to BF16 where humming did not run)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shapes = list(dict.fromkeys(r["shape"] for r in result["rows"]))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), sharey=True, squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        rows = [r for r in result["rows"] if r["shape"] == shape]
        for key, label in (
            ("w4a16_ms", "W4A16"),
            ("fp8_ms", "FP8 activations"),
            ("humming_ms", "humming"),
            ("bf16_ms", "BF16"),
        ):
            points = [(r["tokens"], r["bf16_ms"] / r[key]) for r in rows if r[key] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label)
        axis.set(xscale="log", title=shape, xlabel="tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("speed relative to stored BF16 weights")
    axes[0][0].legend()
    figure.suptitle(result["environment"]["gpu"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write(path: Path, text: str) -> None:
    """Write to a temporary file beside ``path`` and rename."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
        f.write(text)
    Path(f.name).chmod(0o644)
    Path(f.name).replace(path)


def positive(text: str) -> int:
    """A positive integer of the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number.")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "tune", "compile", "prebuild"))
    parser.add_argument("--output", type=Path, default=Path("e2m1-k32.json"), help="JSON result file")
    parser.add_argument("--table", type=Path, help="also write a Markdown table")
    parser.add_argument("--plot", type=Path, help="also write a plot (needs matplotlib)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=positive, help="only these batches")
    parser.add_argument("--samples", type=positive, default=90)
    parser.add_argument(
        "--paths", nargs="+", choices=("w4a16", "fp8"), default=["w4a16", "fp8"], help="only these paths (tune)"
    )
    parser.add_argument("--jobs", type=positive, default=14, help="compiling processes (tune)")
    parser.add_argument("--no-humming", dest="humming", action="store_false")
    parser.add_argument("--humming-cache", type=Path, help="humming's kernels, built ahead by prebuild")
    args = parser.parse_args()
    for path in (args.output, args.table, args.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: its folder does not exist.")
    if args.command == "tune" and (unknown := set(args.tokens or ()) - set(BLOCKS)):
        parser.error(f"--tokens {min(unknown)}: tune knows {', '.join(map(str, BLOCKS))}.")
    if args.humming_cache:
        use_humming_cache(args.humming_cache)
    if args.command == "prebuild":
        if not args.humming_cache:
            parser.error("prebuild needs --humming-cache, the folder to fill.")
        print(prebuild(args), "kernels in", args.humming_cache.name)
        return 0
    if not torch.cuda.is_available():
        print("No CUDA device is visible: run this on the GPU host.", file=sys.stderr)
        return 2
    argv = [a.rsplit("/", 1)[-1] for a in sys.argv[1:]]
    if args.command == "compile":
        print("\n".join(compile_all(args)) or "all tiles compiled")
        return 0
    result = (run if args.command == "run" else tune)(args, argv)
    write(args.output, json.dumps(result, indent=1) + "\n")
    if args.command == "run":
        print(table(result))
        if args.table:
            write(args.table, table(result))
        if args.plot:
            plot(result, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
