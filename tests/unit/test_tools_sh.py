"""tests/tools.sh with a fake Python, and tests/in_container.sh with a fake client."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = "pytest==9.0.0 --hash=sha256:ab\n"
# A Python whose venvs hold a Python that installs by making the tool, unless the file `fails` says otherwise.
PYTHON = """
case "$*" in
  -c*) echo 3.11;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$HERE/venv-python" "$3/bin/python"; chmod 755 "$3/bin/python";;
esac
"""
VENV_PYTHON = """#!/bin/bash
printf '%s %s\\n' "$PIP_CONFIG_FILE" "$*" >>"$HERE/pip"
[ ! -e "$HERE/fails" ] || { . "$HERE/fails"; }
printf '#!/bin/bash\\n' >"${0%/*}/pytest"
"""


@pytest.fixture
def tools(tmp_path, commands):
    """Run a copy of tools.sh; its lock, cache and fakes lie in ``tmp_path``."""
    fakes = commands()
    fakes.add("python3", PYTHON)
    (tmp_path / "venv-python").write_text(VENV_PYTHON)
    (tmp_path / "tests").mkdir()
    shutil.copyfile(ROOT / "tests/tools.sh", tmp_path / "tests/tools.sh")
    (tmp_path / "tests/requirements.lock").write_text(LOCK)

    def run(**environment) -> subprocess.CompletedProcess:
        path = f"{fakes.folder}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(tmp_path / "tests/tools.sh"), str(tmp_path / "cache")],
            env={**os.environ, "PATH": path, "HERE": str(tmp_path), **environment},
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def pip_calls(folder: Path) -> list[str]:
    return (folder / "pip").read_text().splitlines() if (folder / "pip").exists() else []


def test_tools_are_installed_once_below_the_cache(tools, tmp_path):
    done = tools()
    key = hashlib.sha256(LOCK.encode()).hexdigest()[:12]
    folder = tmp_path / f"cache/tools-3.11-{key}"
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert (folder / "bin/pytest").exists()
    assert tools().stdout == f"{folder}\n"
    assert len(pip_calls(tmp_path)) == 1


def test_another_lock_gets_another_folder(tools, tmp_path):
    first = tools().stdout
    (tmp_path / "tests/requirements.lock").write_text(LOCK.replace("ab", "cd"))
    assert tools().stdout != first
    assert len(pip_calls(tmp_path)) == 2


def test_only_locked_bytes_and_no_configuration_of_the_machine(tools, tmp_path):
    tools(PIP_CONFIG_FILE="/etc/other.conf")
    (call,) = pip_calls(tmp_path)
    configuration, *words = call.split()
    assert configuration == "/dev/null"
    assert words[:3] == ["-m", "pip", "--isolated"]
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(words)
    assert words[-2:] == ["-r", f"{tmp_path}/tests/requirements.lock"]


def test_a_failing_installation_is_one_sentence_and_leaves_nothing(tools, tmp_path):
    (tmp_path / "fails").write_text('echo "ERROR: no network" >&2; exit 1')
    done = tools()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        "cannot run: the test tools could not be installed (network to PyPI?); run again"
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tools.lock"]
    (tmp_path / "fails").unlink()
    assert tools().returncode == 0


def test_a_failing_venv_is_one_sentence(tools, tmp_path, commands):
    (tmp_path / "bin/python3").write_text(
        '#!/bin/bash\n[ "$1" = -c ] && echo 3.11 || { echo "no ensurepip" >&2; exit 1; }\n'
    )
    done = tools()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("cannot run: the test tools could not be installed")


def test_killed_half_way_it_begins_again(tools, tmp_path):
    (tmp_path / "fails").write_text(': >"${0%/*}/half"; kill -KILL $PPID; exit 1')
    assert tools().returncode == -9
    (tmp_path / "fails").unlink()
    done = tools()
    folder = Path(done.stdout.strip())
    assert done.returncode == 0
    assert (folder / "bin/pytest").exists()
    assert not (folder / "bin/half").exists()


def test_no_cache_is_told():
    done = subprocess.run(["bash", str(ROOT / "tests/tools.sh")], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "CACHE" in done.stderr


# tests/in_container.sh


@pytest.fixture
def container(tmp_path, commands):
    """A copy of in_container.sh beside a host.sh that prints a fake client."""
    fakes = commands()
    for name in ("tests", "images"):
        (tmp_path / name).mkdir()
    shutil.copyfile(ROOT / "tests/in_container.sh", tmp_path / "tests/in_container.sh")
    host = tmp_path / "images/host.sh"
    host.write_text(f'#!/bin/bash\necho "{fakes.folder}/docker"\n')
    host.chmod(0o755)

    def run(body: str = "exit 0", *arguments: str) -> subprocess.CompletedProcess:
        fakes.add("docker", body)
        return subprocess.run(
            ["bash", str(tmp_path / "tests/in_container.sh"), *arguments], capture_output=True, text=True, check=False
        )

    run.calls, run.host = fakes.calls, host
    return run


def test_the_engines_tests_run_locked_down_in_the_checked_image(container, tmp_path):
    assert container("exit 0", "mova-fp8").returncode == 0
    (call,) = container.calls()
    words = call.split()
    image = words.index("horizon-images/mova-fp8:candidate")
    locks = {"--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"}
    assert locks <= set(words[:image])
    assert f"--volume={tmp_path}/tests:/opt/horizon/tests:ro" in words[:image]
    assert words[image + 1 : image + 4] == ["python3", "-m", "pytest"]
    assert words[-2:] == ["/opt/horizon/tests/engine", "/opt/horizon/tests/kernels"]


@pytest.mark.parametrize("code", [1, 5, 125])
def test_their_exit_code_is_the_scripts(container, code):
    assert container(f"exit {code}", "mova-fp8").returncode == code


def test_without_an_engine_the_sentence_of_host_sh_comes_through(container):
    container.host.write_text('#!/bin/bash\necho "cannot run: no container engine" >&2\nexit 2\n')
    done = container("exit 0", "mova-fp8")
    assert (done.returncode, done.stderr) == (2, "cannot run: no container engine\n")
    assert container.calls() == []
