"""Texts as a trained model writes them, and what the engine's parsers must make of them: random weights write none.

Per name of a parser as recipes give it. K2-Horizon's chat template opens the thinking block itself, so that a model's
text begins inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "object"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


@dataclass(frozen=True, slots=True)
class Case:
    """A model's whole text, and the parts that a client gets: (name, arguments) of each call."""

    text: str
    reasoning: str
    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


def _argument(key: str, value: str) -> str:
    return f"<ifm|arg_key>{key}</ifm|arg_key><ifm|arg_value>{value}</ifm|arg_value>"


_WEATHER = f"<ifm|tool_call>weather{_argument('city', '00123')}{_argument('days', '3')}</ifm|tool_call>"
_NESTED = '<ifm|tool_call>{"name": "weather", "arguments": {"units": {"t": "C", "of": [1, 2]}}}</ifm|tool_call>'

#: parser -> its cases; reasoning and tool calls of a model go by one name
CASES = {
    "k2_horizon": (
        Case("Let me see.</ifm|think>Four.", "Let me see.", "Four."),
        Case("1 < 2, and <ifm| is no tag.</ifm|think>So < it is.", "1 < 2, and <ifm| is no tag.", "So < it is."),
        Case("Ünï \U0001f600</ifm|think>\U0001f680 ß", "Ünï \U0001f600", "\U0001f680 ß"),
        Case(
            f"Ask.</ifm|think>I ask.<ifm|tool_calls>\n{_WEATHER}\n</ifm|tool_calls>",
            "Ask.", "I ask.", (("weather", {"city": "00123", "days": 3}),),
        ),
        Case(
            f"Twice.</ifm|think><ifm|tool_calls>\n{_WEATHER}\n<ifm|tool_call>now</ifm|tool_call>\n</ifm|tool_calls>",
            "Twice.", "", (("weather", {"city": "00123", "days": 3}), ("now", {})),
        ),
        Case(
            f"JSON.</ifm|think><ifm|tool_calls>{_NESTED}</ifm|tool_calls>",
            "JSON.", "", (("weather", {"units": {"t": "C", "of": [1, 2]}}),),
        ),
    ),
}  # fmt: skip
