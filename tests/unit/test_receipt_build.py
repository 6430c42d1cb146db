"""Sealing a run directory: what counts as passed, which image, and when nothing is written."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from qualify import cli
from qualify.receipt import canonical, sanitise
from tests.unit import receipt_runs as runs


@pytest.fixture
def lab(tmp_path, capsys, monkeypatch):
    """Seal a run directory with the measured policy (or the project's own); returns code, receipt and what was said."""
    monkeypatch.setattr(sanitise, "names_here", set)  # whatever the host of the tests is called

    class Lab:
        out = tmp_path / "receipt.json"
        policy = runs.measured_policy(tmp_path)

        def seal(self, *words, run=None, stages=None, image=None, own_policy=False, rewrite=True):
            policy = runs.POLICY if own_policy else self.policy
            if rewrite:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                runs.write(tmp_path / "run", runs.facts(policy, **(run or {})), stages)
            given = tmp_path / "inspect.json"
            given.write_text(json.dumps(image if image is not None else runs.inspect()))
            code = cli.main(
                ["seal", "--run", str(tmp_path / "run"), "--out", str(self.out), "--policy", str(policy)]
                + ([] if "--config-digest" in words else ["--image-inspect", str(given)])
                + list(words)
            )
            told = capsys.readouterr()
            self.said = told.out + told.err
            return code

        @property
        def receipt(self):
            return json.loads(self.out.read_text())

        @property
        def extension(self):
            return self.receipt["predicate"]["horizonImages"]

        def results(self):
            return {name: stage["result"] for name, stage in self.extension["stages"].items()}

    result = Lab()
    result.folder = tmp_path
    return result


def test_a_complete_run_is_passed(lab):
    assert lab.seal("--release") == 0, lab.said
    predicate = lab.receipt["predicate"]
    assert predicate["result"] == "PASSED"
    assert predicate["passedTests"] == list(runs.STAGES)
    assert predicate["warnedTests"] == predicate["failedTests"] == []
    assert lab.extension["release_blockers"] == []
    assert lab.said == "sealed receipt.json: PASSED, scope published, mova-fp8 on sm90\n"


def test_everything_is_bound(lab):
    """What issue and documentation promise: a receipt names each of these."""
    lab.seal()
    receipt, extension, made = lab.receipt, lab.extension, runs.identity()
    assert receipt["_type"] == "https://in-toto.io/Statement/v1"
    assert receipt["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    facts = runs.facts(lab.policy)
    assert receipt["subject"] == [
        {
            "name": "image-config",
            "digest": {"sha256": runs.sha256("config")},
            "annotations": {"diffIds": runs.inspect()[0]["RootFS"]["Layers"]},
        },
        {"name": "checkpoint-manifest", "digest": {"sha256": facts["checkpoint"]["manifest_sha256"]}},
    ]
    assert {item["name"]: item["digest"]["sha256"] for item in receipt["predicate"]["configuration"]} == {
        "policy.toml": runs.sha256(lab.policy.read_bytes()),
        "run.json": runs.sha256((lab.folder / "run/run.json").read_bytes()),
        "identity.json": runs.sha256(runs.text(made)),
        "engine-wheel": runs.sha256("wheel"),
        "base": runs.sha256("rootfs"),
        "patch-series": runs.sha256("series"),
    }
    for key in ("repository", "revision", "source_epoch", "format", "identity", "bytes", "tensors"):
        assert extension["checkpoint"][key] == facts["checkpoint"][key]
    for key in ("topology", "declared", "flags", "artifact", "target", "target_name"):
        assert extension[key] == facts[key]
    assert extension["gpu"] == {"name": "NVIDIA H200", "capability": [9, 0], "count": 1}
    assert extension["stages"]["load"]["gpu"]["driver"] == "580.159.04"
    assert extension["stages"]["cleanup"]["numbers"] == runs.NUMBERS["cleanup"]
    file = (lab.folder / "run/stages/load.json").read_bytes()
    assert extension["stages"]["load"]["file_sha256"] == runs.sha256(file)


def test_the_same_run_gives_the_same_bytes(lab, monkeypatch):
    lab.seal()
    first = lab.out.read_bytes()
    lab.out.unlink()
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    os.utime(lab.folder / "run/run.json", (1, 1))
    reordered = json.loads((lab.folder / "inspect.json").read_text())
    assert lab.seal(image=[dict(reversed(reordered[0].items()))], rewrite=False) == 0
    assert lab.out.read_bytes() == first
    assert first == runs.text(lab.receipt).encode()


# Stages

GPU_STAGES = ("load", "numerics", "requests", "performance", "cleanup")
NOT_RUN = {
    "without a file": None,
    "with a file of another run": {"run_sha256": "0" * 64},
    "that did not run": {"result": "not-run", "reason": "no GPU"},
    "without tests": {"tests": {"passed": [], "failed": [], "skipped": []}},
    "with a skipped test": {"tests": {"skipped": ["test_x"]}},
    "with nothing but skipped tests": {"tests": {"passed": [], "failed": [], "skipped": ["test_x"]}},
}
FAILED = {
    "that failed": {"result": "failed", "reason": "the server ended"},
    "that failed without a reason": {"result": "failed"},
    "that claims to have passed with a failed test": {"tests": {"failed": ["test_x"]}},
    "that claims not to have run with a failed test": {"result": "not-run", "tests": {"failed": ["test_x"]}},
    "with failed and skipped tests": {"tests": {"failed": ["test_x"], "skipped": ["test_y"]}},
}


@pytest.mark.parametrize("stage", runs.STAGES)
@pytest.mark.parametrize("case", NOT_RUN)
def test_not_run_is_a_stage(lab, case, stage):
    assert lab.seal(stages={stage: NOT_RUN[case]}) == 0, lab.said
    assert lab.results() == {name: "not-run" if name == stage else "passed" for name in runs.STAGES}
    predicate = lab.receipt["predicate"]
    assert predicate["result"] == "FAILED"
    assert stage not in predicate["passedTests"] + predicate["warnedTests"] + predicate["failedTests"]
    assert lab.extension["release_blockers"] == [f"the stage {stage} is not-run"]
    assert lab.extension["stages"][stage]["reason"]


@pytest.mark.parametrize("case", FAILED)
def test_failed_is_a_stage(lab, case):
    assert lab.seal(stages={"requests": FAILED[case]}) == 0, lab.said
    assert lab.results()["requests"] == "failed"
    assert lab.receipt["predicate"]["failedTests"] == ["requests"]
    assert lab.receipt["predicate"]["result"] == "FAILED"
    assert lab.extension["stages"]["requests"]["reason"]


@pytest.mark.parametrize(
    ("stage", "numbers", "result", "reason"),
    [
        ("load", {"missing": 1}, "failed", "missing misses the threshold load-missing"),
        ("load", {"invalid": 3}, "failed", "invalid misses the threshold load-invalid"),
        ("load", {"invalid": None}, "not-run", "it did not measure invalid, which the threshold load-invalid needs"),
        ("cleanup", {"mount": "writable"}, "failed", "mount misses the threshold cleanup-mount"),
        ("cleanup", {"mount": "unknown"}, "failed", "mount misses the threshold cleanup-mount"),
        ("cleanup", {"files_changed": 1}, "failed", "files_changed misses the threshold cleanup-files"),
        ("cleanup", {"processes_left": 2}, "failed", "processes_left misses the threshold cleanup-processes"),
        ("performance", {"decode-32": 1}, "not-run", "it did not measure decode-32.input_tokens, which the threshold "
         "performance-input needs"),
        ("performance", {"decode-32": {"output_tokens": 511}}, "failed", "decode-32.output_tokens misses the threshold "
         "performance-output"),
    ],
)  # fmt: skip
def test_numbers_decide_and_not_what_a_stage_says_of_itself(lab, stage, numbers, result, reason):
    assert lab.seal(stages={stage: {"numbers": numbers}}) == 0, lab.said
    found = lab.extension["stages"][stage]
    assert (found["reported"], found["result"], found["reason"]) == ("passed", result, reason)
    assert lab.receipt["predicate"]["result"] == "FAILED"


def test_an_unmeasured_threshold_stands_in_the_way_of_a_release(lab):
    """The project's own policy: nobody has published bounds for FP8 numerics."""
    assert lab.seal(own_policy=True) == 0, lab.said
    predicate = lab.receipt["predicate"]
    assert (predicate["result"], predicate["warnedTests"]) == ("WARNED", ["numerics"])
    assert "numerics" not in predicate["passedTests"]
    assert lab.results()["numerics"] == "passed"
    (blocker,) = lab.extension["release_blockers"]
    assert blocker.startswith("the stage numerics has no measured bound for numerics-mean-error, ")
    lab.out.unlink()
    assert lab.seal("--release", own_policy=True) == 1
    assert lab.said == f"rejected: not sealed for a release: {blocker}\n"
    assert not lab.out.exists()


@pytest.mark.parametrize(
    ("change", "result", "blockers"),
    [(None, "PASSED", []), ({"result": "failed", "reason": "x"}, "FAILED", ["the stage performance is failed"])],
)
def test_a_stage_that_is_not_required(lab, change, result, blockers):
    """It may be left out; failed it stands in the way all the same."""
    lab.policy.write_text(
        lab.policy.read_text().replace('"requests", "performance", "cleanup"]\n', '"requests", "cleanup"]\n')
    )
    assert lab.seal(stages={"performance": change}) == 0, lab.said
    assert lab.receipt["predicate"]["result"] == result
    assert lab.extension["release_blockers"] == blockers


@pytest.mark.parametrize("stage", runs.STAGES)
def test_stages_that_need_a_gpu_count_on_one_only(lab, stage):
    lab.seal(stages={stage: {"gpu": None}})
    assert lab.results()[stage] == ("not-run" if stage in GPU_STAGES else "passed")


def test_another_architecture_is_not_the_target(lab):
    assert lab.seal(stages={name: {"gpu": {"capability": [12, 0]}} for name in runs.STAGES}) == 0
    assert {name for name, result in lab.results().items() if result == "not-run"} == set(GPU_STAGES)


def test_fewer_gpus_than_the_topology_needs(lab):
    lab.seal(run={"topology": {"tp": 2}, "flags": {"--tp-size": 2}})
    assert {name for name, result in lab.results().items() if result == "not-run"} == set(GPU_STAGES)
    assert lab.extension["stages"]["load"]["reason"] == "it saw 1 GPUs, fewer than the topology needs"


def test_pipeline_stages_need_gpus_of_their_own(lab):
    lab.seal(run={"topology": {"pp": 2}})
    assert lab.results()["load"] == "not-run"


def test_sittings_on_one_gpu_model_are_joined(lab):
    assert lab.seal(stages={"numerics": {"gpu": {"driver": "590.10"}, "began": "2026-12-01T08:00:00Z"}}) == 0
    assert lab.receipt["predicate"]["result"] == "PASSED"
    assert lab.extension["stages"]["numerics"]["gpu"]["driver"] == "590.10"


@pytest.mark.parametrize("change", [{"name": "NVIDIA H100"}, {"count": 2}, {"capability": [9, 1]}])
def test_sittings_on_two_gpu_models_are_not(lab, change):
    assert lab.seal(stages={"numerics": {"gpu": change}}) == 1
    assert lab.said.startswith("rejected: stage numerics ran on another GPU model, or number of GPUs, than the first")
    assert not lab.out.exists()


# Scope and libraries


def test_a_synthetic_checkpoint_is_never_passed(lab):
    assert lab.seal(run=runs.SYNTHETIC) == 0, lab.said
    assert lab.extension["scope"] == "synthetic"
    assert lab.receipt["predicate"]["result"] == "WARNED"
    assert lab.extension["release_blockers"] == ["the scope is synthetic; only published can be released"]


@pytest.mark.parametrize("scope", ["uncatalogued", "bf16", "dequantised", "kv-only"])
def test_nor_is_another_scope(lab, scope):
    assert lab.seal(run={"checkpoint": {"scope": scope}}) == 0, lab.said
    assert (lab.extension["scope"], lab.receipt["predicate"]["result"]) == (scope, "WARNED")


@pytest.mark.parametrize("missing", ["repository", "revision", "source_epoch"])
def test_a_published_checkpoint_has_a_source(lab, missing):
    assert lab.seal(run={"checkpoint": {missing: None}}) == 1
    assert "the scope is published, and repository, revision or source epoch is missing" in lab.said


def test_a_synthetic_checkpoint_has_none(lab):
    assert lab.seal(run={"checkpoint": {"scope": "synthetic"}}) == 1
    assert "the scope is synthetic, and a repository, revision or source epoch is named" in lab.said


def test_substituted_libraries_are_said_and_stop_a_release(lab):
    libraries = {"image": {"substituted_libraries": ["venv/lib/python3.11/site-packages/nvidia"]}}
    assert lab.seal("--release", run=libraries) == 1
    assert lab.said == ("rejected: not sealed for a release: the run replaced libraries of the image by the host's\n")
    assert lab.seal(run=libraries) == 0
    assert lab.receipt["predicate"]["result"] == "WARNED"
    assert lab.extension["image"]["substituted_libraries"] == libraries["image"]["substituted_libraries"]


# The image


@pytest.mark.parametrize(
    "label",
    [
        "io.horizon-images.artifact",
        "io.horizon-images.series",
        "io.horizon-images.engine.wheel",
        "org.opencontainers.image.revision",
        "org.opencontainers.image.base.digest",
    ],
)
@pytest.mark.parametrize("value", ["sha256:" + "0" * 64, None])
def test_another_image_than_the_one_that_ran(lab, label, value):
    image = runs.inspect()
    image[0]["Config"]["Labels"][label] = value
    assert lab.seal(image=image) == 1
    assert (
        lab.said == f"rejected: the image is not the one that ran: its label {label} differs from run.json's identity\n"
    )


def test_an_image_known_by_its_digests_alone_stops_a_release(lab):
    words = ["--config-digest", f"sha256:{'a' * 64}", "--diff-id", f"sha256:{'b' * 64}"]
    assert lab.seal(*words) == 0, lab.said
    assert lab.receipt["subject"][0]["digest"]["sha256"] == "a" * 64
    assert lab.receipt["subject"][0]["annotations"]["diffIds"] == [f"sha256:{'b' * 64}"]
    assert lab.extension["release_blockers"] == ["nobody compared the image's labels with the identity that ran"]


@pytest.mark.parametrize(
    "words",
    [
        ["--config-digest", "sha256:" + "a" * 64],
        ["--config-digest", "a" * 64, "--diff-id", "sha256:" + "b" * 64],
        ["--config-digest", "sha256:" + "a" * 64, "--diff-id", "sha256:" + "b" * 63],
    ],
)
def test_half_an_image(lab, words):
    assert lab.seal(*words) == 1
    assert "lacks a configuration digest or diff IDs" in lab.said


@pytest.mark.parametrize("image", [[], {}, [1], [{}, {}], "x", [{"Id": "sha256:0"}], None, [{"Id": 1, "RootFS": {}}]])
def test_a_file_that_is_no_inspect_output(lab, image):
    (lab.folder / "inspect.json").write_text("")
    assert lab.seal(image=image if image is not None else [None]) == 1
    assert lab.said == "rejected: --image-inspect is not the output of `docker image inspect` for one image\n"


def test_the_containerd_store_has_no_configuration_digest(lab):
    image = runs.inspect(Descriptor={"mediaType": "application/vnd.oci.image.index.v1+json", "size": 1})
    assert lab.seal(image=image) == 1
    assert "containerd image store, whose Id is no configuration digest" in lab.said


PUSHED = f"registry.example.com:5000/horizon-images/mova-fp8@sha256:{'9' * 64}"


def test_a_pushed_image_adds_its_manifest_to_the_sealed_receipt(lab):
    lab.seal()
    before = lab.receipt
    assert lab.seal("--pushed", PUSHED, image=runs.inspect(RepoDigests=[PUSHED])) == 0, lab.said
    after = lab.receipt
    assert [item["name"] for item in after["subject"]] == ["image-config", "image-manifest", "checkpoint-manifest"]
    assert after["subject"][1]["digest"] == {"sha256": "9" * 64}
    assert [after["subject"][0], after["subject"][2]] == before["subject"]
    assert "example.com" not in lab.out.read_text()
    # And it is not taken away again, nor replaced by another.
    other = PUSHED.replace("9", "8")
    for words, digests in (([], [PUSHED]), (["--pushed", other], [other])):
        assert lab.seal(*words, image=runs.inspect(RepoDigests=digests)) == 1
        assert "receipt.json names a pushed manifest that this receipt lacks" in lab.said
    assert lab.receipt == after


@pytest.mark.parametrize(
    "image",
    [
        {"RepoDigests": [PUSHED], "Id": f"sha256:{'1' * 64}"},
        {"RepoDigests": [PUSHED], "RootFS": {"Layers": [f"sha256:{'1' * 64}"]}},
    ],
)
def test_a_pushed_image_with_other_digests_than_sealed(lab, image):
    lab.seal()
    before = lab.out.read_bytes()
    assert lab.seal("--pushed", PUSHED, image=runs.inspect(**image)) == 1
    assert lab.said.startswith("rejected: receipt.json is there already and is of another run or image")
    assert lab.out.read_bytes() == before


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (PUSHED, "was never pushed or pulled under that digest"),
        ("horizon-images/mova-fp8:1", "give name@sha256:"),
        ("x@sha256:" + "9" * 63, "give name@sha256:"),
    ],
)
def test_a_push_that_the_engine_does_not_know(lab, reference, told):
    assert lab.seal("--pushed", reference) == 1
    assert told in lab.said
    assert not lab.out.exists()


def test_a_sealed_receipt_is_not_replaced_by_one_of_another_run(lab):
    lab.seal()
    before = lab.out.read_bytes()
    assert lab.seal() == 0  # the same one again
    assert lab.seal(stages={"load": {"seconds": 13.5}}) == 1
    assert "receipt.json is there already and is of another run or image" in lab.said
    assert lab.out.read_bytes() == before
    lab.out.write_text("{}")
    assert lab.seal() == 1
    assert lab.out.read_text() == "{}"


# What is refused


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.json", "{", "run.json is not a usable file: not JSON"),
        ("run.json", "{}", "run.json: the document has no artifact"),
        ("run.json", '{"a": 1, "a": 2}', "run.json has the key 'a' twice"),
        ("stages/load.json", "", "stages/load.json is not a usable file"),
        ("stages/load.json", '{"seconds": NaN}', "stages/load.json is not a usable file"),
        ("stages/load.json", '{"seconds": 1e999}', "stages/load.json is not a usable file: not JSON: 1e999 is too"),
        ("stages/load.json", runs.text(runs.stage("load", run_sha256="0" * 64, numbers={"a\n\x1bb": 1})),
         "stages/load.json: numbers.a\\n\\x1bb is"),
        ("stages/load.json", "[" * 5000, "stages/load.json is not a usable file"),
        ("stages/load.json", "[]", "stages/load.json: the document is not of type object"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_no_stage_that_did_not_run(lab, name, content, told):
    lab.seal()
    lab.out.unlink()
    (lab.folder / "run" / name).write_text(content)
    assert lab.seal(rewrite=False) == 1
    assert lab.said.startswith(f"rejected: {told}")
    assert lab.said.count("\n") == 1
    assert not lab.out.exists()


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"more": 1}, "run.json: the document has the unknown field more"),
        ({"topology": {"tp": 0}}, "run.json: topology.tp is less than 1"),
        ({"topology": {"tp": True}}, "run.json: topology.tp is not of type integer"),
        ({"policy_sha256": "0" * 64}, "the run was measured under another policy"),
        ({"target": "sm80"}, "the policy says nothing of mova-fp8 on sm80"),
        ({"image": {"identity_sha256": "0" * 64}}, "image.identity is not the file that image.identity_sha256 names"),
        (
            {"artifact": "k2-horizon-fp8", "image": runs.facts()["image"]},
            "the run is of k2-horizon-fp8, its image of mova",
        ),
    ],
)
def test_a_run_that_does_not_hang_together(lab, run, told):
    assert lab.seal(run=run) == 1
    assert told in lab.said
    assert not lab.out.exists()


def test_an_edited_identity(lab):
    made = runs.identity()
    made["engine"]["wheel_sha256"] = "0" * 64
    assert lab.seal(run={"image": {"identity": made, "identity_sha256": runs.sha256(runs.text(made))}}) == 1
    assert "does not have the digest of its own inputs, source_sha256" in lab.said


def test_a_stage_file_under_another_name(lab):
    lab.seal(stages={"load": {"stage": "numerics"}})
    assert "stages/load.json holds the stage numerics" in lab.said


@pytest.mark.parametrize(
    ("run", "stages", "told"),
    [
        ({"target_name": "sm120"}, {}, "target_name sm120 is not sm90, or not the GPU on which the stages ran"),
        ({}, {name: {"gpu": {"name": "NVIDIA H100"}} for name in runs.STAGES}, "target_name h200 is not sm90, or not"),
        ({"flags": {"--tp-size": 8}}, {}, "topology.tp is not what the flag --tp-size says"),
        ({}, {"cleanup": {"numbers": {"manifest_sha256": "0" * 64}}}, "stage cleanup found another checkpoint than"),
    ],
)
def test_a_run_that_contradicts_itself(lab, run, stages, told):
    """What verify-receipt would refuse is not written."""
    assert lab.seal(run=run, stages=stages) == 1
    assert told in lab.said
    assert not lab.out.exists()


def test_a_checkpoint_that_changed_is_a_failed_cleanup(lab):
    changed = {"numbers": {"manifest_sha256": "0" * 64, "files_changed": 1}}
    assert lab.seal(stages={"cleanup": changed}) == 0, lab.said
    assert lab.results()["cleanup"] == "failed"


def test_an_image_told_in_two_ways(lab):
    """Nothing that was given goes unread."""
    assert lab.seal("--diff-id", "sha256:" + "b" * 64) == 1
    assert "--image-inspect has the diff IDs: leave --diff-id out" in lab.said
    assert lab.seal("--config-digest", "sha256:" + "a" * 64, "--diff-id", "sha256:" + "b" * 64, "--pushed", PUSHED) == 1
    assert "--pushed needs --image-inspect" in lab.said


def test_no_run_and_no_image(lab, capsys):
    out = ["--out", str(lab.out)]
    assert cli.main(["seal", "--run", str(lab.folder / "none"), "--config-digest", "x", *out]) == 1
    assert cli.main(["seal", "--run", str(lab.folder), *out]) == 1
    told = capsys.readouterr().err
    assert "say which image: either --image-inspect, or --config-digest with --diff-id" in told


def test_a_receipt_is_written_whole_or_not_at_all(lab, monkeypatch):
    lab.seal()
    before = lab.out.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert lab.seal("--pushed", PUSHED, image=runs.inspect(RepoDigests=[PUSHED])) == 2
    assert lab.out.read_bytes() == before
    assert not [path for path in lab.folder.rglob(".*") if path.is_file()]


def test_no_more_is_read_than_can_be_used(lab, monkeypatch):
    monkeypatch.setattr(canonical.strictjson, "MAX_BYTES", 10)
    assert len(canonical.read(runs.POLICY, "a file")) == 11


def test_a_receipt_that_cannot_be_written(lab):
    lab.out = lab.folder / "policy.toml" / "receipt.json"
    assert lab.seal() == 2
    assert lab.said.startswith("cannot run: cannot write ")
    assert not [path for path in lab.folder.rglob(".*") if path.is_file()]
