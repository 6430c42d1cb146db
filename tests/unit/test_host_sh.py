"""images/host.sh on machines of fakes: what it installs, what it starts, and what it says where it can do neither.

The script runs from a copy in which the paths that it looks at lie below the test's folder, with a PATH of fakes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOOKED_AT = [
    "/etc/os-release",
    "/etc/ssl/certs/ca-certificates.crt",
    "/run/systemd/system",
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/var/run/docker.sock",
]
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12"\nID=debian\n'
WORKING = "exit 0"
UP = '[ -e "$ROOT/up" ] || { echo "Cannot connect to the Docker daemon." >&2; exit 1; }'


class Machine:
    """A fake machine on which nothing is missing: root on Debian with a client that builds."""

    def __init__(self, folder: Path, fakes):
        self.folder, self.fakes = folder, fakes
        (folder / "images").mkdir()
        (folder / "qualify").mkdir()
        shutil.copyfile(ROOT / "qualify/errors.py", folder / "qualify/errors.py")
        self.copy("images/docker.py", {'"/usr/bin", "/usr/local/bin"': ""})
        self.copy("images/host.sh", {path: f"{folder}{path}" for path in LOOKED_AT})
        for path in ("/etc/os-release", "/etc/ssl/certs/ca-certificates.crt"):
            self.write(path)
        self.write("/usr/share/keyrings/debian-archive-keyring.gpg")
        self.write("/etc/os-release", DEBIAN)
        fakes.real(
            "bash", "cat", "chmod", "cp", "cut", "dirname", "echo", "grep", "seq", "setsid", "sleep", "tail", "xargs"
        )
        for name in ("curl", "mmdebstrap", "zstd", "systemctl"):
            fakes.add(name)
        self.python()
        self.user("0")
        fakes.add("docker", WORKING)
        fakes.add("apt-cache")
        # Installing a package makes the command of its name.
        fakes.add(
            "apt-get",
            '[ "$1" = install ] || exit 0\n'
            'for p; do case $p in -*|install) ;; docker.io) cp "$ROOT/docker" "$ROOT/bin/docker";;'
            ' *) printf "#!/bin/bash\\n" >"$ROOT/bin/$p"; chmod 755 "$ROOT/bin/$p";; esac; done\nexit 0',
        )

    def copy(self, name: str, replaced: dict[str, str]) -> None:
        text = (ROOT / name).read_text()
        for old, new in replaced.items():
            assert old in text, f"{name} no longer has {old}: this test would look at the real machine"
            text = text.replace(old, new)
        (self.folder / name).write_text(text)

    def write(self, path: str, text: str = "") -> None:
        target = Path(f"{self.folder}{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.fakes.folder / name).unlink()

    def user(self, uid: str) -> None:
        self.fakes.add("id", f"echo {uid}")

    def python(self, venv: bool = True, old: str = "") -> None:
        self.fakes.add(
            "python3",
            f'case "$*" in *ensurepip*) exit {0 if venv else 1};; *version_info*) exit {1 if old else 0};;'
            f' -V) echo "Python {old}"; exit 0;; esac\nexec "{sys.executable}" -B "$@"',
        )

    def after_installation(self, body: str) -> None:
        """The client that the package docker.io brings."""
        shutil.copyfile(self.fakes.add("docker", body), self.folder / "docker")
        (self.folder / "docker").chmod(0o755)
        self.remove("docker")

    def run(self, **environment) -> subprocess.CompletedProcess:
        path = {"PATH": str(self.fakes.folder), "ROOT": str(self.folder), "TMPDIR": str(self.folder)}
        return subprocess.run(
            ["/bin/bash", str(self.folder / "images/host.sh")],
            env={**path, **environment}, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip

    def installed(self) -> list[str]:
        calls = [call.split() for call in self.fakes.calls("apt-get") if call.split()[1] == "install"]
        return [word for call in calls for word in call[2:] if not word.startswith("-")]

    def changed(self) -> list[str]:
        """Calls of what changes a machine."""
        return [call for call in self.fakes.calls() if call.split()[0] in ("apt-get", "dockerd", "systemctl")]

    @property
    def client(self) -> str:
        return f"{self.fakes.folder}/docker\n"


@pytest.fixture
def machine(tmp_path, commands):
    made = Machine(tmp_path, commands())
    yield made
    if (tmp_path / "dockerd.pid").exists():
        os.kill(int((tmp_path / "dockerd.pid").read_text()), signal.SIGKILL)


def refused(done: subprocess.CompletedProcess) -> str:
    """The one sentence of a refusal with exit 2."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("cannot run: ")]
    assert len(said) == 1, done.stderr
    assert done.stderr.endswith(said[0] + "\n"), done.stderr
    return said[0].removeprefix("cannot run: ")


def test_where_nothing_is_missing_nothing_is_changed(machine):
    done = machine.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, machine.client, "")
    assert machine.changed() == []


def test_a_user_needs_no_root_where_nothing_is_missing(machine):
    machine.user("1000")
    done = machine.run()
    assert (done.returncode, done.stdout, machine.changed()) == (0, machine.client, [])


# Missing tools


def elsewhere(machine, kind: str) -> None:
    if kind == "not root":
        machine.user("1000")
    elif kind == "no apt-get":
        machine.remove("apt-get")
    elif kind == "no os-release":
        Path(f"{machine.folder}/etc/os-release").unlink()
    else:
        machine.write("/etc/os-release", 'NAME="Fedora Linux"\nID=fedora\nHOME_URL="https://not.debian.example"\n')


ELSEWHERE = ["not root", "not Debian", "no apt-get", "no os-release"]


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_elsewhere_one_sentence_names_what_is_missing(machine, kind):
    elsewhere(machine, kind)
    machine.remove("mmdebstrap", "zstd")
    said = refused(machine.run())
    assert said == "missing: mmdebstrap zstd (as root on Debian or Ubuntu this installs them)"
    assert machine.changed() == []


def lack(machine, package: str) -> None:
    if package == "debian-archive-keyring":
        Path(f"{machine.folder}/usr/share/keyrings/debian-archive-keyring.gpg").unlink()
    elif package == "ca-certificates":
        Path(f"{machine.folder}/etc/ssl/certs/ca-certificates.crt").unlink()
    elif package == "python3-venv":
        machine.python(venv=False)
    elif package == "python3 python3-venv":
        machine.remove("python3")
    else:
        machine.remove(package)


NEEDED = [
    "curl",
    "mmdebstrap",
    "zstd",
    "debian-archive-keyring",
    "ca-certificates",
    "python3-venv",
    "python3 python3-venv",
]


@pytest.mark.parametrize("package", NEEDED)
def test_each_missing_thing_is_named_by_its_package(machine, package):
    machine.user("1000")
    lack(machine, package)
    assert refused(machine.run()) == f"missing: {package} (as root on Debian or Ubuntu this installs them)"


@pytest.mark.parametrize(
    "release", [DEBIAN, "ID=ubuntu\nID_LIKE=debian\n", 'ID=linuxmint\nID_LIKE="ubuntu debian"\n', 'ID="debian"\n']
)
def test_root_on_debian_installs_what_is_missing_and_no_more(machine, release):
    machine.write("/etc/os-release", release)
    machine.remove("mmdebstrap", "zstd")
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr
    assert machine.installed() == ["mmdebstrap", "zstd"]
    assert machine.fakes.calls("apt-get")[0].split()[1] == "update"
    # Nothing of the machine's is taken away for it.
    assert "--no-remove" in machine.fakes.calls("apt-get")[1]


@pytest.mark.parametrize("verb", ["update", "install"])
def test_a_failing_installation_says_why(machine, verb):
    machine.remove("zstd")
    machine.fakes.add("apt-get", f'[ "$1" != {verb} ] || {{ echo Reading; echo "E: no network" >&2; exit 100; }}')
    assert refused(machine.run()) == "apt-get could not install zstd: E: no network"


def test_an_old_python(machine):
    machine.python(old="3.9.2")
    assert refused(machine.run()) == "Python 3.11 or newer is needed, python3 is 3.9.2"


# The container engine


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_elsewhere_without_an_engine(machine, kind):
    elsewhere(machine, kind)
    machine.remove("docker")
    assert refused(machine.run()).startswith("no container engine: install Docker 20.10 or newer")
    assert machine.changed() == []


def test_a_user_without_access_to_the_engine_is_told_what_to_do(machine):
    machine.user("1000")
    machine.fakes.add("docker", 'echo "permission denied while trying to connect" >&2; exit 1')
    machine.fakes.add("dockerd", "exit 1")
    assert "this user may not use the engine: run with sudo, or join the group docker" in refused(machine.run())
    assert machine.changed() == []


@pytest.mark.parametrize(
    ("known", "packages"),
    [("", ["docker.io"]), ("docker-cli docker-buildx", ["docker.io", "docker-cli", "docker-buildx"])],
    ids=["debian-12", "debian-13"],
)
def test_root_on_debian_installs_an_engine(machine, known, packages):
    machine.after_installation(WORKING)
    machine.fakes.add("apt-cache", f'case " {known} " in *" ${{!#}} "*) echo "Package: ${{!#}}";; esac')
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr
    assert machine.installed() == packages
    assert machine.fakes.calls("dockerd") == []  # it runs already


def test_a_client_that_cannot_build_gets_one_beside_it_that_can(machine):
    machine.after_installation(WORKING)
    machine.fakes.add("docker", 'case $1 in build*) echo "unknown command" >&2; exit 1;; esac')
    done = machine.run()
    assert (done.returncode, machine.installed()) == (0, ["docker.io"]), done.stderr
    assert machine.fakes.calls("dockerd") == []


def dockerd(machine, needs: str = "") -> None:
    """An engine that starts (with certain options only), and a client that reaches it then."""
    machine.fakes.add("docker", UP)
    machine.fakes.add(
        "dockerd",
        f'case "$*" in *"{needs}"*) ;; *) echo "starting"; echo "failed: no bridge"; exit 1;; esac\n'
        f'"{sys.executable}" -c "import socket; socket.socket(socket.AF_UNIX).bind(\'$ROOT/var/run/docker.sock\')"\n'
        'echo $$ >"$ROOT/dockerd.pid"; : >"$ROOT/up"; exec sleep 100',
    )
    (machine.folder / "var/run").mkdir(parents=True)


def test_a_stopped_engine_is_started(machine):
    dockerd(machine)
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr
    assert machine.changed() == ["dockerd "]


def test_an_engine_without_a_client_gets_one(machine):
    """Debian 13 has the client in a package of its own: without one, nobody can say whether the engine runs."""
    dockerd(machine)
    machine.after_installation(UP)
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr


def test_where_the_kernel_lets_no_bridge_be_made(machine):
    dockerd(machine, needs="--bridge=none")
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr
    assert machine.changed() == ["dockerd ", "dockerd --bridge=none --iptables=false"]


def test_an_engine_that_does_not_start(machine):
    dockerd(machine, needs="never")
    assert refused(machine.run()) == "dockerd does not start: failed: no bridge"


def test_systemd_starts_the_engine(machine):
    dockerd(machine)
    (machine.folder / "run/systemd/system").mkdir(parents=True)
    machine.fakes.add("systemctl", ': >"$ROOT/up"')
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, machine.client), done.stderr
    assert machine.changed() == ["systemctl start docker"]


def test_systemd_cannot_start_the_engine(machine):
    dockerd(machine)
    (machine.folder / "run/systemd/system").mkdir(parents=True)
    machine.fakes.add("systemctl", "exit 1")
    assert refused(machine.run()) == "systemctl could not start docker; see journalctl -u docker"


def test_a_user_does_not_start_an_engine(machine):
    dockerd(machine)
    machine.user("1000")
    assert "Cannot connect to the Docker daemon." in refused(machine.run())
    assert machine.changed() == []


def test_an_engine_elsewhere_is_not_replaced_by_one_here(machine):
    dockerd(machine)
    machine.after_installation(UP)
    machine.fakes.add("docker", UP)
    assert "Cannot connect to the Docker daemon." in refused(machine.run(DOCKER_HOST="tcp://192.0.2.1:2375"))
    assert machine.fakes.calls("dockerd") == []
