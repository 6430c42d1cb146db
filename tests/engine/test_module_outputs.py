"""The recorder sees what the modules of the engine's own model get and give, once, and changes nothing.

One CPU rank; the attention over the KV cache, the FP8 experts and the rotary kernel need a GPU and are stand-ins. What
is tested are the calls between the modules, which are the engine's.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from qualify import engine_cpu, numerics
from qualify.checks.loading import PROVENANCE
from tests.engine.test_reference_engine import without_fp8

TOKENS = 7
IDS = torch.arange(TOKENS) * 5 + 3


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HORIZON_MODULE_OUTPUTS", str(tmp_path))
    return tmp_path


def attend(self, q, k, v, forward_batch, **_):
    """Causal attention of one request without a cache."""
    q, k, v = (x.view(len(x), -1, self.head_dim).transpose(0, 1).float() for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).reshape(q.shape[1], -1).bfloat16()


def experts(self, hidden_states, topk_output):
    """Overwrites its input, as the engine's kernels do."""
    mix = topk_output.topk_weights.sum(1, keepdim=True) * topk_output.topk_ids.float().mean(1, keepdim=True)
    return hidden_states.mul_(mix.to(hidden_states))


@pytest.fixture
def stand_ins(monkeypatch):
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    monkeypatch.setattr(RadixAttention, "forward", attend)
    monkeypatch.setattr(FusedMoE, "forward", experts)
    monkeypatch.setattr(RotaryEmbedding, "forward", RotaryEmbedding.forward_native)

    def batch(ids, prefix=0, mode=ForwardMode.EXTEND, size=1):
        lengths = torch.full((size,), len(ids))
        return ForwardBatch(
            forward_mode=mode, batch_size=size, input_ids=ids, extend_prefix_lens_cpu=[prefix] * size,
            req_pool_indices=torch.zeros(size), seq_lens=lengths, out_cache_loc=ids, seq_lens_sum=int(lengths.sum()),
        )  # fmt: skip

    return batch


def hidden(model, batch):
    """The decoder's output, by the calls of ``XllmForCausalLM.forward`` without its logits."""
    with torch.no_grad():
        return model.model(batch.input_ids, torch.arange(len(batch.input_ids)), batch, None, pp_proxy_tensors=None)


def arm(folder, ids=IDS):
    (folder / "armed.json").write_text(json.dumps({"input_ids": ids.tolist()}))


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_records_one_pass_and_changes_nothing(tiny_mova, folder, stand_ins):
    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    assert hooks(model) == 2
    before = hidden(model, stand_ins(IDS))
    assert list(folder.iterdir()) == []
    arm(folder)
    recorded = hidden(model, stand_ins(IDS))
    assert hooks(model) == 2
    assert torch.equal(before, recorded) and torch.equal(before, hidden(model, stand_ins(IDS)))
    assert [path.name for path in folder.iterdir()] == ["pass"]
    config = json.loads((tiny_mova / "config.json").read_text())
    names = sorted(path.name for path in (folder / "pass").iterdir())
    assert names == ["final.safetensors", *(f"layer-{i:03}.safetensors" for i in range(config["num_hidden_layers"]))]
    final = load_file(folder / "pass/final.safetensors")
    assert torch.equal(final["final.output"], before)
    layers = [load_file(folder / f"pass/{name}") for name in names[1:]]
    dense = len(config["mlp_only_layers"])
    for number, layer in enumerate(layers):
        assert ("router.logits" in layer) == ("values.output" in layer) == (number >= dense)
        # The residual stream ties the modules together, in BF16.
        assert torch.equal(layer["norm.input"] + layer["attention.output"], layer["ffn_norm.input"])
        after = layers[number + 1]["norm.input"] if number + 1 < len(layers) else final["final.input"]
        assert torch.equal(layer["ffn_norm.input"] + layer["ffn.output"], after)
        norm = model.model.layers[number].post_attention_layernorm
        assert torch.equal(norm(layer["ffn_norm.input"]), layer["ffn.input"])
    embedding = model.model.embed_tokens.weight[IDS]
    assert torch.equal(layers[0]["norm.input"], embedding)
    for layer in layers[dense:]:
        for name, experts_key in (("router", "num_experts"), ("value_router", "mova_num_experts")):
            assert layer[f"{name}.logits"].shape == (TOKENS, config[experts_key])
            assert layer[f"{name}.logits"].dtype == torch.float32
            assert layer[f"{name}.ids"].shape == layer[f"{name}.weights"].shape
            sums = layer[f"{name}.weights"].sum(1)
            assert torch.allclose(sums, torch.full_like(sums, config["router_scaling_factor"]))


@pytest.mark.parametrize(
    "change", [{"prefix": 3}, {"size": 2}, {"ids": IDS + 1}, {"ids": IDS[:-1]}, {"mode": "DECODE"}], ids=str
)
def test_waits_for_its_request(tiny_mova, folder, stand_ins, change):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    arm(folder)
    change = {"ids": IDS} | change
    if "mode" in change:
        change["mode"] = ForwardMode[change["mode"]]
    hidden(model, stand_ins(**change))
    assert [path.name for path in folder.iterdir()] == ["armed.json"]
    hidden(model, stand_ins(IDS))
    assert [path.name for path in folder.iterdir()] == ["pass"]


def test_the_prefill_graph_is_left_for_the_armed_batch_alone(tiny_mova, folder, stand_ins, monkeypatch):
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    monkeypatch.setattr(PrefillCudaGraphRunner, "can_run_graph", lambda self, batch: True)
    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    can = PrefillCudaGraphRunner.can_run_graph
    assert can(None, stand_ins(IDS)) is True
    arm(folder)
    assert can(None, stand_ins(IDS)) is False
    assert can(None, stand_ins(IDS + 1)) is True
    # Were it replayed all the same, the decoder would be called and its body would not run.
    with prefill_graph_scope(full_graph=False):
        hidden(model, stand_ins(IDS))
    assert [path.name for path in folder.iterdir()] == ["armed.json"]


def test_a_module_that_is_not_called_is_told(tiny_mova, folder, stand_ins, monkeypatch):
    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    gate = model.model.layers[4].mlp.gate
    monkeypatch.setattr(type(gate), "__call__", lambda self, x: self.forward(x), raising=False)
    arm(folder)
    hidden(model, stand_ins(IDS))
    assert (folder / "failed").read_text() == "layer-003 was not recorded whole: nothing of router.logits was seen\n"
    assert sorted(path.name for path in folder.iterdir()) == [".pass", "failed"]


def test_a_pass_that_fails_leaves_no_hook(tiny_mova, folder, stand_ins, monkeypatch):
    model = engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
    arm(folder)
    with monkeypatch.context() as broken:
        broken.setattr(type(model.model.layers[4].mlp), "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            hidden(model, stand_ins(IDS))
    assert hooks(model) == 2
    assert not (folder / "pass").exists() and (folder / "failed").exists()


@pytest.mark.parametrize(
    ("kind", "partitions", "groups"),
    [("tiny_mova", 2, 2), ("tiny_mova", 1, 2), ("tiny_moe", 1, 1), ("tiny_dense", 1, 4)],
)
def test_what_it_records_is_what_the_reference_computes(
    kind, partitions, groups, request, folder, monkeypatch, stand_ins
):
    """The engine's own modules, its native experts on weights without FP8, and every comparison of the stage."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.model_loader import module_outputs

    source, plain = request.getfixturevalue(kind), folder.parent / f"{folder.name}-plain"
    without_fp8(source, plain, groups)
    overrides = {} if kind == "tiny_dense" else {"xllm_source_router_gemm_partitions": partitions}
    monkeypatch.undo()  # the experts' stand-in; the others are set again
    monkeypatch.setenv("HORIZON_MODULE_OUTPUTS", str(folder))
    monkeypatch.setattr(RadixAttention, "forward", attend)
    monkeypatch.setattr(RotaryEmbedding, "forward", RotaryEmbedding.forward_native)
    model = engine_cpu.load_model(plain, overrides=overrides)
    module_outputs.register(model)
    ids = numerics.draw(plain, json.loads((plain / "config.json").read_text()), 1, 64)
    arm(folder, torch.tensor(ids))
    hidden(model, stand_ins(torch.tensor(ids)))
    rounded = numerics.references(plain, "cpu", partitions)[1]
    run = numerics.Run(ids, numerics.Answer([], *[torch.empty(0)] * 3), folder / "pass")
    found = numerics.compare(rounded, rounded, run, whole=False)["modules"]
    assert found["embedding"]["max"] == 0 and found["add"]["max"] <= 2**-9
    assert all(told["max"] < 0.01 for told in found.values() if "max" in told)
    if kind != "tiny_dense":
        assert found["router"]["unequal_logits"] == found["router"]["misrouted"] == 0
        assert found["router"]["mixing"] < 1e-5
    if kind == "tiny_mova":
        assert found["values"]["unequal_logits"] == found["values"]["misrouted"] == 0
        assert found["values"]["mixing"] < 1e-5


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_other_formats(kind, request, folder):
    """Registered after their strict loads, too; the modules that it hooks are there."""
    model = engine_cpu.load_model(request.getfixturevalue(kind), overrides={})
    assert model.module_outputs.folder == folder and hooks(model) == 2


def test_nobody_asked(tiny_mova, monkeypatch):
    monkeypatch.delenv("HORIZON_MODULE_OUTPUTS", raising=False)
    assert hooks(engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)) == 0
