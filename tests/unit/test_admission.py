"""docs/admission.md: a consumer with jsonschema, a receipt and `docker image inspect`, and none of our code.

Its program is the one in the documentation, run by a Python that cannot import this project.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import receipt_runs as runs

ROOT = Path(__file__).resolve().parents[2]
PUSHED = f"registry.example/horizon-images/mova-fp8@sha256:{'9' * 64}"


@pytest.fixture
def consumer(tmp_path):
    """Seal a receipt by the command line, then let the consumer decide: (exit code, what it said)."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/admission.md").read_text(), flags=re.S)
    (tmp_path / "admit.py").write_text(program)
    policy = runs.measured_policy(tmp_path)
    wanted = {
        "repository": runs.REPOSITORY,
        "revision": runs.REVISION,
        "target": "sm90",
        "topologies": [[1, 1]],
        "policies": [runs.sha256(policy.read_bytes())],
    }

    def seal(*words, run=None, stages=None, used=policy):
        runs.write(tmp_path / "run", runs.facts(used, **(run or {})), stages)
        (tmp_path / "sealed.json").write_text(json.dumps(runs.inspect(RepoDigests=[PUSHED])))
        done = subprocess.run(
            [sys.executable, "-B", "-m", "qualify", "seal", "--run", tmp_path / "run", "--policy", used,
             "--image-inspect", tmp_path / "sealed.json", "--out", tmp_path / "receipt.json", *words],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "receipt.json").read_text())

    def decide(receipt, image=None, **changes):
        (tmp_path / "receipt.json").write_text(json.dumps(receipt))
        (tmp_path / "inspect.json").write_text(json.dumps(image or runs.inspect()))
        (tmp_path / "wanted.json").write_text(json.dumps(wanted | changes))
        files = [tmp_path / "receipt.json", ROOT / "qualify/receipt/schema-v1.json"]
        files += [tmp_path / "inspect.json", tmp_path / "wanted.json"]
        done = subprocess.run(
            [sys.executable, "-B", "-I", tmp_path / "admit.py", *files],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stderr == ""
        return done.returncode, done.stdout.strip()

    decide.seal = seal
    return decide


def reseal(receipt):
    """What a forger would do, who knows the documentation."""
    del receipt["predicate"]["horizonImages"]["content_sha256"]
    content = json.dumps(receipt, sort_keys=True, separators=(",", ":"))
    receipt["predicate"]["horizonImages"]["content_sha256"] = hashlib.sha256(content.encode()).hexdigest()
    return receipt


def test_the_consumer_cannot_import_this_project(tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-c", "import qualify"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "No module named 'qualify'" in done.stderr


def test_a_passing_receipt_is_admitted(consumer):
    assert consumer(consumer.seal()) == (0, "admitted")


def test_a_receipt_in_another_layout_too(consumer):
    receipt = consumer.seal()
    assert consumer(dict(reversed(receipt.items()))) == (0, "admitted")


CHECKPOINT = {"checkpoint": {"scope": "uncatalogued"}}
OTHERS = {
    "another configuration": ({"image": runs.inspect(Id="sha256:" + "1" * 64)}, "of another image"),
    "other layers": ({"image": runs.inspect(RootFS={"Layers": ["sha256:" + "1" * 64]})}, "of another image"),
    "another repository": ({"repository": "IFM/Other"}, "of another repository"),
    "another revision": ({"revision": "0" * 40}, "of another revision"),
    "another target": ({"target": "sm120"}, "of another target or topology"),
    "another topology": ({"topologies": [[8, 4]]}, "of another target or topology"),
    "an unread policy": ({"policies": []}, "sealed under a policy that nobody here has read"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_refused_for(consumer, name):
    changes, told = OTHERS[name]
    assert consumer(consumer.seal(), **changes) == (1, f"refused: {told}")


@pytest.mark.parametrize("part", ["pp", "dp"])
def test_a_topology_that_no_pair_can_name_is_refused(consumer, part):
    two = {name: {"gpu": {"count": 2}} for name in runs.STAGES}
    receipt = consumer.seal(run={"topology": {part: 2}}, stages=two)
    assert receipt["predicate"]["result"] == "PASSED"
    assert consumer(receipt) == (1, "refused: of another target or topology")


@pytest.mark.parametrize(
    ("run", "stages", "told"),
    [
        (runs.SYNTHETIC, None, "its scope is synthetic"),
        (CHECKPOINT, None, "its scope is uncatalogued"),
        (None, {"numerics": None}, "FAILED: the stage numerics is not-run"),
        (None, {"cleanup": {"numbers": {"processes_left": 1}}}, "FAILED: the stage cleanup is failed"),
        ({"image": {"substituted_libraries": ["venv/lib"]}}, None,
         "WARNED: the run replaced libraries of the image by the host's"),
    ],
)  # fmt: skip
def test_a_receipt_that_is_no_release_is_refused(consumer, run, stages, told):
    assert consumer(consumer.seal(run=run, stages=stages)) == (1, f"refused: {told}")


def test_the_projects_policy_admits_nothing_yet(consumer):
    """Bounds for FP8 numerics are not measured: this changes together with qualify/policy.toml."""
    code, told = consumer(consumer.seal(used=runs.POLICY), policies=[runs.sha256(runs.POLICY.read_bytes())])
    assert code == 1
    assert told.startswith("refused: WARNED: the stage numerics has no measured bound")


def test_a_changed_receipt_is_refused(consumer):
    receipt = consumer.seal(stages={"numerics": {"numbers": {"top5_overlap": 0.5}}})
    receipt["predicate"]["horizonImages"]["stages"]["numerics"]["numbers"]["top5_overlap"] = 0.99
    assert consumer(receipt) == (1, "refused: changed after it was sealed")


def test_another_version_of_the_receipt_is_refused(consumer):
    receipt = consumer.seal()
    receipt["predicate"]["horizonImages"]["schema"] = "horizon-images/receipt/v2"
    assert consumer(reseal(receipt)) == (1, "refused: not a receipt of version 1: $.predicate.horizonImages.schema")


@pytest.mark.parametrize("which", [0, 1])
def test_two_subjects_of_one_kind_are_refused(consumer, which):
    """Two images or two checkpoints would let one be vouched for and the other be compared."""
    receipt = consumer.seal()
    receipt["subject"] = [receipt["subject"][which]] * 2
    assert consumer(reseal(receipt)) == (1, "refused: not a receipt of version 1: $.subject")


def test_a_pulled_image_in_a_store_without_configuration_digests(consumer):
    pulled = runs.inspect(Id="sha256:" + "9" * 64, RepoDigests=[f"mirror.example/x@sha256:{'9' * 64}"])
    assert consumer(consumer.seal("--pushed", PUSHED), image=pulled) == (0, "admitted")
    receipt = json.loads(json.dumps(consumer.seal("--pushed", PUSHED)))
    receipt["subject"].pop(1)
    assert consumer(reseal(receipt), image=pulled) == (1, "refused: of another image")


def test_the_manifest_of_a_checkpoint_as_documented(consumer):
    """The documentation's sentence on checkpoint-manifest, followed to the letter."""
    files = sorted(runs.FILES, key=lambda file: file["name"])
    content = json.dumps(files, sort_keys=True, separators=(",", ":"))
    subject = {item["name"]: item["digest"]["sha256"] for item in consumer.seal()["subject"]}
    assert subject["checkpoint-manifest"] == hashlib.sha256(content.encode()).hexdigest()
