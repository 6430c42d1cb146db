"""Online updates: the whole of another checkpoint, bit-equal; or refused, and the old weights serve on; or, once half
of it is written, a model that never serves again.

MoVA takes none: tests/engine/test_mova_strict.py. Two ranks: ``restored`` cases of tests/engine/ownership.py.
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from qualify import engine_cpu
from qualify.checks.loading import faults, read_checkpoint
from tests.engine.restoring import load_presharded, updater

NORM = "model.norm.weight"
CODES = "model.layers.0.self_attn.o_proj.weight"
SCALE = f"{CODES}_scale"


@pytest.fixture(scope="module")
def served(tiny_dense):
    """The dense checkpoint."""
    return tiny_dense


@pytest.fixture
def model(served):
    return engine_cpu.load_model(served, overrides={})


def other_values(tensors: dict) -> dict:
    """Another checkpoint of the same architecture: every tensor's elements one place on, and norms doubled."""
    rolled = {}
    for name, tensor in tensors.items():
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        moved = tensor.view(integer).reshape(-1).roll(1).reshape(tensor.shape).view(tensor.dtype)
        rolled[name] = moved * 2 if "norm" in name else moved
    return rolled


def write(directory, served, tensors):
    """A checkpoint directory of one shard with the config that is served."""
    directory.mkdir()
    shutil.copy(served / "config.json", directory)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def new(served):
    """The tensors of the other checkpoint; nobody writes into one."""
    return other_values(read_checkpoint(served))


@pytest.fixture(scope="module")
def newer(served, new, tmp_path_factory):
    """The directory of the other checkpoint."""
    return write(tmp_path_factory.mktemp("new") / "checkpoint", served, new)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """What the engine asks a GPU for around an update."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    monkeypatch.setattr(weight_updater, "get_available_gpu_memory", lambda *args, **kwargs: 0.0)
    monkeypatch.setattr(weight_updater, "monkey_patch_torch_reductions", lambda: None)


def serves(model) -> bool:
    return model.checkpoint_ledger.state.name == "READY" and "forward" not in vars(model)


def bucket(tensors):
    """The engine's flattened bucket of some tensors."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=tensors)
    return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}


#: How a list of tensors comes in.
ROUTES = {
    "tensor": lambda updater, tensors: updater.update_weights_from_tensor(tensors),
    "bucket": lambda updater, tensors: updater.update_weights_from_tensor(bucket(tensors), "flattened_bucket"),
    "distributed": lambda updater, tensors: updater.load_weights_from_distributed(tensors),
}


# --- updates that go through ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_dense", "tiny_moe"])
@pytest.mark.parametrize("restored", [False, True], ids=["loaded", "restored"])
def test_an_update_from_disk_is_bit_equal(request, name, restored, tmp_path, monkeypatch):
    """And so is the one back to the first checkpoint, after a load and after a restore."""
    from sglang.srt.model_loader import presharded_copy

    monkeypatch.setattr(presharded_copy, "CACHE", str(tmp_path))
    directory = request.getfixturevalue(name)
    if restored:
        load_presharded(directory, tmp_path / "copies")
        model, was = load_presharded(directory, tmp_path / "copies")
        assert was
    else:
        model = engine_cpu.load_model(directory, overrides={})
    new = write(tmp_path / "new", directory, other_values(read_checkpoint(directory)))
    for checkpoint in (new, directory):
        before = faults(model, checkpoint)
        assert before
        assert updater(model).update_weights_from_disk(str(checkpoint), "auto") == (
            True,
            "Succeeded to update model weights.",
        )
        assert faults(model, checkpoint) == []
        assert serves(model)


@pytest.mark.parametrize("route", ROUTES)
def test_an_update_from_tensors_is_bit_equal_and_serves_when_it_is_ended(model, new, newer, refusal, route):
    update = updater(model)
    update.begin_weight_update()
    done, message = ROUTES[route](update, list(new.items()))
    assert done, message
    assert "does not serve" in refusal(model.forward, None, None, None)
    update.end_weight_update(run_post_load=False)
    assert faults(model, newer) == []
    assert serves(model)


def test_an_update_from_tensors_of_routed_experts(tiny_moe, tmp_path):
    model = engine_cpu.load_model(tiny_moe, overrides={})
    tensors = other_values(read_checkpoint(tiny_moe))
    update = updater(model)
    assert update.update_weights_from_tensor(list(tensors.items()))[0]
    update.end_weight_update(run_post_load=False)
    assert faults(model, write(tmp_path / "new", tiny_moe, tensors)) == []
    assert serves(model)


def test_an_empty_session_changes_nothing(model, served):
    update = updater(model)
    update.begin_weight_update()
    update.end_weight_update(run_post_load=True)
    assert faults(model, served) == []
    assert serves(model)


# --- updates that are refused before anything is written --------------------------------------------------------


def changed(name, change):
    def mutate(tensors):
        tensors[name] = change(tensors[name].clone())

    return mutate


def with_nan(tensor):
    tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).reshape(-1)[0] = (
        0x7F if (tensor.element_size() == 1) else 0x7FC0
    )
    return tensor


def with_zero(tensor):
    tensor.reshape(-1)[0] = 0
    return tensor


SHAPES = {
    "one-missing": (lambda tensors: tensors.pop(NORM), f"missing (1):\n  {NORM}: "),
    "one-scale-missing": (lambda tensors: tensors.pop(SCALE), f"missing (1):\n  {SCALE}: "),
    "one-only": (lambda tensors: [tensors.pop(name) for name in list(tensors) if name != NORM], "missing ("),
    "none": (lambda tensors: tensors.clear(), "missing ("),
    "one-more": (lambda tensors: tensors.update({"model.more.weight": tensors[NORM].clone()}), "unexpected (1):"),
    "wrong-dtype": (changed(NORM, torch.Tensor.float), f"dtype (1):\n  {NORM}: is torch.float32"),
    "codes-in-bf16": (changed(CODES, torch.Tensor.bfloat16), f"dtype (1):\n  {CODES}: is torch.bfloat16"),
    "wrong-shape": (changed(NORM, lambda tensor: tensor[:1]), f"shape (1):\n  {NORM}: is (1,)"),
}
VALUES = {
    "nan": (changed(NORM, with_nan), f"value (1):\n  {NORM}: "),
    "nan-code": (changed(CODES, with_nan), f"value (1):\n  {CODES}: "),
    "zero-scale": (changed(SCALE, with_zero), f"value (1):\n  {SCALE}: "),
}


# The engine makes no bucket of nothing.
LISTS = [(fault, route) for fault in (*SHAPES, *VALUES) for route in ROUTES if (fault, route) != ("none", "bucket")]


@pytest.mark.parametrize(("fault", "route"), LISTS)
def test_a_bad_list_of_tensors_is_refused_and_the_model_keeps_its_weights(model, served, new, fault, route):
    mutate, words = (SHAPES | VALUES)[fault]
    tensors = dict(new)
    mutate(tensors)
    update = updater(model)
    update.begin_weight_update()
    done, message = ROUTES[route](update, list(tensors.items()))
    assert not done
    assert words in message
    assert "the model keeps its weights" in message
    update.end_weight_update(run_post_load=False)
    assert faults(model, served) == []
    assert serves(model)


def test_a_tensor_that_comes_twice_is_refused(model, served, new):
    done, message = updater(model).update_weights_from_tensor([*new.items(), (NORM, new[NORM])])
    assert not done
    assert "duplicate (1):" in message
    assert faults(model, served) == []
    assert serves(model)


@pytest.mark.parametrize("here", ["ready", "damaged", "raises"])
def test_every_rank_votes_once_whatever_happens_to_it(model, served, new, monkeypatch, here):
    """A rank that says nothing would leave the others waiting; and each writes only when all agree."""
    from sglang.srt.model_loader import weight_update
    from sglang.srt.model_loader.checkpoint_ledger import State

    votes = []

    def gather(good):
        votes.append(good)
        return [good, False]

    group = SimpleNamespace(tp_group=SimpleNamespace(all_gather_object=gather))
    monkeypatch.setattr(weight_update, "get_parallel", lambda: group)
    update = updater(model)
    if here == "damaged":
        model.checkpoint_ledger.state = State.FAILED
    if here == "raises":
        monkeypatch.setattr(type(update), "_assert_weight_cache_inactive", lambda self, name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            update.load_weights_from_distributed(list(new.items()))
    else:
        done, message = update.load_weights_from_distributed(list(new.items()))
        assert not done
        assert ("rank 1 of this" if here == "ready" else "takes no update") in message
    assert votes == [here == "ready"]
    assert faults(model, served) == []


def test_a_stream_of_tensors_is_refused_before_it_is_touched(model, served):
    class Untouchable:
        def __iter__(self):
            pytest.fail("the iterator of a refused update was touched")

    done, message = updater(model).load_weights_from_distributed(Untouchable())
    assert not done
    assert "a stream that nobody has checked" in message
    assert serves(model)


@pytest.mark.parametrize("fault", SHAPES)
def test_a_bad_directory_is_refused_and_the_model_keeps_its_weights(model, served, new, tmp_path, fault):
    mutate, words = SHAPES[fault]
    tensors = dict(new)
    mutate(tensors)
    update = updater(model)
    done, message = update.update_weights_from_disk(str(write(tmp_path / "bad", served, tensors)), "auto")
    assert not done
    assert words in message
    assert "the model keeps its weights" in message
    assert update.model_config.model_path == "served"
    assert faults(model, served) == []
    assert serves(model)


def other_config(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


def no_config(directory):
    (directory / "config.json").unlink()


def truncated(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def stale_index(directory):
    index = {"weight_map": {"model.gone.weight": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def second_declaration(directory):
    (directory / "hf_quant_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_config, "config.json: is not that of the model that serves"),
        (no_config, "config.json: is not that of the model that serves"),
        (truncated, "model.safetensors: is cut short"),
        (stale_index, "model.gone.weight: is in no shard"),
        (second_declaration, "hf_quant_config.json: declares a quantisation"),
    ],
)
def test_files_that_are_not_those_of_a_good_checkpoint_are_refused(model, served, new, tmp_path, damage, words):
    directory = write(tmp_path / "bad", served, new)
    damage(directory)
    done, message = updater(model).update_weights_from_disk(str(directory), "auto")
    assert not done
    assert words in message
    assert faults(model, served) == []
    assert serves(model)


def test_an_updated_model_is_compared_with_the_config_it_was_loaded_with(model, served, new, tmp_path):
    """Not only the first update."""
    good, bad = (write(tmp_path / name, served, new) for name in ("good", "bad"))
    other_config(bad)
    assert updater(model).update_weights_from_disk(str(good), "auto")[0]
    assert not updater(model).update_weights_from_disk(str(bad), "auto")[0]
    assert faults(model, good) == []


# --- ways that are closed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempt",
    [
        lambda updater, new, path: updater.update_weights_from_tensor([(NORM, new[NORM])], load_format="direct"),
        lambda updater, new, path: updater.update_weights_from_tensor(list(new.items()), "direct"),
        lambda updater, new, path: updater.update_weights_from_tensor(list(new.items()), load_format="custom"),
        lambda updater, new, path: updater.update_weights_from_ipc(None),
        lambda updater, new, path: updater.update_weights_from_disk(str(path), "dummy"),
        lambda updater, new, path: updater.update_weights_from_disk(str(path), "sharded_state"),
        lambda updater, new, path: updater.update_weights_from_disk(str(path), "remote"),
        lambda updater, new, path: updater.update_weights_from_disk(str(path), "flash_rl"),
    ],
    ids=["direct", "direct-whole", "custom", "ipc", "dummy", "sharded-state", "remote", "flash-rl"],
)
def test_what_writes_past_load_weights_is_refused(model, served, new, newer, attempt):
    done, message = attempt(updater(model), new, newer)
    assert not done
    assert "is updated from disk, or from a list of all tensors" in message
    assert faults(model, served) == []
    assert serves(model)


def test_no_update_is_announced_by_load_weights_itself(model, served, new, refusal):
    assert "takes no weights a second time" in refusal(model.load_weights, list(new.items()))
    assert faults(model, served) == []
    assert serves(model)


def test_a_second_list_in_one_session_is_refused(model, new):
    update = updater(model)
    assert update.update_weights_from_tensor(list(new.items()))[0]
    done, message = update.update_weights_from_tensor(list(new.items()))
    assert not done
    assert "takes no update, its weights were not post-processed" in message


def test_a_directory_that_was_checked_excuses_no_stream(model, served, newer, new, refusal, monkeypatch):
    """An update ends with the call that announced it."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def give_up(model, device):
        raise RuntimeError("before the load")

    monkeypatch.setattr(DefaultModelLoader, "restore_weights_before_loading", staticmethod(give_up))
    with pytest.raises(RuntimeError, match="before the load"):
        updater(model).update_weights_from_disk(str(newer), "auto")
    assert "takes no weights a second time" in refusal(model.load_weights, iter(new.items()))
    assert faults(model, served) == []


# --- updates that fail half way ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", VALUES)
def test_bad_values_on_disk_leave_a_model_that_refuses(model, served, new, tmp_path, refusal, fault):
    mutate, _ = VALUES[fault]
    tensors = dict(new)
    mutate(tensors)
    directory = write(tmp_path / "bad", served, tensors)
    assert "its checkpoint was refused" in refusal(updater(model).update_weights_from_disk, str(directory), "auto")
    assert "its checkpoint was refused" in refusal(model.forward, None, None, None)
    done, message = updater(model).update_weights_from_disk(str(served), "auto")
    assert not done
    assert "takes no update, its checkpoint was refused" in message


@pytest.mark.parametrize("route", ["disk", "tensor", "distributed"])
def test_a_consumer_that_fails_half_way_leaves_a_model_that_refuses(model, new, newer, refusal, monkeypatch, route):
    parameter = model.get_parameter(NORM)

    def fail(*args, **kwargs):
        raise RuntimeError("half way")

    monkeypatch.setattr(parameter, "weight_loader", fail, raising=False)
    update = updater(model)
    if route == "distributed":
        assert "half way" in refusal(update.load_weights_from_distributed, list(new.items()))
    else:
        with pytest.raises((RuntimeError, ValueError), match=r"half way|second time"):
            if route == "disk":
                update.update_weights_from_disk(str(newer), "auto")
            else:
                update.update_weights_from_tensor(list(new.items()))
    assert "does not serve, its load did not come to an end" in refusal(model.forward, None, None, None)
    update.end_weight_update(run_post_load=False)
    assert "does not serve, its load did not come to an end" in refusal(model.forward, None, None, None)


def test_a_stream_that_breaks_off_leaves_a_model_that_refuses(model, newer, refusal, monkeypatch):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_weights_iterator

    def broken(self, source):
        weights = iter(list(original(self, source)))
        return (next(weights) if number < 5 else 1 / 0 for number in range(9))

    monkeypatch.setattr(DefaultModelLoader, "_get_weights_iterator", broken)
    refusal(updater(model).update_weights_from_disk, str(newer), "auto")
    assert "does not serve, its checkpoint was refused" in refusal(model.forward, None, None, None)


def test_post_processing_that_changes_an_updated_model_is_refused(model, new, refusal):
    """The control of the ledger's last look, after an update as after a load."""
    update = updater(model)
    assert update.update_weights_from_tensor(list(new.items()))[0]
    norm = model.get_submodule("model.norm")
    norm.weight.data = norm.weight.data.float()
    refusal(update.end_weight_update, run_post_load=False)
    assert "its checkpoint was refused" in refusal(model.forward, None, None, None)
