"""Fixtures of the in-container checks."""

import pytest

from qualify import engine_cpu
from qualify.checks.loading import MOVA_CONFIG, PROVENANCE
from qualify.synth.command import synthesise


@pytest.fixture(scope="session")
def tiny_mova(tmp_path_factory):
    """A tiny synthetic MoVA FP8 checkpoint in the layout of the published config."""
    directory = tmp_path_factory.mktemp("checkpoint") / "mova-tiny"
    synthesise(MOVA_CONFIG, directory, tiny=True)
    return directory


@pytest.fixture(scope="session")
def loaded_mova(tiny_mova):
    """That checkpoint as the engine's ``DefaultModelLoader`` loads it."""
    engine_cpu.start()
    return engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
