"""Routed FP8 experts of one layer on one GPU: DeepGEMM as DeepEP feeds it, beside the default Triton path.

    python3 -B -m benchmarks.deepep --model 375b-a23b --out FILE [--repetitions 20]

One rank owns all experts, at true width. Both sides run the same tensors on the same tokens and routes. DeepEP's
kernels do not take part: ``tests.deep_ep_stand_in`` loops tokens back, and only what follows it is timed: permutation,
both grouped GEMMs, activation and the weighted sum (that of low latency is DeepEP's own, and is not in the time).
Triton is timed from BF16 tokens to BF16 tokens, so its side has the quantisation too, which DeepEP does before it
sends. Medians of CUDA event times; compilation comes before them. Needs a GPU of compute capability 9.0 and ``sglang``
with the series.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.load_mova import machine, start_cuda
from qualify.checks.loading import PROVENANCE
from qualify.errors import CannotRun, Parser, exit_code
from qualify.models import MOVA_CONFIG, assumed
from qualify.synth.layout import derive_config
from tests import deep_ep_stand_in

#: name -> (config as far as it is known, overrides that its load needs)
MODELS = {
    "375b-a23b": (assumed.config_375b, {}),
    "mova": (lambda: json.loads(MOVA_CONFIG.read_text()), PROVENANCE),
}
#: Tokens by mode; a rank may send at most 128 at once in low latency by default.
TOKENS = {"normal": (1, 16, 128, 1024, 4096, 8192), "low_latency": (1, 16, 64, 128)}


def build(name: str, seed: int = 0) -> dict:
    """Build a cut of model ``name`` with one sparse layer twice, and give both layers the same random experts.

    Starts the engine's world: once per process, before anything imports ``sglang``. Returns the layers as ``default``
    and ``deepep`` (mode auto: :func:`dispatch_as` picks), and the engine's ``torch``.
    """
    # One compilation for each shape that comes, not for every one that could.
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    deep_ep_stand_in.install()
    make, overrides = MODELS[name]
    whole = make()
    config = derive_config(whole, tiny=False, layers=len(whole["mlp_only_layers"]) + 1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model_config, device_config, torch = start_cuda(Path(folder), overrides)
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
        from sglang.srt.layers.quantization import deepep_admission
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.runtime_context import get_flags

        deepep_admission.RANKS = (1,)  # the library's own limit, and it is not here
        get_flags().moe.deepep_mode = DeepEPMode.AUTO
        layers = {}
        for side, backend in (("default", MoeA2ABackend.NONE), ("deepep", MoeA2ABackend.DEEPEP)):
            get_flags().moe.a2a_backend = backend
            model = DefaultModelLoader(LoadConfig()).initialize_model_for_startup(
                model_config=model_config, device_config=device_config
            )
            layers[side] = model.model.layers[-1].mlp.experts
            del model
    deep_ep_stand_in.connect()
    fill(layers["default"], torch, seed)
    for parameter, values in layers["default"].named_parameters():
        getattr(layers["deepep"], parameter).data = values.data
    for layer in layers.values():
        layer.quant_method.process_weights_after_loading(layer)
    return layers | {"torch": torch}


def fill(experts, torch, seed: int) -> None:
    """Random codes of all sizes, and scales with which a layer neither grows nor shrinks its input much."""
    device = experts.w13_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in experts.named_parameters():
        width = experts.hidden_size if name.startswith("w13") else experts.intermediate_size_per_partition
        for data in parameter.data:
            if data.dtype == torch.float8_e4m3fn:
                data.copy_(torch.randn(data.shape, device=device, generator=generator) * 48)
            else:
                scales = torch.rand(data.shape, device=device, generator=generator)
                data.copy_((scales + 0.5) / (48 * width**0.5))


def tokens_and_routes(experts, count: int, torch, seed: int = 1):
    """Random BF16 tokens (count, hidden) and their routes as the engine's router gives them."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    device = experts.w13_weight.device
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, experts.hidden_size, device=device, generator=generator).bfloat16()
    logits = torch.randn(count, experts.num_experts, device=device, generator=generator)
    weights, ids = logits.softmax(1).topk(experts.top_k)
    return x, StandardTopKOutput(weights / weights.sum(1, keepdim=True), ids.int(), logits)


def dispatch_as(mode: str) -> None:
    """Let a layer built with mode auto dispatch as ``normal`` or ``low_latency``."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    set_is_extend_in_batch(mode == "normal")


def milliseconds(prepare, run, torch, repetitions: int) -> float:
    """Median GPU time of ``run(prepare())``, of which only ``run`` is timed; three calls come before."""
    times = []
    for _ in range(repetitions + 3):
        prepared = prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run(prepared)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def measure(built: dict, repetitions: int) -> list[dict]:
    """One row for each mode and number of tokens."""
    torch, default, deepep = built["torch"], built["default"], built["deepep"]
    rows = []
    for mode, counts in TOKENS.items():
        dispatch_as(mode)
        for count in counts:
            x, topk = tokens_and_routes(default, count, torch)

            def dispatched(x=x, topk=topk):
                # Anew for every call: the runner frees its input.
                output = deepep.dispatch(x, topk)
                combine = deepep.dispatcher._inners[0]
                combine._stage = type(combine._stage).INITIAL
                return output

            row = {
                "mode": mode,
                "tokens": count,
                "triton_ms": milliseconds(x.clone, lambda x, topk=topk: default(x, topk), torch, repetitions),
                "deep_gemm_ms": milliseconds(dispatched, deepep.run_moe_core, torch, repetitions),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def run(args: argparse.Namespace) -> int:
    """Measure one model and write the result file."""
    import torch

    if not torch.cuda.is_available():
        raise CannotRun("no CUDA device; run this where there is a GPU")
    built = build(args.model)
    with torch.no_grad():
        rows = measure(built, args.repetitions)
    result = {
        "benchmark": "deepep",
        "date": datetime.now(UTC).date().isoformat(),
        "model": args.model,
        "machine": machine(torch, True),
        "transport": "stand-in, not timed",
        "repetitions": args.repetitions,
        "rows": rows,
    }
    partial = args.out.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n")
    partial.rename(args.out)
    return 0


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=20)
    return exit_code(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
