"""The reference on checkpoints: one small enough to work out by hand, tiny synthetic ones, planted faults, prompts.

In place of an engine stands the right reference with BF16 storage: its distance from the float32 one is the least noise
that an engine can have, not the bound of one on a GPU.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from qualify.errors import Rejected
from qualify.reference import compare, faults, prompts
from qualify.reference.model import Reference
from qualify.reference.weights import Weights

LN3 = 1.0986123
SILU = 0.8239592  # of ln 3; of -ln 3 it is -0.2746531

MICRO = {
    "model_type": "k2_horizon",
    "hidden_act": "silu",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "rope_head_dim": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 0.0,
    "layernorm_num_groups": 2,
    "attention_gate_func": "softplus",
    "mlp_only_layers": [],
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "mova_num_experts": 2,
    "mova_num_experts_per_tok": 2,
    "moe_gate_bias": True,
    "norm_topk_prob": True,
    "router_scaling_factor": 2.0,
    "router_score_func": "sigmoid",
    "vocab_size": 6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def micro_tensors():
    """Weights that are zero but for a few entries, so that every product is one number."""
    layer, attention, mlp = "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp"

    def place(rows, columns, **entries):
        found = torch.zeros(rows, columns)
        for where, value in entries.items():
            found[int(where[1]), int(where[2])] = value
        return found

    tensors = {
        "model.embed_tokens": torch.arange(24.0).view(6, 4),
        "model.norm": torch.ones(4),
        f"{layer}.input_layernorm": torch.ones(4),
        f"{layer}.post_attention_layernorm": torch.ones(4),
        "lm_head": place(6, 4, _00=1.0, _51=2.0),
        f"{attention}.q_proj": torch.zeros(4, 4),
        f"{attention}.k_proj": torch.zeros(2, 4),
        f"{attention}.gate_proj": place(4, 4, _00=1.0),
        f"{attention}.o_proj": torch.eye(4),
        f"{attention}.v_router": torch.zeros(2, 4),
        f"{attention}.v_experts.0": place(2, 4, _00=1.0),
        f"{attention}.v_experts.1": place(2, 4, _00=-1.0),
        f"{mlp}.gate": torch.zeros(2, 4),
    }
    for name, down in (("experts.0", 1.0), ("experts.1", 10.0), ("shared_experts", 100.0)):
        tensors[f"{mlp}.{name}.gate_proj"] = place(1, 4, _00=1.0)
        tensors[f"{mlp}.{name}.up_proj"] = place(1, 4, _01=1.0)
        tensors[f"{mlp}.{name}.down_proj"] = place(4, 1, _20=down)
    biases = {f"{attention}.v_router.bias": torch.tensor([0.5, 0.0]), f"{mlp}.gate.bias": torch.zeros(2)}
    return {f"{name}.weight": tensor for name, tensor in tensors.items()} | biases


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    folder = tmp_path_factory.mktemp("micro")
    (folder / "config.json").write_text(json.dumps(MICRO))
    save_file(micro_tensors(), folder / "model.safetensors")
    return folder


def close(found, wanted):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=2e-6, atol=2e-6)


def test_values_are_activated_before_they_are_weighted(micro):
    """Both scores are 1/2, so both weights 1/2 * 2 = 1, whatever the bias: silu(ln 3) + silu(-ln 3) = 0.5493062."""
    found = Reference(micro).module(0, "values", {"input": torch.tensor([[LN3, 0, 0, 0]])})
    close(found["output"], [[0.5493062, 0.0]])
    assert found["logits"].tolist() == [[0.0, 0.0]]


def test_given_logits_decide_the_mixture(micro):
    """Scores 3/4 and 1/4, so weights 1.5 and 0.5: 1.5 * 0.8239592 - 0.5 * 0.2746531 = 1.0986123."""
    given = {"input": torch.tensor([[LN3, 0, 0, 0]]), "logits": torch.tensor([[LN3, -LN3]])}
    close(Reference(micro).module(0, "values", given)["output"], [[1.0986123, 0.0]])


def test_the_gate_multiplies_before_the_output_projection(micro):
    """One token: attention returns its values (0.5493062, 0) for both heads. Gates: log2(1 + 2^1.0986123) = 1.6514472
    for the first dimension, log2(1 + 1) = 1 for the others."""
    found = Reference(micro).module(0, "attention", {"input": torch.tensor([[LN3, 0, 0, 0]])})
    close(found["output"], [[0.5493062 * 1.6514472, 0.0, 0.5493062, 0.0]])


def test_the_shared_expert_is_added_ungated(micro):
    """silu(ln 3) * 2 = 1.6479184; weights 1 and 1: 1 + 10 times that, and 100 times that of the shared expert."""
    found = Reference(micro).module(0, "ffn", {"input": torch.tensor([[LN3, 2.0, 0, 0]])})
    close(found["output"], [[0.0, 0.0, 111 * 1.6479184, 0.0]])


def test_the_block_adds_to_the_stream_and_norms_before(micro):
    """Stream (1, 1, 3, 3): norms in two groups give ones. Attention: silu(1) + silu(-1) = 0.7310586 - 0.2689414 =
    0.4621172, times gate log2(1 + 2) = 1.5849625 in the first dimension; stream (1.7324384, 1, 3.4621172, 3). Norm of
    the first group: mean square 2.0006714, root 1.4144509: 1.2248134, 0.7069881. MLP: silu(1.2248134) = 1.2248134 *
    0.7729081 = 0.9466682, times 0.7069881 times 111 = 74.2905... into dimension 2."""
    found = Reference(micro).module(0, "residual", {"input": torch.tensor([[1.0, 1, 3, 3]])})["output"][0]
    close(found[:2], [1 + 0.4621172 * 1.5849625, 1.0])
    close(found[3:], [3.0])
    assert found[2].item() == pytest.approx(3.4621172 + 0.9466682 * 0.7069881 * 111, rel=1e-5)


def test_final_norm_and_head(micro):
    """Stream (1, 7, 5, 5): first group has root 5, so 0.2 and 1.4; rows 0 and 5 of the head read them."""
    reference = Reference(micro)
    stream = torch.tensor([[1.0, 7, 5, 5]])
    close(reference.module(0, "final", {"input": stream})["output"], [[0.2, 1.4, 1.0, 1.0]])
    close(reference.logits(stream), [[0.2, 0, 0, 0, 0, 2.8]])


def test_logprobs_are_of_the_next_token(micro):
    """Against the logits themselves, position by position; the five best of six tokens are all but the least."""
    reference, ids = Reference(micro), [2, 5, 3]
    logits = reference.logits(reference.hidden(ids))
    wanted = [(logits[t, ids[t + 1]] - logits[t].exp().sum().log()).item() for t in (0, 1)]
    found = reference.logprobs(ids)
    close(found.next, wanted)
    assert found.top_ids.shape == (2, 5) and found.top_ids[:, 0].tolist() == logits[:2].argmax(1).tolist()


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1.0}),
        ("attention_gate_func", "relu"),
        ("sliding_window", 4096),
        ("query_key_norm", True),
        ("attention_bias", True),
        ("router_score_func", "tanh"),
        ("hidden_act", "gelu"),
        ("model_type", "llama"),
    ],
)
def test_a_model_of_other_formulas_is_refused(micro, tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps(MICRO | {key: value}))
    (tmp_path / "model.safetensors").symlink_to(micro / "model.safetensors")
    with pytest.raises(Rejected, match=key):
        Reference(tmp_path)


def test_wrong_arguments_are_refused(micro):
    for arguments, sentence in (({"router_partitions": 3}, "1 or 2"), ({"fault": "bad-luck"}, "known are")):
        with pytest.raises(Rejected, match=sentence):
            Reference(micro, **arguments)
    reference = Reference(micro)
    for ids in ([], [6], [-1]):
        with pytest.raises(Rejected, match="token ids"):
            reference.embed(ids)
    x = {"input": torch.ones(1, 4)}
    for layer, kind in ((1, "ffn"), (-1, "norm"), (0, "poetry")):
        with pytest.raises(Rejected):
            reference.module(layer, kind, x)


def test_wrong_files_are_refused(micro, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MICRO))
    with pytest.raises(Rejected, match=r"no \.safetensors"):
        Weights(tmp_path)
    for name in ("a", "b"):
        save_file({"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(Rejected, match=r"x\.weight is in two shards"):
        Weights(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(Rejected, match="no scale beside it"):
        Weights(tmp_path).matrix("x")
    with pytest.raises(Rejected, match="no tensor y"):
        Weights(tmp_path).stored("y.weight")
    (tmp_path / "a.safetensors").write_bytes(b"short")
    with pytest.raises(Rejected, match=r"a\.safetensors cannot be read"):
        Weights(tmp_path)


# --- tiny synthetic checkpoints -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tiny_mova", "tiny_moe", "tiny_dense"])
def case(request):
    """(folder, reference, token ids, records of all layers) of each kind of model."""
    folder = request.getfixturevalue(request.param)
    reference = Reference(folder)
    ids = prompts.choose(reference, length=128).ids[0]
    return folder, reference, ids, list(reference.layers(ids))


def engine_like(folder, records, layer):
    """One layer's records as an engine would have them that computes the right thing and stores BF16."""
    engine, found = Reference(folder, bf16=True), {}
    for kind, record in records.items():
        x = record["input"].bfloat16()
        output = {
            name: value
            for name, value in engine.module(layer, kind, {"input": x}).items()
            if name in ("output", "logits")
        }
        found[kind] = {"input": x, **output}
    return found


def test_records_have_the_promised_shapes(case):
    _, reference, ids, records = case
    config, tokens = reference.config, len(ids)
    assert len(records) == config["num_hidden_layers"]
    for layer, found in enumerate(records):
        sparse = config["num_experts"] and layer >= len(config["mlp_only_layers"])
        optional = ({"router"} if sparse else set()) | ({"values"} if sparse and config["mova_num_experts"] else set())
        assert found.keys() == {"norm", "attention", "second_norm", "ffn", "residual"} | optional
        hidden = (tokens, config["hidden_size"])
        for kind, record in found.items():
            assert record["input"].shape == hidden
            if kind == "values":
                assert record["output"].shape == (tokens, config["num_key_value_heads"] * config["head_dim"])
            elif kind != "router":
                assert record["output"].shape == hidden
            assert all(value.dtype == torch.float32 for name, value in record.items() if name != "chosen")
        if layer:
            assert torch.equal(found["residual"]["input"], records[layer - 1]["residual"]["output"])


def test_a_module_alone_computes_what_it_does_in_the_model(case):
    _, reference, _, records = case
    found = compare.layer(reference, reference.layer_count - 1, records[-1])
    assert {value for metrics in found.values() for value in metrics.values()} == {0.0}


def test_inputs_that_two_modules_share_are_recorded_once(tiny_mova):
    reference = Reference(tiny_mova)
    *_, records = reference.layers(range(40, 60))
    whole = compare.layer(reference, 4, records)
    del records["values"]["input"], records["router"]["input"]
    assert compare.layer(reference, 4, records) == whole
    del records["attention"]
    with pytest.raises(Rejected, match="record of values has no input"):
        compare.layer(reference, 4, records)


def test_logprobs_belong_to_the_layers(case):
    """The generator's last stream through norm and head, by another way than ``logprobs``."""
    _, reference, ids, records = case
    logs = reference.logits(records[-1]["residual"]["output"]).log_softmax(-1)
    found = reference.logprobs(ids)
    torch.testing.assert_close(found.next, logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    assert torch.equal(found.top_ids, logs[:-1].topk(5).indices)


def test_log_probabilities_mean_something(case):
    """Peaked but not certain, few ties, and most next tokens of the prompt likely ones (a flat model has -6.9 nat and
    ties everywhere)."""
    _, reference, ids, _ = case
    found = reference.logprobs(ids)
    ties = (found.top[:, 0] - found.top[:, 1] < compare.TIE_MARGIN).double().mean()
    print(f"median of next {found.next.median():.2f}, of best {found.top[:, 0].median():.3f}, ties {ties:.3f}")
    assert ties < 0.15
    assert -4 < found.next.median() < -0.1
    assert 0.5 < found.top[:, 0].exp().quantile(0.25) < 0.99


#: fault -> kind of record and metric in which it must show, and at least how many times the noise
SHOWS = {
    "expert-scale-doubled": ("ffn", "worst_expert", 5),
    "experts-swapped": ("ffn", "worst_expert", 5),
    "router-provenance": ("router", "unequal_logits", 5),
    "gate-silu": ("attention", "mean", 5),
    "norm-groups": ("norm", "mean", 5),
    "value-expert-zeroed": ("values", "worst_expert", 5),
    # These two move the output of a layer by 3%, BF16 in front of the quantiser by 1%: see ``bf16`` of the reference.
    "router-bias-in-weights": ("ffn", "mean", 2),
    "activation-not-quantised": ("ffn", "mean", 2),
    "rope-pairing": ("attention", "mean", 5),
    # Of one expert, or of the whole MLP of a dense layer.
    "scale-power-of-two": ("ffn", "worst_expert", 1.5),
    "sibling-scales-swapped": ("ffn", "worst_expert", 5),
}

CANNOT = {
    "tiny_mova": set(),
    "tiny_moe": {"gate-silu", "value-expert-zeroed"},
    "tiny_dense": {
        "expert-scale-doubled", "experts-swapped", "router-provenance", "gate-silu", "value-expert-zeroed",
        "router-bias-in-weights",
    },
}  # fmt: skip


def test_every_fault_is_tested():
    assert SHOWS.keys() == faults.FAULTS.keys()


def test_every_fault_stands_out_where_it_is_planted(case, request):
    """Well above the noise of BF16 in its own module, and nothing but noise in the layer before."""
    folder, reference, _, records = case
    cannot = CANNOT[request.node.callspec.params["case"]]
    layer = reference.layer_count - 1
    engine, before = (engine_like(folder, records[number], number) for number in (layer, layer - 1))
    noise, calm = compare.layer(reference, layer, engine), compare.layer(reference, layer - 1, before)
    for name, (kind, metric, times) in SHOWS.items():
        if name in cannot:
            with pytest.raises(Rejected, match=f"fault {name}"):
                Reference(folder, fault=name)
            continue
        faulty = Reference(folder, fault=f"{name}:{layer}")
        found = compare.layer(faulty, layer, engine)[kind]
        metric = metric if metric in found else "mean"
        print(f"{name:26} {kind} {metric} {found[metric]:.4f}, without {noise[kind][metric]:.4f}")
        assert found[metric] > times * noise[kind][metric], name
        if name == "router-provenance":
            assert noise[kind][metric] == 0 and found[metric] > 0.4
        if name not in ("router-provenance", "gate-silu", "router-bias-in-weights", "rope-pairing"):
            assert compare.layer(faulty, layer - 1, before) == calm, name


def test_a_fault_without_a_layer_is_in_the_first_sparse_one(tiny_mova, tiny_dense):
    assert Reference(tiny_mova, fault="experts-swapped").fault.layer == 3
    assert Reference(tiny_dense, fault="scale-power-of-two").fault.layer == 0
    for text in ("norm-groups:5", "norm-groups:-1", "norm-groups:x"):
        with pytest.raises(Rejected, match="a number from 0 to 4"):
            Reference(tiny_mova, fault=text)
    with pytest.raises(Rejected, match="layer 0 has no routed expert"):
        Reference(tiny_mova, fault="experts-swapped:0")


def test_faulty_weights_are_what_they_say(tiny_mova):
    """Read tensor by tensor, beside the right ones."""
    right, expert = Weights(tiny_mova), "model.layers.3.mlp.experts.1"

    def faulty(name):
        return Reference(tiny_mova, fault=name).weights

    assert torch.equal(
        faulty("expert-scale-doubled").matrix(f"{expert}.down_proj").values,
        2 * right.matrix(f"{expert}.down_proj").values,
    )
    swapped = faulty("experts-swapped")
    for one, other in ((1, 2), (2, 1), (3, 3), (11, 11)):
        names = (f"model.layers.3.mlp.experts.{number}.up_proj" for number in (one, other))
        assert torch.equal(swapped.matrix(next(names)).values, right.matrix(next(names)).values)
    scale = faulty("scale-power-of-two").parts(f"{expert}.down_proj")[1]
    assert (scale.log2() == scale.log2().round()).all()
    ratio = scale / right.parts(f"{expert}.down_proj")[1]
    assert (ratio < 1.42).all() and (ratio > 0.7).all() and (ratio != 1).any()
    siblings = faulty("sibling-scales-swapped")
    for one, other in (("gate_proj", "up_proj"), ("up_proj", "gate_proj"), ("down_proj", "down_proj")):
        assert torch.equal(siblings.parts(f"{expert}.{one}")[1], right.parts(f"{expert}.{other}")[1])
        assert torch.equal(siblings.stored(f"{expert}.{one}.weight"), right.stored(f"{expert}.{one}.weight"))
    value = "model.layers.3.self_attn.v_experts"
    assert not faulty("value-expert-zeroed").matrix(f"{value}.1").values.any()
    assert faulty("value-expert-zeroed").matrix(f"{value}.0").values.any()


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_reach_every_expert(tiny_mova):
    reference = Reference(tiny_mova)
    chosen = prompts.choose(reference, seed=3, prompts=2, length=64)
    assert [len(ids) for ids in chosen.ids] == [64, 64] and chosen.ids[0] != chosen.ids[1]
    assert chosen.least >= prompts.MINIMUM
    assert chosen.hits.keys() == {(layer, kind) for layer in (3, 4) for kind in ("router", "values")}
    # Every token chooses 8 experts and 4 value experts.
    assert {kind: int(hits.sum()) for (_, kind), hits in chosen.hits.items()} == {"router": 1024, "values": 512}
    assert prompts.choose(reference, seed=3, prompts=2, length=64).ids == chosen.ids
    assert prompts.choose(reference, seed=4, prompts=2, length=64).ids != chosen.ids
    with pytest.raises(Rejected, match=r"gets [0-7] of 1 x 8 tokens"):
        prompts.choose(reference, length=8)


def test_prompts_leave_out_begin_and_end():
    """Of six ids two are special: the others all occur, on a conditioned checkpoint and on any other."""
    for synthetic in ({}, {"clusters": 2, "knobs": {"successors": 2, "successor_stride": 5}}):
        assert set(prompts.draw(MICRO, synthetic, 0, 400)) == {2, 3, 4, 5}
