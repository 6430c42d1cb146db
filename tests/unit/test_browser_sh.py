"""tests/browser.sh on machines of fakes: which browser it takes, what it installs, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFUSAL = (
    "cannot run: missing: chromium-headless-shell, chromium or google-chrome "
    "(as root on Debian or Ubuntu this installs one)\n"
)


@pytest.fixture
def machine(tmp_path, commands):
    """Run the script with a PATH that holds nothing but fakes."""
    fakes = commands()
    fakes.real("bash", "grep", "tail")
    fakes.add("id", "echo 0")
    release = tmp_path / "os-release"
    release.write_text("ID=debian\n")
    script = tmp_path / "browser.sh"
    script.write_text((ROOT / "tests/browser.sh").read_text().replace("/etc/os-release", str(release)))

    def run():
        bash = shutil.which("bash")
        return subprocess.run(
            [bash, script], env={"PATH": str(fakes.folder)}, capture_output=True, text=True, check=False
        )

    run.fakes, run.release = fakes, release
    return run


@pytest.mark.parametrize("name", ["chromium-headless-shell", "chromium", "google-chrome"])
def test_a_browser_that_is_there_is_taken(machine, name):
    path = machine.fakes.add(name)
    machine.fakes.add("apt-get")
    done = machine()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    assert machine.fakes.calls("apt-get") == []


def test_root_on_debian_gets_one_installed(machine):
    browser = machine.fakes.folder / "chromium-headless-shell"
    body = f'[ "$1" = update ] || {{ echo "#!/bin/bash" >"{browser}"; {shutil.which("chmod")} +x "{browser}"; }}'
    machine.fakes.add("apt-get", body)
    done = machine()
    assert (done.returncode, done.stdout) == (0, f"{browser}\n")
    assert done.stderr == "installing: chromium-headless-shell\n"
    update, install = machine.fakes.calls("apt-get")
    assert update == "apt-get update -qq"
    assert install.endswith("--no-remove --no-install-recommends chromium-headless-shell fonts-dejavu-core")


@pytest.mark.parametrize("lacks", ["root", "debian", "apt-get"])
def test_elsewhere_it_says_what_is_missing(machine, lacks):
    if lacks != "apt-get":
        machine.fakes.add("apt-get")
    if lacks == "root":
        machine.fakes.add("id", "echo 1000")
    if lacks == "debian":
        machine.release.write_text("ID=fedora\n")
    done = machine()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", REFUSAL)
    assert machine.fakes.calls("apt-get") == []


def test_a_mirror_that_fails_is_said(machine):
    machine.fakes.add("apt-get", 'echo "reading"; echo "E: no such mirror" >&2; exit 100')
    done = machine()
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last == "cannot run: apt-get could not install chromium-headless-shell: E: no such mirror"


def test_an_install_that_brings_none_is_a_failure(machine):
    machine.fakes.add("apt-get")
    assert machine().returncode != 0
    assert os.listdir(machine.fakes.folder)
