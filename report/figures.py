"""Figures of receipts and benchmark files: which numbers, in which plot, with which words."""

from __future__ import annotations

import math
import statistics
from typing import Any

from qualify.errors import Rejected
from report import floors, svg
from report.pieces import figure
from report.sources import Kernels, Load, Origin, Receipt, Round, Serving

_SPREAD = [("mean", 0), ("p95", 1), ("max", 2)]
#: series of a limit: an upright tick
_BOUND = 5
#: name in start_up_seconds -> what it is; ``scheduler`` without the parts that are named, and ``other`` last
_START = {
    "checks": "checks of the launcher",
    "weights": "weights",
    "kv_cache": "KV cache",
    "graphs": "CUDA graphs",
    "scheduler": "rest of the scheduler",
    "other": "imports, tokeniser, warm-up",
}
_KERNELS = [
    ("W4A16, this project", "w4a16_ms"),
    ("FP8, this project", "fp8_ms"),
    ("humming", "humming_ms"),
    ("BF16", "bf16_ms"),
]


def numerics(receipt: Receipt) -> list[str]:
    """Error per layer, stream, modules and log-probabilities of a receipt that has them. Raises ``Rejected``."""
    extension, origin = receipt.extension, receipt.origin
    numbers = extension["stages"]["numerics"]["numbers"]
    thresholds = extension["policy"]["thresholds"]
    bounds = {item["number"]: item["max"] for item in thresholds if item["stage"] == "numerics" and "max" in item}
    try:
        return [
            *_layers(numbers, origin),
            *_stream(numbers, origin),
            *_modules(numbers, bounds, origin),
            *_logprobs(numbers, bounds, origin),
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Rejected(f"{receipt.file}: the numbers of its stage numerics are unusable: {error}") from None


def _layers(numbers: dict[str, Any], origin: Origin) -> list[str]:
    layers = {name: _values(values) for name, values in sorted(numbers.get("layers", {}).items())}
    halves = {
        "Error per layer: attention": ("norm.", "attention.", "values."),
        "Error per layer: feed-forward": ("second_norm.", "ffn."),
    }
    found = []
    for title, starts in halves.items():
        mine = {name: values for name, values in layers.items() if name.startswith(starts) and "unequal" not in name}
        found += _per_layer(title, mine, origin, "relative error", True)
    unequal = {name: values for name, values in layers.items() if "unequal" in name}
    return found + _per_layer(
        "Router logits that are not the reference's bits", unequal, origin, "share of logits", False
    )


def _per_layer(title: str, series: dict[str, list], origin: Origin, label: str, log: bool) -> list[str]:
    zero = [name for name, values in series.items() if not any(values)]
    drawn = [(name, values) for name, values in series.items() if not log or name not in zero]
    if not drawn:
        return []
    count = max(len(values) for _, values in drawn)
    if any(len(values) != count for values in series.values()):
        raise ValueError("layers has lists of several lengths")
    notes = ["On the engine's own input of each module: an error stays where it is made."] if log else []
    if log and zero:
        notes.append(f"0 in every layer, so not on a logarithmic axis: {', '.join(zero)}.")
    plot = svg.lines(title, drawn, range(count), "layer", label, log=log)
    rows = [[index, *(values[index] for values in series.values())] for index in range(count)]
    keys = svg.legend([(name, index) for index, (name, _) in enumerate(drawn)], lines=True)
    return [figure(title, plot, origin, notes, ["layer", *series], rows, keys)]


def _stream(numbers: dict[str, Any], origin: Origin) -> list[str]:
    values = _values(numbers.get("stream", []))
    if not values:
        return []
    title = "How far the residual stream has gone apart"
    plot = svg.lines(title, [("stream", values)], range(len(values)), "after layer", "relative error")
    notes = ["Engine and reference each on its own activations: here errors add up."]
    return [figure(title, plot, origin, notes, ["after layer", "relative error"], list(enumerate(values)))]


def _modules(numbers: dict[str, Any], bounds: dict[str, float], origin: Origin) -> list[str]:
    rows, body = [], []
    for kind, found in sorted(numbers.get("modules", {}).items()):
        values = {name: _number(found[name]) for name, _ in _SPREAD if name in found}
        if values:  # a router has no relative error
            rows.append(_row(kind, values, bounds.get(f"modules.{kind}.mean")))
            body.append([kind, *(values.get(name) for name, _ in _SPREAD), bounds.get(f"modules.{kind}.mean")])
        if "worst_expert" in found:
            worst, bound = {"mean": _number(found["worst_expert"])}, bounds.get(f"modules.{kind}.worst_expert")
            rows.append(_row(f"{kind}, worst expert", worst, bound))
            body.append([f"{kind}, worst expert", worst["mean"], None, None, bound])
    title = "Error of a token, by module: the worst layer"
    return _spread(title, rows, "relative error", True, origin, ["module"], body)


def _logprobs(numbers: dict[str, Any], bounds: dict[str, float], origin: Origin) -> list[str]:
    rows, body = [], []
    for label, prefix, found in (("prompt", "", numbers), ("decoded", "decode.", numbers.get("decode", {}))):
        keys = {name: f"{name}_abs_logprob_error" for name, _ in _SPREAD}
        if all(key in found for key in keys.values()):
            values, bound = {name: _number(found[key]) for name, key in keys.items()}, bounds.get(prefix + keys["mean"])
            rows.append(_row(f"{label}, {found['positions']} positions", values, bound))
            body.append([label, found["positions"], *values.values(), bound])
    title = "Error of log-probabilities, whole model"
    return _spread(title, rows, "nat", False, origin, ["rows of the", "positions"], body)


def _row(label: str, values: dict[str, float], bound: float | None) -> tuple[str, str, list[tuple[float, int]]]:
    """One row of a plot of spans, with the bound of its mean where there is one."""
    low, high = min(values.values()), max(values.values())
    told = (
        "0: equal to the bit" if not high else svg.number(low) + (f" – {svg.number(high)}" if len(values) > 1 else "")
    )
    points = [(values[name], series) for name, series in _SPREAD if name in values]
    return label, told, [*points, *([(bound, _BOUND)] if bound else [])]


def _spread(
    title: str, rows: list, unit: str, log: bool, origin: Origin, head: list[str], body: list[list[Any]]
) -> list[str]:
    if not rows:
        return []
    drawn = {series for _, _, points in rows for _, series in points}
    notes = [] if _BOUND in drawn else ["No bound of a mean is measured, so none is drawn."]
    keys = svg.legend([(name, series) for name, series in [*_SPREAD, ("bound of the mean", _BOUND)] if series in drawn])
    heads = [*head, *(name for name, _ in _SPREAD), "bound of the mean"]
    return [figure(title, svg.spans(title, rows, unit, log), origin, notes, heads, body, keys)]


def serving(one: Serving, of: str = "") -> list[str]:
    """Throughput, latencies and start of a served model; ``of`` ends each title."""
    return [*_throughput(one, of), *_latency(one, "inter_token", f"Time between tokens{of}"),
            *_latency(one, "first_token", f"Time to first token{of}"), *_start_up(one)]  # fmt: skip


def _without_floor(one: Serving) -> str:
    if one.model is None:
        return "No floor: tensors and bytes of the checkpoint are those of no model whose config is here."
    if one.gpu not in floors.rates():
        return f"No floor: report/rates.toml has no rates for {one.gpu or 'an unrecorded GPU'}."
    return ""


def _round(name: str, one: Round) -> str:
    """A round with its tokens."""
    return f"{_short(name, one)}: {one.input_tokens:,} in, {one.output_tokens:,} out"


def _short(name: str, one: Round) -> str:
    """A round as a plot has room for it; the cookbook's keep their name, because their tokens do not stand there."""
    cookbook = f"{name.rsplit(' ', 1)[0]}, " if name.startswith("cookbook") else ""
    return f"{cookbook}{one.at_once} at once"


def _throughput(one: Serving, of: str) -> list[str]:
    groups, body = [], []
    for name, first in next(iter(one.sides.values())).items():
        bars, best = [], None
        if not _without_floor(one):
            batches = first.requests / first.at_once
            seconds = batches * floors.round_seconds(
                one.model, one.gpu, first.at_once, first.input_tokens, first.output_tokens, one.ranks
            )
            best = first.requests * (first.output_tokens if first.counted == "output" else first.input_tokens) / seconds
        for index, (side, rounds) in enumerate(one.sides.items()):
            rate = rounds[name].tokens_per_second if name in rounds else None
            if rate is not None:
                share = f" · {rate / best:.0%}" if best else ""
                bars.append((side, rate, f"{svg.number(rate)}{share}", index))
            body.append([_round(name, first), side, first.counted, rate, best, rate / best if rate and best else None])
        if best:
            bars.append(("at the floor", best, svg.number(best), 4))
        label = _short(name, first) if name.startswith("cookbook") else _round(name, first)
        groups.append((f"{label}, {first.counted} tok/s", bars))
    if not groups:
        return []
    notes = [
        _without_floor(one)
        or "At the floor: what memory and arithmetic of the GPU allow at most; the share is of that."
    ]
    if any(row[-1] and row[-1] > 1 for row in body):
        notes.append("A rate above this floor: its router does not choose evenly, or something was measured wrongly.")
    if "stock" not in one.sides:
        notes.append("Stock: not in this file.")
    if one.model and one.model.assumed:
        notes.append("Sizes of this model are partly assumed, and so is its floor.")
    title = f"Throughput{of}"
    head = ["round", "side", "tokens counted", "tokens/s", "at the floor", "share"]
    return [figure(title, svg.bars(title, groups), one.origin, notes, head, body)]


def _latency(one: Serving, key: str, title: str) -> list[str]:
    rows, body = [], []
    for side, rounds in one.sides.items():
        for name, found in rounds.items():
            spread = getattr(found, key)
            if spread is None:
                continue
            least = None
            if not _without_floor(one):
                if key == "inter_token":
                    context = found.input_tokens + found.output_tokens / 2
                    least = floors.step_seconds(one.model, one.gpu, found.at_once, context, one.ranks)
                else:
                    least = floors.prefill_seconds(one.model, one.gpu, 1, found.input_tokens, one.ranks)
            label = _short(name, found) if len(one.sides) == 1 else f"{found.at_once} at once, {side}"
            median, p95 = (value * 1000 for value in spread)
            points = [(median, 0), (p95, 1), *([(least * 1000, 5)] if least else [])]
            rows.append((label, f"{svg.number(median)} ms, p95 {svg.number(p95)} ms", points))
            body.append([_round(name, found), side, median, p95, least * 1000 if least else None])
    if not rows:
        return []
    floor = "of one decode step" if key == "inter_token" else "of a request's own prompt alone"
    notes = [_without_floor(one) or f"Floor: the least time {floor}."]
    keys = svg.legend([("median", 0), ("p95", 1), *([] if _without_floor(one) else [("floor", 5)])])
    head = ["round", "side", "median ms", "p95 ms", "floor ms"]
    return [figure(title, svg.spans(title, rows, "ms"), one.origin, notes, head, body, keys)]


def _start_up(one: Serving) -> list[str]:
    told = dict(one.start_up)
    if not told:
        return []
    inner = sum(told.get(name, 0.0) for name in ("weights", "kv_cache", "graphs"))
    if "scheduler" in told:
        told["scheduler"] = max(0.0, told["scheduler"] - inner)  # it contains them
    shares = [(words, told[name]) for name, words in _START.items() if name in told]
    title = "From start to ready"
    notes = ["Durations by the engine's own clocks, one after another; the last part lies partly before the others."]
    keys = svg.swatches([f"{words} {svg.number(value)} s" for words, value in shares])
    body = [[name, value] for name, value in one.start_up.items()]
    return [figure(title, svg.stack(title, shares, "s"), one.origin, notes, ["part", "seconds"], body, keys)]


def load(one: Load, of: str = "") -> list[str]:
    """Seconds of loading, each repetition a point; ``of`` ends the title."""
    title = f"Loading the checkpoint{of}"
    rows = [
        (side, f"median {svg.number(statistics.median(values))} s", [(value, index) for value in values])
        for index, (side, values) in enumerate(one.seconds.items())
    ]
    body = [[side, number, value] for side, values in one.seconds.items() for number, value in enumerate(values, 1)]
    return [figure(title, svg.spans(title, rows, "s"), one.origin, ["Each point is one repetition."],
                   ["side", "repetition", "seconds"], body)]  # fmt: skip


def kernels(one: Kernels) -> list[str]:
    """Milliseconds over tokens of the E2M1-K32 kernels, one plot a shape."""
    found = []
    for shape in dict.fromkeys(row["shape"] for row in one.rows):
        rows = sorted((row for row in one.rows if row["shape"] == shape), key=lambda row: row["tokens"])
        series = [(label, [row[key] for row in rows]) for label, key in _KERNELS]
        # copy_share: W4A16's rate of bytes over that of a copy, so this is what a copy of the same bytes takes.
        series.append(("copy of W4A16's bytes", [row["w4a16_ms"] * row["copy_share"] for row in rows]))
        title = f"E2M1-K32 experts, shape {shape}"
        plot = svg.lines(title, series, [row["tokens"] for row in rows], "tokens", "milliseconds", log=True, log_x=True)
        body = [[row["tokens"], *(row[key] for _, key in _KERNELS), values] for row, values in
                zip(rows, series[-1][1], strict=True)]  # fmt: skip
        head = ["tokens", *(f"{label}, ms" for label, _ in series)]
        keys = svg.legend([(label, index) for index, (label, _) in enumerate(series)], lines=True)
        found.append(figure(title, plot, one.origin, ["The floor is the time in which a copy moves as many bytes."],
                            head, body, keys))  # fmt: skip
    return found


def _values(raw: Any) -> list[float | None]:
    if not isinstance(raw, list):
        raise ValueError("a list of layers is none")
    return [None if value is None else _number(value) for value in raw]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no number of at least 0")
    return float(value)
