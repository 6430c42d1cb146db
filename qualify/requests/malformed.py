"""Requests that no server may answer with 200, fail on with 500, or die of.

Not among them, because SGLang 0.5.23 behaves otherwise: it serves any model name, and takes a negative ``n``, ``top_k``
or ``logprobs`` (docs/qualification.md). ``DEFECTS`` are those that it answers with 500 and outlives. Those outside the
vocabulary ended the server without the patch ``request-bounds``.
"""

from __future__ import annotations

import json
from typing import Any

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
#: a validator of chat requests takes every body for an object
DEFECTS = [("a list for a body", CHAT, b"[]")]


def bodies(model: str) -> list[tuple[str, str, bytes]]:
    """(what is wrong, path, body) of each."""
    plain = {"model": model, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    native = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}

    def changed(what: str, path: str, body: dict[str, Any], **changes: Any) -> tuple[str, str, bytes]:
        return what, path, json.dumps(body | changes).encode()

    def without(what: str, path: str, body: dict[str, Any], key: str) -> tuple[str, str, bytes]:
        return what, path, json.dumps({name: value for name, value in body.items() if name != key}).encode()

    return [
        *(("half of a JSON document", path, b'{"model": "m", "prompt": ') for path in (COMPLETIONS, CHAT, GENERATE)),
        *(("a list for a body", path, b"[]") for path in (COMPLETIONS, GENERATE)),
        *(("no body", path, b"") for path in (COMPLETIONS, CHAT, GENERATE)),
        ("bytes that are no UTF-8", COMPLETIONS, b'\xff\xfe{"'),
        ("NaN for a temperature", COMPLETIONS, json.dumps(plain | {"temperature": float("nan")}).encode()),
        without("no prompt", COMPLETIONS, plain, "prompt"),
        changed("null for a prompt", COMPLETIONS, plain, prompt=None),
        changed("an empty prompt", COMPLETIONS, plain, prompt=""),
        changed("no token in the prompt", COMPLETIONS, plain, prompt=[]),
        changed("a token outside every vocabulary", COMPLETIONS, plain, prompt=[1, 1 << 31]),
        changed("an empty prompt in a list", COMPLETIONS, plain, prompt=[[]]),
        changed("a number for a prompt", COMPLETIONS, plain, prompt=5),
        changed("tokens and text in one prompt", COMPLETIONS, plain, prompt=[1, "a"]),
        changed("negative max_tokens", COMPLETIONS, plain, max_tokens=-1),
        changed("no max_tokens wanted", COMPLETIONS, plain, max_tokens=0),
        changed("a word for max_tokens", COMPLETIONS, plain, max_tokens="many"),
        changed("max_tokens beyond any context", COMPLETIONS, plain, max_tokens=10**9),
        changed("a word for a temperature", COMPLETIONS, plain, temperature="hot"),
        changed("a negative temperature", COMPLETIONS, plain, temperature=-1),
        changed("top_p above 1", COMPLETIONS, plain, top_p=2),
        changed("no answer wanted", COMPLETIONS, plain, n=0),
        changed("a number for stop", COMPLETIONS, plain, stop=5),
        changed("a word for stream", COMPLETIONS, plain, stream="perhaps"),
        changed("a number for a model", COMPLETIONS, plain, model=5),
        changed("an adapter that there is not", COMPLETIONS, plain, model=f"{model}:adapter"),
        changed("a bias on a word", COMPLETIONS, plain, logit_bias={"x": 1}),
        changed("a bias outside the vocabulary", COMPLETIONS, plain, logit_bias={"100000000": 1}),
        changed("a broken regular expression", COMPLETIONS, plain, regex="("),
        without("no messages", CHAT, chat, "messages"),
        changed("an empty list of messages", CHAT, chat, messages=[]),
        changed("a text for messages", CHAT, chat, messages="hello"),
        changed("an unknown role", CHAT, chat, messages=[{"role": "stranger", "content": "a"}]),
        changed("a message without content", CHAT, chat, messages=[{"role": "user"}]),
        changed("negative max_tokens", CHAT, chat, max_tokens=-4),
        changed("a tool wanted and none given", CHAT, chat, tool_choice="required"),
        changed("no token in the prompt", GENERATE, native, input_ids=[]),
        changed("a negative token", GENERATE, native, input_ids=[1, -1]),
        changed("more log-probabilities than tokens", GENERATE, native, return_logprob=True, top_logprobs_num=10**9),
        changed("a text for tokens", GENERATE, native, input_ids="a"),
        without("no prompt", GENERATE, native, "input_ids"),
        changed("negative max_new_tokens", GENERATE, native, sampling_params={"max_new_tokens": -1}),
        changed("a word for max_new_tokens", GENERATE, native, sampling_params={"max_new_tokens": "a"}),
        changed("an unknown sampling parameter", GENERATE, native, sampling_params={"max_new_tokenz": 1}),
        ("a path that there is not", "/v1/nothing", json.dumps(plain).encode()),
    ]
