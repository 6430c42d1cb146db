"""qualify run and the command line above it: unrun is never passed, a wrong word is one sentence."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qualify import cli, run
from qualify.errors import Rejected

ROOT = Path(__file__).resolve().parents[2]
PASSES = "def test_passes(): pass\n"
PASS, FAIL, SKIP = "passed", "failed", "skipped"


@pytest.mark.parametrize(
    ("code", "outcomes", "expected"),
    [
        (0, [PASS], "passed"),
        (0, [PASS, PASS], "passed"),
        (0, [], "not-run"),
        (5, [], "not-run"),
        (0, [SKIP], "not-run"),
        (0, [PASS, SKIP], "not-run"),
        (5, [SKIP], "not-run"),
        (1, [FAIL], "failed"),
        (1, [PASS, FAIL], "failed"),
        (0, [PASS, FAIL], "failed"),
        (5, [FAIL], "failed"),
        (1, [FAIL, SKIP], "failed"),
        (1, [PASS], "failed"),
        (2, [], "failed"),
        (2, [PASS], "failed"),
        (3, [PASS], "failed"),
        (4, [], "failed"),
    ],
)
def test_verdict(code, outcomes, expected):
    assert run.verdict(code, {f"test_{n}": outcome for n, outcome in enumerate(outcomes)}) == expected


# Stages: pytest modules in a folder of their own, run by a process of their own as in the image.


def run_tier(folder: Path, stages: dict[str, str], *options: str, names: list[str] | None = None, **environment):
    """`qualify run --tier cpu` over the given modules, and its JSON."""
    checks = folder / "checks"
    checks.mkdir()
    for name, text in stages.items():
        (checks / (name if name.endswith(".py") else f"test_{name}.py")).write_text(text)
    tier = names if names is not None else [name for name in stages if not name.endswith(".py")]
    code = (
        "import sys; from pathlib import Path; from qualify import cli, run; "
        f"run.TIERS['cpu'] = {tier!r}; run.CHECKS = Path({str(checks)!r}); "
        f"sys.exit(cli.main(['run', '--tier', 'cpu', '--json', {str(folder / 'results.json')!r}, *{options!r}]))"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={**clean, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
    )  # fmt: skip
    results = folder / "results.json"
    return done, json.loads(results.read_text()) if results.is_file() else None


MARK = "import pytest\n"
STAGES = {
    "passing": (PASSES, "passed"),
    "parametrized": (MARK + "@pytest.mark.parametrize('n', range(3))\ndef test_n(n): pass\n", "passed"),
    "failing": ("def test_fails(): assert 0\n", "failed"),
    "partly failing": (PASSES + "def test_fails(): assert 0\n", "failed"),
    "empty": ("", "not-run"),
    "only a helper": ("def helper(): pass\n", "not-run"),
    "all skipped": (MARK + "@pytest.mark.skip\ndef test_x(): pass\n", "not-run"),
    "partly skipped": (PASSES + MARK + "@pytest.mark.skip\ndef test_x(): pass\n", "not-run"),
    "skipped inside": (PASSES + MARK + "def test_x(): pytest.skip('no GPU')\n", "not-run"),
    "skipped in set-up": (
        PASSES + MARK + "@pytest.fixture\ndef gpu(): pytest.skip('no GPU')\ndef test_x(gpu): pass\n",
        "not-run",
    ),
    "skipped module": (MARK + "pytest.skip('no GPU', allow_module_level=True)\n" + PASSES, "not-run"),
    "missing import": (MARK + "pytest.importorskip('no_such_module')\n" + PASSES, "not-run"),
    "no parameters": (PASSES + MARK + "@pytest.mark.parametrize('n', [])\ndef test_n(n): pass\n", "not-run"),
    "expected failure": (PASSES + MARK + "@pytest.mark.xfail\ndef test_x(): assert 0\n", "not-run"),
    "expected failure that does not run": (
        PASSES + MARK + "@pytest.mark.xfail(run=False)\ndef test_x(): assert 0\n",
        "not-run",
    ),
    "unexpected pass": (PASSES + MARK + "@pytest.mark.xfail\ndef test_x(): pass\n", "not-run"),
    "strict unexpected pass": (PASSES + MARK + "@pytest.mark.xfail(strict=True)\ndef test_x(): pass\n", "failed"),
    "syntax error": ("def test_x(:\n", "failed"),
    "import error": ("import no_such_module\n" + PASSES, "failed"),
    "failing set-up": (PASSES + MARK + "@pytest.fixture\ndef x(): assert 0\ndef test_x(x): pass\n", "failed"),
    "failing tear-down": (MARK + "@pytest.fixture\ndef x():\n yield\n assert 0\ndef test_x(x): pass\n", "failed"),
    "unknown fixture": (PASSES + "def test_x(nothing): pass\n", "failed"),
    "skip after a failing tear-down": (
        MARK + "@pytest.fixture\ndef x():\n yield\n assert 0\ndef test_x(x): pytest.skip('late')\n",
        "failed",
    ),
    "exit half-way": (
        MARK + PASSES + "def test_x(): pytest.exit('enough', returncode=0)\ndef test_y(): pass\n",
        "not-run",
    ),
    "interrupted": (PASSES + "def test_x(): raise KeyboardInterrupt\n", "failed"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Every stage of STAGES in one tier; a stage must not show in the verdict of another."""
    names = {name.replace(" ", "_").replace("-", "_"): name for name in STAGES}
    _, report = run_tier(tmp_path_factory.mktemp("tier"), {key: STAGES[name][0] for key, name in names.items()})
    return {names[stage["stage"]]: stage for stage in report["stages"]}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_is(results, name):
    assert results[name]["result"] == STAGES[name][1], results[name]["tests"]


def test_stages_count_their_own_tests(results):
    assert sorted(results["parametrized"]["tests"].values()) == ["passed"] * 3
    assert sorted(results["partly failing"]["tests"].values()) == ["failed", "passed"]
    assert results["empty"]["tests"] == {}
    assert sorted(results["failing set-up"]["tests"].values()) == ["failed", "passed"]


def test_a_tier_that_passed(tmp_path):
    done, report = run_tier(tmp_path, {"one": PASSES, "two": PASSES})
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["tier"] == "cpu"
    assert [(stage["stage"], stage["result"]) for stage in report["stages"]] == [("one", "passed"), ("two", "passed")]
    assert [line.split()[:4] for line in done.stdout.splitlines()[-2:]] == [
        ["one", "passed", "1", "tests"],
        ["two", "passed", "1", "tests"],
    ]


@pytest.mark.parametrize("stage", ["failing", "all skipped", "empty", "partly skipped"])
def test_one_stage_that_did_not_pass_fails_the_tier_and_the_others_still_run(tmp_path, stage):
    done, report = run_tier(tmp_path, {"first": STAGES[stage][0], "second": PASSES})
    assert done.returncode == 1
    assert [entry["result"] for entry in report["stages"]] == [STAGES[stage][1], "passed"]


def test_a_missing_module_is_not_run(tmp_path):
    done, report = run_tier(tmp_path, {"one": PASSES}, names=["one", "gone"])
    assert done.returncode == 1
    assert [entry["result"] for entry in report["stages"]] == ["passed", "not-run"]


@pytest.mark.parametrize(
    "options", ["-k nothing", "-k passes", "--deselect test_one.py::test_other", "--collect-only", "--setup-only"]
)
def test_pytests_own_options_cannot_make_a_stage_pass(tmp_path, options):
    """PYTEST_ADDOPTS of the environment reaches the stages."""
    done, report = run_tier(tmp_path, {"one": PASSES + "def test_other(): assert 0\n"}, PYTEST_ADDOPTS=options)
    assert done.returncode == 1
    assert report["stages"][0]["result"] == "not-run"


def test_an_early_end_leaves_the_rest_not_run(tmp_path):
    text = PASSES + "def test_other(): pass\n"
    stop = "def pytest_runtest_logfinish(nodeid):\n    import pytest\n    pytest.exit('enough', returncode=0)\n"
    done, report = run_tier(tmp_path, {"one": text, "conftest.py": stop})
    assert done.returncode == 1
    assert report["stages"][0]["result"] == "not-run"
    assert sorted(report["stages"][0]["tests"].values()) == ["passed", "skipped"]


def test_json_that_cannot_be_written(tmp_path):
    (tmp_path / "results.json").mkdir()
    done, _ = run_tier(tmp_path, {"one": PASSES})
    assert done.returncode == 2
    assert done.stderr == f"cannot run: --json {tmp_path}/results.json: Is a directory\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checks", "results.json"]


def test_without_pytest(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert cli.main(["run", "--tier", "cpu"]) == 2
    assert capsys.readouterr().err == (
        "cannot run: `qualify run` works inside an image of this project: pytest is missing here\n"
    )


def test_every_stage_of_every_tier_has_its_module():
    stages = {(tier, name) for tier, names in run.TIERS.items() for name in names}
    assert all(run.module(*stage).is_file() for stage in stages)


def test_every_check_is_in_a_tier():
    modules = {path for folder in (run.CHECKS, run.CHECKS / "gpu") for path in folder.glob("test_*.py")}
    used = {run.module(tier, name) for tier, names in run.TIERS.items() for name in names}
    assert modules == {module for module in used if module.exists()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tier", "gpu"], "--tier gpu needs --artifact"),
        (["--tier", "gpu", "--artifact", "a", "--model-dir", "m", "--target", "h200"], "--tier gpu needs --out"),
        (["--tier", "cpu", "--model-dir", "m"], "--model-dir is for --tier gpu"),
        (["--tier", "cpu", "--only", "load"], "--only is for --tier gpu"),
    ],
)
def test_arguments_of_the_other_tier(capsys, words, says):
    assert cli.main(["run", *words]) == 1
    assert capsys.readouterr().err == f"rejected: {says}\n"


# The command line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "COMMAND"),
        (["ran"], "ran"),
        (["run"], "--tier"),
        (["run", "--tier", "gpuu"], "gpuu"),
        (["run", "--tier", "cpu", "--jsn", "x"], "--jsn"),
        (["run", "--tie", "cpu"], "--tie"),
        (["run", "--tier", "cpu", "more"], "more"),
        (["--tier", "cpu", "run"], "cpu"),
        (["--verbose", "run", "--tier", "cpu"], "--verbose"),
    ],
)
def test_a_wrong_word_is_one_sentence(capsys, words, told):
    assert cli.main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("rejected: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert "--help" in captured.err


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    entries = [line.split()[0] for line in shown.splitlines() if line.startswith("    ") and line[4] != " "]
    assert entries == list(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module(name):
    done = subprocess.run(
        [sys.executable, "-B", "-m", "qualify", name, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode and "No module named 'torch'" in done.stderr:
        pytest.fail(f"`{name} --help` imports torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python3 -m qualify {name} ")


def test_the_exit_code_is_the_processs():
    done = subprocess.run(
        [sys.executable, "-B", "-m", "qualify", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_only_the_wanted_command_is_imported():
    code = (
        "import sys; from qualify import cli; cli.main(['run', '--tier', 'x']); print('qualify.synth' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_subcommands_refusal_passes_through(monkeypatch, capsys):
    def refuse(args: argparse.Namespace) -> int:
        raise Rejected("this is wrong")

    monkeypatch.setattr(run, "run", refuse)
    assert cli.main(["run", "--tier", "cpu"]) == 1
    assert capsys.readouterr().err == "rejected: this is wrong\n"
