"""qualify/policy.py: the project's own policy is complete and says where it comes from; a wrong one is refused."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

import pytest

from qualify import catalogue, policy
from qualify.errors import CannotRun, Rejected
from qualify.policy import Threshold
from tests.unit import receipt_runs

ROOT = Path(__file__).resolve().parents[2]


def test_every_image_has_a_policy_for_each_of_its_targets():
    loaded = policy.load()
    images = [path for path in (ROOT / "recipes").glob("*.toml") if tomllib.loads(path.read_text()).get("image")]
    assert images
    for path in images:
        for target in catalogue.load()[path.stem].targets:
            section = loaded.section(path.stem, target)
            assert section.required == policy.STAGES
            assert section.scopes == ("published",)


def test_artifacts_need_the_same_outside_the_numerics():
    """What a model is made of changes its numerics alone."""
    sections = policy.load().sections
    needs = {tuple(item.name for item in section.thresholds if item.stage != "numerics") for section in sections}
    assert len(sections) > 2
    assert len(needs) == 1


def test_every_threshold_says_where_it_comes_from_and_is_used():
    raw = tomllib.loads(policy.PATH.read_text())
    used = {name for item in raw["policies"] for name in item["thresholds"]}
    assert used == set(raw["thresholds"])
    for name, threshold in raw["thresholds"].items():
        assert name.startswith(threshold["stage"]), name
        assert len(threshold.get("source") or threshold["unmeasured"]) > 20, name


def test_the_bounds_of_fp8_numerics_are_unmeasured():
    """Change this together with a measurement: the public bounds are for BF16."""
    for artifact in ("mova-fp8", "k2-horizon-fp8"):
        thresholds = policy.load().section(artifact, "sm90").of_stage("numerics")
        told = {
            item.name.removeprefix("numerics-"): item.judge(receipt_runs.NUMBERS["numerics"]) for item in thresholds
        }
        assert {name for name, verdict in told.items() if verdict != "unmeasured"} == BY_DEFINITION & told.keys()
        assert set(told.values()) == {"unmeasured", "met"}


#: conditions and exact values of the numerics stage, which need no measurement
BY_DEFINITION = {"positions", "expert-tokens", "embedding", "add"}


def test_the_digest_is_of_the_files_bytes(tmp_path):
    assert policy.load().sha256 == receipt_runs.sha256(policy.PATH.read_bytes())
    other = tmp_path / "policy.toml"
    other.write_bytes(policy.PATH.read_bytes() + b"\n")
    assert policy.load(other).sha256 != policy.load().sha256


def test_an_unknown_artifact_or_target_has_no_policy():
    for pair in (("mova-fp8", "sm80"), ("no-such", "sm90")):
        with pytest.raises(Rejected, match=f"says nothing of {pair[0]} on {pair[1]}"):
            policy.load().section(*pair)
    with pytest.raises(CannotRun, match="no threshold nothing"):
        policy.load().section("mova-fp8", "sm90").threshold("nothing")
    assert policy.load().section("mova-fp8", "sm90").threshold("load-missing").value == 0


@pytest.mark.parametrize(
    ("bound", "value", "found", "verdict"),
    [
        ("max", 3, 3, "met"),
        ("max", 3, 3.5, "missed"),
        ("max", 0, 0.0, "met"),
        ("min", 0.5, 0.5, "met"),
        ("min", 0.5, 0.49, "missed"),
        ("max", 1, True, "missed"),
        ("max", 1, "0", "missed"),
        ("max", 1, math.nan, "missed"),
        ("equals", 512, 512, "met"),
        ("equals", 512, 511, "missed"),
        ("equals", 1, True, "missed"),
        ("equals", True, True, "met"),
        ("equals", True, 1, "missed"),
        ("equals", "read-only", "read-only", "met"),
        ("equals", "read-only", "unknown", "missed"),
        ("equals", 0, None, "absent"),
        ("equals", 0, {}, "absent"),
        ("equals", 0, [0], "absent"),
        ("", None, 7, "unmeasured"),
        ("", None, None, "absent"),
    ],
)
def test_judge(bound, value, found, verdict):
    threshold = Threshold("a", "load", "deep.number", bound, value, "a test")
    assert threshold.judge({"deep": {"number": found}}) == verdict
    assert threshold.judge({"deep": 1}) == threshold.judge({}) == "absent"


@pytest.mark.parametrize(("target", "expected"), [("sm90", [9, 0]), ("sm120", [12, 0]), ("sm103", [10, 3])])
def test_capability(target, expected):
    assert policy.capability(target) == expected


@pytest.mark.parametrize("target", ["", "sm", "sm9", "h200", "sm90a", "sm90\n", "sm1200"])
def test_no_capability(target):
    with pytest.raises(Rejected):
        policy.capability(target)


GOOD = policy.PATH.read_text()
LOAD = re.search(r"\[thresholds.load-missing\]\n(?:.+\n)+", GOOD)[0]
MEMORY = re.search(r"\[thresholds.cleanup-gpu-memory\]\n(?:.+\n)+", GOOD)[0]
WRONG = {
    "not TOML": "policy",
    "another schema": GOOD.replace("policy/v1", "policy/v2"),
    "an unknown table": GOOD + "\n[more]\n",
    "an unknown word in a policy": GOOD + "more = 1\n",
    "an unknown stage required": GOOD.replace('required = ["identity"', 'required = ["idendity"'),
    "nothing required": re.sub(r"required = \[.*\]", "required = []", GOOD),
    "a stage required twice": GOOD.replace('required = ["identity"', 'required = ["load"'),
    "an unknown threshold": GOOD.replace('    "load-missing"', '    "load-missed"'),
    "an unknown scope": GOOD.replace('scopes = ["published"]', 'scopes = ["all"]'),
    "an unknown target": GOOD.replace('targets = ["sm90"', 'targets = ["h200"'),
    "two policies for one pair": GOOD + GOOD[GOOD.index("[[policies]]") :],
    "a threshold of no stage": GOOD.replace(LOAD, LOAD.replace('stage = "load"', 'stage = "lode"')),
    "a bound without source": GOOD.replace(LOAD, re.sub(r"source = .*\n", "", LOAD)),
    "a bound with an empty source": GOOD.replace(LOAD, re.sub(r'source = ".*"', 'source = " "', LOAD)),
    "two bounds": GOOD.replace(LOAD, LOAD + "min = 0\n"),
    "no bound": GOOD.replace(LOAD, LOAD.replace("equals = 0\n", "")),
    "a bound that is a word": GOOD.replace(MEMORY, MEMORY.replace("max = 67_108_864", 'max = "0"')),
    "a bound that is true": GOOD.replace(MEMORY, MEMORY.replace("max = 67_108_864", "max = true")),
    "a bound that is nan": GOOD.replace(MEMORY, MEMORY.replace("max = 67_108_864", "max = nan")),
    "a bound that is infinite": GOOD.replace(MEMORY, MEMORY.replace("max = 67_108_864", "max = inf")),
    "a bound and unmeasured": GOOD.replace(LOAD, LOAD + 'unmeasured = "x"\n'),
    "a threshold's unknown word": GOOD.replace(LOAD, LOAD + "maximum = 0\n"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_policy_with(name, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(WRONG[name])
    assert WRONG[name] != GOOD
    with pytest.raises(CannotRun, match=r"policy\.toml is not a usable policy"):
        policy.load(path)


def test_a_policy_that_is_not_there(tmp_path):
    with pytest.raises(CannotRun, match=r"policy\.toml cannot be read: No such file"):
        policy.load(tmp_path / "policy.toml")
