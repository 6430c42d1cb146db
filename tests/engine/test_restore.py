"""Restoring from a presharded copy: bit-equal, of this checkpoint and this engine, complete, or refused.

More than one rank: ``restored`` cases of tests/engine/ownership.py.
"""

import base64
import fcntl
import hashlib
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qualify import engine_cpu
from qualify.checks.loading import PROVENANCE, faults
from tests.engine.restoring import flip, load_presharded
from tests.engine.strict import Untouchable


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The temporary directory in the place of /var/cache."""
    from sglang.srt.model_loader import presharded_copy

    monkeypatch.setattr(presharded_copy, "CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def made(tiny_dense, tmp_path_factory):
    """The folder of all copies after a first load of the dense checkpoint; nobody writes into it."""
    from sglang.srt.model_loader import presharded_copy

    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presharded_copy, "CACHE", str(folder.parent))
        load_presharded(tiny_dense, folder)
    return folder


@pytest.fixture
def copies(made, cache):
    """A fresh duplicate of it."""
    return Path(shutil.copytree(made, cache / "copies", symlinks=True))


@pytest.fixture
def built(monkeypatch):
    """Every model that a loader builds, in order."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    models, original = [], DefaultModelLoader.initialize_model_for_startup

    def build(self, **kwargs):
        models.append(original(self, **kwargs))
        return models[-1]

    monkeypatch.setattr(DefaultModelLoader, "initialize_model_for_startup", build)
    return models


def only(copies: Path) -> Path:
    """The one copy in a folder."""
    (copy,) = (path for path in copies.iterdir() if not path.name.startswith("."))
    return copy


def shard(copy: Path) -> Path:
    return next(copy.glob("*.safetensor"))


def twin(directory: Path, target: Path, change=None) -> Path:
    """A copy of a checkpoint with the same times, also where ``change`` wrote into a file of it."""
    shutil.copytree(directory, target)
    if change:
        change(target)
    for path in directory.iterdir():
        if (target / path.name).exists():
            os.utime(target / path.name, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    return target


def edit_norm(folder: Path, edit) -> None:
    """Rewrite the shard that holds the final norm after ``edit`` has had its tensors."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / weight_map["model.norm.weight"]
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


# --- what is restored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_dense", "tiny_moe", "tiny_mova"])
def test_a_restored_model_is_bit_equal_and_loaded_once(request, name, cache, refusal):
    directory = request.getfixturevalue(name)
    overrides = PROVENANCE if name == "tiny_mova" else {}
    before = {path.name: path.stat() for path in directory.iterdir()}
    for expected in (False, True):
        model, restored = load_presharded(directory, cache / "copies", overrides=overrides)
        assert restored is expected
        assert faults(model, directory) == []
        assert "forward" not in vars(model)
        assert model.checkpoint_ledger.state.name == "READY"
        assert "takes no weights a second time" in refusal(model.load_weights, Untouchable())
    for path in directory.iterdir():
        assert path.stat()[:-3] == before.pop(path.name)[:-3]  # all but the times, which reading changes
    assert before == {}


def test_a_restored_model_does_not_serve_before_post_processing(tiny_dense, copies, built, monkeypatch, refusal):
    from sglang.srt.model_loader.presharded_copy import StrictPresharded

    monkeypatch.setattr(StrictPresharded, "postprocess_weights", staticmethod(lambda model, device: None))
    model, restored = load_presharded(tiny_dense, copies)
    assert restored
    assert "does not serve, its weights were not post-processed" in refusal(model.forward, None, None, None)


def test_a_bf16_model_gets_the_stock_loader(tiny_mova, cache):
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import PreshardedModelLoader, get_model_loader

    directory = twin(tiny_mova, cache / "bf16")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    model_config = engine_cpu._model_config(directory, PROVENANCE, "bfloat16")
    assert type(get_model_loader(LoadConfig(load_format="presharded"), model_config)) is PreshardedModelLoader


# --- damaged copies ---------------------------------------------------------------------------------------------


def edit_plan(**changes):
    def edit(copy):
        plan = json.loads((copy / "checksum.json").read_text())
        for key, change in changes.items():
            plan[key] = change(plan[key])
        (copy / "checksum.json").write_text(json.dumps(plan))

    return edit


def replace_by_link(copy):
    elsewhere = copy.parent.parent / "elsewhere"
    path = shard(copy)
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def whole_link(copy):
    elsewhere = copy.parent.parent / "elsewhere"
    copy.rename(elsewhere)
    copy.symlink_to(elsewhere)


def another_tensor(copy):
    path = shard(copy)
    tensors = load_file(path)
    tensors["more"] = torch.zeros(1)
    save_file(tensors, path)


def fewer_reads(reads):
    return {"0": reads["0"][1:]}


def swapped_reads(reads):
    """Two parameters of one shape under each other's names."""
    first, second = [read for read in reads["0"] if read["name"].endswith("input_layernorm.weight")][:2]
    first["name"], second["name"] = second["name"], first["name"]
    return reads


DAMAGES = {
    "flipped-byte": (lambda copy: flip(shard(copy)), "holds other bytes for"),
    "missing-file": (lambda copy: shard(copy).unlink(), "lacks model-00000-common.safetensor"),
    "one-more-file": (lambda copy: shutil.copy(shard(copy), copy / "more.safetensor"), "has more.safetensor"),
    "truncated": (lambda copy: os.truncate(shard(copy), shard(copy).stat().st_size - 1), "is cut short"),
    "empty-file": (lambda copy: os.truncate(shard(copy), 0), "has no safetensors header"),
    "another-tensor": (another_tensor, "holds other tensors than its plan says"),
    "half-written": (lambda copy: (copy / "READY").unlink(), "is not complete"),
    "no-plan": (lambda copy: (copy / "checksum.json").unlink(), "cannot be read"),
    "cut-plan": (lambda copy: os.truncate(copy / "checksum.json", 100), "damaged plan"),
    "no-reads": (edit_plan(rank_to_reads=lambda reads: {}), "damaged plan"),
    "fewer-reads": (edit_plan(rank_to_reads=fewer_reads), "is not what its plan says"),
    "swapped-names": (edit_plan(rank_to_reads=swapped_reads), "is not what its plan says"),
    "other-ranks": (edit_plan(world_size=lambda size: 2), "made by 2 ranks"),
    "other-version": (edit_plan(version=lambda version: 2), "version 2"),
    "link-to-file": (replace_by_link, "which is no plain file"),
    "link-to-folder": (whole_link, "is no folder but a link"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_refused_and_left_for_the_operator(tiny_dense, copies, built, refusal, damage):
    change, words = DAMAGES[damage]
    change(only(copies))
    said = refusal(load_presharded, tiny_dense, copies)
    assert words in said
    assert f"The presharded copy {copies}/TP-1-sig-" in said
    assert "remove the folder" in said
    assert "\n" not in said
    assert "does not serve, its load did not come to an end" in refusal(built[-1].forward, None, None, None)
    assert only(copies)


@pytest.mark.parametrize("damage", ["dtype", "shape", "nan", "missing"])
def test_what_a_ledger_adopts_is_checked_all_the_same(tiny_dense, refusal, damage):
    """A copy whose checksums are right, but not what this model needs."""
    loaded = engine_cpu.load_model(tiny_dense, overrides={})
    tensors = {name: parameter.data.clone() for name, parameter in loaded.named_parameters()}
    name = "model.norm.weight"
    if damage == "dtype":
        tensors[name] = tensors[name].float()
    elif damage == "shape":
        tensors[name] = tensors[name][:1]
    elif damage == "nan":
        tensors[name][0] = torch.nan
    else:
        del tensors[name]
    model = engine_cpu.empty_model(tiny_dense, overrides={})
    said = refusal(model.checkpoint_ledger.adopt, model, str(tiny_dense), tensors.items())
    assert said.startswith("The copy of this checkpoint cannot be restored: remove the copy.")
    assert f"  {name}: " in said
    assert "its checkpoint was refused" in refusal(model.forward, None, None, None)


# --- copies of something else -----------------------------------------------------------------------------------


def other_values(folder):
    edit_norm(folder, lambda tensors: tensors["model.norm.weight"].add_(1))


def other_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_parameters": {"rope_theta": 1, "rope_type": "default"}})
    )


def other_header(folder):
    path = next(folder.glob("*.safetensors"))
    save_file(load_file(path), path, metadata={"format": "other"})


def other_time(folder):
    path = next(folder.glob("*.safetensors"))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "part"),
    [(other_values, "samples_sha256"), (other_config, "config_sha256"), (other_header, "headers_sha256")],
)
def test_a_copy_of_another_checkpoint_of_this_shape_is_not_taken(tiny_dense, copies, cache, refusal, change, part):
    """Not by its key; and if somebody gives it the name of this one's, not either."""
    other = twin(tiny_dense, cache / "other", change)
    first = only(copies)
    model, restored = load_presharded(other, copies)
    assert not restored
    assert faults(model, other) == []
    (second,) = {path for path in copies.iterdir() if not path.name.startswith(".")} - {first}
    shutil.rmtree(second)
    first.rename(second)
    said = refusal(load_presharded, other, copies)
    assert "was made for another checkpoint, engine or topology" in said
    assert part in said


def test_a_file_that_was_written_again_has_a_copy_of_its_own(tiny_dense, cache):
    from sglang.srt.model_loader.presharded_copy import identity

    other = twin(tiny_dense, cache / "other")
    assert identity(other) == identity(tiny_dense)
    other_time(other)
    differing = {part for part in identity(other) if identity(other)[part] != identity(tiny_dense)[part]}
    assert differing == {"file_stamps_sha256"}


def test_a_copy_of_another_series_is_not_taken(tiny_dense, copies, monkeypatch, refusal):
    from sglang.srt.model_loader import presharded_copy

    first = only(copies)
    monkeypatch.setattr(presharded_copy, "engine_digest", lambda: "another")
    assert load_presharded(tiny_dense, copies)[1] is False
    (second,) = {path for path in copies.iterdir() if not path.name.startswith(".")} - {first}
    shutil.rmtree(second)
    first.rename(second)
    assert "(engine_sha256)" in refusal(load_presharded, tiny_dense, copies)


def test_the_record_that_identifies_the_engine_lists_its_patched_files():
    from sglang.srt.model_loader import presharded_copy

    record = metadata.distribution("sglang").read_text("RECORD")
    assert presharded_copy.engine_digest() == hashlib.sha256(record.encode()).hexdigest()
    digest = hashlib.sha256(Path(presharded_copy.__file__).read_bytes()).digest()
    row = f"sglang/srt/model_loader/presharded_copy.py,sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},"
    assert row in record


def test_an_engine_without_a_record_is_refused(monkeypatch, refusal):
    import sglang
    from sglang.srt.model_loader import presharded_copy

    monkeypatch.setattr(sglang, "__file__", "/elsewhere/sglang/__init__.py")
    assert "has no RECORD" in refusal(presharded_copy.engine_digest)


@pytest.mark.parametrize("flag", ["moe_runner_backend", "moe_a2a_backend"])
def test_what_decides_how_weights_are_cut_is_part_of_the_key(tiny_dense, copies, flag):
    from sglang.srt.runtime_context import get_exec

    with get_exec().moe.override(**{flag: "another"}):
        assert load_presharded(tiny_dense, copies)[1] is False


# --- where copies lie -------------------------------------------------------------------------------------------


def test_copies_lie_in_the_cache_of_the_image():
    from sglang.srt.model_loader import presharded_copy

    assert presharded_copy.ROOT == "/var/cache/horizon/presharded"
    source = Path(presharded_copy.__file__).read_text()
    assert '\nCACHE = "/var/cache"\n' in source


def linked(cache, target):
    (cache / "link").symlink_to(target)
    return cache / "link" / "copies"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda cache, checkpoint: checkpoint / "presharded", "lies in the checkpoint"),
        (lambda cache, checkpoint: checkpoint, "lies in the checkpoint"),
        (linked, "lies in the checkpoint"),
        (lambda cache, checkpoint: linked(cache, cache.parent), "are kept below"),
        (lambda cache, checkpoint: cache / ".." / "elsewhere", "are kept below"),
        (lambda cache, checkpoint: cache, "are kept below"),
    ],
    ids=["in-checkpoint", "checkpoint", "link-to-checkpoint", "link-outside", "dots-outside", "cache-itself"],
)
def test_a_folder_in_the_checkpoint_or_outside_the_cache_is_refused(tiny_dense, cache, built, refusal, place, words):
    checkpoint = twin(tiny_dense, cache / "checkpoint")
    before = sorted(cache.rglob("*"))
    folder = place(cache, checkpoint)
    assert words in refusal(load_presharded, checkpoint, folder)
    assert built == []
    assert [path for path in sorted(cache.rglob("*")) if path.name != "link"] == before


def test_verification_cannot_be_switched_off(tiny_dense, cache, refusal):
    assert "verify_on_load" in refusal(load_presharded, tiny_dense, cache / "copies", verify_on_load=False)


def test_a_checkpoint_that_is_no_directory_is_refused(cache, refusal):
    from sglang.srt.model_loader.presharded_copy import identity

    assert "serve a local directory" in refusal(identity, str(cache / "nothing"))
    (cache / "config.json").write_text("{}")
    assert "has no safetensors shard" in refusal(identity, str(cache))


# --- how copies are made ----------------------------------------------------------------------------------------


def leftovers(copies: Path) -> list[str]:
    return sorted(path.name for path in copies.iterdir() if path.suffix != ".lock")


def test_a_refused_checkpoint_leaves_no_copy(tiny_dense, cache, refusal):
    other = twin(tiny_dense, cache / "other")
    edit_norm(other, lambda tensors: tensors.pop("model.norm.weight"))
    assert "missing (1)" in refusal(load_presharded, other, cache / "copies")
    assert leftovers(cache / "copies") == []


def test_a_checkpoint_that_is_exchanged_during_its_load_leaves_no_copy(tiny_dense, cache, monkeypatch, refusal):
    """The key was made of the files from before; a later start with those would be served the others."""
    from sglang.srt.model_loader.presharded_copy import StrictPresharded

    other, original = twin(tiny_dense, cache / "other"), StrictPresharded._get_all_weights

    def exchanged(self, *args, **kwargs):
        other_values(other)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StrictPresharded, "_get_all_weights", exchanged)
    assert "was changed while it was loaded" in refusal(load_presharded, other, cache / "copies")
    assert leftovers(cache / "copies") == []


def test_ranks_that_see_different_checkpoints_are_refused():
    from sglang.srt.model_loader import presharded_copy
    from sglang.srt.model_loader.checkpoint_ledger import CheckpointRefused

    here = {"config_sha256": "a", "engine_sha256": "b", "file_stamps_sha256": "c"}

    def seen(**there):
        group = SimpleNamespace(all_gather_object=lambda mine: [mine, mine | there])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(presharded_copy, "identity", lambda checkpoint: dict(here))
            return presharded_copy.identified("checkpoint", group)

    assert seen() != seen(file_stamps_sha256="d")
    for part in ("config_sha256", "engine_sha256"):
        with pytest.raises(CheckpointRefused, match=f"Rank 1 sees another .*{part} differs"):
            seen(**{part: "d"})


def test_a_copy_that_cannot_be_written_leaves_nothing(tiny_dense, cache, monkeypatch, built, refusal):
    from sglang.srt.model_loader.presharded_copy import StrictPresharded

    def full(self, tensors, plan, rank, folder):
        Path(folder, "model-00000-common.safetensor").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StrictPresharded, "_dump_files_for_rank", full)
    assert "No space left on device" in refusal(load_presharded, tiny_dense, cache / "copies")
    assert leftovers(cache / "copies") == []
    assert "does not serve" in refusal(built[-1].forward, None, None, None)


def test_a_folder_that_cannot_be_made_is_refused_before_the_load(tiny_dense, cache, refusal):
    (cache / "copies").write_text("a file")
    assert "cannot be written to" in refusal(load_presharded, tiny_dense, cache / "copies")


@pytest.mark.parametrize("left", ["folder", "link"])
def test_what_a_killed_server_left_is_made_anew(tiny_dense, copies, cache, left):
    copy = only(copies)
    unfinished = copies / f".{copy.name}.unfinished"
    shutil.rmtree(copy)
    victim = twin(tiny_dense, cache / "victim")
    if left == "link":
        unfinished.symlink_to(victim)
    else:
        unfinished.mkdir()
        (unfinished / "model-00000-common.safetensor").symlink_to(next(victim.glob("*.safetensors")))
    assert load_presharded(tiny_dense, copies)[1] is False
    assert load_presharded(tiny_dense, copies)[1] is True
    assert leftovers(copies) == [copy.name]
    for path in tiny_dense.iterdir():
        assert (victim / path.name).read_bytes() == path.read_bytes()


def test_a_link_in_the_place_of_the_lock_is_refused(tiny_dense, copies, cache, refusal):
    copy = only(copies)
    shutil.rmtree(copy)
    lock = copies / f".{copy.name}.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(cache / "victim")
    assert "cannot be written to" in refusal(load_presharded, tiny_dense, copies)
    assert not (cache / "victim").exists()


def test_two_servers_do_not_write_one_copy(tiny_dense, copies):
    """The second one loads the checkpoint and leaves the copy to the first."""
    copy = only(copies)
    shutil.rmtree(copy)
    unfinished = copies / f".{copy.name}.unfinished"
    unfinished.mkdir()
    with (copies / f".{copy.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model, restored = load_presharded(tiny_dense, copies)
    assert not restored
    assert faults(model, tiny_dense) == []
    assert leftovers(copies) == [unfinished.name]
