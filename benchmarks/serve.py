"""Throughput of a running server: decode at several concurrencies, prefill, and two sanity checks beside them.

    python3 -B -m benchmarks.serve --out FILE [--url http://127.0.0.1:30000] [--repetitions 3] [--note TEXT]

Every request has exactly the stated number of random input ids (seeded) and gets exactly the stated number of output
tokens (end-of-text ignored); a request that answers with another count, or an error, ends the run. The prefix cache
is flushed before each round. Rates are of whole rounds, prefill included: output tokens, or for prefill input tokens,
over the time from the first request sent to the last answer. Start-up and flags come from the launcher's status file.

Sanity: all log-probabilities of a 512-token prompt are finite, and a greedy answer is the same token for token after
a flush of the cache.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from launch import status
from qualify.errors import CannotRun, Parser, Rejected, exit_code

#: name -> (requests at once, input tokens, output tokens)
ROUNDS = {
    "decode-1": (1, 512, 256),
    "decode-32": (32, 512, 512),
    "decode-64": (64, 512, 256),
    "prefill-16x4096": (16, 4096, 1),
}
SEED = 20260901


class Server:
    """HTTP to one server; ids are drawn below ``vocabulary``."""

    def __init__(self, session, url: str, vocabulary: int, rng: random.Random):
        self.session, self.url, self.vocabulary, self.rng = session, url, vocabulary, rng

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a POST. Raises CannotRun for anything but 200."""
        async with self.session.post(f"{self.url}{path}", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise CannotRun(f"{path} answers {answer.status}: {text[:300]}")
            return json.loads(text) if text.startswith(("{", "[")) else text

    async def generate(self, ids: list[int], count: int, **more: Any) -> dict[str, Any]:
        """Greedy continuation by exactly ``count`` tokens. Raises Rejected where the counts are others."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        answer = await self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **more})
        told = answer["meta_info"]
        if (told["prompt_tokens"], told["completion_tokens"]) != (len(ids), count):
            raise Rejected(
                f"asked for {len(ids)} tokens in and {count} out, got {told['prompt_tokens']} in and "
                f"{told['completion_tokens']} out"
            )
        return answer

    def prompt(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]

    async def round(self, requests: int, given: int, wanted: int) -> float:
        """Seconds of one round after a flush of the prefix cache."""
        prompts = [self.prompt(given) for _ in range(requests)]
        await self.post("/flush_cache")
        began = time.perf_counter()
        await asyncio.gather(*(self.generate(prompt, wanted) for prompt in prompts))
        return time.perf_counter() - began


async def measure(url: str, key: str | None, vocabulary: int, repetitions: int) -> dict[str, Any]:
    """All rounds and checks, as they stand in the result file."""
    import aiohttp

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        server = Server(session, url, vocabulary, random.Random(SEED))
        async with session.get(f"{url}/server_info") as answer:
            info = await answer.json()
        result = {"kv_tokens": info["max_total_num_tokens"], "sanity": await sanity(server), "rounds": {}}
        for name, (requests, given, wanted) in ROUNDS.items():
            await server.round(requests, given, min(wanted, 16))  # kernels of these shapes compile outside the clock
            seconds = [await server.round(requests, given, wanted) for _ in range(repetitions)]
            tokens = requests * (wanted if wanted > 1 else given)
            rate = tokens / statistics.median(seconds)
            result["rounds"][name] = {
                "requests": requests, "input_tokens": given, "output_tokens": wanted, "seconds": seconds,
                "tokens_per_second": rate, "counted": "output" if wanted > 1 else "input",
            }  # fmt: skip
            print(f"{name:18} {rate:10.1f} tok/s ({result['rounds'][name]['counted']})", file=sys.stderr, flush=True)
        return result


async def sanity(server: Server) -> dict[str, Any]:
    """Finite log-probabilities and a repeatable greedy answer. Raises Rejected where they are not."""
    prompt = server.prompt(512)
    answers = []
    for _ in range(2):
        await server.post("/flush_cache")
        answers.append(await server.generate(prompt, 64, return_logprob=True, logprob_start_len=0))
    told = answers[0]["meta_info"]
    values = [entry[0] for entry in told["input_token_logprobs"][1:] + told["output_token_logprobs"]]
    if len(values) != 511 + 64 or not all(isinstance(value, float) and math.isfinite(value) for value in values):
        raise Rejected(f"of {len(values)} log-probabilities (575 expected) some are not finite numbers")
    ids = [[entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
    if ids[0] != ids[1]:
        first = next(index for index, pair in enumerate(zip(*ids, strict=True)) if pair[0] != pair[1])
        raise Rejected(f"a cold repeat of a greedy answer differs from token {first} on")
    return {
        "finite_logprobs": len(values),
        "mean_input_logprob": statistics.fmean(values[:511]),
        "cold_repeat_equal_tokens": len(ids[0]),
        "distinct_output_tokens": len(set(ids[0])),
    }


def machine() -> dict[str, Any]:
    """GPU, driver and versions."""
    query = "--query-gpu=name,driver_version,memory.used,memory.total"
    done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return {
        "gpu": [line.split(", ") for line in done.stdout.splitlines()],
        "versions": {name: metadata.version(name) for name in ("sglang", "torch", "triton", "sglang-kernel")},
        "cpus": os.cpu_count(),
    }


def without_paths(launch: dict[str, Any] | None) -> dict[str, Any] | None:
    """The launcher's record without the place of the checkpoint on this machine."""
    if launch is None:
        return None
    path = launch["plan"]["flags"]["--model-path"]["value"]
    return json.loads(json.dumps(launch).replace(json.dumps(path)[1:-1], "MODEL_DIR"))


def main() -> int:
    parser = Parser(prog="python3 -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--url", help="default: that of the launcher's status file")
    parser.add_argument("--vocabulary", type=int, default=250624, help="ids are drawn below this (default 250624)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    found = status.read()
    if args.url is None and found["state"] != "ready":
        raise CannotRun(f"no server is ready ({found['detail']}): start one, or give --url")
    key = None
    if os.environ.get("API_KEY_FILE"):
        from launch.plan import read_key

        key = read_key(os.environ["API_KEY_FILE"])
    result = {
        "benchmark": "serve",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "launch": without_paths(found.get("launch")),
        "ready": found["detail"],
        "command": f"python3 -B -m benchmarks.serve --out FILE --repetitions {args.repetitions}",
        "note": args.note,
        **asyncio.run(measure(args.url or found["url"], key, args.vocabulary, args.repetitions)),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
