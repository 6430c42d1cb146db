"""Every kind of fault in ``mutations.py`` and ``mutations_k2.py``, through the engine's own loaders; also on stock.

On the patched engine a fault must be refused in the words of its row. On stock, with MoVA's two gates relaxed, any
exception counts as detection, however it reads: ``mutation_count.py`` runs both and prints the counts.
"""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import stock
from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, read_checkpoint
from tests.engine import mutations, mutations_k2
from tests.engine.mutations import INDEX

STOCK = stock.is_stock()
ROUTES = {"tensors": ("directory", "stream"), "files": ("directory",), "config": ("directory",), "stream": ("stream",)}
# Without a quantization_config nothing asks for the strict format: the engine builds a BF16 model and stumbles.
ENGINES_OWN = {"config-no-quantisation"}
MODELS = {"mova": "tiny_mova", "dense": "tiny_dense", "moe": "tiny_moe"}
CASES = [(kind, route) for kind in mutations.KINDS + mutations_k2.KINDS for route in ROUTES[kind.route]]


@pytest.fixture(scope="module")
def intact(request):
    """Model -> (directory, its tensors); mutations replace entries of a copy and never write into a tensor."""
    found = {}

    def get(model):
        if model not in found:
            directory = request.getfixturevalue(MODELS[model])
            found[model] = directory, read_checkpoint(directory)
        return found[model]

    return get


@pytest.fixture
def damaged(intact, tmp_path):
    """Return a function that writes the damaged checkpoint of a kind."""

    def write(kind):
        directory = tmp_path / "damaged"
        source, tensors = intact(kind.model)
        if kind.route == "tensors":
            write_checkpoint(directory, source, tensors, mutated(kind, tensors))
            return directory
        shutil.copytree(source, directory, copy_function=link)
        if kind.route == "files":
            kind.mutate(directory)
        elif kind.route == "config":
            path = directory / "config.json"
            config = json.loads(path.read_text())
            kind.mutate(config)
            path.unlink()
            path.write_text(json.dumps(config))
        return directory

    yield write
    shutil.rmtree(tmp_path, ignore_errors=True)


def mutated(kind, tensors):
    copy = dict(tensors)
    kind.mutate(copy)
    return copy


def link(source, target):
    """A hard link: whoever changes a file of a damaged checkpoint unlinks it first."""
    os.link(source, target)


def write_checkpoint(directory, like, intact, tensors):
    """Write ``tensors`` in the shards of the checkpoint ``like``, new names in one more, with an index that agrees.

    A shard whose tensors are those of ``intact`` is linked."""
    directory.mkdir()
    link(like / "config.json", directory / "config.json")
    before = json.loads((like / INDEX).read_text())["weight_map"]
    weight_map = {name: before.get(name, "added.safetensors") for name in tensors}
    for shard in {*weight_map.values(), *before.values()}:
        held = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        if held.keys() == {name for name in before if before[name] == shard} and all(
            held[name] is intact[name] for name in held
        ):
            link(like / shard, directory / shard)
        elif held:
            save_file(held, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def overrides(model):
    return PROVENANCE if model == "mova" else {}


def load_streams(model, directory, streams):
    """Load streams one after the other into one model through its ``load_weights``."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    built = engine_cpu.empty_model(directory, overrides=overrides(model))
    for stream in streams:
        built.load_weights(iter(stream))
    DefaultModelLoader.postprocess_weights(built, torch.device("cpu"))
    return built


def attempt(kind, route, damaged, intact):
    source, tensors = intact(kind.model)
    if route == "directory":
        engine_cpu.load_model(damaged(kind), overrides=overrides(kind.model))
    elif kind.route == "stream":
        load_streams(kind.model, source, kind.mutate(dict(tensors)))
    else:
        load_streams(kind.model, source, [mutated(kind, tensors).items()])


@pytest.mark.parametrize(("kind", "route"), CASES, ids=[f"{kind.case}-by-{route}" for kind, route in CASES])
def test_the_fault_is_detected(kind, route, damaged, intact):
    with pytest.raises(Exception) as caught:
        attempt(kind, route, damaged, intact)
    if STOCK:
        return
    if kind.id not in ENGINES_OWN:
        assert isinstance(caught.value, ValueError), caught.value
    for words in kind.says:
        assert words in str(caught.value)


@pytest.mark.parametrize("route", ["directory", "stream"])
@pytest.mark.parametrize("model", MODELS)
def test_the_control_loads(model, route, intact, tmp_path):
    """Intact, rewritten and streamed: a count of detections means nothing if this fails."""
    source, tensors = intact(model)
    if route == "directory":
        rewritten = {name: tensor.clone() for name, tensor in tensors.items()}
        write_checkpoint(tmp_path / "intact", source, tensors, rewritten)
        engine_cpu.load_model(tmp_path / "intact", overrides=overrides(model))
    else:
        load_streams(model, source, [tensors.items()])
