"""Answers like the engine's HTTP server, as far as the stages "requests" and "performance" ask (SGLang 0.5.23).

A model whose greedy tokens follow from the whole prompt, so that answers to different prompts differ, and whose input
log-probabilities follow from each pair of tokens, so that a long prompt begins like its beginning alone.

What it can be told to do wrong: ``nan`` and ``null`` (log-probabilities), ``short`` (tokens missing in counts),
``moody`` (answers change), ``swap`` (two of many answers are exchanged), ``echo`` (another prompt is named), ``drift``
(nat by which /v1/completions is off), ``loaded`` (nat by which one of many answers is off), ``lost`` (a stream loses a
piece of text), ``usage`` (a stream counts wrong), ``chat`` (another prompt is answered), ``keep`` (a request whose
client has gone runs on), ``refuses`` (status of malformed bodies), ``spoiled`` (answers change after a malformed body),
``truncate`` (a prompt that is too long is cut), ``future`` (nat by which the length changes input log-probabilities),
``deaf`` (parsers find nothing).
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from qualify.requests.parsers import CASES

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
ROLES = {"system", "user", "assistant", "tool"}
SAMPLING = {"max_new_tokens", "temperature", "ignore_eos"}
#: beyond this many tokens a stream is slow enough for its client to go
LONG = 1000


class Engine:
    """One server's state: what it was asked, what runs, and what it does wrong."""

    def __init__(self, name: str, vocabulary: int, context: int, wrong: dict[str, Any]):
        self.name, self.vocabulary, self.context, self.wrong = name, vocabulary, context, wrong
        self.lock, self.running, self.asked, self.spoiled = threading.Lock(), 0, 0, False
        self.pair, self.paired = [], threading.Condition()

    def get(self, path: str) -> Any:
        """The answer to a GET, None where there is none of that path."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0, "owned_by": "x"}]}
        if path.startswith("/v1/loads"):
            return {"loads": [{"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0}]}
        return None

    def post(self, path: str, raw: bytes) -> tuple[int, Any]:
        """Status and answer to a POST: a document, or the pieces of a stream."""
        if path == "/flush_cache":
            return (400 if self.running else 200), {}
        if path not in (COMPLETIONS, CHAT, GENERATE, "/separate_reasoning", "/parse_function_call"):
            return 404, {"detail": "Not Found"}
        try:
            body = json.loads(raw)
            if path in (COMPLETIONS, CHAT, GENERATE):
                self.check(path, body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.spoiled = self.spoiled or bool(self.wrong.get("spoiled"))
            return self.wrong.get("refuses", 400), {"object": "error", "message": str(error), "code": 400}
        if path == "/separate_reasoning":
            return 200, self.separate(body["text"])
        if path == "/parse_function_call":
            return 200, self.calls(body["text"])
        answer = {GENERATE: self.generate, COMPLETIONS: self.complete, CHAT: self.chat}[path]
        if not body.get("stream"):
            with self.runs():
                return 200, answer(body)
        return 200, self.streamed(path, body)

    def runs(self):
        engine = self

        class Running:
            def __enter__(self):
                with engine.lock:
                    engine.running += 1
                    engine.asked += 1

            def __exit__(self, kind, *_):
                # A client that has gone is seen when its next piece cannot be written.
                if kind is None or not engine.wrong.get("keep"):
                    with engine.lock:
                        engine.running -= 1

        return Running()

    def check(self, path: str, body: dict) -> None:
        """Raise for what the engine answers with 400."""
        if not isinstance(body, dict):
            raise TypeError("no object")
        sampling = body["sampling_params"] if path == GENERATE else body
        wanted = sampling.get("max_new_tokens" if path == GENERATE else "max_tokens")
        if type(wanted) is not int or wanted < (path == COMPLETIONS):
            raise ValueError("max_tokens")
        if path == GENERATE and set(sampling) - SAMPLING:
            raise ValueError("unknown field")
        if not 0 <= float(body.get("temperature", 0)) < math.inf or body.get("top_p", 1) > 1:
            raise ValueError("temperature or top_p")
        if type(body.get("stream", False)) is not bool or type(body.get("n", 1)) is not int or body.get("n") == 0:
            raise ValueError("stream or n")
        if not isinstance(body.get("stop", ""), (str, list)) or ":" in body.get("model", ""):
            raise ValueError("stop or model")
        if any(not 0 <= int(key) < self.vocabulary for key in body.get("logit_bias", {})):
            raise ValueError("logit_bias")
        try:
            re.compile(body.get("regex", ""))
        except re.error as error:
            raise ValueError("regex") from error
        prompt = self.prompt(path, body)
        if not prompt or not all(type(token) is int and 0 <= token < self.vocabulary for token in prompt):
            raise ValueError("prompt")
        if body.get("top_logprobs_num", 0) > self.vocabulary:
            raise ValueError("top_logprobs_num")
        if len(prompt) + wanted > self.context and self.wrong.get("truncate"):
            sampling["max_tokens"] = 1
        elif len(prompt) + wanted > self.context:
            raise ValueError(f"the prompt is longer than the context length ({self.context})")

    def prompt(self, path: str, body: dict) -> list[int]:
        if path != CHAT:
            return list(body["input_ids" if path == GENERATE else "prompt"])
        if body.get("tool_choice") == "required" or not isinstance(body["messages"], list) or not body["messages"]:
            raise ValueError("messages")
        if any(message["role"] not in ROLES for message in body["messages"]):
            raise ValueError("role")
        text = "".join(f"{message['role']}: {message['content']}" for message in body["messages"])
        return [byte % self.vocabulary for byte in text.encode()]

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        if self.wrong.get("moody"):
            prompt = [*prompt, self.asked]
        rng = random.Random(f"{prompt}{self.spoiled}")
        return [rng.randrange(self.vocabulary) for _ in range(count)]

    def logprob(self, token: int, off: float = 0) -> Any:
        if self.wrong.get("nan"):
            return math.nan
        return None if self.wrong.get("null") else -0.5 - token % 7 / 100 - off

    def exchanged(self, prompt: list[int]) -> list[int]:
        """The other prompt for the two requests that arrive while the fifth waits for another."""
        with self.paired:
            self.pair.append(prompt)
            number = len(self.pair)
            self.paired.notify_all()
            if number not in (5, 6):
                return prompt
            self.paired.wait_for(lambda: len(self.pair) >= 6, timeout=5)
            return self.pair[5 if number == 5 else 4]

    def generate(self, body: dict) -> dict:
        prompt, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids = self.tokens(prompt, wanted)
        told = {"prompt_tokens": len(prompt), "completion_tokens": wanted - self.wrong.get("short", 0)}
        if body.get("return_logprob"):
            told["output_token_logprobs"] = [[self.logprob(one), one, None] for one in ids]
            off = self.wrong.get("future", 0) * (len(prompt) > LONG)
            if body.get("logprob_start_len") == 0:
                pairs = itertools.pairwise(prompt)
                values = [[self.logprob(a + b, off), b, None] for a, b in pairs]
                told["input_token_logprobs"] = [[None, prompt[0], None], *values]
        if body.get("top_logprobs_num"):
            other = [[self.logprob(one, 3), (one + 1) % self.vocabulary, None] for one in ids]
            told["output_top_logprobs"] = list(map(list, zip(told["output_token_logprobs"], other, strict=True)))
        return {"text": self.text(ids), "output_ids": ids, "meta_info": told}

    def text(self, ids: list[int]) -> str:
        return "".join(f"<{one}>" for one in ids)

    def complete(self, body: dict) -> dict:
        prompt, wanted = body["prompt"], body["max_tokens"]
        from_whom = self.exchanged(prompt) if self.wrong.get("swap") and wanted > 100 else prompt
        ids = self.tokens(from_whom, wanted)
        off = self.wrong.get("drift", 0) + (self.wrong.get("loaded", 0) if wanted > 100 else 0)
        choice = {"index": 0, "text": self.text(ids), "finish_reason": "length", "logprobs": None}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": [self.logprob(one, off) for one in ids], "tokens": [],
                                  "text_offset": [], "top_logprobs": []}  # fmt: skip
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": [0, *prompt[1:]] if self.wrong.get("echo") else prompt}
        return {"id": "x", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice],
                "usage": self.usage(prompt, wanted)}  # fmt: skip

    def usage(self, prompt: list[int], wanted: int) -> dict:
        wanted -= self.wrong.get("short", 0)
        return {"prompt_tokens": len(prompt), "completion_tokens": wanted, "total_tokens": len(prompt) + wanted}

    def chat(self, body: dict) -> dict:
        prompt, wanted = self.prompt(CHAT, body), body["max_tokens"]
        ids = self.tokens([*prompt, 1] if self.wrong.get("chat") else prompt, wanted)
        content = [{"token": "", "bytes": None, "logprob": self.logprob(one), "top_logprobs": []} for one in ids]
        choice = {
            "index": 0, "finish_reason": "length", "logprobs": {"content": content} if body.get("logprobs") else None,
            "message": {"role": "assistant", "content": "", "reasoning_content": self.text(ids)},
        }  # fmt: skip
        if body.get("return_token_ids"):
            choice |= {"response_token_ids": ids, "prompt_token_ids": prompt}
        return {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice],
                "usage": self.usage(prompt, wanted)}  # fmt: skip

    def streamed(self, path: str, body: dict) -> Iterator[dict]:
        """The same answer, a token a piece."""
        prompt, wanted, options = self.prompt(path, body), body["max_tokens"], body.get("stream_options") or {}
        with self.runs():
            ids = self.tokens(prompt, wanted)
            for number, one in enumerate(ids, 1):
                text = "" if self.wrong.get("lost") and number == 3 else f"<{one}>"
                choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if number == wanted else None}
                if path == CHAT:
                    choice["delta"] = {"reasoning_content": text} | ({"role": "assistant"} if number == 1 else {})
                    entry = {"token": "", "bytes": None, "logprob": self.logprob(one), "top_logprobs": []}
                    choice["logprobs"] = {"content": [entry]} if body.get("logprobs") else None
                else:
                    choice |= {"text": text, "logprobs": None, "token_ids": [one]}
                    if body.get("logprobs") is not None:
                        choice["logprobs"] = {"token_logprobs": [self.logprob(one, self.wrong.get("drift", 0))]}
                piece = {"id": "x", "object": "x", "created": 0, "model": body["model"], "choices": [choice]}
                if options.get("continuous_usage_stats"):
                    piece["usage"] = self.usage(prompt, number + self.wrong.get("short", 0))
                yield piece
                if wanted > LONG:
                    time.sleep(0.002)
            if options.get("include_usage"):
                usage = self.usage(prompt, wanted - self.wrong.get("usage", 0))
                yield {"id": "x", "object": "x", "created": 0, "model": body["model"], "choices": [], "usage": usage}

    def separate(self, text: str) -> dict:
        case = next((case for case in CASES["k2_horizon"] if case.text == text), None)
        if case is None or self.wrong.get("deaf"):
            return {"reasoning_text": "", "text": text}
        return {"reasoning_text": case.reasoning, "text": text.partition("</ifm|think>")[2]}

    def calls(self, text: str) -> dict:
        case = next(case for case in CASES["k2_horizon"] if case.text.endswith(text))
        return {"normal_text": case.content,
                "calls": [{"name": name, "parameters": json.dumps(given)} for name, given in case.calls]}  # fmt: skip
