"""Stage "requests": the server runs as planned, answers exactly what is asked, with numbers, and the same twice."""

from launch import arguments, effective
from launch.plan import Choice, Plan
from launch.supervise import get
from qualify import serving

#: requests at once, input tokens, output tokens
TOGETHER, GIVEN, WANTED = 8, 512, 512


def test_server_info_equals_the_plan(status, planned):
    """Every flag that the launcher says it planned, and that plan against the recipe's, made anew."""
    told = status["launch"]["plan"]
    choices = {
        name: Choice(arguments.lookup(name), flag["value"], (), flag["source"]) for name, flag in told["flags"].items()
    }
    ran = Plan(told["artifact"], told["target"], choices, told["declared"], told["expect"], told["uncatalogued"], None)
    assert effective.differences(ran, get(f"{status['url']}/server_info", planned.key, seconds=60)) == []
    assert {name: choice.value for name, choice in planned.choices.items()}.items() <= {
        name: choice.value for name, choice in choices.items()
    }.items()


def test_exact_counts_together(server, measure):
    """Any error or another count raises."""
    answers, seconds = server.together([server.prompt(GIVEN) for _ in range(TOGETHER)], WANTED)
    assert len(answers) == TOGETHER
    measure(requests=TOGETHER, input_tokens=GIVEN, output_tokens=WANTED, errors=0, seconds=round(seconds, 3))
    measure(output_tokens_per_second=round(TOGETHER * WANTED / seconds, 1))


def test_finite_log_probabilities_and_a_cold_repeat(server, measure):
    measure(**serving.sanity(server))
