#!/usr/bin/env python3
"""Find a container engine client that can build with BuildKit, and drive it.

Machines differ: Docker 20.10 builds by itself, newer clients need the buildx plugin, and a client without it may come
first on PATH. So every client is asked to build an empty image, and the first that can is taken.

    docker.py find    print the client that can build, or the reason why none can (exit 2)
    docker.py ping    exit 0 where an engine answers
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from qualify.errors import CannotRun, exit_code


@dataclass(frozen=True)
class Docker:
    """A client: its path, the words that build with it, and the environment they need."""

    path: str
    build: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run([self.path, *arguments], env={**os.environ, **self.environment}, **options)

    def output(self, *arguments: str) -> str:
        """The stdout of a command that must succeed. Raises CannotRun with the client's own last line."""
        done = self.run(*arguments, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"`docker {arguments[0]}` failed: {last_line(done.stderr)}")
        return done.stdout.strip()

    def inspect(self, image: str) -> dict:
        return json.loads(self.output("image", "inspect", image))[0]


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def candidates() -> list[str]:
    """Clients in the order tried: $DOCKER, every `docker` on PATH, the distribution's own."""
    if chosen := os.environ.get("DOCKER"):
        return [chosen]
    folders = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    found = [shutil.which("docker", path=folder) for folder in folders if folder]
    # Two names of one file (/bin is a link to /usr/bin) are one client.
    clients: dict[str, str] = {}
    for path in filter(None, found):
        clients.setdefault(os.path.realpath(path), path)
    return list(clients.values())


def probe(path: str) -> Docker | str:
    """A client that has just built an empty image, or the reason why this one cannot."""
    reasons = []
    ways = [
        Docker(path, ["buildx", "build", "--load", "--provenance=false"]),
        Docker(path, ["build"], {"DOCKER_BUILDKIT": "1"}),
    ]
    with tempfile.TemporaryDirectory() as context:
        Path(context, "Dockerfile").write_text('FROM scratch\nLABEL probe="1"\n')
        for docker in ways:
            try:
                done = docker.run(*docker.build, "--quiet", "--network=none", context,
                                  capture_output=True, text=True, check=False)  # fmt: skip
            except OSError as error:  # not there, not for this machine
                return f"{path}: {error.strerror}"
            if done.returncode == 0:
                return docker
            if "permission denied" in done.stderr:
                return f"{path}: this user may not use the engine: run with sudo, or join the group docker"
            reasons.append(last_line(done.stderr))
    return f"{path}: {reasons[-1]}"


def find() -> Docker:
    """The first client that can build. Raises CannotRun with each candidate's reason."""
    paths = candidates()
    if not paths:
        raise CannotRun("no container engine: install Docker 20.10 or newer (on Debian or Ubuntu, root does it here)")
    reasons = []
    for path in paths:
        found = probe(path)
        if isinstance(found, Docker):
            return found
        reasons.append(found)
    raise CannotRun("no docker client here can build with BuildKit: " + "; ".join(reasons))


def ping() -> bool:
    """Whether any client here reaches an engine."""
    for path in candidates():
        with contextlib.suppress(OSError):
            done = Docker(path, []).run("version", "--format", "{{.Server.Version}}", capture_output=True, check=False)
            if done.returncode == 0:
                return True
    return False


def main() -> int:
    if sys.argv[1:] == ["ping"]:
        return 0 if ping() else 2
    if sys.argv[1:] != ["find"]:
        raise CannotRun("usage: docker.py find | ping")
    print(find().path)
    return 0


if __name__ == "__main__":
    # As a script its own folder comes first on the import path; nothing in it may shadow a package.
    sys.exit(exit_code(main))
