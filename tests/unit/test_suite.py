"""The GPU tier from its command line to its stage files: real processes, launcher, signals and HTTP; the engine and
the GPU's driver are stand-ins."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT))
from launch.machine import GIB, Gpu, Machine  # noqa: E402
from qualify.errors import CannotRun, Rejected  # noqa: E402
from qualify.receipt import canonical, schema  # noqa: E402
from qualify.suite import facts, processes, rundir, sitting, targets  # noqa: E402
from tests.cases import bases  # noqa: E402

STAGES = ["identity", "checkpoint", "load", "numerics", "requests", "performance", "cleanup"]
SERVED = STAGES[2:]
COMMAND = """
import sys
from pathlib import Path
from qualify import cli
from qualify.suite import facts, server
server.COMMAND = [sys.executable, {fake!r}]
facts.HOME = Path({home!r})
sys.exit(cli.main(sys.argv[1:]))
"""


ROUNDS = {
    "(1, 512, 512)": "(1, 64, 16)", "(32, 512, 512)": "(32, 64, 16)", "(64, 512, 512)": "(64, 64, 16)",
    "(16, 4096, 1)": "(16, 256, 1)", "(8192, 1024, 32)": "(64, 16, 4)", "{1: (256, 64), ": "{1: (8, 4), ",
}  # fmt: skip


class Suite:
    """A tree with the suite in it, a checkpoint, and one run directory."""

    def __init__(self, folder: Path):
        self.folder, self.tree, self.out, self.model = folder, folder / "tree", folder / "out", folder / "m"
        for name in ("qualify", "launch", "recipes"):
            shutil.copytree(ROOT / name, self.tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.checks = self.tree / "qualify/checks"
        # The stand-in engine is no model: tests/engine/test_numerics.py runs this stage.
        (self.checks / "gpu/test_numerics.py").unlink()
        # There is no image here.
        (self.checks / "test_identity.py").write_text("def test_identity(): pass\n")
        # Small rounds.
        text = (self.tree / "qualify/serving.py").read_text()
        for round_, small in ROUNDS.items():
            assert text.count(round_) == 1
            text = text.replace(round_, small)
        (self.tree / "qualify/serving.py").write_text(text)
        bases.b1().write(self.model)
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "identity.json").write_text(json.dumps({"artifact": "mova-fp8", "series_sha256": "0" * 64}))
        (folder / "cache").mkdir()

    def command(self, *words: str) -> list[str]:
        code = COMMAND.format(fake=str(HERE / "fake_launch.py"), home=str(self.home))
        return [
            sys.executable, "-B", "-c", code, "run", "--tier", "gpu", "--artifact", "mova-fp8", "--model-dir",
            str(self.model), "--target", "h200", "--out", str(self.out), *words,
        ]  # fmt: skip

    def environment(self, fake: dict, **more: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        return clean | {
            "PYTHONPATH": f"{self.tree}:{HERE / 'fake_driver'}", "FAKE_ENGINE": json.dumps(fake),
            "FAKE_CACHE": str(self.folder / "cache"), "FAKE_GPU": str(self.folder / "gpu.json"),
            "ROUTER_PARTITIONS": "2", "UNCATALOGUED": "1", "CONTEXT_LENGTH": "20000", "DRAIN_SECONDS": "5",
            "PORT": free_port(), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more,
        }  # fmt: skip

    def run(self, *words: str, fake: dict | None = None, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*words), env=self.environment(fake or {}, **environment), cwd=self.folder,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def stages(self) -> dict[str, dict]:
        return {path.stem: json.loads(path.read_text()) for path in (self.out / "stages").glob("*.json")}

    def results(self) -> dict[str, str]:
        return {name: stage["result"] for name, stage in self.stages().items()}

    def left(self) -> list[str]:
        """Processes of this suite's that still live."""
        mark = f"FAKE_GPU={self.folder / 'gpu.json'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().decode())
            except OSError:
                continue
        return found


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def suite(tmp_path):
    one = Suite(tmp_path)
    yield one
    assert one.left() == []


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """A whole sitting that passes where there is a module."""
    one = Suite(tmp_path_factory.mktemp("passed"))
    one.done = one.run("--json", str(one.folder / "results.json"))
    yield one
    assert one.left() == []


GPU = {"name": "NVIDIA H200", "capability": [9, 0], "count": 1, "driver": "580.1", "cuda": "13.0"}
ALL_BUT_NUMERICS = {name: "not-run" if name == "numerics" else "passed" for name in STAGES}


def test_a_whole_sitting(passed):
    assert passed.results() == ALL_BUT_NUMERICS, passed.done.stdout + passed.done.stderr
    assert passed.done.returncode == 1  # numerics
    report = json.loads((passed.folder / "results.json").read_text())
    assert [stage["stage"] for stage in report["stages"]] == STAGES
    assert passed.stages()["numerics"]["reason"] == "there is no module of the stage numerics"


def test_run_json(passed):
    run = json.loads((passed.out / "run.json").read_text())
    assert (run["schema"], run["artifact"], run["target"], run["target_name"]) == (
        "horizon-images/run/v1", "mova-fp8", "sm90", "h200"
    )  # fmt: skip
    assert run["topology"] == {"tp": 1, "ep": 1, "pp": 1, "dp": 1, "a2a": "none"}
    assert run["declared"]["ROUTER_PARTITIONS"]["value"] == 2
    assert run["declared"]["ROUTER_PARTITIONS"]["model_override"] == "xllm_source_router_gemm_partitions"
    checkpoint = run["checkpoint"]
    assert (checkpoint["scope"], checkpoint["format"], checkpoint["repository"]) == ("uncatalogued", "fp8-block", None)
    files = json.loads((passed.out / "manifest.json").read_text())
    for file in files:
        raw = (passed.model / file["name"]).read_bytes()
        assert (file["size"], file["sha256"]) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert {file["name"] for file in files} == {path.name for path in passed.model.iterdir()}
    assert checkpoint["manifest_sha256"] == facts.manifest_sha256(files)
    assert run["image"]["substituted_libraries"] == ["PYTHONPATH"]  # that of these tests, without its value
    assert str(passed.folder) not in (passed.out / "run.json").read_text()


def test_stage_files(passed):
    sha256 = hashlib.sha256((passed.out / "run.json").read_bytes()).hexdigest()
    for name, stage in passed.stages().items():
        assert (stage["schema"], stage["stage"], stage["run_sha256"]) == ("horizon-images/stage/v1", name, sha256)
        assert stage["gpu"] == GPU
        assert time.strptime(stage["began"], "%Y-%m-%dT%H:%M:%SZ")
        assert str(passed.folder) not in json.dumps(stage)
        if stage["result"] == "passed":
            assert stage["tests"]["passed"]
            assert (stage["tests"]["failed"], stage["tests"]["skipped"], stage["reason"]) == ([], [], "")
            assert passed.out.joinpath("logs", f"{name}.log").read_text()
    assert "checks" not in {path.name for path in passed.out.iterdir()}


def test_numbers(passed):
    stages = passed.stages()
    load = stages["load"]["numbers"]
    assert (load["missing"], load["invalid"], load["ranks"]) == (0, 0, 1)
    assert set(load["classes"]["routed_expert"]) == {"float8_e4m3fn", "float32"}
    assert load["scales"]["routed_expert"] > 0
    assert load["gpu_peak_bytes"] == 60 * GIB
    assert load["host_peak_resident_bytes"] > load["host_peak_anonymous_bytes"] > 1 << 20
    assert 0 < load["seconds_to_ready"] < 60
    requests = stages["requests"]["numbers"]
    assert (requests["requests"], requests["input_tokens"], requests["output_tokens"]) == (64, 512, 512)
    assert (requests["finite_logprobs"], requests["cold_repeat_tokens"], requests["canary_tokens"]) == (559, 96, 2048)
    performance = stages["performance"]["numbers"]
    assert len(performance["decode-64"]["seconds"]) == 2
    assert set(performance["decode-32"]["inter_token_seconds"]) == {"median", "p95"}
    assert performance["start_up_seconds"]["scheduler"] == 0.05
    assert performance["start_up_seconds"]["ready"] >= performance["start_up_seconds"]["other"] > 0
    cleanup = stages["cleanup"]["numbers"]
    assert (cleanup["exit_code"], cleanup["processes_left"], cleanup["gpu_bytes_over"]) == (0, 0, 0)
    run = json.loads((passed.out / "run.json").read_text())
    assert cleanup["manifest_sha256"] == run["checkpoint"]["manifest_sha256"]
    assert stages["checkpoint"]["numbers"]["mount"] in ("read-only", "writable")


def test_progress_on_the_screen(passed):
    lines = passed.done.stdout.splitlines()
    assert [line.split()[0] for line in lines if " s  passed" in line] == [s for s in STAGES if s != "numerics"]


# --- the server or a stage dies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "stage", "at"),
    [
        ("engine", "load", 0),
        ("launcher", "load", 0),
        ("engine", "requests", 3),
        ("launcher", "requests", 3),
        ("scheduler", "requests", 3),
        ("engine", "performance", 1),
    ],
)
def test_killed(suite, who, stage, at):
    # Only the performance stage calls the model by no name.
    model = {"model": "default"} if stage == "performance" else {}
    suite.run("--only", *SERVED, fake={"kill": {"who": who, "at": at, **model}, "orphan": True})
    results, found = suite.results(), suite.stages()
    position = SERVED.index(stage)
    assert {results[name] for name in SERVED[:position] if name != "numerics"} <= {"passed"}
    assert results[stage] == "failed"
    assert {results[name] for name in SERVED[position + 1 : -1]} <= {"not-run"}
    assert results["cleanup"] == "failed"
    told = found[stage]["reason"]
    expected = {"engine": "SIGKILL", "launcher": "SIGKILL", "scheduler": "sglang::scheduler"}[who]
    assert expected in told, told
    numbers = found["cleanup"]["numbers"]
    assert numbers["exit_code"] == (-9 if who == "launcher" else 2)
    assert numbers["processes_left"] >= 1  # the orphan of another session
    assert numbers["processes_that_cannot_be_killed"] == 0
    assert numbers["gpu_bytes_over"] == 0
    assert numbers["files_changed"] == 0


def test_an_engine_that_dies_while_loading(suite):
    """As out of memory looks: the engine ends by itself."""
    done = suite.run("--only", "load", "requests", fake={"print": "CUDA out of memory", "die": 1})
    assert suite.results() == {"load": "failed", "requests": "not-run", "cleanup": "failed"}
    assert "ended while loading (exit code 1)" in suite.stages()["load"]["reason"]
    assert suite.stages()["requests"]["reason"] == "load did not pass"
    assert suite.stages()["cleanup"]["numbers"]["processes_left"] == 0
    assert "CUDA out of memory" in (suite.out / "logs/server.log").read_text()
    assert done.returncode == 1


def test_a_launch_that_is_refused(suite):
    suite.run("--only", "load", UNCATALOGUED="0")
    assert suite.results() == {"load": "failed", "cleanup": "failed"}
    assert "UNCATALOGUED=1" in suite.stages()["load"]["reason"]
    suite.run("--only", "checkpoint", UNCATALOGUED="0")
    assert suite.results()["checkpoint"] == "failed"
    assert "UNCATALOGUED=1" in suite.stages()["checkpoint"]["reason"]


def test_a_killed_stage_is_failed(suite):
    path = suite.checks / "gpu/test_requests.py"
    path.write_text("import os\ndef test_x(): os.kill(os.getpid(), 9)\n")
    suite.run("--only", "requests", "performance")
    assert suite.results() == {"load": "passed", "requests": "failed", "performance": "passed", "cleanup": "passed"}
    assert "without a result (-9)" in suite.stages()["requests"]["reason"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sitting_that_is_broken_off(suite, number):
    """Nothing of it is left (the fixture looks), and the stage is not-run."""
    process = subprocess.Popen(
        suite.command("--only", *SERVED), env=suite.environment({"slow": 30}), cwd=suite.folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        # A shell starts what runs in its background with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.time() + 30
    while not (suite.out / "work/status.json").exists():
        assert time.time() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(timeout=30)
    deadline = time.time() + 15
    while suite.left() and time.time() < deadline:
        time.sleep(0.1)
    assert suite.left() == []
    assert suite.results() in ({}, {"numerics": "not-run"})


# --- what the stages find ---------------------------------------------------------------------------------------


def one_stage(passed: Suite, folder: Path, name: str, change) -> dict:
    """What the process of one stage says of a copy of a run directory, changed, with its server still ready."""
    one = copy_of(passed, folder)
    status = one.out / "work/status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "ready"}))
    change(one)
    done = subprocess.run(
        [sys.executable, "-B", "-P", "-m", "qualify.suite.stage", name], cwd=folder, capture_output=True, text=True,
        env=one.environment({}, HORIZON_RUN=str(one.out), HORIZON_MODEL_DIR=str(one.model), HORIZON_LAUNCH=json.dumps(
            {"artifact": "mova-fp8", "arguments": ["--model-path", str(one.model)], "target": "sm90"})),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((one.out / f"work/stage-{name}.json").read_text())


def report(**changes):
    """Change the load report."""

    def change(one: Suite) -> None:
        path = one.out / "work/load/rank-0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def parameter(leaf: str, **changes):
    """Change the first parameter of that leaf, or drop it."""

    def change(one: Suite) -> None:
        path = one.out / "work/load/rank-0.json"
        told = json.loads(path.read_text())
        place = next(i for i, entry in enumerate(told["parameters"]) if entry["name"].endswith(leaf))
        told["parameters"][place : place + 1] = [told["parameters"][place] | changes] if changes else []
        path.write_text(json.dumps(told))

    return change


EVERYTHING, LIVE, SCALES = (
    "test_every_rank_loaded_everything", "test_live_parameters_are_what_is_stored", "test_scales_are_all_there"
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (lambda one: None, set()),
        (report(tensors={"expected": 60, "consumed": 59}), {EVERYTHING}),
        (report(tensors={"expected": 0, "consumed": 0}), {EVERYTHING}),
        (report(ranks=2), {EVERYTHING}),
        (report(rank=1), {EVERYTHING}),
        (report(parameters=[]), {LIVE, SCALES}),
        (parameter(".weight", invalid=1), {EVERYTHING}),
        (parameter("norm.weight"), {LIVE}),
        (parameter("norm.weight", dtype="float32"), {LIVE}),
        (parameter("mlp.gate.bias", dtype="float32"), set()),
        (parameter("down_proj.weight_scale_inv"), {LIVE, SCALES}),
        (parameter("down_proj.weight_scale_inv", scale=False), {SCALES}),
        (lambda one: shutil.rmtree(one.out / "work/load"), {EVERYTHING, LIVE, SCALES}),
    ],
)
def test_load_compares_the_report_with_the_checkpoint(passed, tmp_path, change, fails):
    told = one_stage(passed, tmp_path, "load", change)
    failed = {test.rpartition("::")[2] for test, outcome in told["tests"].items() if outcome != "passed"}
    assert failed == fails
    assert len(told["tests"]) == 4


def test_a_load_report_of_another_schema(passed, tmp_path):
    told = one_stage(passed, tmp_path, "load", report(schema="horizon-images/load-report/v0"))
    assert "a load report of schema" in told["reason"]


@pytest.mark.parametrize(
    ("fake", "stage", "says"),
    [
        ({"orphan": True}, "cleanup", "1 processes of the server were left"),
        ({"leak": 1 << 30}, "cleanup", "1,073,741,824 bytes of GPU memory have not come back"),
        ({"scribble": True}, "cleanup", "changed: ['config.json']"),
        ({"stubborn": True}, "cleanup", "exit code is 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_fails(suite, fake, stage, says):
    if "leak" in fake:  # the stage waits half a minute for it
        path = suite.checks / "gpu/test_cleanup.py"
        path.write_text(path.read_text().replace("STOP, BACK = 60, 30", "STOP, BACK = 60, 1"))
    suite.run("--only", stage, fake=fake)
    found = suite.stages()[stage]
    assert found["result"] == "failed"
    assert says in found["reason"], found
    assert {result for name, result in suite.results().items() if name != stage} == {"passed"}


# --- unrun is never passed --------------------------------------------------------------------------------------


def module(one: Suite, name: str) -> Path:
    return one.checks / ("test_identity.py" if name == "identity" else f"gpu/test_{name}.py")


@pytest.mark.parametrize(
    ("names", "unrun"),
    [
        (["identity", "checkpoint", "requests", "performance"], []),
        (["load"], ["requests", "performance", "cleanup"]),
        (["cleanup"], []),
    ],
)
def test_a_deleted_module_is_not_run(passed, tmp_path, names, unrun):
    """Also where the stage had passed before."""
    one = copy_of(passed, tmp_path)
    for name in [*names, *unrun]:  # those that need the deleted one would be kept otherwise
        (one.out / f"stages/{name}.json").unlink()
    for name in names:
        shutil.copy(passed.out / f"stages/{name}.json", one.out / "stages")
        module(one, name).unlink()
    one.run()
    assert one.results() == ALL_BUT_NUMERICS | dict.fromkeys([*names, *unrun], "not-run")
    assert {one.stages()[name]["reason"] for name in names} == {f"there is no module of the stage {n}" for n in names}


@pytest.mark.parametrize(
    ("names", "unrun"),
    [
        (["identity", "checkpoint", "requests", "performance", "cleanup"], []),
        (["load"], ["requests", "performance"]),
    ],
)
def test_a_skipped_test_is_not_run(suite, names, unrun):
    for name in names:
        with module(suite, name).open("a") as file:
            file.write("\n\ndef test_more():\n    import pytest\n    pytest.skip('no')\n")
    suite.run()
    assert suite.results() == ALL_BUT_NUMERICS | dict.fromkeys([*names, *unrun], "not-run")
    assert all("test_more" in suite.stages()[name]["reason"] for name in names)
    assert all(suite.stages()[name]["reason"] == "load did not pass" for name in unrun)


def copy_of(passed: Suite, folder: Path) -> Suite:
    """The same suite and run directory, for a test that changes them; the checkpoint stays where it is."""
    (folder / "copy").mkdir()
    one = Suite(folder / "copy")
    one.model = passed.model
    shutil.copytree(passed.out, one.out)
    return one


def passed_files(one: Suite) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (one.out / "stages").iterdir() if path.stem != "numerics"}


def test_what_passed_is_kept(passed, tmp_path):
    one = copy_of(passed, tmp_path)
    before = passed_files(one)
    done = one.run()
    assert passed_files(one) == before
    assert done.stdout.count("kept: passed in an earlier sitting") == len(STAGES) - 1


def test_what_did_not_pass_runs_again_with_its_server(passed, tmp_path):
    one = copy_of(passed, tmp_path)
    path = one.out / "stages/requests.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": "failed"}))
    before = {path.stem: path.read_bytes() for path in (one.out / "stages").iterdir()}
    one.run()
    after = {path.stem: path.read_bytes() for path in (one.out / "stages").iterdir()}
    assert one.results() == ALL_BUT_NUMERICS
    assert {name for name in after if after[name] != before[name]} - {"numerics"} == {"load", "requests", "cleanup"}


def test_a_clean_end_is_that_of_the_server_that_was_asked(passed, tmp_path):
    """Another server that does nothing and ends well proves nothing of the one that left a process behind."""
    one = copy_of(passed, tmp_path)
    path = one.out / "stages/cleanup.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"result": "failed"}))
    one.run("--only", "cleanup")
    assert one.results() == dict.fromkeys(("identity", "checkpoint", "load", "cleanup"), "passed")


@pytest.mark.parametrize(("cleanup", "launches"), [("passed", sitting.LAUNCHES), ("failed", 1)])
def test_a_launch_that_leaves_something_is_the_last(tmp_path, monkeypatch, cleanup, launches):
    """The next one's clean end would be written over it."""
    run = rundir.RunDirectory(tmp_path / "out")
    run.create()
    one, served = sitting.Sitting(run, "0" * 64, GPU, [], {}), []
    monkeypatch.setattr(one, "_serve", lambda names: served.append(names) or one._note("cleanup", cleanup, ""))
    one.run(["load", "performance", "cleanup"], full=True)
    assert served == [["load", "performance", "cleanup"]] * launches


@pytest.mark.parametrize("change", ["run_sha256", "gpu", "broken", "empty"])
def test_a_stage_of_another_run_or_gpu_is_not_kept(passed, tmp_path, change):
    one = copy_of(passed, tmp_path)
    path = one.out / "stages/identity.json"
    stage = json.loads(path.read_text())
    changed = {
        "run_sha256": json.dumps(stage | {"run_sha256": "0" * 64}),
        "gpu": json.dumps(stage | {"gpu": {"name": "NVIDIA H200 NVL"}}),
        "broken": "{",
        "empty": json.dumps({"run_sha256": stage["run_sha256"]}),
    }
    path.write_text(changed[change])
    one.run("--only", "identity")
    assert json.loads(path.read_text())["began"] >= stage["began"]
    assert json.loads(path.read_text())["run_sha256"] == stage["run_sha256"]
    assert json.loads(path.read_text())["gpu"] == stage["gpu"]


# --- refused before anything starts -----------------------------------------------------------------------------


def test_a_run_directory_of_something_else(passed, tmp_path):
    one = copy_of(passed, tmp_path)
    for environment, words, says in (
        ({"ROUTER_PARTITIONS": "1"}, (), "declared.ROUTER_PARTITIONS.value: 2 there, 1 here"),
        ({"MAX_RUNNING": "32"}, (), "flags.--max-running-requests: 64 there, 32 here"),
    ):
        done = one.run("--only", "identity", *words, **environment)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert f"holds a run of something else ({says}): give another --out" in done.stderr
    shutil.copytree(one.model, tmp_path / "m")
    one.model = tmp_path / "m"
    (one.model / "README.md").write_text("another file")
    assert "checkpoint.manifest_sha256" in one.run("--only", "identity").stderr
    (one.model / "README.md").unlink()
    (one.home / "identity.json").write_text(json.dumps({"artifact": "mova-fp8", "series_sha256": "1" * 64}))
    assert "image.identity.series_sha256" in one.run("--only", "identity").stderr
    (one.out / "run.json").write_text("[")
    assert "is no run of this suite" in one.run("--only", "identity").stderr


@pytest.mark.parametrize(
    ("words", "environment", "code", "says"),
    [
        (["--target", "a100"], {}, 1, "target 'a100' is unknown: give h200 or sm120"),
        (["--artifact", "nothing"], {}, 1, "artifact 'nothing' is unknown"),
        (["--artifact", "e2m1-k32"], {}, 1, "cannot be launched yet"),
        (["--artifact", "k2-horizon-fp8"], {}, 1, "this is the image of mova-fp8"),
        (["--model-dir", "/nowhere"], {}, 2, "/nowhere"),
        (["--model-dir", f"{ROOT}/docs"], {}, 1, "there is no config.json"),
        (["--tp", "2"], {}, 2, "2 GPUs are needed and 1 are visible"),
        (["--tp", "2", "--ep", "3"], {}, 1, "EP divides TP"),
        ([], {"TP": "2"}, 1, "contradicts"),
        ([], {"ROUTER_PARTITIONS": ""}, 1, "ROUTER_PARTITIONS is not set"),
        ([], {"FAKE_GPU_NAME": "NVIDIA H100"}, 2, "the GPU is NVIDIA H100 (sm90), and target h200 is H200 (sm90)"),
        ([], {"FAKE_GPU_NAME": "NVIDIA RTX PRO 6000"}, 2, "(sm120), and target h200"),
        (["--target", "sm120"], {}, 2, "the GPU is NVIDIA H200 (sm90), and target sm120 is any (sm120)"),
        (["--only", "cooking"], {}, 1, "invalid choice: 'cooking'"),
        (["--only", "load", "--full"], {}, 1, "--full is of the stage performance, and --only leaves that out"),
    ],
)
def test_refused(suite, words, environment, code, says):
    done = suite.run(*words, **environment)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert says in done.stderr
    assert not suite.out.exists()


def test_outside_an_image_and_in_another_artifacts(suite):
    (suite.home / "identity.json").write_text(json.dumps({"artifact": "other"}))
    done = suite.run()
    assert (done.returncode, "this is the image of other" in done.stderr) == (1, True)
    (suite.home / "identity.json").unlink()
    done = suite.run()
    assert (done.returncode, "works inside an image" in done.stderr) == (2, True)
    assert not suite.out.exists()


@pytest.mark.parametrize("through", ["its name", "a link"])
def test_out_inside_the_checkpoint(suite, through):
    (suite.folder / "link").symlink_to(suite.model)
    suite.out = (suite.model if through == "its name" else suite.folder / "link") / "out"
    done = suite.run()
    assert (done.returncode, "lies inside the checkpoint" in done.stderr) == (1, True)
    assert not suite.out.exists()


def test_two_sittings_in_one_directory(suite):
    run = rundir.RunDirectory(suite.out)
    run.create()
    with run.lock():
        done = suite.run("--only", "identity")
    assert (done.returncode, "another sitting is at work" in done.stderr) == (2, True)
    assert suite.run("--only", "identity").returncode == 0


def test_out_that_cannot_be_written(suite):
    suite.out.write_text("")
    done = suite.run()
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--out" in done.stderr


# --- parts ------------------------------------------------------------------------------------------------------


def test_what_came_of_a_stage_can_be_sealed(tmp_path):
    """Whatever a failed stage measured and said: its file is JSON, and its reason public and short enough."""
    run = rundir.RunDirectory(tmp_path / "out")
    run.create()
    one = sitting.Sitting(run, "0" * 64, GPU, [], {sitting.MODEL: "/srv/models/m"})
    reason = f"/srv/models/m/config.json, {run.path}/logs and /home/x/y: \u2588 " + "long " * 200
    told = {"result": "failed", "reason": reason, "tests": {"a": "failed"}, "numbers": {"error": math.nan}}
    rundir.write_json(run.result("load"), told)
    stage = one.blank("load", "") | one._outcome("load", 0)
    assert schema.defect(canonical.parse(rundir.write_json(run.stage("load"), stage), "the file"), "stageFile") is None
    assert stage["numbers"] == {"error": "NaN"}
    assert stage["reason"].startswith("MODEL_DIR/config.json, OUT/logs and [...] [...] long ")


def gpus(*names: str) -> Machine:
    return Machine(tuple(Gpu(name, (9, 0), 140 * GIB, 139 * GIB) for name in names), "580.1", (13, 0))


def test_targets():
    found = targets.check("h200", gpus("NVIDIA H200", "NVIDIA H200", "NVIDIA A100"), 2)
    assert (found["name"], found["count"]) == ("NVIDIA H200", 2)
    for machine_, count in ((gpus("NVIDIA H200"), 2), (gpus("NVIDIA H200", "NVIDIA H200 NVL"), 2), (gpus("H100"), 1)):
        with pytest.raises(CannotRun):
            targets.check("h200", machine_, count)
    with pytest.raises(Rejected):
        targets.get("H200")


def test_substituted_libraries():
    lines = [
        "1 0 0:1 / / rw - overlay overlay rw",
        "2 1 0:2 /x /opt/horizon/venv/lib/nvidia/cudnn ro - ext4 /dev/sda rw",
        "3 1 0:2 /x /opt/horizon/venv/lib/nvidia/cu13/lib ro - ext4 /dev/sda rw",
        "4 1 0:2 /x /opt/horizons rw - ext4 /dev/sda rw",
        "5 1 0:2 /x /models ro - ext4 /dev/sda rw",
    ]
    assert facts.substituted(Path("/opt/horizon"), "\n".join(lines), {"LD_PRELOAD": "", "PATH": "/x"}) == [
        "venv/lib/nvidia/cu13/lib", "venv/lib/nvidia/cudnn"
    ]  # fmt: skip
    assert facts.substituted(Path("/opt/horizon"), lines[0], {}) == []
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"):
        assert facts.substituted(Path("/opt/horizon"), lines[0], {name: "/x"}) == [name]


def test_manifest_digest_depends_on_everything_but_the_order():
    files = [{"name": "a", "size": 1, "sha256": "0" * 64}, {"name": "b", "size": 2, "sha256": "1" * 64}]
    digest = facts.manifest_sha256(files)
    assert facts.manifest_sha256(files[::-1]) == digest
    for key, value in (("name", "c"), ("size", 3), ("sha256", "2" * 64)):
        assert facts.manifest_sha256([files[0] | {key: value}, files[1]]) != digest


def test_differences():
    assert list(rundir.differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2, "d": None})) == [
        "a.b: 1 there, 3 here"
    ]


def test_descendants_and_kill():
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "print(p.pid, flush=True); p.wait()"
    )
    middle = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    last = int(middle.stdout.readline())
    assert set(processes.descendants(os.getpid())) >= {middle.pid, last}
    assert not set(processes.descendants(os.getpid(), without=middle.pid)) & {middle.pid, last}
    own, resident = processes.memory([middle.pid, 1 << 30])
    assert 0 < own < resident
    assert processes.kill(middle.pid) == []
    middle.wait()
    assert last not in processes.descendants(os.getpid())
