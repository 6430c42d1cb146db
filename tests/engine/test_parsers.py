"""The parsers that the recipes name, on texts as a trained model writes them: whole, and cut at every position.

Random weights write no such text, so no server that is qualified with them shows it.
"""

from __future__ import annotations

import json

import pytest

from launch import recipe
from qualify.requests.parsers import CASES, TOOLS

FLAGS = ("--reasoning-parser", "--tool-call-parser")
PIECES = [(name, number) for name, cases in CASES.items() for number in range(len(cases))]


@pytest.mark.parametrize("artifact", ["mova-fp8", "k2-horizon-fp8"])
def test_recipes_name_parsers_with_canned_texts(artifact):
    names = {setting.value for setting in recipe.load(artifact).settings if setting.flag in FLAGS}
    assert names and names <= CASES.keys()


def parse(name: str, pieces: list[str]):
    """(reasoning, content, calls) of a stream, as the chat endpoint chains the two parsers."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    thinker = ReasoningParser(model_type=name, stream_reasoning=True, force_reasoning=True)
    caller = FunctionCallParser(tools=[Tool(**tool) for tool in TOOLS], tool_call_parser=name)
    reasoning, content, calls = "", "", []

    def take(thought: str | None, rest: str | None) -> None:
        nonlocal reasoning, content
        reasoning += thought or ""
        if rest:
            text, found = caller.parse_stream_chunk(rest)
            content += text or ""
            calls.extend(found)

    for piece in pieces:
        take(*thinker.parse_stream_chunk(piece))
    take(*thinker.parse_stream_end())
    text, found = caller.parse_stream_end()
    content += text or ""
    calls += found
    joined: dict[int, list[str]] = {}
    for call in calls:  # a name comes once, arguments may come in parts
        entry = joined.setdefault(call.tool_index, ["", ""])
        entry[0] += call.name or ""
        entry[1] += call.parameters or ""
    return reasoning, content, tuple((tool, json.loads(given)) for _, (tool, given) in sorted(joined.items()))


@pytest.mark.parametrize(("name", "number"), PIECES)
def test_a_stream_cut_anywhere(name, number):
    case = CASES[name][number]
    wanted = (case.reasoning, case.content, case.calls)
    cuts = [[case.text], list(case.text)]
    cuts += [[case.text[:place], case.text[place:]] for place in range(1, len(case.text))]
    found = [pieces for pieces in cuts if parse(name, pieces) != wanted]
    assert not found, (len(found), found[0], parse(name, found[0]))


@pytest.mark.parametrize(("name", "number"), PIECES)
def test_a_whole_text(name, number):
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    case = CASES[name][number]
    reasoning, rest = ReasoningParser(model_type=name, force_reasoning=True).parse_non_stream(case.text)
    parser = FunctionCallParser(tools=[Tool(**tool) for tool in TOOLS], tool_call_parser=name)
    content, calls = parser.parse_non_stream(rest)
    told = tuple((call.name, json.loads(call.parameters)) for call in calls)
    assert (reasoning, content, told) == (case.reasoning, case.content, case.calls)
