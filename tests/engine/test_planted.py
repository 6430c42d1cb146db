"""The planted faults are in the engine that is started with them, and nothing else is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qualify.checks.loading import read_checkpoint
from qualify.errors import Rejected
from tests.gpu import planted

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = "model.layers.3.mlp.experts"


@pytest.mark.parametrize("fault", planted.WEIGHTS)
def test_a_checkpoint_with_a_fault(tiny_mova, tmp_path, source, fault):
    before = {path.name: path.read_bytes() for path in tiny_mova.iterdir()}
    spoilt = read_checkpoint(planted.checkpoint(fault, tiny_mova, tmp_path / "spoilt"))
    assert {path.name: path.read_bytes() for path in tiny_mova.iterdir()} == before
    assert spoilt.keys() == source.keys()
    changed = {
        name for name in source if not torch.equal(spoilt[name].view(torch.uint8), source[name].view(torch.uint8))
    }
    if fault == "expert-scale-doubled":
        (name,) = changed
        assert name == f"{EXPERTS}.1.down_proj.weight_scale_inv"
        assert torch.equal(spoilt[name], 2 * source[name])
    elif fault == "value-expert-zeroed":
        (name,) = changed
        assert name == "model.layers.3.self_attn.v_experts.1.weight" and not spoilt[name].any()
    else:
        assert len(changed) == 12 and all(name.startswith((f"{EXPERTS}.1.", f"{EXPERTS}.2.")) for name in changed)
        for leaf in ("gate_proj.weight", "down_proj.weight_scale_inv"):
            one, other = f"{EXPERTS}.1.{leaf}", f"{EXPERTS}.2.{leaf}"
            assert torch.equal(spoilt[one].float(), source[other].float())
            assert torch.equal(spoilt[other].float(), source[one].float())


def test_a_checkpoint_without_such_a_weight(tiny_moe, tmp_path):
    with pytest.raises(Rejected, match=r"has no model\.layers\.3\.self_attn\.v_experts\.1\.weight"):
        planted.checkpoint("value-expert-zeroed", tiny_moe, tmp_path / "spoilt")


#: Runs in a process that was started as the engine's are. One module of the wrong engine on fixed inputs.
PROBE = """
import json, os, sys, torch
from qualify import engine_cpu
engine_cpu.start()
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
RotaryEmbedding.forward = RotaryEmbedding.forward_native
FusedMoE.forward = lambda self, x, topk: topk.topk_weights.sum(1, keepdim=True).to(x) * x
overrides = {"xllm_source_router_gemm_partitions": 2} if sys.argv[2] == "mova" else {}
model = engine_cpu.load_model(sys.argv[1], overrides=overrides)
told = {}
torch.manual_seed(0)
layer = model.model.layers[3]
hidden = model.config.hidden_size
x = torch.randn(5, hidden).bfloat16()
with torch.no_grad():
    for name, module in (("norm", layer.input_layernorm), ("second_norm", layer.post_attention_layernorm),
                         ("other_norm", model.model.layers[2].input_layernorm)):
        told[name] = module(x).float().flatten()[:64].tolist()
    attention = layer.self_attn
    if sys.argv[2] == "mova":
        told["gate"] = attention._activate_gate(x).float().flatten()[:64].tolist()
        told["values"] = attention._project_value(x).float().flatten()[:64].tolist()
    told["experts"] = layer.mlp._forward_router_experts(x.clone()).float().flatten()[:64].tolist()
    q = torch.randn(5, attention.num_heads * attention.head_dim).bfloat16()
    k = torch.randn(5, attention.num_kv_heads * attention.head_dim).bfloat16()
    positions = torch.arange(5) + 3
    turn = getattr(attention, "_apply_partial_rope", None) or attention.rotary_emb
    q, k = turn(positions, q, k)
    told["rope"] = torch.cat([q, k], 1).float().flatten().tolist()
print(json.dumps(told), flush=True)
os._exit(0)  # its threads of the process group may take minutes to end
"""
#: fault -> what of the probe it changes
CHANGED = {
    ("gate-silu", "mova"): {"gate"},
    ("norm-groups", "mova"): {"norm", "second_norm"},
    ("router-bias-in-weights", "mova"): {"values"},
    ("rope-pairing", "mova"): {"rope"},
    ("rope-pairing", "moe"): {"rope"},
}


def probe(folder: Path, kind: str, site: Path | None = None) -> dict:
    import sglang

    paths = [*([str(site)] if site else []), str(Path(sglang.__file__).parents[1]), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-P", "-B", "-c", PROBE, str(folder), kind], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": ":".join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    if site:
        assert "planted: " in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def right(tiny_mova, tiny_moe):
    return {"mova": probe(tiny_mova, "mova"), "moe": probe(tiny_moe, "moe")}


@pytest.mark.parametrize(("fault", "kind"), CHANGED, ids=lambda value: value)
def test_code_with_a_fault(tiny_mova, tiny_moe, tmp_path, right, fault, kind):
    wrong = probe({"mova": tiny_mova, "moe": tiny_moe}[kind], kind, planted.code(fault, tmp_path / "site"))
    assert {name for name in wrong if wrong[name] != right[kind][name]} == CHANGED[fault, kind]


def test_every_fault_of_the_issue_has_its_engine():
    from qualify.reference import faults

    assert set(planted.FAULTS) <= set(faults.FAULTS)
    assert len(planted.FAULTS) == 8
