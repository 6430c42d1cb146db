"""make tag: no release tag without receipts for exactly this image, checkpoint and every claimed target.

The container engine is a recording stand-in, the catalogue a fixture that no command takes.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from qualify import catalogue, cli, policy, tag
from qualify.errors import CannotRun, Rejected
from qualify.receipt import sanitise
from tests.unit import receipt_runs as runs

ROOT = Path(__file__).resolve().parents[2]
CONFIG = runs.inspect()[0]["Id"]
RELEASE = "horizon-images/mova-fp8:" + runs.inspect()[0]["Config"]["Labels"]["org.opencontainers.image.version"]
#: a client that can build, knows the images in files beside it and keeps new tags there
CLIENT = r"""
case "$1 $2" in
"buildx build") exit 0 ;;
"image ls") for last; do :; done; cat "$STORE/$(echo "$last" | tr /: __)" 2>/dev/null; exit 0 ;;
"image inspect") cat "$STORE/inspect.json" ;;
"run --rm") cat "$STORE/recipe.toml" ;;
tag*) echo "$2" >"$STORE/$(echo "$3" | tr /: __)" ;;
*) exit 9 ;;
esac
"""


@pytest.fixture
def lab(tmp_path, commands, monkeypatch):
    """A candidate image, a fixture catalogue, and receipts sealed by the command."""
    store = tmp_path / "store"
    for folder in (store, tmp_path / "recipes", tmp_path / "evidence"):
        folder.mkdir()
    fakes = commands()
    monkeypatch.setenv("DOCKER", str(fakes.add("docker", CLIENT)))
    monkeypatch.setenv("STORE", str(store))
    monkeypatch.setattr(policy, "PATH", runs.measured_policy(tmp_path))
    monkeypatch.setattr(sanitise, "names_here", set)  # whatever the host of the tests is called

    class Lab:
        evidence = tmp_path / "evidence"
        recipe = tmp_path / "recipes/mova-fp8.toml"

        def image(self, **changes):
            (store / "inspect.json").write_text(json.dumps(runs.inspect(**changes)))
            (store / "horizon-images_mova-fp8_candidate").write_text(runs.inspect(**changes)[0]["Id"] + "\n")

        def receipt(self, name="sm90.json", run=None, stages=None, image=None):
            folder = tmp_path / f"run-{name}"
            runs.write(folder, runs.facts(policy.PATH, **(run or {})), stages)
            shown = tmp_path / f"inspect-{name}"
            shown.write_text(json.dumps(image or runs.inspect()))
            words = ["--run", folder, "--image-inspect", shown, "--out", self.evidence / name]
            assert cli.main(["seal", *map(str, words)]) == 0

        def tag(self):
            if not (store / "recipe.toml").exists():
                (store / "recipe.toml").write_text(self.recipe.read_text())
            return tag.tag("mova-fp8", self.evidence, self.recipe.parent, fixtures=True)

        def refusal(self):
            with pytest.raises(Rejected) as refused:
                self.tag()
            assert self.tags() == []
            return str(refused.value)

        def tags(self):
            return [call for call in fakes.calls() if call.startswith("docker tag ")]

    lab = Lab()
    lab.store, lab.fakes = store, fakes
    lab.recipe.write_text(runs.RECIPE)
    lab.image()
    return lab


def test_a_passing_receipt_gives_the_tag(lab):
    lab.receipt()
    assert lab.tag() == f"{RELEASE} is {CONFIG}, by sm90.json"
    assert lab.tags() == [f"docker tag {CONFIG} {RELEASE}"]
    assert (lab.store / RELEASE.translate(str.maketrans("/:", "__"))).read_text() == f"{CONFIG}\n"


def test_a_second_time_nothing_happens(lab):
    lab.receipt()
    lab.tag()
    assert lab.tag() == f"{RELEASE} is {CONFIG} already, by sm90.json"
    assert len(lab.tags()) == 1


def test_a_release_tag_is_never_moved(lab):
    lab.receipt()
    (lab.store / RELEASE.translate(str.maketrans("/:", "__"))).write_text("sha256:" + "1" * 64 + "\n")
    assert lab.refusal() == f"{RELEASE} is another image (sha256:111111111111): a release tag is never moved"


def test_without_a_receipt(lab):
    told = lab.refusal()
    assert told == f"no receipt lets mova-fp8 be released for {runs.REPOSITORY} on sm90 (there is none)"
    lab.evidence.rmdir()
    assert lab.refusal() == told


@pytest.mark.parametrize("stage", runs.STAGES)
def test_the_missing_stage_is_named(lab, stage):
    lab.receipt(stages={stage: None})
    assert lab.refusal().endswith(f"(sm90.json: its result is FAILED: the stage {stage} is not-run)")


def test_a_failed_cleanup_is_no_release(lab):
    lab.receipt(stages={"cleanup": {"numbers": {"files_changed": 1}}})
    assert "its result is FAILED: the stage cleanup is failed" in lab.refusal()


def test_every_claimed_target_needs_its_own(lab):
    lab.recipe.write_text(runs.RECIPE.replace('status = "not-run"', 'status = "verified"'))
    lab.receipt()
    assert f"released for {runs.REPOSITORY} on sm120 (there is none)" in lab.refusal()
    blackwell = {"gpu": {"name": "NVIDIA RTX PRO 6000", "capability": [12, 0]}}
    lab.receipt("sm120.json", {"target": "sm120", "target_name": "sm120"}, dict.fromkeys(runs.STAGES, blackwell))
    assert lab.tag() == f"{RELEASE} is {CONFIG}, by sm90.json, sm120.json"


def test_every_pinned_checkpoint_needs_its_own(lab):
    second = runs.RECIPE[runs.RECIPE.index("[[checkpoints]]") :].replace(runs.REPOSITORY, "IFM/Other")
    lab.recipe.write_text(runs.RECIPE + second)
    lab.receipt()
    told = lab.refusal()
    assert "released for IFM/Other on sm90" in told
    assert "it is of another checkpoint than IFM/Other" in told


SCOPES = {
    "synthetic": "a synthetic checkpoint stands for no published one",
    "uncatalogued": "nobody vouches for the checkpoint",
    "bf16": "the weights that ran were BF16",
    "dequantised": "the weights were dequantised before they ran",
    "kv-only": "only the KV cache was quantised",
}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_that_is_not_published(lab, scope):
    lab.receipt(run=runs.SYNTHETIC if scope == "synthetic" else {"checkpoint": {"scope": scope}})
    assert f"sm90.json: its scope is {scope}: {SCOPES[scope]}" in lab.refusal()


@pytest.mark.parametrize("scope", SCOPES)
def test_nor_where_the_policy_would_allow_it(lab, scope):
    """Two locks: the tag does not take the policy's word for scopes."""
    policy.PATH.write_text(policy.PATH.read_text().replace('scopes = ["published"]', f'scopes = ["{scope}"]'))
    lab.receipt(run=runs.SYNTHETIC if scope == "synthetic" else {"checkpoint": {"scope": scope}})
    receipt = json.loads((lab.evidence / "sm90.json").read_text())
    assert receipt["predicate"]["result"] == "PASSED"
    assert f"its scope is {scope}" in lab.refusal()


def test_weights_of_another_format(lab):
    lab.receipt(run={"checkpoint": {"format": "bf16"}})
    assert "the checkpoint that ran is bf16, which this artifact does not serve" in lab.refusal()


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ({"repository": "IFM/Other"}, "it is of another checkpoint than"),
        ({"revision": "0" * 40}, "it is of another checkpoint than"),
        ({"source_epoch": "2026-10-01"}, "it is of another checkpoint than"),
        ({"identity": {"config": "0" * 64}}, "the config that ran is not the catalogue's"),
        ({"identity": {"headers": "0" * 64}}, "the headers that ran is not the catalogue's"),
        ({"manifest_sha256": "0" * 64}, "the files that ran are not the catalogue's (checkpoint manifest)"),
    ],
)
def test_another_checkpoint(lab, run, told):
    seen = {key: value for key, value in run.items() if key == "manifest_sha256"}
    lab.receipt(run={"checkpoint": run}, stages={"cleanup": {"numbers": seen}})
    assert told in lab.refusal()


def test_an_index_that_is_not_the_catalogues(lab):
    index = f'\n[[checkpoints.files]]\nrole = "index"\nname = "i.json"\nbytes = 1\nsha256 = "{"1" * 64}"\n'
    lab.recipe.write_text(runs.RECIPE + index)
    lab.receipt()
    assert "the index that ran is not the catalogue's" in lab.refusal()


def test_a_topology_that_the_catalogue_does_not_list(lab):
    four = {"gpu": {"count": 4}}
    lab.receipt(run={"topology": {"tp": 4}, "flags": {"--tp-size": 4}}, stages=dict.fromkeys(runs.STAGES, four))
    assert "TP 4 EP 1 PP 1 DP 1 is none of the catalogue's topologies" in lab.refusal()


@pytest.mark.parametrize("part", ["pp", "dp"])
def test_a_topology_that_no_pair_can_name(lab, part):
    lab.receipt(run={"topology": {part: 2}}, stages={name: {"gpu": {"count": 2}} for name in runs.STAGES})
    assert f"{part.upper()} 2" in lab.refusal()


@pytest.mark.parametrize("declared", [{}, {"ROUTER_PARTITIONS": {"value": 3}}])
def test_router_provenance_must_have_been_declared(lab, declared):
    run = runs.facts(policy.PATH)
    folder = lab.evidence.parent / "run"
    run["declared"] = runs.merge(run["declared"], declared) if declared else {}
    runs.write(folder, run)
    shown = lab.evidence.parent / "shown.json"
    shown.write_text(json.dumps(runs.inspect()))
    words = ["--run", str(folder), "--image-inspect", str(shown), "--out", str(lab.evidence / "a.json")]
    assert cli.main(["seal", *words]) == 0
    assert "nobody declared ROUTER_PARTITIONS" in lab.refusal()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"Id": "sha256:" + "1" * 64}, "it is of another image (configuration digest)"),
        ({"RootFS": {"Layers": ["sha256:" + "1" * 64]}}, "it is of another image (layer diff IDs)"),
    ],
)
def test_another_image(lab, change, told):
    lab.receipt()
    lab.image(**change)
    assert f"sm90.json: {told}" in lab.refusal()


def test_an_image_of_another_recipe(lab):
    """The claims are the image's own: who edits them in the checkout alone has another image to build."""
    lab.receipt()
    (lab.store / "recipe.toml").write_text(runs.RECIPE.replace('status = "not-run"', 'status = "verified"'))
    assert "was built from another recipes/mova-fp8.toml than this one: build it again" in lab.refusal()
    (asked,) = lab.fakes.calls()[-1:]
    assert asked == (
        f"docker run --rm --network=none --read-only --cap-drop=ALL --entrypoint=cat {CONFIG} "
        "/opt/horizon/recipes/mova-fp8.toml"
    )


def test_substituted_libraries(lab):
    lab.receipt(run={"image": {"substituted_libraries": ["venv/lib"]}})
    assert "the run replaced libraries of the image by the host's" in lab.refusal()


def test_no_release_under_the_projects_own_policy_yet(lab, monkeypatch):
    """Bounds for FP8 numerics are not measured: this changes together with qualify/policy.toml."""
    monkeypatch.setattr(policy, "PATH", runs.POLICY)
    lab.receipt()
    assert "its result is WARNED: the stage numerics has no measured bound for numerics-mean-error" in lab.refusal()


def test_a_receipt_that_was_changed(lab):
    lab.receipt(stages={"load": {"result": "failed", "reason": "x"}})
    path = lab.evidence / "sm90.json"
    path.write_text(path.read_text().replace('"FAILED"', '"PASSED"'))
    assert "sm90.json: the receipt was changed after it was sealed" in lab.refusal()


def test_a_receipt_under_another_policy(lab):
    lab.receipt()
    policy.PATH.write_text(policy.PATH.read_text() + "\n")
    assert "sm90.json: the receipt was sealed under another policy" in lab.refusal()


def test_files_that_are_no_receipts_do_not_stand_in_the_way(lab):
    (lab.evidence / "a.json").write_text("{")
    lab.receipt("b.json")
    text = (lab.evidence / "b.json").read_text()
    (lab.evidence / "b.json").write_text(text.replace('"seconds": 12.5', '"seconds": 1e999'))
    lab.receipt("another.json", stages={"load": None})
    lab.receipt()
    assert lab.tag().endswith("by sm90.json")


# Before anything is asked of the engine


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('status = "verified"', 'status = "not-run"', "recipes/mova-fp8.toml claims no target"),
        ('reviewed_by = "tests"', 'reviewed_by = "tests"\nunpinned = "x"', None),
        ("bytes = 10\n", "", "the catalogue has no size for config.json: pin the checkpoint again"),
        ('role = "weights"', 'role = "other"', None),
    ],
)
def test_a_catalogue_that_claims_nothing_or_too_little(lab, old, new, told):
    assert old in runs.RECIPE
    lab.recipe.write_text(runs.RECIPE.replace(old, new, 1))
    if told is None:  # the catalogue itself refuses it
        with pytest.raises(CannotRun, match=r"it is pinned and says it is not|it is not pinned and does not say why"):
            lab.tag()
    else:
        assert told in lab.refusal()
    assert lab.fakes.calls() == []


def test_an_unpinned_catalogue(lab):
    recipe = runs.RECIPE.replace('role = "weights"', 'role = "other"').replace("fixture = true", 'unpinned = "no time"')
    lab.recipe.write_text(recipe)
    assert lab.refusal() == "no checkpoint of mova-fp8 is pinned in the catalogue (fixture: no time)"


def test_an_unknown_artifact(lab):
    with pytest.raises(Rejected, match="ARTIFACT=nothing: unknown; recipes/ has mova-fp8"):
        tag.tag("nothing", lab.evidence, lab.recipe.parent, fixtures=True)


def test_no_candidate(lab):
    lab.receipt()
    (lab.store / "horizon-images_mova-fp8_candidate").unlink()
    assert lab.refusal() == (
        "there is no horizon-images/mova-fp8:candidate: build it with make image ARTIFACT=mova-fp8"
    )


@pytest.mark.parametrize("version", ["", "candidate", "a b", "-x"])
def test_a_candidate_without_a_version(lab, version):
    image = runs.inspect()
    image[0]["Config"]["Labels"]["org.opencontainers.image.version"] = version
    (lab.store / "inspect.json").write_text(json.dumps(image))
    lab.receipt()
    assert "has no usable version in its label" in lab.refusal()


def test_the_engine_fails(lab, monkeypatch):
    lab.receipt()
    lab.fakes.add("docker", CLIENT.replace("tag*)", "tag*) echo 'no space' >&2; exit 1;;\nnever)"))
    with pytest.raises(CannotRun, match="`docker tag` failed: no space"):
        lab.tag()


# Fixtures


def test_no_command_takes_a_fixture(lab, monkeypatch, capsys):
    """The catalogue of the tests, in the place of the project's own, stops every command."""
    lab.receipt()
    capsys.readouterr()
    monkeypatch.setattr(catalogue, "RECIPES", lab.recipe.parent)
    with pytest.raises(CannotRun, match="'fixture' is a fixture of the tests: no command takes it"):
        tag.tag("mova-fp8", lab.evidence)
    for words in (["tag", "mova-fp8", "--evidence", str(lab.evidence)], ["inspect", str(lab.evidence)]):
        assert cli.main(words) == 2
        assert "is a fixture of the tests: no command takes it" in capsys.readouterr().err
    assert lab.tags() == []
    assert cli.main(["tag", "mova-fp8", "--fixtures"]) == 1


@pytest.mark.parametrize("value", ["true", '"no"', "1", "0"])
def test_whatever_the_mark_says(lab, value):
    lab.recipe.write_text(runs.RECIPE.replace("fixture = true", f"fixture = {value}"))
    with pytest.raises(CannotRun, match="is a fixture of the tests"):
        catalogue.load(lab.recipe.parent)


def test_the_projects_catalogue_has_no_fixture():
    for path in (ROOT / "recipes").glob("*.toml"):
        assert "fixture" not in path.read_text()


# make


def make(*words: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARTIFACT"))}
    return subprocess.run(
        ["make", "-C", str(ROOT), "tag", *words],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_tag_today():
    """No target is claimed yet: this changes together with recipes/mova-fp8.toml."""
    done = make("ARTIFACT=mova-fp8")
    assert done.returncode == 2
    assert done.stderr.startswith('rejected: recipes/mova-fp8.toml claims no target (status = "verified")')
    done = make()
    assert done.stderr.startswith("rejected: say which image, for example make tag ARTIFACT=mova-fp8\n")
