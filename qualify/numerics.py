"""Compares a served model with the independent reference: log-probabilities of whole answers, and every module on the
inputs that the engine itself gave to it. What is compared and why: docs/numerics.md. Needs torch.

    run = observe(server, ids, wanted, recorder)      # one answer, and one recorded prefill of the same prompt
    numbers = compare(*references(folder, ...), run)  # JSON, without a non-finite number
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from qualify.errors import Rejected
from qualify.reference import compare as metrics
from qualify.reference import prompts
from qualify.reference.model import Reference
from qualify.serving import Server
from qualify.suite.server import MODULE_OUTPUTS

#: tokens of a prompt, tried in this order until every expert gets its share; tokens decoded after it
LENGTHS, DECODED = (512, 1024, 2048), 64
#: likeliest tokens that are compared at every position
TOP = 5
#: seconds after the answer until a recorded pass must be there, and how often a prefill is asked for: another request
#: in the same batch, such as a health probe, keeps it from being recorded
WAIT, TRIES = 30, 3
#: bytes that a GPU must have free beside the server: for the reference's logits, and the parts of lm_head
GPU_BYTES = 4 << 30

#: the engine's records of a layer as the reference's kinds: kind -> {its field: the engine's name}
KINDS = {
    "norm": {"input": "norm.input", "output": "attention.input"},
    "attention": {"input": "attention.input", "output": "attention.output"},
    "values": {"input": "attention.input", "output": "values.output", "logits": "value_router.logits"},
    "second_norm": {"input": "ffn_norm.input", "output": "ffn.input"},
    "router": {"input": "ffn.input", "logits": "router.logits"},
    "ffn": {"input": "ffn.input", "output": "ffn.output"},
}
#: kind with a router -> the engine's name of it
ROUTERS = {"values": "value_router", "router": "router"}


class Answer(NamedTuple):
    """What the engine said of a prompt of T tokens and its W greedy ones: row r predicts token r + 1."""

    decoded: list[int]
    next: torch.Tensor  #: float64 (T + W - 1,), nat
    top_ids: torch.Tensor  #: int64 (T + W - 1, 5), likeliest first
    top: torch.Tensor  #: float64 (T + W - 1, 5)


@dataclass(frozen=True)
class Run:
    """One prompt at the engine. ``recorded``: the folder of its modules' records, where they were asked for."""

    prompt: list[int]
    answer: Answer
    recorded: Path | None = None
    #: largest difference, in nat, of the prompt's log-probabilities between the answer and the recorded pass
    recording_difference: float | None = None


# --- the engine ---------------------------------------------------------------------------------------------------


def observe(server: Server, ids: list[int], wanted: int, recorder: Path | None = None) -> Run:
    """Ask for a greedy answer as any client would; then, with ``recorder``, for one recorded prefill of the prompt.

    Raises Rejected for an answer that is incomplete or not finite, or a pass that was not recorded.
    """
    answer = ask(server, ids, wanted)
    if recorder is None:
        return Run(ids, answer)
    again = record(server, ids, recorder)
    count = len(ids) - 1
    difference = (answer.next[:count] - again.next[:count]).abs().max().item()
    return Run(ids, answer, recorder / "pass", difference)


def ask(server: Server, ids: list[int], wanted: int) -> Answer:
    """One request, alone, nothing of it cached."""
    server.flush()
    told = server.generate(ids, wanted, return_logprob=True, logprob_start_len=0, top_logprobs_num=TOP)["meta_info"]
    # The first input token has no prediction: nothing comes before it.
    following = told["input_token_logprobs"][1:] + told["output_token_logprobs"]
    likely = told["input_top_logprobs"][1:] + told["output_top_logprobs"]
    count = len(ids) - 1 + wanted
    if len(following) != count or [len(row or ()) for row in likely] != [TOP] * count:
        raise Rejected(
            f"of {count} positions the engine gave {len(following)} log-probabilities and {len(likely)} tops"
        )
    given = [entry[1] for entry in following[: len(ids) - 1]]
    if given != ids[1:]:
        raise Rejected("the engine's log-probabilities are of other tokens than those it was given")
    answer = Answer(
        [entry[1] for entry in told["output_token_logprobs"]],
        torch.tensor([_number(entry[0]) for entry in following], dtype=torch.float64),
        torch.tensor([[entry[1] for entry in row] for row in likely]),
        torch.tensor([[_number(entry[0]) for entry in row] for row in likely], dtype=torch.float64),
    )
    if not (answer.next.isfinite().all() and answer.top.isfinite().all()):
        raise Rejected("some of the engine's log-probabilities are not finite numbers")
    return answer


def record(server: Server, ids: list[int], folder: Path) -> Answer:
    """Let the engine record one prefill of ``ids`` to ``folder/pass``, and return what it answered to it."""
    for name in ("pass", "failed", "armed.json"):
        _remove(folder / name)
    new = folder / ".armed"
    new.write_text(json.dumps({"input_ids": ids}))
    new.rename(folder / "armed.json")
    for _ in range(TRIES):
        answer = ask(server, ids, 1)
        deadline = time.monotonic() + WAIT / TRIES
        while time.monotonic() < deadline:
            if (folder / "failed").exists():
                raise Rejected(f"the engine could not record its modules: {(folder / 'failed').read_text().strip()}")
            if (folder / "pass").exists():
                return answer
            time.sleep(0.05)
    _remove(folder / "armed.json")
    raise Rejected(
        f"the engine recorded none of {TRIES} prefills of {len(ids)} tokens: was it started with {MODULE_OUTPUTS}?"
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.nan


# --- the reference -------------------------------------------------------------------------------------------------


def device(needed: int = GPU_BYTES) -> str:
    """``cuda`` where the first GPU has ``needed`` bytes left, whoever uses the others; else ``cpu``, which is slow."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info(0)[0] >= needed:
        return "cuda"
    return "cpu"


def draw(folder: Path, config: dict[str, Any], seed: int, length: int) -> list[int]:
    """Ids of one prompt for this checkpoint (:func:`qualify.reference.prompts.draw`)."""
    try:
        synthetic = json.loads((folder / "synthetic.json").read_text())
    except FileNotFoundError:
        synthetic = {}
    return prompts.draw(config, synthetic, seed, length)


def references(folder: Path, device: str, partitions: int, fault: str | None = None) -> tuple[Reference, Reference]:
    """The definition in float32, for whole answers; and one that rounds where engines store BF16, for single modules.

    A rounding in front of the quantiser of activations moves codes by whole steps: without it a right module is 1% off.
    """
    return (
        Reference(folder, device, partitions, fault=fault),
        Reference(folder, device, partitions, fault=fault, bf16=True),
    )


@torch.no_grad()
def compare(reference: Reference, rounded: Reference, run: Run, whole: bool = True) -> dict[str, Any]:
    """Stream ``reference`` once over prompt and decoded tokens, and each recorded module by ``rounded`` beside it.

    Top-level log-probability numbers are of the rows that the prefill made, ``decode`` has those of the rows made by
    decoding, one token at a time. ``expert_tokens`` is how many tokens of the prompt the expert with the fewest got
    (only for a model with experts); ``modules``, ``layers`` and ``stream`` only with recorded modules. Not ``whole``:
    ``modules`` and ``layers`` alone, in half the time.
    """
    if not whole:
        local = Modules(rounded, run)
        for number in range(rounded.layer_count):
            local.layer(number, None)
        return finite(local.numbers())
    ids, count = run.prompt + run.answer.decoded, len(run.prompt)
    hits: list[int] = []
    local = Modules(rounded, run) if run.recorded else None
    for number, records in enumerate(reference.layers(ids)):
        for kind in ROUTERS.keys() & records.keys():
            experts = records[kind]["logits"].shape[1]
            hits.append(int(metrics.coverage([records[kind]["chosen"][:count]], experts).min()))
        hidden = records["residual"]["output"]
        if local:
            local.layer(number, hidden[:count])
        del records  # of the layer before, while the next one is computed
    wanted = _logprobs(reference, hidden, ids)
    answer = run.answer
    numbers: dict[str, Any] = {"positions": count, **_told(answer, wanted, slice(0, count))}
    if len(answer.decoded) > 1:
        numbers["decode"] = {"positions": len(ids) - 1 - count, **_told(answer, wanted, slice(count, None))}
    if hits:
        numbers["expert_tokens"] = min(hits)
    if local:
        numbers |= local.numbers()
        numbers["recording_difference"] = run.recording_difference
    return finite(numbers)


def _told(answer: Answer, wanted: Answer, rows: slice) -> dict[str, Any]:
    return {
        **metrics.logprobs(answer.next[rows], wanted.next[rows]),
        "top5_overlap": metrics.top5_overlap(answer.top_ids[rows], wanted.top_ids[rows]),
        **metrics.greedy(answer.top_ids[rows, 0], wanted.top_ids[rows], wanted.top[rows]),
    }


def _logprobs(reference: Reference, hidden: torch.Tensor, ids: list[int], step: int = 64) -> Answer:
    """What :meth:`Reference.logprobs` gives, from a residual stream that is there already."""
    following = torch.tensor(ids[1:], device=hidden.device)[:, None]
    logits, found = reference.logits(hidden[:-1]), []
    for first in range(0, len(logits), step):
        logs = logits[first : first + step].log_softmax(-1)
        top = logs.topk(TOP, -1)
        found.append((logs.gather(1, following[first : first + step])[:, 0], top.indices, top.values))
    return Answer([], *(torch.cat(parts).cpu() for parts in zip(*found, strict=True)))


class Modules:
    """Every recorded module against the reference's on the same input; per layer, and the worst of all layers."""

    def __init__(self, reference: Reference, run: Run):
        self.reference, self.run = reference, run
        #: (kind, metric) -> value per layer, None where the layer has no such module
        self.found: dict[tuple[str, str], list[float | None]] = {}
        #: relative error of the stream after each layer between engine and reference, each on its own activations
        self.stream: list[float] = []
        # What the engine must have in its residual stream after the last compared layer, and what the reference has.
        self._left: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def layer(self, number: int, own: torch.Tensor | None) -> None:
        """Compare layer ``number``; ``own`` (T, H) is the reference's own residual stream after it, if at hand."""
        engine = self._read(f"layer-{number:03}")
        self._ties(number, engine["norm.input"])
        records = {
            kind: {field: engine[name] for field, name in fields.items()}
            for kind, fields in KINDS.items()
            if all(name in engine for name in fields.values())
        }
        if number == 0:
            # Copied, not computed: bit for bit.
            stored = self.reference.embed(self.run.prompt)
            self._note("embedding", "max", 0, _max(metrics.token_errors(engine["norm.input"], stored)))
        for kind in ROUTERS:
            if self.reference.has(number, kind) != (kind in records):
                raise Rejected(f"layer {number}: the engine recorded {'no' if kind not in records else 'a'} {kind}")
        for kind, told in metrics.layer(self.reference, number, records).items():
            for metric, value in told.items():
                self._note(kind, metric, number, value)
        for kind in ROUTERS.keys() & records.keys():
            for metric, value in self._routing(number, kind, engine).items():
                self._note(kind, metric, number, value)
        added = engine["norm.input"].float() + engine["attention.output"].float()
        self._note("add", "max", number, _max(metrics.token_errors(engine["ffn_norm.input"], added)))
        self._left = engine["ffn_norm.input"].float() + engine["ffn.output"].float(), own

    def numbers(self) -> dict[str, Any]:
        """After the last layer: the final norm, and everything together."""
        final = self._read("final")
        self._ties(self.reference.layer_count, final["final.input"])
        wanted = self.reference.module(0, "final", {"input": final["final.input"]})["output"]
        for metric, value in metrics.relative(metrics.token_errors(final["final.output"], wanted)).items():
            self._note("final", metric, 0, value)
        worst: dict[str, dict[str, float]] = {}
        layers: dict[str, list[float | None]] = {}
        for (kind, metric), values in self.found.items():
            known = [value for value in values if value is not None]
            worst.setdefault(kind, {})[metric] = sum(known) if metric in ("flips", "misrouted") else _worst(known)
            if metric in ("mean", "worst_expert", "unequal_logits") and kind not in ("final", "embedding"):
                layers[f"{kind}.{metric}"] = [None if value is None else float(f"{value:.3g}") for value in values]
        return {"modules": worst, "layers": layers, "stream": [float(f"{value:.3g}") for value in self.stream]}

    def _read(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.run.recorded / f"{name}.safetensors")
        except OSError as error:
            raise Rejected(f"the engine recorded no {name}: {error}") from None

    def _ties(self, number: int, stream: torch.Tensor) -> None:
        """The stream that enters layer ``number`` is what the one before left."""
        if self._left:
            added, own = self._left
            self._note("add", "max", number - 1, _max(metrics.token_errors(stream, added)))
            if own is not None:
                self.stream.append(metrics.token_errors(stream, own).mean().item())

    def _routing(self, number: int, kind: str, engine: dict[str, torch.Tensor]) -> dict[str, float]:
        """Experts and mixing weights that the engine took from its own logits."""
        name = ROUTERS[kind]
        logits, ids, weights = (engine[f"{name}.{what}"].cpu() for what in ("logits", "ids", "weights"))
        wanted = self.reference.routing(number, kind, {"logits": logits})
        order, other = ids.long().argsort(-1), wanted["chosen"].cpu().argsort(-1)
        same = (ids.long().gather(1, order) == wanted["chosen"].cpu().gather(1, other)).all(-1)
        right = wanted["weights"].double().cpu().gather(1, other)[same]
        error = (weights.double().gather(1, order)[same] - right).abs() / right.abs()
        return {"misrouted": int((~same).sum()), "mixing": _max(error) if len(error) else math.nan}

    def _note(self, kind: str, metric: str, number: int, value: float) -> None:
        values = self.found.setdefault((kind, metric), [None] * self.reference.layer_count)
        values[number] = value if values[number] is None else _worst([values[number], value])


def _max(values: torch.Tensor) -> float:
    return values.max().item()


def _worst(values: list[float]) -> float:
    """The largest; NaN where there is one."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


NOT_FINITE = "not finite"


def finite(value: Any) -> Any:
    """The same JSON value with :data:`NOT_FINITE` in place of what JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return NOT_FINITE if isinstance(value, float) and not math.isfinite(value) else value


def all_finite(value: Any) -> bool:
    """Whether :func:`finite` had nothing to replace."""
    if isinstance(value, dict | list):
        return all(all_finite(item) for item in (value.values() if isinstance(value, dict) else value))
    return value != NOT_FINITE
