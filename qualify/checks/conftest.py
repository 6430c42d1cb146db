"""Fixtures of the in-container checks.

Torch and the engine are imported by the fixtures that need them, so that the other checks can say what is
wrong with an image in which these do not import.
"""

import pytest


@pytest.fixture(scope="session")
def tiny_mova(tmp_path_factory):
    """Directory of a tiny synthetic MoVA FP8 checkpoint in the layout of the published config."""
    from qualify.models import MOVA_CONFIG
    from qualify.synth.command import synthesise

    directory = tmp_path_factory.mktemp("checkpoint") / "mova-tiny"
    synthesise(MOVA_CONFIG, directory, tiny=True)
    return directory


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory):
    """Directory of a tiny dense compressed-tensors FP8 checkpoint in the layout of the published 7B config."""
    from qualify.models import DENSE_CONFIG
    from qualify.synth.command import synthesise

    directory = tmp_path_factory.mktemp("checkpoint") / "dense-tiny"
    synthesise(DENSE_CONFIG, directory, tiny=True)
    return directory


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory):
    """Directory of a tiny compressed-tensors FP8 checkpoint with routed experts: the 375B as known."""
    from qualify.synth.command import synthesise

    directory = tmp_path_factory.mktemp("checkpoint") / "moe-tiny"
    synthesise("375b-a23b", directory, tiny=True)
    return directory


@pytest.fixture(scope="session")
def loaded_mova(tiny_mova):
    """That checkpoint as the engine's ``DefaultModelLoader`` loads it."""
    from qualify import engine_cpu
    from qualify.checks.loading import PROVENANCE

    engine_cpu.start()
    return engine_cpu.load_model(tiny_mova, overrides=PROVENANCE)
