"""The Makefile: `make help`, the cache's place, and that a failing step is a failing target."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make(tmp_path, commands):
    """Run make in a copy of the Makefile whose scripts are fakes that log their calls."""
    for folder in ("recipes", "images", "tests"):
        (tmp_path / folder).mkdir()
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    for artifact in ("alpha", "beta"):
        (tmp_path / f"recipes/{artifact}.toml").write_text("image = true\n")
    (tmp_path / "recipes/planned.toml").write_text("")
    fakes = commands()
    fakes.add("python3", 'case "$*" in *"$FAILS"*) [ -z "$FAILS" ] || exit 1;; esac')
    tools = commands("tools/bin")
    for name in ("pytest", "ruff", "shellcheck", "hadolint", "python"):
        tools.add(name)
    for name, body in {
        "images/host.sh": "",
        "tests/in_container.sh": "",
        "tests/browser.sh": "echo /usr/bin/chromium",
        "tests/tools.sh": f"echo {tmp_path}/tools",
    }.items():
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >>"{fakes.log}"\n{body}\n')
        path.chmod(0o755)

    def run(*words: str, **environment) -> subprocess.CompletedProcess:
        dropped = ("MAKE", "MFLAGS", "HORIZON_CACHE", "ARTIFACT", "STRICT", "BASE_IMAGE", "DOCKER", "SUDO_")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        return subprocess.run(
            ["make", "-C", str(tmp_path), *words],
            env={**clean, "PATH": f"{fakes.folder}:{os.environ['PATH']}", "FAILS": "", **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    run.fakes, run.tools, run.folder = fakes, tools, tmp_path
    return run


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.M))


def test_help_lists_every_target(make):
    done = make("help")
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^  make (\S+) +(\S.*)$", done.stdout, flags=re.M)
    assert {name for name, _ in listed} == targets()
    assert "ARTIFACT=alpha|beta" in done.stdout


def test_help_is_the_default(make):
    assert make().stdout == make("help").stdout


def test_every_target_is_phony():
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {name for names in phony for name in names.split()} == targets()


def test_every_script_that_the_makefile_runs_exists():
    text = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\b((?:images|tests|patches)/[a-z_]+\.(?:py|sh))\b", text))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    run_directly = set(re.findall(r"(?:@|\(|; do )((?:images|tests)/[a-z_]+\.sh)", text))
    assert [name for name in sorted(run_directly) if not os.access(ROOT / name, os.X_OK)] == []


# The cache


def cache_of(make, *words: str, **environment) -> str:
    return re.search(r"HORIZON_CACHE=(\S+)", make("help", *words, **environment).stdout)[1]


def test_sudo_does_not_move_the_cache(make):
    make.fakes.add("getent", 'echo "$2:x:1000:1000::/home/$2:/bin/bash"')
    make.fakes.add("id", "echo root")
    assert cache_of(make, SUDO_USER="alice", HOME="/root") == "/home/alice/.cache/horizon-images"
    assert cache_of(make, HOME="/somewhere") == "/home/root/.cache/horizon-images"


def test_the_cache_can_be_chosen(make):
    assert cache_of(make, HORIZON_CACHE="/data/cache", SUDO_USER="alice") == "/data/cache"
    assert cache_of(make, "HORIZON_CACHE=/data/other") == "/data/other"


# Targets


def test_image_sets_up_the_machine_and_builds(make):
    done = make("image", "ARTIFACT=alpha", HORIZON_CACHE="/c")
    assert done.returncode == 0, done.stderr
    assert make.fakes.calls() == ["host.sh ", "python3 images/build.py alpha --cache /c"]


def test_image_without_artifact_changes_nothing(make):
    done = make("image")
    assert done.returncode != 0
    assert "rejected: say which image, for example make image ARTIFACT=mova-fp8\n" in done.stderr
    assert make.fakes.calls() == []


def test_image_stops_where_the_machine_is_not_set_up(make):
    (make.folder / "images/host.sh").write_text('#!/bin/bash\necho "cannot run: missing: zstd" >&2\nexit 2\n')
    done = make("image", "ARTIFACT=alpha")
    assert done.returncode != 0
    assert "cannot run: missing: zstd\n" in done.stderr
    assert make.fakes.calls("python3") == []


def test_test_does_everything_for_every_artifact(make):
    done = make("test", HORIZON_CACHE="/c")
    assert done.returncode == 0, done.stderr
    calls = make.fakes.calls()
    assert [call for call in calls if "build.py" in call] == [
        "python3 images/build.py alpha --cache /c",
        "python3 images/build.py beta --cache /c",
    ]
    assert [call for call in calls if "in_container" in call] == ["in_container.sh alpha"]  # the engine is one
    assert any("series.py check" in call for call in calls)
    assert make.tools.calls("pytest") == ["pytest -q tests/unit", "pytest -q tests/browser", "pytest -q tests/image"]
    assert {call.split()[0] for call in make.tools.calls()} == {"shellcheck", "hadolint", "ruff", "pytest"}


def test_test_of_one_artifact(make):
    make("test", "ARTIFACT=beta", HORIZON_CACHE="/c")
    calls = [call for call in make.fakes.calls() if "build.py" in call or "in_container" in call]
    assert calls == ["python3 images/build.py beta --cache /c", "in_container.sh beta"]


@pytest.mark.parametrize(
    "fails",
    ["build.py alpha", "build.py beta", "series.py", "in_container", "shellcheck", "hadolint", "ruff", "pytest"],
)
def test_test_fails_where_any_step_fails(make, fails):
    if fails == "in_container":
        (make.folder / "tests/in_container.sh").write_text("#!/bin/bash\nexit 1\n")
    elif (make.tools.folder / fails).exists():
        make.tools.add(fails, "exit 1")
    assert make("test", FAILS=fails if ".py" in fails else "").returncode != 0


@pytest.mark.parametrize("target", ["unit", "lint", "format", "lock"])
def test_without_the_test_tools_nothing_else_runs_in_their_place(make, target):
    (make.folder / "tests/tools.sh").write_text('#!/bin/bash\necho "cannot run: no test tools" >&2\nexit 2\n')
    done = make(target)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert told == ["cannot run: no test tools"]
    assert make.fakes.calls("python3") == []


def test_variables_reach_the_build(make):
    make.fakes.add("python3", f'echo "$STRICT|$BASE_IMAGE|$DOCKER" >"{make.folder}/seen"')
    make("image", "ARTIFACT=alpha", "STRICT=1", "BASE_IMAGE=a@sha256:b", "DOCKER=/d")
    assert (make.folder / "seen").read_text() == "1|a@sha256:b|/d\n"


def test_qualify_hands_everything_on(make):
    assert make("qualify", "ARTIFACT=alpha", "MODEL_DIR=/m", "TARGET=h200", "TP=2", "OUT=/o").returncode == 0
    assert make.fakes.calls("python3")[-1] == (
        "python3 -m qualify.host --artifact alpha --model-dir /m --target h200 --tp 2 --ep 1 --out /o"
    )
    # What is missing is refused by the command, in one sentence.
    make("qualify")
    assert make.fakes.calls("python3")[-1] == (
        "python3 -m qualify.host --artifact  --model-dir  --target  --tp 1 --ep 1"
    )
