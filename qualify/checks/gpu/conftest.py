"""Fixtures of the GPU tier's stages: the run, the plan, and the server that the sitting has started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qualify.suite.rundir import VARIABLE, RunDirectory
from qualify.suite.sitting import LAUNCH, MODEL


@pytest.fixture(scope="session")
def directory() -> RunDirectory:
    """The run directory."""
    return RunDirectory(Path(os.environ[VARIABLE]))


@pytest.fixture(scope="session")
def run(directory) -> dict:
    """run.json: what is qualified."""
    return json.loads(directory.run.read_text())


@pytest.fixture(scope="session")
def model() -> Path:
    """The checkpoint's folder."""
    return Path(os.environ[MODEL])


@pytest.fixture(scope="session")
def planned():
    """The plan, made anew from the recipe as the launcher makes it."""
    from launch import plan, recipe

    told = json.loads(os.environ[LAUNCH])
    return plan.build(recipe.load(told["artifact"]), os.environ, told["arguments"], told["target"])


@pytest.fixture(scope="session")
def launched(directory) -> dict:
    """What the sitting started: pid of the launcher, when, and the GPU memory that was in use before."""
    return json.loads(directory.server.read_text())


@pytest.fixture(scope="session")
def status(directory) -> dict:
    """The launcher's record of a server that is ready."""
    found = json.loads(directory.status.read_text())
    assert found["state"] == "ready", found["detail"]
    return found


@pytest.fixture(scope="session")
def server(status, planned, model):
    """HTTP to it; random prompts over the whole vocabulary."""
    from qualify.serving import Server

    config = json.loads((model / "config.json").read_text())
    return Server(status["url"], planned.key, config["vocab_size"])


@pytest.fixture
def measure(record_property):
    """Record numbers of a stage, also those of a test that fails later: ``measure(seconds=1.5)``."""

    def record(**numbers) -> None:
        for name, value in numbers.items():
            record_property(name, value)

    return record
