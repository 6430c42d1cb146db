"""The reference against the engine on a CPU: tiny checkpoints, module by module and whole, with the engine's own code.

The checkpoints are the synthetic ones with their FP8 weights dequantised to BF16, since the engine's FP8 kernels need a
GPU. The engine's own are: norms, BF16 projections, RoPE (full and partial), gate, router product, choice of experts,
value experts (the engine's eager form), routed experts (its native CPU form), shared expert, MLP, residual stream.
Not run, because they need a GPU: attention kernels (PyTorch's stands in, behind the engine's ``RadixAttention``), the
Triton and DeepGEMM experts, activation quantisation and block-FP8 products, fused top-k, fused norms.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention

from qualify import engine_cpu
from qualify.checks.loading import dequantise, read_checkpoint
from qualify.reference import compare, prompts
from qualify.reference.model import Reference

#: Relative error of a token in one module: some roundings to BF16, each at most 2^-9 of a value. Measured: 0.0106.
MODULE = 0.015
#: After all layers, on own activations: 0.009 was measured.
MODEL = 0.02

CASES = [
    ("tiny_mova", 1, 2),
    ("tiny_mova", 2, 1),
    ("tiny_mova", 2, 2),
    ("tiny_mova", 4, 2),
    ("tiny_moe", 1, 1),
    ("tiny_moe", 4, 1),
    ("tiny_dense", 1, 1),
    ("tiny_dense", 2, 1),
    ("tiny_dense", 4, 1),
]


def name(case):
    return "-".join(map(str, case))


class Attention(torch.nn.Module):
    """Stands in for ``RadixAttention``: one sequence, no cache."""

    def __init__(self, head_dim):
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q, k, v, forward_batch):
        q, k, v = (part.reshape(len(part), -1, self.head_dim).transpose(0, 1) for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)


def without_fp8(source, out, groups):
    """Write the checkpoint ``source`` to ``out``: no FP8, ``groups`` norm groups, nothing else changed."""
    stored, tensors = read_checkpoint(source), {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{name}_scale_inv", stored.get(f"{name}_scale"))
            tensor = dequantise(tensor, scale).bfloat16()
        if "weight_scale" not in name:
            tensors[name] = tensor
    config = json.loads((source / "config.json").read_text()) | {"layernorm_num_groups": groups}
    del config["quantization_config"]
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    (out / "synthetic.json").write_text((source / "synthetic.json").read_text())
    save_file(tensors, out / "model.safetensors")


@pytest.fixture(scope="module", params=CASES, ids=name)
def pair(request, tmp_path_factory):
    """(engine's model, reference, token ids, the reference's records)."""
    kind, groups, partitions = request.param
    folder = tmp_path_factory.mktemp("bf16") / "out"
    without_fp8(request.getfixturevalue(kind), folder, groups)
    overrides = {} if kind == "tiny_dense" else {"xllm_source_router_gemm_partitions": partitions}
    model = engine_cpu.load_model(folder, overrides=overrides)
    for layer in model.model.layers:
        layer.self_attn.attn = Attention(layer.self_attn.head_dim)
    reference = Reference(folder, router_partitions=partitions)
    ids = prompts.choose(reference, length=96).ids[0]
    return model, reference, ids, list(reference.layers(ids))


def engine_records(layer, records, reference, number):
    """The engine's modules on the reference's inputs, rounded to BF16."""
    x, y = (records[kind]["input"].bfloat16() for kind in ("attention", "ffn"))
    stream, between = (records[kind]["input"].bfloat16() for kind in ("norm", "second_norm"))
    found = {
        "norm": {"input": stream, "output": layer.input_layernorm(stream)},
        "second_norm": {"input": between, "output": layer.post_attention_layernorm(between)},
        "attention": {"input": x, "output": layer.self_attn(torch.arange(len(x)), x, None)},
        "ffn": {"input": y, "output": layer.mlp(y.clone())},
    }
    if reference.has(number, "router"):
        found["router"] = {"input": y, "logits": layer.mlp.gate(y)}
    if reference.has(number, "values"):
        found["values"] = {"input": x, "output": layer.self_attn._project_value(x)}
    return found


@torch.no_grad()
def test_each_module_agrees_on_the_same_input(pair):
    """Router logits, whose rounding is a contract, to the bit."""
    model, reference, _, records = pair
    for number in {0, reference.layer_count - 1}:
        found = compare.layer(
            reference, number, engine_records(model.model.layers[number], records[number], reference, number)
        )
        print(
            number,
            {kind: {name: round(value, 5) for name, value in metrics.items()} for kind, metrics in found.items()},
        )
        assert found.keys() >= {"norm", "second_norm", "attention", "ffn"}
        for kind, metrics in found.items():
            if kind == "router":
                assert metrics == {"unequal_logits": 0, "flips": 0}
            else:
                assert metrics["max"] < MODULE, kind


@torch.no_grad()
def test_norms_round_to_bf16_once_at_the_end(pair):
    """With BF16 storage the reference's norms are the engine's, to the bit."""
    model, reference, _, records = pair
    stored = Reference(reference.weights.folder, bf16=True)
    stream = records[0]["norm"]["input"].bfloat16()
    engine = model.model.layers[0].input_layernorm(stream)
    assert torch.equal(engine.float(), stored.module(0, "norm", {"input": stream})["output"])


@torch.no_grad()
@pytest.mark.parametrize("pair", [case for case in CASES if case[0] != "tiny_dense"], indirect=True, ids=name)
def test_the_other_provenance_is_seen_in_the_router(pair):
    model, reference, _, records = pair
    number = reference.layer_count - 1
    other = Reference(reference.weights.folder, router_partitions=3 - reference.right.router_partitions)
    engine = engine_records(model.model.layers[number], records[number], reference, number)
    assert compare.layer(other, number, {"router": engine["router"]})["router"]["unequal_logits"] > 0.4


@torch.no_grad()
def test_the_whole_model_agrees_on_its_own_activations(pair):
    """The engine's decoder from token ids to the final norm, then log-probabilities through its head in float32: in
    BF16, logits around 40 are multiples of 0.25, which makes the mean error 0.05 nat instead of 0.02."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    model, reference, ids, records = pair
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        residual_stream=None,
        attn_cp_metadata=None,
        can_run_tbo=False,
        global_num_tokens_cpu=None,
    )
    hidden = model.model(torch.tensor(ids), torch.arange(len(ids)), batch)
    wanted = reference.module(0, "final", {"input": records[-1]["residual"]["output"]})["output"]
    errors = compare.relative(compare.token_errors(hidden, wanted))
    logs = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)
    right = reference.logprobs(ids)
    following = logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = compare.logprobs(following, right.next) | compare.greedy(logs[:-1].argmax(-1), right.top_ids, right.top)
    print(errors, found)
    assert errors["max"] < MODEL
    assert found["mean_abs_logprob_error"] < 0.03
    assert found["tie_aware_agreement"] == 1 and found["non_tie_mismatch"] == 0
