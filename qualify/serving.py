"""Measures a running server over HTTP: throughput of whole rounds, and the sanity checks beside them. Standard library.

Every request has exactly the stated number of random input ids (seeded) and gets exactly the stated number of output
tokens (end-of-text ignored); another count, or an error, ends the measurement. The prefix cache is flushed before
each round. Rates are of whole rounds, prefill included: output tokens, or for prefill input tokens, over the time
from the first request sent to the last answer.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launch.direct import OPENER
from qualify.errors import CannotRun, Rejected

#: name -> (requests at once, input tokens, output tokens)
ROUNDS = {
    "decode-1": (1, 512, 256),
    "decode-32": (32, 512, 512),
    "decode-64": (64, 512, 256),
    "prefill-16x4096": (16, 4096, 1),
}
SEED = 20260901
#: seconds until one request is given up
TIMEOUT = 600


class Server:
    """HTTP to one server; ids are drawn below ``vocabulary``. One thread a request in flight."""

    def __init__(self, url: str, key: str | None, vocabulary: int, seed: int = SEED):
        self.url, self.vocabulary, self.rng = url, vocabulary, random.Random(seed)
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """The answer, parsed where it is JSON. Raises CannotRun for anything but 200, and for no answer."""
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        request = urllib.request.Request(f"{self.url}{path}", data, self.headers, method=method)
        try:
            with OPENER.open(request, timeout=TIMEOUT) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            raise CannotRun(f"{path} answers {error.code}: {error.read()[:300].decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException) as error:
            raise CannotRun(f"{path} does not answer: {error}") from None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def flush(self) -> None:
        """Empty the prefix cache."""
        self.ask("/flush_cache")

    def generate(self, ids: list[int], count: int, **more: Any) -> dict[str, Any]:
        """Greedy continuation by exactly ``count`` tokens. Raises Rejected where the counts are others."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer = self.ask("/generate", {"input_ids": ids, "sampling_params": sampling, **more})
        told = answer["meta_info"]
        if (told["prompt_tokens"], told["completion_tokens"]) != (len(ids), count):
            raise Rejected(
                f"asked for {len(ids)} tokens in and {count} out, got {told['prompt_tokens']} in and "
                f"{told['completion_tokens']} out"
            )
        return answer

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def together(self, prompts: list[list[int]], wanted: int, **more: Any) -> tuple[list[dict[str, Any]], float]:
        """The answers to all prompts, asked at once, and the seconds until the last; the prefix cache was flushed."""
        self.flush()
        with ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda prompt: self.generate(prompt, wanted, **more), prompts))
            return answers, time.perf_counter() - began

    def round(self, requests: int, given: int, wanted: int) -> float:
        """Seconds of one round."""
        return self.together([self.prompt(given) for _ in range(requests)], wanted)[1]


def rounds(server: Server, repetitions: int) -> dict[str, dict[str, Any]]:
    """All of ROUNDS, as they stand in a result file; the rate is that of the median repetition."""
    result = {}
    for name, (requests, given, wanted) in ROUNDS.items():
        server.round(requests, given, min(wanted, 16))  # kernels of these shapes compile outside the clock
        seconds = [server.round(requests, given, wanted) for _ in range(repetitions)]
        rate = requests * (wanted if wanted > 1 else given) / statistics.median(seconds)
        result[name] = {
            "requests": requests, "input_tokens": given, "output_tokens": wanted, "seconds": seconds,
            "tokens_per_second": rate, "counted": "output" if wanted > 1 else "input",
        }  # fmt: skip
        print(f"{name:18} {rate:10.1f} tok/s ({result[name]['counted']})", file=sys.stderr, flush=True)
    return result


def sanity(server: Server, given: int = 512, wanted: int = 64) -> dict[str, Any]:
    """Finite log-probabilities, and a greedy answer that a flush of the prefix cache does not change.

    Raises Rejected where they are not so.
    """
    prompt = server.prompt(given)
    answers = []
    for _ in range(2):
        server.flush()
        answers.append(server.generate(prompt, wanted, return_logprob=True, logprob_start_len=0))
    told = answers[0]["meta_info"]
    # The first input token has none: nothing comes before it.
    values = [entry[0] for entry in told["input_token_logprobs"][1:] + told["output_token_logprobs"]]
    count = given - 1 + wanted
    if len(values) != count or not all(isinstance(value, float) and math.isfinite(value) for value in values):
        raise Rejected(f"of {len(values)} log-probabilities ({count} expected) some are not finite numbers")
    ids = [[entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    if ids[0] != ids[1]:
        first = next(index for index, pair in enumerate(zip(*ids, strict=True)) if pair[0] != pair[1])
        raise Rejected(f"a cold repeat of a greedy answer differs from token {first} on")
    return {
        "finite_logprobs": len(values),
        "mean_input_logprob": statistics.fmean(values[: given - 1]),
        "cold_repeat_equal_tokens": len(ids[0]),
        "distinct_output_tokens": len(set(ids[0])),
    }
