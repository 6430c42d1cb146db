"""images/docker.py with fake clients: which one is taken, and what is said where none can build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from images import docker
from qualify.errors import CannotRun

ROOT = Path(__file__).resolve().parents[2]
HAS_CONTEXT = 'for context; do :; done; grep -q "^FROM scratch" "$context/Dockerfile" || exit 9\n'
# Clients as they behave: BuildKit by an environment variable, by a plugin, or not at all.
BUILDKIT_2010 = (
    'if [ "$1" = buildx ]; then echo "docker: \'buildx\' is not a docker command." >&2; exit 1; fi\n'
    'if [ "$1" = build ]; then [ "$DOCKER_BUILDKIT" = 1 ] || { echo "legacy builder" >&2; exit 1; }\n'
    + HAS_CONTEXT
    + "fi"
)
BUILDX = (
    'if [ "$1" = build ]; then echo "ERROR: BuildKit is enabled but the buildx component is missing" >&2; exit 1; fi\n'
    'if [ "$1 $2" = "buildx build" ]; then\n' + HAS_CONTEXT + "fi"
)
CANNOT_BUILD = 'case $1 in build*) echo >&2; echo "unknown command: $1" >&2; echo >&2; exit 125;; esac'
NO_DAEMON = 'echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock." >&2; exit 1'


@pytest.fixture
def clients(commands, monkeypatch):
    """Put fake clients on PATH, each in a folder of its own, and nothing else of that name anywhere."""
    monkeypatch.delenv("DOCKER", raising=False)
    which = docker.shutil.which

    def put(*bodies: str) -> list:
        folders = [commands(f"bin{n}") for n in range(len(bodies))]
        for folder, body in zip(folders, bodies, strict=True):
            folder.add("docker", body)
        mine = {str(folder.folder) for folder in folders}
        monkeypatch.setattr(docker.shutil, "which", lambda name, path: which(name, path=path) if path in mine else None)
        monkeypatch.setenv("PATH", os.pathsep.join([*(str(f.folder) for f in folders), os.environ["PATH"]]))
        return folders

    return put


def test_docker_2010_builds_by_itself(clients):
    (only,) = clients(BUILDKIT_2010)
    found = docker.find()
    assert found == docker.Docker(str(only.folder / "docker"), ["build"], {"DOCKER_BUILDKIT": "1"})
    assert all("--network=none" in call for call in only.calls())


def test_a_newer_docker_builds_with_buildx(clients):
    (only,) = clients(BUILDX)
    # --load: the image must end up in the engine; no provenance, which would change the image.
    words = ["buildx", "build", "--load", "--provenance=false"]
    assert docker.find() == docker.Docker(str(only.folder / "docker"), words)


def test_a_client_that_cannot_build_comes_first_on_path(clients):
    first, second = clients(CANNOT_BUILD, BUILDKIT_2010)
    assert docker.find().path == str(second.folder / "docker")
    assert first.calls()  # it was asked


def test_the_first_that_can_build_is_taken(clients):
    first, second = clients(BUILDX, BUILDKIT_2010)
    assert docker.find().path == str(first.folder / "docker")
    assert second.calls() == []


def test_a_client_that_does_not_start_is_passed_over(clients):
    first, second = clients("", BUILDX)
    (first.folder / "docker").write_text("not a program\n")
    assert docker.find().path == str(second.folder / "docker")


def test_no_client(clients):
    clients()
    with pytest.raises(CannotRun, match=r"^no container engine: install Docker 20\.10 or newer"):
        docker.find()


def test_every_client_fails_each_with_its_reason(clients):
    first, second = clients(CANNOT_BUILD, NO_DAEMON)
    with pytest.raises(CannotRun) as refusal:
        docker.find()
    assert str(refusal.value) == (
        "no docker client here can build with BuildKit: "
        f"{first.folder}/docker: unknown command: build; "
        f"{second.folder}/docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    )


def test_the_chosen_client_is_the_only_one_asked(clients, commands, monkeypatch):
    (on_path,) = clients(BUILDX)
    chosen = commands("chosen")
    monkeypatch.setenv("DOCKER", str(chosen.add("docker", BUILDKIT_2010)))
    assert docker.find().path == str(chosen.folder / "docker")
    chosen.add("docker", NO_DAEMON)
    with pytest.raises(CannotRun, match="Cannot connect"):
        docker.find()
    assert on_path.calls() == []


def test_the_chosen_client_does_not_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER", str(tmp_path / "none"))
    with pytest.raises(CannotRun, match=f"{tmp_path}/none: No such file or directory"):
        docker.find()
    assert docker.ping() is False


def test_the_distributions_own_client_is_asked_last(monkeypatch):
    monkeypatch.delenv("DOCKER", raising=False)
    monkeypatch.setenv("PATH", "/opt/bin:/usr/bin::/opt/bin")
    monkeypatch.setattr(docker.shutil, "which", lambda name, path: f"{path}/{name}")
    assert docker.candidates() == ["/opt/bin/docker", "/usr/bin/docker", "/usr/local/bin/docker"]


# Driving it


def test_environment_reaches_every_command(commands):
    fakes = commands()
    client = docker.Docker(str(fakes.add("docker", 'echo "$DOCKER_BUILDKIT $1"')), ["build"], {"DOCKER_BUILDKIT": "1"})
    assert client.output("tag", "a", "b") == "1 tag"


def test_a_failing_command_says_its_last_line(commands):
    fakes = commands()
    client = docker.Docker(str(fakes.add("docker", 'printf "warning\\nno such image\\n\\n" >&2; exit 1')), [])
    with pytest.raises(CannotRun, match=r"^`docker tag` failed: no such image$"):
        client.output("tag", "a", "b")


def test_inspect(commands):
    fakes = commands()
    client = docker.Docker(str(fakes.add("docker", "echo '[{\"Size\": 7}]'")), [])
    assert client.inspect("an:image") == {"Size": 7}
    assert fakes.calls() == ["docker image inspect an:image"]


@pytest.mark.parametrize(("text", "line"), [("a\nb\n\n  \n", "b"), ("", "no message"), (" x ", "x")])
def test_last_line(text, line):
    assert docker.last_line(text) == line


# The command


def run(*arguments: str, client: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-B", str(ROOT / "images/docker.py"), *arguments],
        env={**os.environ, "DOCKER": str(client)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_command_find(commands):
    fakes = commands()
    client = fakes.add("docker", BUILDKIT_2010)
    done = run("find", client=client)
    assert (done.returncode, done.stdout) == (0, f"{client}\n")
    client = fakes.add("docker", NO_DAEMON)
    done = run("find", client=client)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cannot run: no docker client here can build with BuildKit: ")
    assert done.stderr.count("\n") == 1


def test_command_ping(commands):
    fakes = commands()
    # A client without BuildKit reaches the engine all the same.
    assert run("ping", client=fakes.add("docker", CANNOT_BUILD)).returncode == 0
    assert run("ping", client=fakes.add("docker", NO_DAEMON)).returncode == 2


def test_command_knows_no_such_word(commands):
    done = run("fund", client=commands().add("docker", BUILDX))
    assert done.stderr == "cannot run: usage: docker.py find | ping\n"
