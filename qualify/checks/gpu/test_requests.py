"""Stage "requests": real requests over HTTP, most by the ``openai`` client, and each answer is the right one.

Wrong is: no finite number, another count, another request's answer, log-probabilities outside their bound, a server
that does not live on. Right by an independent model is the stage "numerics". Bounds stand in qualify/policy.toml.
"""

import json
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from launch import arguments, effective
from launch.plan import Choice, Plan
from launch.supervise import get
from qualify import policy, serving
from qualify.requests import canary, malformed, parsers

#: requests at once, input tokens, output tokens
TOGETHER, GIVEN, WANTED = 64, 512, 512
#: tokens that a canary's answer alone has, and prompts that may be drawn for TOGETHER that differ
KNOWN, DRAWN = 32, 96
#: tokens of answers that are read whole; of the long prompt, and of its beginning alone
SHORT, LONG, BEGINNING = 48, 16384, 512
#: streamed chunks before a client goes, seconds for the server to notice, tokens that would take it far longer
READ, FREED, ENDLESS = 8, 10, 100_000
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 2 + 2? Ünï \U0001f600"}]


@pytest.fixture(scope="session")
def client(status, planned):
    """Of the server itself, whatever proxies the environment names."""
    with httpx.Client(trust_env=False, timeout=serving.TIMEOUT, limits=httpx.Limits(max_connections=None)) as http:
        key = planned.key or "none"
        yield openai.OpenAI(base_url=f"{status['url']}/v1", api_key=key, max_retries=0, http_client=http)


@pytest.fixture(scope="session")
def name(client) -> str:
    """The one model that the server says it serves."""
    [model] = client.models.list().data
    return model.id


@pytest.fixture(scope="session")
def bound(planned):
    """A threshold's value by the end of its name."""
    section = policy.load().section(planned.artifact, planned.target)
    return lambda end: section.threshold(f"requests-{end}").value


@pytest.fixture(scope="session")
def known(server):
    """A prompt with its answer, both from before anything went wrong."""
    prompt = server.prompt(GIVEN)
    return prompt, alone(server, prompt)


def alone(server, prompt: list[int], wanted: int = KNOWN) -> canary.Answer:
    """What comes where nothing else is asked."""
    answer = server.generate(prompt, wanted, return_logprob=True, top_logprobs_num=5)
    return canary.of(answer["meta_info"])


def lives_on(server, known, bound) -> None:
    """The known prompt still gets its answer, with nothing cached. A running request makes the flush an error."""
    server.flush()
    prompt, before = known
    found = canary.compare(before, alone(server, prompt), bound("logprob-difference"), bound("tie-margin"))
    assert not found.wrong, f"the known answer has changed: {found.wrong}"


def finite(values: list, count: int) -> list[float]:
    good = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    assert (len(values), len(good)) == (count, count), f"{len(good)} of {len(values)} ({count} expected) are finite"
    return good


def counts(usage) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens


def test_server_info_equals_the_plan(status, planned):
    """Every flag that the launcher says it planned, and that plan against the recipe's, made anew."""
    told = status["launch"]["plan"]
    choices = {
        name: Choice(arguments.lookup(name), flag["value"], (), flag["source"]) for name, flag in told["flags"].items()
    }
    ran = Plan(told["artifact"], told["target"], choices, told["declared"], told["expect"], told["uncatalogued"], None)
    found = effective.differences(ran, get(f"{status['url']}/server_info", planned.key, seconds=60))
    assert not found, "; ".join(found)
    assert {name: choice.value for name, choice in planned.choices.items()}.items() <= {
        name: choice.value for name, choice in choices.items()
    }.items()


def test_a_completion_and_its_log_probabilities(server, client, name, bound, measure):
    """Equal to what /generate says of the same prompt; streamed the same text, counts and log-probabilities."""
    prompt = server.prompt(GIVEN)
    server.flush()
    native = server.generate(prompt, SHORT, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)
    before = canary.of(native["meta_info"])
    # The first input token has none: nothing comes before it.
    inputs = finite([entry[0] for entry in native["meta_info"]["input_token_logprobs"][1:]], GIVEN - 1)
    finite(before.logprobs, SHORT)
    asked = {"model": name, "prompt": prompt, "max_tokens": SHORT, "logprobs": 1, **GREEDY}
    asked["extra_body"] = asked["extra_body"] | {"return_token_ids": True}
    server.flush()
    whole = client.completions.create(**asked)
    [choice] = whole.choices
    assert counts(whole.usage) == (GIVEN, SHORT)
    assert (choice.prompt_token_ids, choice.finish_reason, choice.text) == (prompt, "length", native["text"])
    logprobs = finite(choice.logprobs.token_logprobs, SHORT)
    found = canary.compare(before, canary.Answer(choice.token_ids, logprobs), bound("logprob-difference"), 0)
    assert (found.wrong, found.tie) == ("", None)
    difference = max(found.differences)
    server.flush()
    text, ids, streamed, usages = "", [], [], []
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages += [counts(chunk.usage)] if chunk.usage else []
        for part in chunk.choices:
            text += part.text
            ids += part.token_ids or []
            streamed += part.logprobs.token_logprobs if part.logprobs else []
    assert (usages, ids, text) == ([(GIVEN, SHORT)], choice.token_ids, choice.text)
    again = [abs(one - other) for one, other in zip(logprobs, finite(streamed, SHORT), strict=True)]
    assert statistics.fmean(again) <= bound("logprob-difference")
    measure(finite_logprobs=len(inputs) + SHORT, mean_input_logprob=statistics.fmean(inputs))
    measure(endpoint_logprob_difference=difference, streamed_logprob_difference=max(again))


def test_chat(server, client, name, measure):
    """Exact counts, the tokens that /generate gives to the rendered prompt, and the same text streamed."""
    asked = {"model": name, "messages": MESSAGES, "max_tokens": SHORT, "logprobs": True, **GREEDY}
    server.flush()
    # The engine returns ids of whole answers alone.
    ids = {"extra_body": asked["extra_body"] | {"return_token_ids": True}}
    whole = client.chat.completions.create(**asked | ids)
    [choice] = whole.choices
    prompt = choice.prompt_token_ids
    assert counts(whole.usage) == (len(prompt), SHORT)
    finite([entry.logprob for entry in choice.logprobs.content], SHORT)
    server.flush()
    native = server.generate(prompt, SHORT, return_logprob=True)
    assert canary.of(native["meta_info"]).ids == choice.response_token_ids
    server.flush()
    parts, streamed, usages, roles = {"content": "", "reasoning_content": ""}, [], [], []
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages += [counts(chunk.usage)] if chunk.usage else []
        for part in chunk.choices:
            roles += [part.delta.role] if part.delta.role else []
            for key in parts:
                parts[key] += getattr(part.delta, key, None) or ""
            streamed += [entry.logprob for entry in part.logprobs.content] if part.logprobs else []
    finite(streamed, SHORT)
    assert (usages, roles) == ([counts(whole.usage)], ["assistant"])
    assert parts == {key: getattr(choice.message, key, None) or "" for key in parts}
    assert "".join(parts.values()), "an answer without text"
    measure(chat_prompt_tokens=len(prompt))


def test_a_cold_repeat(server, measure):
    """The same tokens, with nothing cached; that no low bit changes is recorded and not demanded."""
    prompt, answers = server.prompt(GIVEN), []
    for _ in range(2):
        server.flush()
        answers.append(canary.of(server.generate(prompt, 2 * SHORT, return_logprob=True)["meta_info"]))
    one, two = answers
    difference = max(abs(a - b) for a, b in zip(finite(one.logprobs, 2 * SHORT), two.logprobs, strict=True))
    measure(cold_repeat_tokens=len(one.ids), cold_repeat_logprob_difference=difference)
    measure(distinct_output_tokens=len(set(one.ids)))
    first = next((place for place, pair in enumerate(zip(one.ids, two.ids, strict=True)) if pair[0] != pair[1]), None)
    assert first is None, f"a cold repeat of a greedy answer differs from token {first} on"


def test_many_at_once(server, client, name, bound, measure):
    """Exact counts, no error, and nobody gets another's answer."""
    limits = bound("logprob-difference"), bound("tie-margin")
    prompts, before = [], []
    for _ in range(DRAWN):
        prompt = server.prompt(GIVEN)
        answer = alone(server, prompt)
        # One that could be taken for another's would hide an exchange.
        if not any(canary.alike([answer, other], *limits) for other in before):
            prompts.append(prompt)
            before.append(answer)
        if len(prompts) == TOGETHER:
            break
    assert len(prompts) == TOGETHER, f"only {len(prompts)} of {DRAWN} prompts have answers that can be told apart"

    def ask(prompt: list[int]):
        extra = {"ignore_eos": True, "return_token_ids": True}
        try:
            return client.completions.create(
                model=name, prompt=prompt, max_tokens=WANTED, temperature=0, logprobs=0, extra_body=extra
            )
        except openai.OpenAIError as error:
            return error

    server.flush()
    began = time.monotonic()
    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = list(pool.map(ask, prompts))
    seconds = time.monotonic() - began
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    measure(requests=TOGETHER, input_tokens=GIVEN, output_tokens=WANTED, errors=len(errors))
    assert not errors, f"{len(errors)} of {TOGETHER} requests failed: {errors[0]}"
    wrong = [answer for answer in answers if counts(answer.usage) != (GIVEN, WANTED)]
    assert not wrong, f"{len(wrong)} answers have other counts than {GIVEN} and {WANTED}: {counts(wrong[0].usage)}"
    crossed, differences, ties = [], [], []
    for index, answer in enumerate(answers):
        [choice] = answer.choices
        logprobs = finite(choice.logprobs.token_logprobs, WANTED)
        found = canary.compare(before[index], canary.Answer(choice.token_ids, logprobs), *limits)
        differences += found.differences
        ties += [] if found.tie is None else [found.tie]
        if choice.prompt_token_ids != prompts[index]:
            crossed.append(f"request {index}: its prompt is another's")
        elif found.wrong:
            crossed.append(f"request {index}: {found.wrong}")
    measure(crossed_answers=len(crossed), canary_tokens=len(differences), canary_near_ties=len(ties))
    measure(canary_largest_tie=max(ties, default=0.0))
    if differences:
        measure(canary_mean_logprob_difference=statistics.fmean(differences), canary_max_difference=max(differences))
    measure(seconds=round(seconds, 3), output_tokens_per_second=round(TOGETHER * WANTED / seconds, 1))
    assert not crossed, f"{len(crossed)} of {TOGETHER} got what is not theirs: {crossed[0]}"
    assert len(differences) >= TOGETHER, f"{len(differences)} tokens could be compared: too few to tell anything"


def test_a_client_that_goes(server, client, name, planned, known, bound, measure):
    """In mid-stream: the server frees the request, and the next one is right."""

    def load() -> tuple[int, int]:
        loads = server.ask("/v1/loads?include=core", method="GET")["loads"]
        return sum(rank["num_running_reqs"] for rank in loads), sum(rank["num_waiting_reqs"] for rank in loads)

    prompt = server.prompt(GIVEN)
    wanted = min(ENDLESS, planned.value("--context-length") - GIVEN - 8)
    stream = client.completions.create(model=name, prompt=prompt, max_tokens=wanted, stream=True, **GREEDY)
    with stream:
        chunks = [chunk for chunk, _ in zip(stream, range(READ), strict=False)]
        assert len(chunks) == READ
        deadline = time.monotonic() + FREED
        while not (running := load()[0]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert running == 1, f"while one request is answered, the server says that it runs {running}"
    began = time.monotonic()
    while (left := load()) != (0, 0) and time.monotonic() - began < FREED:
        time.sleep(0.05)
    measure(cancelled_after_chunks=READ, seconds_to_free=round(time.monotonic() - began, 2), requests_left=sum(left))
    assert left == (0, 0), f"{FREED} s after its client has gone, {left[0]} requests run and {left[1]} wait"
    lives_on(server, known, bound)


def test_a_prompt_that_is_too_long(server, client, name, planned, known, bound, measure):
    """And one that leaves no room for the answer: 400 that says so, nothing is cut off."""
    context = planned.value("--context-length")
    for given, wanted in ((context, 1), (context - 4, 8)):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=name, prompt=[1] * given, max_tokens=wanted, **GREEDY)
        assert str(context) in refused.value.message, refused.value.message
    measure(context_length=context)
    lives_on(server, known, bound)


def test_malformed_bodies(server, name, known, bound, measure):
    """4xx with a message, never 500, and the server lives on. Known defects of the engine are counted."""
    wrong, defects = [], 0
    bodies = malformed.bodies(name)
    for what, path, body in bodies:
        status, text = server.status(path, body)
        said = json.loads(text) if text.startswith("{") else None
        if not 400 <= status < 500 or not said:
            wrong.append(f"{what} on {path}: {status} {text[:100]}")
    for what, path, body in malformed.DEFECTS:
        status, text = server.status(path, body)
        defects += status == 500
        if not 400 <= status <= 500:
            wrong.append(f"{what} on {path}: {status} {text[:100]}")
    measure(malformed_bodies=len(bodies), malformed_accepted=len(wrong), known_defects_with_500=defects)
    assert not wrong, f"{len(wrong)} of {len(bodies)}: {wrong[0]}"
    lives_on(server, known, bound)


def test_parsers(server, planned, measure):
    """Canned texts through the server's own parsers, by the names that the recipe gives."""
    names = {flag: planned.value(flag) for flag in ("--reasoning-parser", "--tool-call-parser")}
    assert set(names.values()) <= parsers.CASES.keys(), f"there are no canned texts for {names}"
    cases = parsers.CASES[names["--tool-call-parser"]]
    for case in cases:
        body = {"text": case.text, "reasoning_parser": names["--reasoning-parser"]}
        parts = server.ask("/separate_reasoning", body)
        body = {"text": parts["text"], "tool_call_parser": names["--tool-call-parser"], "tools": parsers.TOOLS}
        told = server.ask("/parse_function_call", body)
        calls = tuple((call["name"], json.loads(call["parameters"])) for call in told["calls"])
        got = (parts["reasoning_text"], told["normal_text"], calls)
        assert got == (case.reasoning, case.content, case.calls), case.text
    measure(parsed_texts=len(cases))


def test_a_long_prompt(server, bound, measure):
    """Exact counts, finite, and its beginning is as likely as alone: what follows has no influence."""
    prompt = server.prompt(LONG)
    told = {}
    for given in (LONG, BEGINNING):
        server.flush()
        answer = server.generate(prompt[:given], SHORT, return_logprob=True, logprob_start_len=0)["meta_info"]
        # The engine writes 0 for the vocabulary's last id here, and computes with the right one.
        echo = [(entry[1], its) for entry, its in zip(answer["input_token_logprobs"], prompt[:given], strict=True)]
        assert all(said == its for said, its in echo if its != server.vocabulary - 1)
        told[given] = finite([entry[0] for entry in answer["input_token_logprobs"][1:]], given - 1)
        finite(canary.of(answer).logprobs, SHORT)
    differences = [abs(one - other) for one, other in zip(told[LONG], told[BEGINNING], strict=False)]
    mean = statistics.fmean(differences)
    measure(long_prompt_tokens=LONG, long_prompt_logprob_difference=mean, long_prompt_max_difference=max(differences))
    assert mean <= bound("logprob-difference"), f"its beginning differs by {mean:.3f} nat on average from itself alone"
