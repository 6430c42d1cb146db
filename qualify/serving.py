"""Measures a running server over HTTP: throughput of whole rounds, and the sanity checks beside them. Standard library.

Every request has exactly the stated number of random input ids (seeded) and gets exactly the stated number of output
tokens (end-of-text ignored); another count, or an error, ends the measurement. The prefix cache is flushed before
each round. Rates are of whole rounds, prefill included: output tokens, or for prefill input tokens, over the time
from the first request sent to the last answer. Rounds with more than one output token are streamed: time to first
token is from sending a request to its first chunk, inter-token latency from chunk to chunk of one request (a chunk of n
tokens counts as n equal steps).
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import random
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from launch.direct import OPENER
from qualify.errors import CannotRun, Rejected

#: name -> (requests at once, input tokens, output tokens)
ROUNDS = {
    "decode-1": (1, 512, 512),
    "decode-32": (32, 512, 512),
    "decode-64": (64, 512, 512),
    "prefill-16x4096": (16, 4096, 1),
}
SEED = 20260901
#: seconds until one request is given up
TIMEOUT = 600
#: SGLang's public cookbook for K2-Horizon: input tokens, output tokens, prompts one after another
COOKBOOK = (8192, 1024, 32)
#: tensor parallelism -> (prompts, of which at once) of its second round
COOKBOOK_LOADED = {1: (256, 64), 2: (256, 32), 8: (256, 8)}


@dataclass(frozen=True, slots=True)
class Stream:
    """When the tokens of one streamed answer came."""

    #: seconds from sending the request to the first token
    first: float
    #: seconds from each token to the next
    steps: list[float]


class Server:
    """HTTP to one server; ids are drawn below ``vocabulary``. One thread a request in flight."""

    def __init__(self, url: str, key: str | None, vocabulary: int, seed: int = SEED):
        self.url, self.vocabulary, self.rng = url, vocabulary, random.Random(seed)
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        """The answer, parsed where it is JSON. Raises CannotRun for anything but 200, and for no answer."""
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        with self.open(path, data, method) as answer:
            try:
                text = answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                raise CannotRun(f"{path} breaks off its answer: {error}") from None
        return json.loads(text) if text.startswith(("{", "[")) else text

    def open(self, path: str, data: bytes | None, method: str = "POST") -> http.client.HTTPResponse:
        """The response, unread. Raises CannotRun for anything but 200, and for no answer."""
        request = urllib.request.Request(f"{self.url}{path}", data, self.headers, method=method)
        try:
            return OPENER.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            raise CannotRun(f"{path} answers {error.code}: {error.read()[:300].decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException) as error:
            raise CannotRun(f"{path} does not answer: {error}") from None

    def status(self, path: str, data: bytes) -> tuple[int, str]:
        """Status and body of a POST, whatever they are. Raises CannotRun for no answer."""
        request = urllib.request.Request(f"{self.url}{path}", data, self.headers, method="POST")
        try:
            with OPENER.open(request, timeout=TIMEOUT) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise CannotRun(f"{path} does not answer: {error}") from None

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

    def stream(self, ids: list[int], count: int) -> Stream:
        """Greedy continuation by exactly ``count`` tokens, streamed. Raises Rejected where the counts are others."""
        body = {
            "model": "default", "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        lines: list[tuple[float, bytes]] = []
        began = time.perf_counter()
        with self.open("/v1/completions", json.dumps(body).encode()) as answer:
            try:
                # Parsed afterwards: with many streams in one process, parsing would be measured too.
                lines += [(time.perf_counter(), line) for line in answer if line.startswith(b"data: {")]
            except (OSError, http.client.HTTPException) as error:
                raise CannotRun(f"/v1/completions breaks off its stream: {error}") from None
        times: list[float] = []
        usage = {}
        for at, line in lines:
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise CannotRun(f"/v1/completions answers in its stream: {str(chunk['error'])[:300]}")
            usage = chunk.get("usage") or {}
            if new := usage.get("completion_tokens", 0) - len(times):
                since = times[-1] if times else at
                times += [since + (at - since) * (step + 1) / new for step in range(new)]
        counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if counts != (len(ids), count) or len(times) != count:
            raise Rejected(f"asked for {len(ids)} tokens in and {count} out, a stream gave {counts[0]} and {counts[1]}")
        return Stream(times[0] - began, [after - before for before, after in itertools.pairwise(times)])

    def streams(self, prompts: Sequence[list[int]], wanted: int, at_once: int) -> tuple[list[Stream], float]:
        """All prompts' streams, ``at_once`` in flight at any time, and the seconds of all; the cache was flushed."""
        self.flush()
        with ThreadPoolExecutor(at_once) as pool:
            began = time.perf_counter()
            found = list(pool.map(lambda prompt: self.stream(prompt, wanted), prompts))
            return found, time.perf_counter() - began

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    def together(self, prompts: list[list[int]], wanted: int, **more: Any) -> tuple[list[dict[str, Any]], float]:
        """The answers to all prompts, asked at once, and the seconds until the last; the prefix cache was flushed."""
        self.flush()
        with ThreadPoolExecutor(len(prompts)) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda prompt: self.generate(prompt, wanted, **more), prompts))
            return answers, time.perf_counter() - began


def measured(requests: int, given: int, wanted: int, seconds: list[float], streams: list[Stream]) -> dict[str, Any]:
    """One round as it stands in a result file; the rate is that of the median repetition.

    Of streamed rounds also median and p95 of time to first token and of inter-token latency, over all repetitions.
    """
    rate = requests * (wanted if wanted > 1 else given) / statistics.median(seconds)
    found = {
        "requests": requests, "input_tokens": given, "output_tokens": wanted, "seconds": seconds,
        "tokens_per_second": rate, "counted": "output" if wanted > 1 else "input",
    }  # fmt: skip
    if streams:
        found["first_token_seconds"] = spread([one.first for one in streams])
        found["inter_token_seconds"] = spread([step for one in streams for step in one.steps])
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile (inclusive)."""
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"median": statistics.median(values), "p95": p95}


def rounds(server: Server, repetitions: int) -> dict[str, dict[str, Any]]:
    """All of ROUNDS, as they stand in a result file."""
    result = {}
    for name, (requests, given, wanted) in ROUNDS.items():
        seconds, streams = [], []
        # Kernels of these shapes compile outside the clock.
        for count in (min(wanted, 16), *[wanted] * repetitions):
            prompts = [server.prompt(given) for _ in range(requests)]
            found, took = server.streams(prompts, count, requests) if wanted > 1 else server.together(prompts, count)
            seconds.append(took)
            streams.append(found if wanted > 1 else [])
        told = measured(requests, given, wanted, seconds[1:], [one for found in streams[1:] for one in found])
        result[name] = told
        print(f"{name:18} {told['tokens_per_second']:10.1f} tok/s ({told['counted']})", file=sys.stderr, flush=True)
    return result


def cookbook(server: Server, tp: int) -> dict[str, dict[str, Any]]:
    """The cookbook's workload on one launch: its seed's prompts one after another, then under load.

    Raises Rejected for a tensor parallelism that the cookbook does not name.
    """
    if tp not in COOKBOOK_LOADED:
        raise Rejected(f"the cookbook names no workload for TP{tp}: it has {', '.join(map(str, COOKBOOK_LOADED))}")
    given, wanted, alone = COOKBOOK
    fresh = random.Random(SEED)  # every launch answers the same prompts
    result = {}
    for prompts, at_once in ((alone, 1), COOKBOOK_LOADED[tp]):
        ids = [[fresh.randrange(server.vocabulary) for _ in range(given)] for _ in range(prompts)]
        streams, seconds = server.streams(ids, wanted, at_once)
        result[f"at-once-{at_once}"] = measured(prompts, given, wanted, [seconds], streams) | {"at_once": at_once}
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
