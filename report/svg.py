"""Three plots as inline SVG: lines, spans of points, and bars. They draw what they are given and know of no receipt.

Each is 340 units wide, so that its text is readable on a phone and two or three stand side by side on a desk. Colours
are classes of report/style.css, which knows light, dark and print; no plot says anything by colour alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 44, 22, 10, 34
#: classes s0, s1, ... in style.css; the marks tell them apart without colour
SERIES = 6
_MARKS = ("circle", "square", "triangle", "diamond", "ring", "cross")


def number(value: float) -> str:
    """Three significant digits, thousands separated: 0.00461, 12.9, 1,301, 1.95 × 10⁻⁵."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        power = math.floor(math.log10(abs(value)))
        digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        mantissa = f"{value / 10**power:.3g}"
        return f"10{digits}" if mantissa == "1" else f"{mantissa} × 10{digits}"
    rounded = float(f"{value:.3g}")
    if abs(rounded) >= 100:
        return f"{value:,.0f}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def tick(value: float) -> str:
    """A value at an axis: as short as it can be."""
    told = number(value)
    return told.rstrip("0").rstrip(".") if "." in told and "×" not in told else told


class Axis:
    """A linear axis from 0, or a logarithmic one over whole steps of 1, 2, 5; ``at`` gives a place in [low, high]."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool = False):
        self.log, self.low, self.high = log, low, high
        if log:
            self.first, self.last = _step_below(min(values)), _step_above(max(values))
            if self.first == self.last:
                self.last = _step_above(self.first * 1.01)
        else:
            self.first, self.last = 0.0, max(values) or 1.0

    def at(self, value: float) -> float:
        first, last, here = (math.log10(x) for x in (self.first, self.last, value)) if self.log else (
            self.first, self.last, value)  # fmt: skip
        return self.low + (here - first) / (last - first) * (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """At most about ``most`` values to write at the axis."""
        if not self.log:
            step = _step_above(self.last / most)
            return [step * index for index in range(int(self.last / step * (1 + 1e-9)) + 1)]
        decades = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
        found = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
        found = [value for value in found if self.first * 0.999 <= value <= self.last * 1.001]
        if len(found) > most:
            found = [value for value in found if _is_decade(value)] or found[:: len(found) // most + 1]
        return found[:: -(-len(found) // (most + 1))]


def lines(
    title: str, series: Sequence[tuple[str, Sequence[float | None]]], xs: Sequence[float], x_label: str, y_label: str,
    log: bool = False, log_x: bool = False,
) -> str:  # fmt: skip
    """One line a series over ``xs``; None, and on a logarithmic axis 0, leaves a gap."""
    height = 220
    usable = [
        (name, [value if value or (value == 0 and not log) else None for value in values]) for name, values in series
    ]
    values = [value for _, points in usable for value in points if value is not None]
    x_axis, y_axis = Axis(xs, LEFT + 6, WIDTH - RIGHT - 6, log_x), Axis(values or [1.0], height - BOTTOM, TOP + 14, log)
    if not log_x:
        x_axis.first, x_axis.last = min(xs), max(max(xs), min(xs) + 1)
    parts = [f'<text class="axis" x="0" y="{TOP}">{escape(y_label)}</text>']
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{tick(value)}</text>')
    for value in x_axis.ticks() if log_x else _whole(xs):
        x, y = x_axis.at(value), height - BOTTOM + 15
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{value:,.0f}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 3}" text-anchor="end">{escape(x_label)}</text>')
    for index, (_, points) in enumerate(usable):
        places = [None if y is None else (x_axis.at(x), y_axis.at(y)) for x, y in zip(xs, points, strict=True)]
        for drawn, run in itertools.groupby(places, key=lambda place: place is not None):
            if drawn:
                joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
                parts.append(f'<polyline class="line s{index % SERIES}" points="{joined}"/>')
        if len(xs) <= 24:
            parts += [mark(index, *place) for place in places if place]
    return _plot(title, f"{y_label} over {x_label}: {', '.join(name for name, _ in series)}", height, parts)


def spans(
    title: str, rows: Sequence[tuple[str, str, Sequence[tuple[float, int]]]], unit: str, log: bool = False
) -> str:
    """One row of points each on one axis: (label, what stands at the right, [(value, series)]). 0 has no place on a
    logarithmic axis: such a row says so in its text."""
    height = len(rows) * 36 + BOTTOM
    values = [value for _, _, points in rows for value, _ in points if value or not log]
    axis = Axis(values or [1.0], 20, WIDTH - 24, log)
    parts = []
    for value in axis.ticks():
        x = axis.at(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - BOTTOM + 2}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 15}" text-anchor="middle">{tick(value)}</text>'
        )
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{height - 3}" text-anchor="end">{escape(unit)}</text>')
    for index, (label, told, points) in enumerate(rows):
        y = index * 36 + 14
        parts.append(f'<text class="label" x="0" y="{y}">{escape(label)}</text>')
        parts.append(f'<text class="value" x="{WIDTH}" y="{y}" text-anchor="end">{escape(told)}</text>')
        places = [(axis.at(value), which) for value, which in points if value or not log]
        if len(places) > 1:
            low, high = min(places)[0], max(places)[0]
            parts.append(f'<line class="span" x1="{low:.1f}" x2="{high:.1f}" y1="{y + 12}" y2="{y + 12}"/>')
        parts += [mark(which, x, y + 12) for x, which in places]
    return _plot(title, "; ".join(f"{label}: {told} {unit}" for label, told, _ in rows), height, parts)


def bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float, str, int]]]]) -> str:
    """Groups of bars, each group on its own axis from 0: (label, [(name, value, what stands at the right, series)])."""
    parts, y, told = [], 0, []
    for label, rows in groups:
        most = max(value for _, value, _, _ in rows) or 1.0
        parts.append(f'<text class="label" x="0" y="{y + 14}">{escape(label)}</text>')
        y += 18
        for name, value, text, series in rows:
            width = max(1.0, value / most * WIDTH)
            parts.append(f'<text class="tick" x="0" y="{y + 12}">{escape(name)}</text>')
            parts.append(f'<text class="value" x="{WIDTH}" y="{y + 12}" text-anchor="end">{escape(text)}</text>')
            parts.append(f'<rect class="track" x="0" y="{y + 16}" width="{WIDTH}" height="7" rx="2"/>')
            parts.append(f'<rect class="bar s{series}" x="0" y="{y + 16}" width="{width:.1f}" height="7" rx="2"/>')
            y += 26
        told.append(f"{label}: " + ", ".join(f"{name} {text}" for name, _, text, _ in rows))
        y += 10
    return _plot(title, "; ".join(told), y, parts)


def stack(title: str, shares: Sequence[tuple[str, float]], unit: str) -> str:
    """One bar of parts, in their order; each part's number stands in it where there is room, and in the legend."""
    total = sum(value for _, value in shares) or 1.0
    parts, x = [], 0.0
    for index, (_, value) in enumerate(shares):
        width = value / total * WIDTH
        parts.append(
            f'<rect class="part s{index % SERIES}" x="{x:.1f}" y="4" width="{max(0.5, width - 1):.1f}" height="34"/>'
        )
        if width > 44:
            parts.append(
                f'<text class="inside" x="{x + width / 2:.1f}" y="26" text-anchor="middle">{number(value)}</text>'
            )
        x += width
    parts.append('<text class="tick" x="0" y="54">0</text>')
    parts.append(f'<text class="tick" x="{WIDTH}" y="54" text-anchor="end">{number(total)} {escape(unit)}</text>')
    return _plot(title, ", ".join(f"{name} {number(value)} {unit}" for name, value in shares), 60, parts)


def legend(names: Sequence[tuple[str, int]], lines: bool = False) -> str:
    """The marks of series, on their lines where the plot has lines, as a list."""
    items = ""
    for name, index in names:
        line = f'<line class="line s{index % SERIES}" x1="1" x2="25" y1="6" y2="6"/>' if lines else ""
        key = f'<svg class="key" width="26" height="12" aria-hidden="true">{line}{mark(index, 13, 6)}</svg>'
        items += f"<li>{key}{escape(name)}</li>"
    return f'<ul class="legend">{items}</ul>'


def swatches(names: Sequence[str]) -> str:
    """The parts of a stack, as a list."""
    box = '<rect class="part s%d" width="12" height="12"/>'
    key = f'<svg class="key" width="12" height="12" aria-hidden="true">{box}</svg>'
    items = "".join(f"<li>{key % (index % SERIES)}{escape(name)}</li>" for index, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def mark(series: int, x: float, y: float) -> str:
    """The mark of a series, about 7 units across."""
    kind, css = _MARKS[series % SERIES], f"mark s{series % SERIES}"
    if kind in ("circle", "ring"):
        return f'<circle class="{css}{" hollow" if kind == "ring" else ""}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -4.5), (4.5, 0), (0, 4.5), (-4.5, 0)),
        "cross": ((-1, -5), (1, -5), (1, 5), (-1, 5)),  # an upright tick: a limit, not a measurement
    }[kind]
    return f'<polygon class="{css}" points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'


def _plot(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    told = escape(f"{title}. {description}", quote=True)
    return f'<svg class="plot" role="img" viewBox="0 0 {WIDTH} {height}" aria-label="{told}">{"".join(parts)}</svg>'


def _whole(xs: Sequence[float]) -> list[float]:
    """Whole numbers of an axis of layers."""
    low, high = math.ceil(min(xs)), math.floor(max(xs))
    step = max(1, math.ceil((high - low) / 6))
    return list(range(low, high + 1, step))


def _step_below(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max((factor * power for factor in (1, 2, 5) if factor * power <= value * 1.0001), default=power)


def _step_above(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.9999), 10 * power)


def _is_decade(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-6
