"""Synthetic checkpoints mean something in a forward pass: measured with a small float32 model.

The model here is a check of the weights, not of the engine: one sequence, no cache, float32 throughout. It follows the
published semantics of K2-Horizon: pre-norm residual blocks with grouped RMSNorm, gated grouped-query attention with
value experts, sigmoid routers whose selection bias does not enter the mixing weights.
"""

import json
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from qualify.checks.loading import dequantise, read_checkpoint
from qualify.models import MOVA_CONFIG
from qualify.synth.command import synthesise
from qualify.synth.conditioning import Knobs

TOKENS = 192

#: Input noise, relative, that no router decision should notice: some times the rounding of BF16 activations.
NOISE = 0.01


@dataclass
class Trace:
    """What a forward pass shows of each layer."""

    residual: list = field(default_factory=list)
    branch: list = field(default_factory=list)
    gate: list = field(default_factory=list)
    routers: list = field(default_factory=list)


class Model:
    """K2-Horizon in float32; ``weights`` maps checkpoint names to tensors as stored."""

    def __init__(self, config, weights):
        self.config, self.weights, self.trace = config, weights, Trace()

    def weight(self, name):
        stored = self.weights[f"{name}.weight"]
        if stored.dtype == torch.float8_e4m3fn:
            return dequantise(stored, self.weights[f"{name}.weight_scale_inv"])
        return stored.float()

    def linear(self, name, x):
        return x @ self.weight(name).T

    def norm(self, name, h):
        groups = h.view(len(h), self.config["layernorm_num_groups"], -1)
        scaled = groups * (groups.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return scaled.view_as(h) * self.weight(name)

    def logits(self, tokens):
        """Token ids ``(n,)`` -> float32 logits ``(n, vocabulary)``."""
        h = self.weights["model.embed_tokens.weight"][tokens].float()
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            for branch, norm in ((self.attention, "input_layernorm"), (self.mlp, "post_attention_layernorm")):
                output = branch(layer, self.norm(f"{layer}.{norm}", h))
                self.trace.branch.append(rms(output))
                h = h + output
            self.trace.residual.append(rms(h))
        return self.linear("lm_head", self.norm("model.norm", h))

    def attention(self, layer, x):
        attention, size = f"{layer}.self_attn", self.config["head_dim"]
        q, k = (
            self.rotate(self.linear(f"{attention}.{name}", x).view(len(x), -1, size)) for name in ("q_proj", "k_proj")
        )
        if f"{attention}.v_proj.weight" in self.weights:
            v = self.linear(f"{attention}.v_proj", x)
        else:
            top_k = self.config["mova_num_experts_per_tok"]
            v = self.routed(
                f"{attention}.v_router",
                x,
                top_k,
                lambda expert, x: silu(self.linear(f"{attention}.v_experts.{expert}", x)),
            )
        heads = [part.transpose(0, 1) for part in (q, k, v.view(len(x), -1, size))]
        mixed = (
            scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1).reshape(len(x), -1)
        )
        gate = torch.log2(1 + torch.exp2(self.linear(f"{attention}.gate_proj", x)))
        self.trace.gate.append(gate)
        return self.linear(f"{attention}.o_proj", mixed * gate)

    def rotate(self, heads):
        half = self.config["head_dim"] // 2
        assert self.config["rope_head_dim"] == self.config["head_dim"]
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = torch.arange(len(heads))[:, None] * theta ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = heads[..., :half], heads[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def mlp(self, layer, x):
        mlp = f"{layer}.mlp"
        if f"{mlp}.gate.weight" not in self.weights:
            return self.expert(mlp, x)
        routed = self.routed(
            f"{mlp}.gate",
            x,
            self.config["num_experts_per_tok"],
            lambda expert, x: self.expert(f"{mlp}.experts.{expert}", x),
        )
        return routed + self.expert(f"{mlp}.shared_experts", x)

    def expert(self, name, x):
        return self.linear(
            f"{name}.down_proj", silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        )

    def routed(self, router, x, top_k, expert):
        weight, bias = self.weight(router), self.weights[f"{router}.bias"].float()
        scores = (x @ weight.T).sigmoid()
        ranked = (scores + bias).sort(-1, descending=True)
        chosen = ranked.indices[:, :top_k]
        disturbed = x * (1 + NOISE * torch.randn_like(x))
        again = (disturbed.bfloat16() @ weight.bfloat16().T).float().sigmoid() + bias
        self.trace.routers.append(
            {
                "margin": ranked.values[:, top_k - 1] - ranked.values[:, top_k],
                "score": scores.gather(1, chosen),
                "flips": (again.topk(top_k).indices.sort(-1).values != chosen.sort(-1).values).any(-1),
                "usage": torch.bincount(chosen.flatten(), minlength=len(bias)),
            }
        )
        mixing = scores.gather(1, chosen)
        mixing = mixing / mixing.sum(-1, keepdim=True) * self.config["router_scaling_factor"]
        parts = []
        for number in range(len(bias)):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                parts.append((rows, mixing[rows, places, None] * expert(number, x[rows])))
        output = torch.zeros(len(x), parts[0][1].shape[1])
        for rows, part in parts:
            output.index_add_(0, rows, part)
        return output


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.fixture(scope="module", params=[{}, {"layers": 48}], ids=["5 layers", "48 layers"])
def measured(request, tmp_path_factory):
    """A tiny checkpoint, random tokens, and what a forward pass over them gives."""
    directory = tmp_path_factory.mktemp("conditioning") / "out"
    synthesise(MOVA_CONFIG, directory, tiny=True, **request.param)
    config = json.loads((directory / "config.json").read_text())
    weights = read_checkpoint(directory)
    shutil.rmtree(directory)
    torch.manual_seed(0)
    tokens = torch.randint(2, config["vocab_size"], (TOKENS,))
    with torch.inference_mode():
        model = Model(config, weights)
        result = Measured(config, weights, tokens, model.logits(tokens), model.trace)
    result.report()
    return result


@dataclass
class Measured:
    """One forward pass; ``report`` prints its numbers for people."""

    config: dict
    weights: dict
    tokens: torch.Tensor
    logits: torch.Tensor
    trace: Trace

    def routers(self, key):
        return torch.cat([router[key].flatten().float() for router in self.trace.routers])

    @property
    def gap(self):
        first, second = self.logits.topk(2).values.unbind(-1)
        return first - second

    @property
    def follows(self):
        knobs = Knobs()
        steps = torch.arange(1, knobs.successors + 1) * knobs.successor_stride
        successors = (self.tokens[:, None] + steps) % self.config["vocab_size"]
        return (self.logits.argmax(-1)[:, None] == successors).any(-1)

    def report(self):
        usage, flips = self.routers("usage"), self.routers("flips")
        print()
        print("residual rms by layer   ", " ".join(f"{value:.2f}" for value in self.trace.residual))
        print("branch rms (attn, mlp)  ", " ".join(f"{value:.2f}" for value in self.trace.branch))
        print("quantiles                1% 10% 50% 90% 99%")
        print("  gate                  ", quantiles(torch.stack(self.trace.gate)))
        print("  router margin         ", quantiles(self.routers("margin")))
        print("  scores of the chosen  ", quantiles(self.routers("score")))
        print("  logit gap             ", quantiles(self.gap))
        print("  top probability       ", quantiles(self.logits.softmax(-1).amax(-1)))
        print(f"decisions changed by noise {flips.sum():.0f} of {flips.numel()}")
        print(f"choices of one expert    {usage.min():.0f} to {usage.max():.0f}")
        print(f"gap under 0.25 nat       {(self.gap < 0.25).float().mean():.3f}")
        print(f"argmax is a successor    {self.follows.float().mean():.3f}")


def quantiles(values):
    sample = values.flatten()
    sample = sample[:: max(1, len(sample) // 1_000_000)].sort().values
    return " ".join(f"{sample[int(share * (len(sample) - 1))]:.3g}" for share in (0.01, 0.1, 0.5, 0.9, 0.99))


def test_the_residual_stream_neither_explodes_nor_vanishes(measured):
    assert all(1 <= value < 3 for value in measured.trace.residual)
    assert all(0.1 < value < 0.5 for value in measured.trace.branch)


def test_the_gate_neither_closes_nor_saturates(measured):
    gate = torch.stack(measured.trace.gate)
    assert gate.isfinite().all()
    assert 0.8 < gate.median() < 1.2
    assert gate.min() > 0.01
    assert gate.max() < 10


def test_router_decisions_survive_the_rounding_of_the_engine(measured):
    """Under 1% of noise on the input and BF16 logits, at most one decision in 250 changes; a random router changes
    several in a hundred."""
    flips = measured.routers("flips")
    assert flips.mean() <= 0.004
    assert measured.routers("margin").median() > 0.3


def test_every_expert_is_chosen_in_every_layer(measured):
    usage = measured.routers("usage")
    assert usage.min() >= TOKENS / 8
    assert all(bias.abs().max() > 0.01 for name, bias in measured.weights.items() if name.endswith(".bias"))


def test_scores_of_chosen_experts_are_not_saturated(measured):
    score = measured.routers("score")
    assert 0.5 < score.quantile(0.05) < score.quantile(0.95) < 0.99


def test_most_positions_have_a_clear_winner(measured):
    assert (measured.gap < 0.25).float().mean() < 0.15
    assert measured.gap.median() > 1
    assert measured.follows.float().mean() > 0.5
    # The winners are not one token, and not certain either.
    assert measured.logits.argmax(-1).unique().numel() > TOKENS / 2
    assert measured.logits.softmax(-1).amax(-1).quantile(0.25) < 0.95


def test_the_context_matters(measured):
    """Other tokens in the first half change the log-probabilities of the second half, and some of its winners."""
    half = TOKENS // 2
    other = measured.tokens.clone()
    other[:half] = torch.randint(2, measured.config["vocab_size"], (half,))
    with torch.inference_mode():
        logits = Model(measured.config, measured.weights).logits(other)
    before, after = measured.logits[half:].log_softmax(-1), logits[half:].log_softmax(-1)
    winners = before.argmax(-1, keepdim=True)
    moved = (before - after).gather(1, winners).abs()
    changed = (winners.squeeze(-1) != after.argmax(-1)).float().mean()
    print(f"\nother first half: winners changed {changed:.3f}, their log-probability moved by {moved.mean():.2f} nat")
    assert moved.mean() > 0.05
    assert changed > 0.03


@pytest.mark.parametrize(
    "knob", [{"router_signal": 0.0, "router_noise": 1.0}, {"head_signal": 0.0}], ids=["router", "head"]
)
def test_without_the_structure_there_are_near_ties(tmp_path, knob):
    """The measurement can tell: unstructured routers or logits of a random model fail what the tests above ask."""
    synthesise(MOVA_CONFIG, tmp_path / "out", tiny=True, knobs=Knobs(**knob))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    torch.manual_seed(0)
    tokens = torch.randint(2, config["vocab_size"], (TOKENS,))
    model = Model(config, read_checkpoint(tmp_path / "out"))
    with torch.inference_mode():
        result = Measured(config, model.weights, tokens, model.logits(tokens), model.trace)
    result.report()
    if "head_signal" in knob:
        assert (result.gap < 0.25).float().mean() > 0.25
    else:
        assert result.routers("flips").mean() > 0.02
