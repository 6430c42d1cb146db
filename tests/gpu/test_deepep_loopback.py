"""Routed experts at true width on one GPU: DeepGEMM behind a loopback of DeepEP against the default Triton path.

Run it in the image, with a GPU of compute capability 9.0: python3 -m pytest tests/gpu/test_deepep_loopback.py

Real are dispatcher, quantisation, permutation, DeepGEMM and the weighted sum; the transport is a stand-in of one rank
(``tests.deep_ep_stand_in``), which in low latency also quantises and adds up. Weights are random, filled into the built
layer: how they get there from files is tested in tests/engine. Each model has its own process, as the engine's world.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no GPU of compute capability 9.0", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("375b-a23b", "mova")
TOKENS = {"normal": (0, 1, 7, 128, 1000, 4096), "low_latency": (0, 1, 7, 64, 128)}
# Errors are measured against one reference in the same run; the default path's own is the bound. Where FP32 sums differ
# in the last bits, an activation on a boundary between two E4M3 codes goes either way, on either side.
TIMES_DEFAULT = 1.5
# A default path that is wrong would be no bound. On an H200 it is at most 0.025; a neighbour's scales make it 0.3.
SOUND = 0.05


def errors(name: str) -> list[dict]:
    """Relative errors (Frobenius) of both paths of model ``name`` for every mode and number of tokens."""
    from benchmarks import deepep

    built = deepep.build(name)
    found = []
    for mode, counts in TOKENS.items():
        deepep.dispatch_as(mode)
        for count in counts:
            x, topk = deepep.tokens_and_routes(built["default"], count, torch)
            ours = built["deepep"](hidden_states=x.clone(), topk_output=topk)
            assert ours.shape == x.shape and ours.dtype == torch.bfloat16
            if count:
                wanted = reference(built["default"], x, topk)
                default = built["default"](hidden_states=x.clone(), topk_output=topk)
                pair = [float((out.float() - wanted).norm() / wanted.norm()) for out in (default, ours)]
                found.append({"mode": mode, "tokens": count, "default": pair[0], "deepep": pair[1]})
    return found


def reference(experts, x, topk) -> torch.Tensor:
    """The layer in FP32 with its roundings: tokens and activations to E4M3, both GEMMs to BF16."""
    from tests.deep_ep_stand_in import quantise

    def rounded(values):
        codes, scales = quantise(values)
        return codes.float() * scales.repeat_interleave(128, -1)

    parameters = dict(experts.named_parameters())
    scale = "weight_scale" if "w13_weight_scale" in parameters else "weight_scale_inv"
    rows, out = rounded(x), torch.zeros(x.shape, device=x.device)
    for expert in topk.topk_ids.unique().tolist():
        token, slot = (topk.topk_ids == expert).nonzero().unbind(1)
        w13, w2 = (
            parameters[f"{leaf}_weight"][expert].float()
            * parameters[f"{leaf}_{scale}"][expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
            for leaf in ("w13", "w2")
        )
        gate, up = (rows[token] @ w13.T).bfloat16().float().chunk(2, -1)
        inner = rounded((torch.nn.functional.silu(gate) * up).bfloat16())
        out.index_add_(0, token, topk.topk_weights[token, slot, None] * (inner @ w2.T).bfloat16().float())
    return out


@pytest.mark.parametrize("name", MODELS)
def test_the_loopback_is_as_right_as_the_default_path(name, tmp_path):
    out = tmp_path / "errors.json"
    command = [sys.executable, "-B", "-m", "tests.gpu.test_deepep_loopback", name, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert out.is_file(), done.stderr[-4000:]
    found = json.loads(out.read_text())
    print(*found, sep="\n")
    assert len(found) == sum(count > 0 for counts in TOKENS.values() for count in counts)
    for row in found:
        assert row["default"] <= SOUND, row
        assert row["deepep"] <= TIMES_DEFAULT * row["default"], row  # false for NaN


if __name__ == "__main__":
    with torch.no_grad():
        Path(sys.argv[2]).write_text(json.dumps(errors(sys.argv[1])))
