"""Small pieces of the page. Everything that comes from a file is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from report.sources import Origin

#: a sign beside the word: nothing is said by colour alone
_SIGNS = {"passed": "✓", "warned": "!", "failed": "✕", "refused": "⊘", "not-run": "○", "unsupported": "–"}


def verdict(word: str, link: str = "") -> str:
    """A verdict as a chip; ``word`` is one of those in _SIGNS, in any case."""
    key = word.lower()
    inner = f'<span aria-hidden="true">{_SIGNS[key]}</span> {escape(word)}'
    if link:
        return f'<a class="verdict {key}" href="#{escape(link, quote=True)}">{inner}</a>'
    return f'<span class="verdict {key}">{inner}</span>'


def table(caption: str, head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """A table; numbers are written as the file has them and stand at the right."""

    def cell(value: Any) -> str:
        if isinstance(value, Markup):
            return f"<td>{value}</td>"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return f'<td class="n">{value:.6g}</td>' if isinstance(value, float) else f'<td class="n">{value:,}</td>'
        return f"<td>{'–' if value is None else escape(str(value))}</td>"

    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    rows = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in body)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def figure(
    title: str, plot: str, origin: Origin, notes: Sequence[str], head: Sequence[str], body: Sequence[Sequence[Any]],
    legend: str = "",
) -> str:  # fmt: skip
    """A plot with its legend, where its numbers come from, what to know of them, and the numbers as a table."""
    told = "".join(f"<p>{escape(note)}</p>" for note in notes)
    numbers = table(f"{title}, {origin.file}", head, body)
    return (
        f"<figure><h4>{escape(title)}</h4>{plot}{legend}<figcaption>{told}{source(origin)}</figcaption>"
        f"<details><summary>Numbers: {escape(title)}</summary>{numbers}</details></figure>"
    )


def source(origin: Origin) -> str:
    """File, date, GPU, driver and versions, each also where the file does not say it."""
    parts = [origin.date or "date not recorded", origin.gpu or "GPU not recorded"]
    parts += [
        f"driver {origin.driver}" if origin.driver else "driver not recorded",
        origin.versions or "versions not recorded",
    ]
    mark = f' <strong class="warn">{escape(origin.mark)}</strong>' if origin.mark and origin.mark != "PASSED" else ""
    return f"<p><code>{escape(origin.file)}</code> · {escape(' · '.join(parts))}{mark}</p>"


def note(title: str, items: Iterable[str], bad: bool = False) -> str:
    """A box with a list that nobody should overlook."""
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<div class="note{" bad" if bad else ""}"><strong>{escape(title)}</strong><ul>{listed}</ul></div>'
