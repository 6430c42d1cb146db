"""verify-receipt: every change of one field is caught, or stands in a list with the reason why it cannot be."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qualify import cli, policy
from qualify.errors import CannotRun, Rejected
from qualify.receipt import EXTENSION, build, canonical, image, rundir, schema, verify
from tests.unit import receipt_runs as runs

ROOT = Path(__file__).resolve().parents[2]
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema.PATH.read_text()))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A policy without unmeasured thresholds."""
    return policy.load(runs.measured_policy(tmp_path_factory.mktemp("policy")))


def sealed(
    folder: Path, used: policy.Policy, run: dict | None = None, stages: dict | None = None, pushed: bool = False
):
    """A receipt as seal builds it."""
    facts = runs.facts(**(run or {})) | {"policy_sha256": used.sha256}
    shown = runs.inspect(RepoDigests=[f"a/b@sha256:{'9' * 64}"])
    which = image.from_inspect(shown)
    if pushed:
        which = image.pushed(which, shown[0]["RepoDigests"][0])
    return build.statement(rundir.load(runs.write(folder, facts, stages)), which, used)


@pytest.fixture(scope="module")
def receipts(tmp_path_factory, measured):
    """Receipts of every kind of outcome."""
    folder = tmp_path_factory.mktemp("runs")
    missing = {"numerics": None, "cleanup": {"result": "failed", "reason": "a process was left"}}
    return {
        "passed": sealed(folder / "a", measured, pushed=True),
        "synthetic": sealed(folder / "b", measured, run=runs.SYNTHETIC),
        "failed": sealed(folder / "c", measured, stages=missing),
        "on a host": sealed(folder / "d", measured, run={"image": {"substituted_libraries": ["venv/lib"]}}),
    }


def consistent(receipt: Any, used: policy.Policy) -> bool:
    try:
        verify.check(receipt, used)
    except Rejected as error:
        assert str(error)
        assert "\n" not in str(error)
        return False
    return True


# Changes of one field


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every value of a document with its path."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from nodes(item, (*path, key))


def others(value: Any) -> list[Any]:
    """Other values for one place: another of its kind, and of other kinds."""
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, (int, float)):
        return [value + 1, value * 2 + 0.5, -1, str(value), None, True, [value]]
    if isinstance(value, str):
        last = {"0": "1", "9": "8", "a": "b"}.get(value[-1:], "0")
        return [value[:-1] + last, last + value[1:], value + "\n", value + "0", "", value.upper(), 0, None, [value]]
    if value is None:
        return ["x", 0, False, {}, "0" * 64]
    if isinstance(value, list):
        return [value[:-1], value[1:], value + value[-1:], value[::-1], [*value, "x"], [*value, None], [], {}, None]
    without = [{key: item for key, item in value.items() if key != gone} for gone in value]
    return [*without, {**value, "more": 1}, {**value, "more": "x"}, {}, [], None]


def replaced(document: Any, path: tuple, value: Any) -> Any:
    """A document with another value at one path; everything else is shared with the old one."""
    if not path:
        return value
    copied = document.copy()
    copied[path[0]] = replaced(document[path[0]], path[1:], value)
    return copied


def changes(receipt: dict[str, Any], every: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every receipt that differs in one place: (where, changed receipt).

    Without ``every``, three of the seven stages and three of the thresholds stand for the others, which have one form.
    """
    for path, value in nodes(receipt):
        where = ".".join(map(str, path))
        if not every and re.search(
            r"stages\.(identity|checkpoint|requests|performance)\.|thresholds\.([3-9]|1[0-4])\b", where
        ):
            continue
        for other in others(value) if path else []:
            if canonical.canonical(other) != canonical.canonical(value):
                yield where, replaced(receipt, path, other)


KINDS = ("passed", "synthetic", "failed", "on a host")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sealed_receipt_is_consistent(receipts, measured, kind):
    verify.check(receipts[kind], measured)
    VALIDATOR.validate(receipts[kind])


@pytest.mark.parametrize("kind", ["passed", "failed"])
def test_every_change_of_one_field_is_caught(receipts, measured, kind):
    found = list(changes(receipts[kind]))
    assert len(found) > 2000
    assert [where for where, changed in found if consistent(changed, measured)] == []


#: What a receipt cannot know of itself: a change together with a new content_sha256 passes here, and only here.
#: Whoever fears that needs a signature, or the thing itself beside the receipt.
ALLOWED = {
    "subject.*.digest": "the image or the checkpoint itself has that digest",
    "subject.*.annotations": "the image itself has those layers",
    "predicate.configuration.*.digest": "the files of those digests are not here (policy.toml is, and is caught)",
    "E.content_sha256": "it is replaced together with what it covers",
    "E.topology": "the plan of the run; tp and pp are held against the number of GPUs",
    "E.image.source_sha256": "the image's label has it",
    "E.image.engine": "the wheel's digest names the engine",
    "E.image.base_drift": "the image's label has the packages",
    "E.checkpoint": "the checkpoint itself: only scope and presence of a source are held against each other",
    "E.declared": "what the operator said",
    "E.flags": "the plan of the run",
    "E.stages.*.tests": "names and number of tests, as long as the verdict stays the same",
    "E.stages.*.numbers": "measured numbers, as long as they keep the thresholds",
    "E.stages.*.gpu.driver": "each sitting has its own driver",
    "E.stages.*.gpu.cuda": "each sitting has its own CUDA version",
    "E.stages.*.gpu$": "a failed stage need not have got to a GPU ($: the field itself, nothing in it)",
    "E.stages.*.began": "the clock of the host",
    "E.stages.*.seconds": "the clock of the host",
    "E.stages.*.file_sha256": "the stage's file is not here",
    "E.stages.*.reason": "a failed stage's own sentence",
}


def allowed(where: str) -> str | None:
    parts = where.replace(f"predicate.{EXTENSION}", "E").split(".")
    for pattern in ALLOWED:
        wanted = pattern.rstrip("$").split(".")
        long_enough = len(parts) == len(wanted) if pattern.endswith("$") else len(parts) >= len(wanted)
        if long_enough and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
            return pattern
    return None


@pytest.fixture(scope="module")
def resealed(receipts, measured):
    """(kind, where) of every change of one field with a new content_sha256 that verify-receipt lets pass."""
    found = []
    for kind in ("passed", "failed"):
        for where, changed in changes(receipts[kind], every=False):
            # Of what has not the form of a receipt there is nothing to seal.
            if schema.defect(changed) is None and consistent(seal_anew(changed), measured):
                found.append((kind, where))
    return found


def seal_anew(receipt: dict[str, Any]) -> dict[str, Any]:
    place = ("predicate", EXTENSION, "content_sha256")
    return replaced(receipt, place, canonical.content_sha256(receipt))


def test_a_change_that_is_sealed_anew_is_caught_or_listed(resealed):
    assert sorted({where for _, where in resealed if not allowed(where)}) == []


def test_the_list_of_what_is_not_caught_is_short_and_true(resealed):
    """Every entry is needed: something of it does pass."""
    used = {allowed(where) for _, where in resealed}
    assert set(ALLOWED) - used == set()
    assert len(ALLOWED) <= 20


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("result", "PASSED"),
        ("result", "WARNED"),
        ("passedTests", list(runs.STAGES)),
        (f"{EXTENSION}.release_blockers", []),
        (f"{EXTENSION}.stages.cleanup.result", "passed"),
        (f"{EXTENSION}.stages.cleanup.reported", "passed"),
        (f"{EXTENSION}.stages.numerics.result", "passed"),
        (f"{EXTENSION}.policy.required", ["identity"]),
        (f"{EXTENSION}.policy.thresholds", []),
    ],
)
def test_a_failed_receipt_does_not_become_a_passed_one_in_one_step(receipts, measured, where, value):
    changed = replaced(receipts["failed"], ("predicate", *where.split(".")), value)
    assert changed != receipts["failed"]
    assert not consistent(seal_anew(changed), measured)


def test_another_policy(receipts):
    with pytest.raises(Rejected, match="sealed under another policy"):
        verify.check(receipts["passed"], policy.load())


def test_a_synthetic_receipt_does_not_become_a_published_one(receipts, measured):
    changed = replaced(receipts["synthetic"], ("predicate", EXTENSION, "scope"), "published")
    assert not consistent(seal_anew(changed), measured)


@pytest.mark.parametrize(
    ("kind", "where", "value", "told"),
    [
        ("passed", "checkpoint.repository", None, "the scope is published, and repository"),
        ("passed", "checkpoint.revision", None, "the scope is published, and repository"),
        ("synthetic", "checkpoint.repository", "IFM/Some", "the scope is synthetic, and a repository"),
        ("passed", "stages.load.began", None, "stage load lacks its time or the digest of its file"),
        ("passed", "stages.load.seconds", None, "stage load lacks its time or the digest of its file"),
        ("failed", "stages.cleanup.file_sha256", None, "stage cleanup lacks its time or the digest of its file"),
        ("failed", "stages.numerics.file_sha256", "0" * 64, "stage numerics lacks its time or the digest"),
        ("passed", "stages.load.gpu.count", 8, "gpu is not the one model on which the stages ran"),
        ("passed", "stages.load.numbers.missing", 1, "stage load says passed; tests, numbers and policy say failed"),
        ("passed", "policy.thresholds", [], "the receipt quotes the policy wrongly"),
        ("passed", "release_blockers", ["x"], "release_blockers does not follow from scope, image and stages"),
        ("passed", "target_name", "sm120", "target_name sm120 is not sm90, or not the GPU on which the stages ran"),
        ("passed", "target_name", "a100", "target 'a100' is unknown"),
        ("passed", "flags.--tp-size", 2, "topology.tp is not what the flag --tp-size says"),
        ("passed", "topology.ep", 2, "topology.ep is not what the flag --ep-size says"),
        ("passed", "stages.cleanup.numbers.manifest_sha256", "0" * 64, "stage cleanup found another checkpoint than"),
        ("passed", "image.labels_compared", False, "release_blockers does not follow from scope, image and stages"),
    ],
)
def test_the_sentence_for(receipts, measured, kind, where, value, told):
    """Single changes inside what the list above names as a whole, and what is said of others."""
    changed = replaced(receipts[kind], ("predicate", EXTENSION, *where.split(".")), value)
    with pytest.raises(Rejected) as refused:
        verify.check(seal_anew(changed), measured)
    assert told in str(refused.value)


def test_a_stage_without_a_file_did_not_say_that_it_ran(receipts, measured):
    changed = receipts["passed"]
    for key in ("began", "seconds", "file_sha256"):
        changed = replaced(changed, ("predicate", EXTENSION, "stages", "identity", key), None)
    assert not consistent(seal_anew(changed), measured)


def test_each_thing_of_the_configuration_is_named_once(receipts, measured):
    """Also to a reader who has the schema alone."""
    for what in (("predicate", "configuration"), ("subject",)):
        entries = receipts["passed"]
        for key in what:
            entries = entries[key]
        for other in ([entries[0]] * len(entries), [*entries[:-2], entries[-1], entries[-2]]):
            changed = seal_anew(replaced(receipts["passed"], what, other))
            assert not consistent(changed, measured)
            assert not VALIDATOR.is_valid(changed)


def test_true_is_not_one():
    assert not verify._equal({"equals": 1}, {"equals": True})
    assert verify._equal({"a": [1], "b": None}, {"b": None, "a": [1]})


# The hand-written structure check and the schema


@pytest.mark.parametrize("kind", ["failed"])
def test_structure_check_and_schema_agree(receipts, kind):
    """One reads schema-v1.json itself, the other is the jsonschema library."""
    disagree, refused = [], 0
    for where, changed in changes(receipts[kind], every=False):
        ours, theirs = schema.defect(changed) is None, VALIDATOR.is_valid(changed)
        refused += not theirs
        if ours != theirs:
            disagree.append(where)
    assert disagree == []
    assert refused > 1000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.text("a0/\n", max_size=5)
    | st.just("0" * 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tp", "max", "name", "value"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(schema.document()["$defs"])), JSON)
def test_structure_check_and_schema_agree_on_every_definition(name, value):
    whole = schema.document()
    part = {"$schema": whole["$schema"], "$ref": f"#/$defs/{name}", "$defs": whole["$defs"]}
    assert (schema.defect(value, name) is None) == jsonschema.Draft202012Validator(part).is_valid(value)


@pytest.mark.parametrize("name", ["runFile", "stageFile"])
def test_structure_check_and_schema_agree_on_the_files_of_a_run(name):
    value = runs.facts() if name == "runFile" else runs.stage("load", run_sha256="0" * 64)
    whole = schema.document()
    validator = jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": whole["$defs"]})
    validator.validate(value)
    assert schema.defect(value, name) is None
    disagree = [w for w, other in changes(value) if (schema.defect(other, name) is None) != validator.is_valid(other)]
    assert disagree == []


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema.document())


def test_a_keyword_that_the_structure_check_does_not_know(monkeypatch):
    monkeypatch.setattr(schema, "document", lambda: {"type": "string", "format": "uri"})
    with pytest.raises(CannotRun, match="uses format, which this version cannot check"):
        schema.defect("x")


# The command


@pytest.fixture
def command(tmp_path, receipts, measured, capsys):
    path = tmp_path / "receipt.json"
    used = runs.measured_policy(tmp_path)

    def call(content: Any = None, *words: str) -> tuple[int, str, str]:
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else canonical.render(content))
        code = cli.main(["verify-receipt", str(path), "--policy", str(used), *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def test_command_says_what_the_receipt_says(command, receipts):
    code, out, err = command(receipts["failed"])
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "CONSISTENT  FAILED  scope published  mova-fp8 on sm90",
        "  identity     passed",
        "  checkpoint   passed",
        "  load         passed",
        "  numerics     not-run",
        "  requests     passed",
        "  performance  passed",
        "  cleanup      failed",
        "  no release: the stage numerics is not-run",
        "  no release: the stage cleanup is failed",
        "  signature: none checked",
    ]


def test_command_for_a_machine(command, receipts):
    code, out, _ = command(receipts["synthetic"], "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["verdict"], found["result"], found["scope"]) == ("consistent", "WARNED", "synthetic")
    assert found["signed_by"] is None
    changed = copy.deepcopy(receipts["synthetic"])
    changed["predicate"]["result"] = "PASSED"
    code, out, err = command(changed, "--json")
    assert code == 1
    assert json.loads(out) == {"verdict": "rejected", "reason": err.removeprefix("rejected: ").strip()}


def test_layout_of_the_file_does_not_matter(command, receipts):
    """A catalogue may store the document in its own layout: digests are over the content."""
    assert command(json.dumps(receipts["passed"]).encode())[0] == 0
    assert command(json.dumps(receipts["passed"], indent=4, sort_keys=False).encode() + b"\n\n")[0] == 0


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"7", b'"x"', b"\xff", b"{" * 100000, b'{"_type": 1, "_type": 2}', b'{"a": NaN}',
     b'{"a": -1e999}', b'{"payloadType": 1}',
     b'{"payloadType": "application/vnd.in-toto+json", "payload": "e30=", "signatures": []}',
     b'{"payloadType": "application/vnd.in-toto+json", "payload": "!", "signatures": [{"sig": ""}]}',
     b'{"payloadType": "application/vnd.in-toto+json", "payload": "e30=", "signatures": [{"sig": ""}]}'],
)  # fmt: skip
def test_what_is_no_receipt_is_one_sentence(command, content):
    code, out, err = command(content)
    assert (code, out) == (1, "")
    assert err.startswith("rejected: the ")
    assert err.count("\n") == 1


def test_deep_nesting_is_one_sentence(command, receipts):
    text = canonical.render(receipts["passed"]).decode()
    deep = text.replace('"missing": 0', '"missing": ' + '{"a":' * 400 + "1" + "}" * 400)
    assert deep != text
    code, _, err = command(deep.encode())
    assert code == 1
    assert err.count("\n") == 1


def test_a_number_beyond_all_bounds_is_one_sentence(command, receipts):
    """It would be read as infinity, of which there is no canonical JSON."""
    huge = canonical.render(receipts["passed"]).replace(b'"seconds": 12.5', b'"seconds": 1e999')
    code, _, err = command(huge)
    assert (code, err) == (1, "rejected: the receipt is not a usable file: not JSON: 1e999 is too large a number\n")


def test_no_file(command, tmp_path):
    code, _, err = command(None)
    assert (code, err) == (1, "rejected: the receipt cannot be read: No such file or directory\n")


def test_the_standard_library_is_enough(tmp_path, receipts, measured):
    """In a Python without any installed package (-S: no site-packages)."""
    path = tmp_path / "receipt.json"
    path.write_bytes(canonical.render(receipts["passed"]))
    words = ["verify-receipt", str(path), "--policy", str(runs.measured_policy(tmp_path))]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from qualify import cli; sys.exit(cli.main({words!r}))"
    done = subprocess.run(
        [sys.executable, "-B", "-I", "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CONSISTENT  PASSED")
