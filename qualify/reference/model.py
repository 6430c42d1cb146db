"""K2-Horizon in float32, from a checkpoint folder, one tensor after the other.

    reference = Reference(folder, "cuda", router_partitions=2)
    reference.logprobs(ids)                                   # whole model on its own activations
    reference.module(5, "attention", {"input": x})            # one module on what the engine fed to its own

Differences from an engine are the rounding of BF16 activations between modules, by design, and whatever is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

from qualify.errors import CannotRun, Rejected
from qualify.reference import faults, formulas
from qualify.reference.weights import Weights

#: Rows of ``lm_head`` at a time: 160 MB in float32 for a hidden size of 2,560.
VOCABULARY_ROWS = 16384
#: Tokens at a time where whole rows of the vocabulary are in memory twice.
LOGIT_TOKENS = 64

Record = dict[str, torch.Tensor]
_GIVEN = ("input", "logits")

#: kind of a router's record -> its module, and the config's number of experts chosen
_ROUTERS = {"values": ("self_attn.v_router", "mova_num_experts_per_tok"), "router": ("mlp.gate", "num_experts_per_tok")}


class LogProbs(NamedTuple):
    """Teacher-forced log-probabilities in nat, position t predicting token t + 1."""

    next: torch.Tensor  #: float32 (T-1,), of the token that follows
    top_ids: torch.Tensor  #: int64 (T-1, 5), most likely first
    top: torch.Tensor  #: float32 (T-1, 5)


class Reference:
    """The model of a checkpoint folder on ``device``.

    ``router_partitions`` is the declared router provenance, 1 or 2 (no meaning for a dense model).
    ``quantise_activations``: FP8 weights see activations quantised per token and 128 columns, as in an engine with
    W8A8 kernels. ``bf16`` rounds to BF16 where engines store (after each norm, product, activation and sum): no longer
    the definition, but sharper, because a rounding in front of the quantiser moves codes by whole steps, which is 1% of
    a layer's output, and logits around 40 are multiples of 0.25. ``fault`` plants one of
    :data:`qualify.reference.faults.FAULTS`. Raises ``Rejected`` for a model whose formulas are not here, ``CannotRun``
    when the device rounds float32 products to TF32.
    """

    def __init__(
        self,
        folder: Path | str,
        device: torch.device | str = "cpu",
        router_partitions: int = 2,
        quantise_activations: bool = True,
        fault: str | None = None,
        bf16: bool = False,
    ):
        self.weights = Weights(folder, device)
        self.device, self.config = self.weights.device, self.weights.config
        _check(self.config)
        if router_partitions not in (1, 2):
            raise Rejected(f"router_partitions is {router_partitions!r}; it must be 1 or 2")
        self.fault = faults.parse(fault, self.config) if fault else None
        if self.fault:
            self.weights = faults.FaultyWeights(folder, device, self.fault)
        self.right = faults.Semantics(
            norm_groups=self.config.get("layernorm_num_groups") or 1,
            gate=self.config.get("attention_gate_func"),
            router_partitions=router_partitions,
            quantise_activations=quantise_activations,
        )
        self.bf16 = bf16
        self.layer_count: int = self.config["num_hidden_layers"]
        _require_float32(self.device)

    # --- whole model ------------------------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Token ids ``(T,)`` -> float32 ``(T, H)``. Raises ``Rejected`` for an id outside the vocabulary."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        if not len(ids) or ids.min() < 0 or ids.max() >= self.config["vocab_size"]:
            raise Rejected(f"token ids must be at least one, each from 0 to {self.config['vocab_size'] - 1}")
        return self.weights.selected("model.embed_tokens.weight", ids)

    @torch.no_grad()
    def layers(self, ids: Sequence[int] | torch.Tensor) -> Iterator[dict[str, Record]]:
        """Yield the records of each decoder layer over ``ids``; names and shapes in :meth:`module`.

        A layer's last residual output is the next one's input; :meth:`logits` takes the last one of all.
        """
        hidden = self.embed(ids)
        for layer in range(self.layer_count):
            records: dict[str, Record] = {}
            hidden = self._layer(layer, hidden, records)
            yield records

    @torch.no_grad()
    def hidden(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """The residual stream after the last layer, ``(T, H)``, before the final norm."""
        hidden = self.embed(ids)
        for layer in range(self.layer_count):
            hidden = self._layer(layer, hidden, {})
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Residual stream after the last layer ``(T, H)`` -> float32 logits ``(T, V)``: final norm and ``lm_head``."""
        x = self._norm(hidden, "model.norm", self.right)
        tied = self.config.get("tie_word_embeddings")
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        logits = torch.empty(len(x), self.config["vocab_size"], device=self.device)
        for first in range(0, logits.shape[1], VOCABULARY_ROWS):
            last = min(first + VOCABULARY_ROWS, logits.shape[1])
            logits[:, first:last] = self._stored(x @ self.weights.rows(name, first, last).T)
        return logits

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int] | torch.Tensor) -> LogProbs:
        """Log-probabilities of each next token of ``ids`` (at least two), and the five most likely ones."""
        ids = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        logits = self.logits(self.hidden(ids)[:-1])
        found = []
        for first in range(0, len(logits), LOGIT_TOKENS):
            logs = logits[first : first + LOGIT_TOKENS].log_softmax(-1)
            top = logs.topk(5, -1)
            following = ids[first + 1 : first + 1 + len(logs), None]
            found.append((logs.gather(1, following)[:, 0], top.indices, top.values))
        return LogProbs(*(torch.cat(parts) for parts in zip(*found, strict=True)))

    # --- one module -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def module(self, layer: int, kind: str, inputs: Record) -> Record:
        """Compute one module of a layer on given inputs, any float dtype; outputs are float32 on the device.

        ``inputs["input"]`` is ``(T, H)``. By ``kind``, what comes back under ``output`` (and what more):

        - ``norm``, ``second_norm``: the norm before the attention, before the MLP; ``(T, H)``
        - ``attention``: after ``o_proj``, ``(T, H)``; input is the first norm's output
        - ``values`` (MoVA layers): mixed values ``(T, kv heads * D)``; ``logits`` and ``chosen`` of the value router
        - ``router`` (sparse layers): no output; what :meth:`routing` returns
        - ``ffn``: MLP, or experts and shared expert, ``(T, H)``; sparse layers also ``logits`` and ``chosen``
        - ``residual``: the whole layer on the residual stream, ``(T, H)``
        - ``final``: the norm after the last layer; ``layer`` is ignored

        ``values`` and ``ffn`` take ``inputs["logits"]`` as well: routing then follows these instead of own ones, so
        that a flipped near tie does not count as an error of the experts. Raises ``Rejected`` for a kind that the
        layer has not.
        """
        x, given = (None if inputs.get(name) is None else inputs[name].to(self.device).float() for name in _GIVEN)
        if kind != "final" and not 0 <= layer < self.layer_count:
            raise Rejected(f"layer {layer}: the model has layers 0 to {self.layer_count - 1}")
        if kind in ("values", "router") and not self.has(layer, kind):
            raise Rejected(f"layer {layer} has no {kind}")
        semantics = self._semantics(layer)
        prefix = f"model.layers.{layer}"
        match kind:
            case "norm":
                return {"output": self._norm(x, f"{prefix}.input_layernorm", semantics)}
            case "second_norm":
                return {"output": self._norm(x, f"{prefix}.post_attention_layernorm", semantics)}
            case "final":
                return {"output": self._norm(x, "model.norm", self.right)}
            case "attention":
                return {"output": self._attention(layer, x, {})}
            case "values":
                return self._values(layer, x, given)
            case "router":
                return self.routing(layer, kind, inputs)
            case "ffn":
                return self._ffn(layer, x, given)
            case "residual":
                return {"output": self._layer(layer, x, {})}
        raise Rejected(f"module kind {kind!r} is unknown")

    @torch.no_grad()
    def routing(self, layer: int, kind: str, inputs: Record) -> Record:
        """``logits``, ``chosen`` and mixing ``weights`` of the router of ``values`` or ``router``, no expert computed.

        ``inputs`` has ``input`` ``(T, H)``, or ``logits``, which are then taken instead of own ones.
        """
        if kind not in ("values", "router") or not self.has(layer, kind):
            raise Rejected(f"layer {layer} has no router {kind!r}")
        x, given = (None if inputs.get(name) is None else inputs[name].to(self.device).float() for name in _GIVEN)
        return self._route(layer, kind, x, given)

    def has(self, layer: int, kind: str) -> bool:
        """Whether a layer has ``values`` (value experts) or a ``router`` (routed experts); any other kind is true."""
        return kind not in _ROUTERS or f"model.layers.{layer}.{_ROUTERS[kind][0]}.weight" in self.weights

    # --- parts ------------------------------------------------------------------------------------------------------

    def _semantics(self, layer: int) -> faults.Semantics:
        return self.fault.semantics(layer, self.right, self.config) if self.fault else self.right

    def _layer(self, layer: int, hidden: torch.Tensor, records: dict[str, Record]) -> torch.Tensor:
        prefix, semantics = f"model.layers.{layer}", self._semantics(layer)
        x = self._norm(hidden, f"{prefix}.input_layernorm", semantics)
        attended = self._attention(layer, x, records)
        between = self._stored(hidden + attended)
        y = self._norm(between, f"{prefix}.post_attention_layernorm", semantics)
        found = self._ffn(layer, y, None)
        records["norm"] = {"input": hidden, "output": x}
        records["attention"] = {"input": x, "output": attended}
        records["second_norm"] = {"input": between, "output": y}
        records["ffn"] = {"input": y, "output": found["output"]}
        if "logits" in found:
            records["router"] = {"input": y, "logits": found["logits"], "chosen": found["chosen"]}
        after = self._stored(between + found["output"])
        records["residual"] = {"input": hidden, "output": after}
        return after

    def _norm(self, x: torch.Tensor, name: str, semantics: faults.Semantics) -> torch.Tensor:
        weight = self.weights.vector(f"{name}.weight")
        return self._stored(formulas.rms_norm(x, weight, semantics.norm_groups, self.config["rms_norm_eps"]))

    def _attention(self, layer: int, x: torch.Tensor, records: dict[str, Record]) -> torch.Tensor:
        prefix, semantics, size = f"model.layers.{layer}.self_attn", self._semantics(layer), self.config["head_dim"]
        project = self._linear(semantics)
        theta, rotated = self.config["rope_parameters"]["rope_theta"], self.config["rope_head_dim"]
        q, k = (
            formulas.rope(project(f"{prefix}.{name}", x).view(len(x), -1, size), theta, rotated, semantics.rope_pairing)
            for name in ("q_proj", "k_proj")
        )
        if self.has(layer, "values"):
            values = self._values(layer, x, None)
            records["values"] = {"input": x, **values}
            v = values["output"]
        else:
            v = project(f"{prefix}.v_proj", x)
        mixed = self._stored(formulas.attention(q, k, v.view(len(x), -1, size)))
        if semantics.gate is not None:
            gate = self._stored(formulas.gate(project(f"{prefix}.gate_proj", x), semantics.gate))
            mixed = self._stored(mixed * gate)
        return project(f"{prefix}.o_proj", mixed)

    def _values(self, layer: int, x: torch.Tensor, given: torch.Tensor | None) -> Record:
        prefix, semantics = f"model.layers.{layer}.self_attn", self._semantics(layer)
        project = self._linear(semantics)
        routed = self._route(layer, "values", x, given)
        width = self.config["num_key_value_heads"] * self.config["head_dim"]
        output = formulas.mix(
            x,
            routed["chosen"],
            routed.pop("weights"),
            width,
            self.config["mova_num_experts"],
            lambda number, rows: self._stored(silu(project(f"{prefix}.v_experts.{number}", rows))),
            self.bf16,
        )
        return {"output": output, **routed}

    def _ffn(self, layer: int, x: torch.Tensor, given: torch.Tensor | None) -> Record:
        prefix, semantics = f"model.layers.{layer}.mlp", self._semantics(layer)

        def mlp(name: str, rows: torch.Tensor) -> torch.Tensor:
            leaves = (self.weights.matrix(f"{name}.{leaf}_proj") for leaf in ("gate", "up", "down"))
            return formulas.mlp(rows, *leaves, semantics.quantise_activations, self.bf16)

        if not self.has(layer, "router"):
            return {"output": mlp(prefix, x)}
        routed = self._route(layer, "router", x, given)
        output = formulas.mix(
            x,
            routed["chosen"],
            routed.pop("weights"),
            x.shape[1],
            self.config["num_experts"],
            lambda number, rows: mlp(f"{prefix}.experts.{number}", rows),
            self.bf16,
        )
        if self.config.get("num_shared_experts"):
            output = self._stored(output + mlp(f"{prefix}.shared_experts", x))
        return {"output": output, **routed}

    def _route(self, layer: int, kind: str, x: torch.Tensor | None, given: torch.Tensor | None) -> Record:
        name, top_k = _ROUTERS[kind]
        router, semantics, logits = f"model.layers.{layer}.{name}", self._semantics(layer), given
        if logits is None:
            weight = self.weights.vector(f"{router}.weight")
            logits = formulas.router_logits(x, weight, semantics.router_partitions)
        bias = self.weights.vector(f"{router}.bias") if f"{router}.bias" in self.weights else None
        chosen, weights = formulas.route(
            logits,
            bias,
            top_k=self.config[top_k],
            score=self.config.get("router_score_func") or "sigmoid",
            normalise=self.config["norm_topk_prob"],
            scaling=self.config["router_scaling_factor"],
            biased=semantics.biased_mixing,
        )
        return {"logits": logits, "chosen": chosen, "weights": weights}

    def _linear(self, semantics: faults.Semantics) -> Callable[[str, torch.Tensor], torch.Tensor]:
        return lambda name, x: formulas.linear(x, self.weights.matrix(name), semantics.quantise_activations, self.bf16)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return formulas.stored(x, self.bf16)


def _check(config: dict[str, Any]) -> None:
    """Refuse what the formulas do not cover, instead of computing another model."""
    rope = config.get("rope_parameters") or {}
    wanted = {
        "model_type": (config.get("model_type"), ("k2_horizon",)),
        "hidden_act": (config.get("hidden_act"), ("silu",)),
        "attention_gate_func": (config.get("attention_gate_func"), (None, "softplus", "silu")),
        "router_score_func": (config.get("router_score_func"), (None, "sigmoid", "softmax")),
        "rope_parameters.rope_type": (rope.get("rope_type"), ("default",)),
        "attention_bias": (bool(config.get("attention_bias")), (False,)),
        "query_key_norm": (bool(config.get("query_key_norm")), (False,)),
        "sliding_window": (config.get("sliding_window"), (None,)),
    }
    for key, (value, known) in wanted.items():
        if value not in known:
            raise Rejected(f"config.json has {key} {value!r}; the reference knows {', '.join(map(repr, known))}")


def _require_float32(device: torch.device) -> None:
    """Forbid TF32, then look: a mantissa of 23 bits must survive a product (the environment can force TF32)."""
    torch.set_float32_matmul_precision("highest")
    fine = 1 + 2.0**-20
    product = torch.full((64, 64), fine, device=device) @ torch.eye(64, device=device)
    if not torch.equal(product, torch.full_like(product, fine)):
        raise CannotRun(f"float32 matrix products on {device} are rounded to TF32; unset NVIDIA_TF32_OVERRIDE")
