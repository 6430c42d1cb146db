"""The same engine world and tiny checkpoints as the in-container checks, plus the published config."""

import json

import pytest

from benchmarks import stock
from qualify import engine_cpu
from qualify.checks.conftest import loaded_mova, tiny_dense, tiny_moe, tiny_mova  # noqa: F401 - fixtures
from qualify.checks.loading import PROVENANCE, read_checkpoint
from qualify.models import MOVA_CONFIG
from tests.engine import ownership_run, strict


@pytest.fixture(scope="session", autouse=True)
def engine():
    """One CPU rank of the engine, started before any test imports it; stock with its two gates relaxed."""
    engine_cpu.start()
    if stock.is_stock():
        stock.relax_gates()


@pytest.fixture
def published():
    """The published MoVA FP8 config, fresh for every test."""
    return json.loads(MOVA_CONFIG.read_text())


@pytest.fixture
def tiny(tiny_mova):  # noqa: F811 - the fixture
    """The config of the tiny synthetic checkpoint, fresh for every test."""
    return json.loads((tiny_mova / "config.json").read_text())


@pytest.fixture(scope="session")
def source(tiny_mova):  # noqa: F811 - the fixture
    """The intact tiny checkpoint in memory, name -> tensor; nobody writes into a tensor of it."""
    return read_checkpoint(tiny_mova)


@pytest.fixture
def empty(tiny_mova):  # noqa: F811 - the fixture
    """The built model, nothing loaded."""
    return engine_cpu.empty_model(tiny_mova, overrides=PROVENANCE)


@pytest.fixture(scope="session")
def ownership(tmp_path_factory):
    """Case name of ``tests.engine.ownership`` -> what every rank of it reported."""
    return ownership_run.run(tmp_path_factory.mktemp("ownership"))


@pytest.fixture
def refusal():
    """:func:`tests.engine.strict.refusal`."""
    return strict.refusal
