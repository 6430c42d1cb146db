"""Stage "numerics": the served model against the independent reference, as a whole and module by module.

Over several ranks no module is compared (their outputs are partial sums); that test is then skipped, which leaves the
stage not-run, with the numbers of the log-probabilities in it.
"""

import json
import shutil

import pytest

from qualify import numerics, policy
from qualify.reference import prompts

SEED = 20261201
#: positions that the makers' own gate compares: 16 prompts of 16 tokens
POSITIONS = 256


@pytest.fixture(scope="session")
def compared(server, planned, run, model, directory):
    """The numbers of the first prompt that gives every expert its tokens."""
    config = json.loads((model / "config.json").read_text())
    declared = planned.declared.get("ROUTER_PARTITIONS", {"value": 1})
    ranks = run["topology"]["tp"] * run["topology"]["pp"]
    device = numerics.device()
    pair = numerics.references(model, device, declared["value"])
    for length in numerics.LENGTHS:
        ids = numerics.draw(model, config, SEED, length)
        try:
            seen = numerics.observe(server, ids, numerics.DECODED, directory.module_outputs if ranks == 1 else None)
            numbers = numerics.compare(*pair, seen)
        finally:
            shutil.rmtree(directory.module_outputs / "pass", ignore_errors=True)
        if numbers.get("expert_tokens", prompts.MINIMUM) >= prompts.MINIMUM:
            break
    return {"reference_device": device, "prompt_tokens": length, "seed": SEED, **numbers}


def test_log_probabilities(compared, measure):
    measure(**{name: value for name, value in compared.items() if name not in ("modules", "layers", "stream")})
    assert compared.get("expert_tokens", prompts.MINIMUM) >= prompts.MINIMUM, (
        f"an expert got {compared['expert_tokens']} of {compared['prompt_tokens']} tokens, fewer than {prompts.MINIMUM}"
    )
    assert compared["positions"] >= POSITIONS, f"{compared['positions']} positions, fewer than {POSITIONS}"
    assert compared["decode"]["positions"] > 0
    assert numerics.all_finite(compared), "some number is not finite"


def test_modules(compared, run, measure):
    if "modules" not in compared:
        pytest.skip(f"modules are recorded with one rank only; this run has tp {run['topology']['tp']}")
    measure(**{name: compared[name] for name in ("modules", "layers", "stream")})
    assert len(compared["stream"]) == max(map(len, compared["layers"].values()))
    # What is copied or added once has nothing to round differently than by one BF16 rounding.
    assert compared["modules"]["embedding"]["max"] == 0
    assert compared["modules"]["add"]["max"] <= 2**-8


def test_thresholds_of_the_policy(compared, planned):
    """Each that has a bound; the receipt judges them again, and finds what was not measured."""
    section = policy.load().section(planned.artifact, planned.target)
    missed = [item.name for item in section.of_stage("numerics") if item.judge(compared) == "missed"]
    assert missed == [], f"missed: {', '.join(missed)}"
