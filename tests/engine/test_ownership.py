"""Every rank of real process groups holds exactly its share of the checkpoint; impossible topologies fail unread."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qualify.models import DENSE_CONFIG, MOVA_CONFIG, k2_horizon
from qualify.synth import layout
from qualify.synth.command import synthesise
from tests.engine.ownership import CASES, TIMEOUT

ROOT = Path(__file__).resolve().parents[2]
WORKING = [case for case in CASES if case.works and not case.lacks]
INCOMPLETE = [case for case in CASES if case.lacks]


def write_checkpoints(folder: Path) -> None:
    """The three tiny checkpoints, and a dense one with fewer KV heads than ranks and an odd vocabulary."""
    for name, source in (("dense", DENSE_CONFIG), ("moe", "375b-a23b"), ("mova", MOVA_CONFIG)):
        synthesise(source, folder / name, tiny=True)
    config = layout.derive_config(json.loads(DENSE_CONFIG.read_text()), tiny=True, layers=None)
    config |= {"num_key_value_heads": 2, "vocab_size": 1000}
    write_random(folder / "kv2", config)


def write_random(directory: Path, config: dict) -> None:
    """A checkpoint of random values, every scale positive and every code finite."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtypes = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    tensors = {}
    for name, tensor in k2_horizon.tensors(config).items():
        values = torch.rand(tensor.shape, generator=generator) + 0.01
        tensors[name] = values.to(dtypes[tensor.dtype])
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Case name -> what every rank reported. One process imports the engine and forks the ranks of all cases."""
    folder = tmp_path_factory.mktemp("ownership")
    write_checkpoints(folder)
    out = folder / "results.json"
    command = [sys.executable, "-B", "-m", "tests.engine.ownership", "--checkpoints", str(folder), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT * 5, check=False)
    assert out.is_file(), done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", WORKING, ids=[case.name for case in WORKING])
def test_every_rank_holds_its_share_and_nothing_else(results, case):
    ranks = results[case.name]["ranks"]
    assert len(ranks) == case.tp * case.pp
    for rank in ranks:
        assert rank.get("differences") == [], rank


@pytest.mark.parametrize("case", WORKING, ids=[case.name for case in WORKING])
def test_all_ranks_together_hold_every_tensor(results, case):
    ranks = results[case.name]["ranks"]
    stages = {tuple(rank["layers"]) for rank in ranks}
    assert len(stages) == case.pp
    covered = sorted(layer for first, end in stages for layer in range(first, end))
    assert covered == list(range(len(covered)))
    held = {name for rank in ranks for name in rank["tensors"]}
    assert held == set(results[case.name]["names"])


@pytest.mark.parametrize("case", [case for case in WORKING if case.tp > 1], ids=lambda case: case.name)
def test_the_comparison_tells_ranks_apart(results, case):
    """The control: what a neighbour must hold is not what a rank holds."""
    assert not any(rank["like_neighbour"] for rank in results[case.name]["ranks"])


@pytest.mark.parametrize("case", INCOMPLETE, ids=lambda case: case.name)
def test_a_lost_tensor_is_refused_where_it_belongs_and_there_alone(results, case):
    """The other rank owns other experts or another stage: it needs nothing of what is not there, and loads."""
    owner = 0 if "experts.3." in case.lacks or ".layers.0." in case.lacks else 1
    ranks = results[case.name]["ranks"]
    assert "missing (1):" in ranks[owner].get("refused", ""), ranks[owner]
    assert f"  {case.lacks}: " in ranks[owner]["refused"]
    assert ranks[1 - owner].get("differences") == [], ranks[1 - owner]


@pytest.mark.parametrize("case", [case for case in WORKING if case.restored], ids=lambda case: case.name)
def test_a_restored_rank_came_from_its_copy_and_sees_its_own_damage(results, case):
    """That it holds its share is tested with the others."""
    first, last = results[case.name]["ranks"]
    assert first["restores"] == last["restores"] == [False, True]
    assert first["damaged"] is None
    assert "holds other bytes for" in last["damaged"]


@pytest.mark.parametrize("case", [case for case in WORKING if case.restored], ids=lambda case: case.name)
def test_ranks_update_all_or_none(results, case):
    """The tensor that rank 1 lacks, both refuse; then both hold their share of the whole update. MoVA takes neither."""
    wanted = [False, False, False] if case.model == "mova" else [False, True, True]
    for rank in results[case.name]["ranks"]:
        assert rank["updates"] == wanted


IMPOSSIBLE = [
    ("dense-tp2-ep2-pp1", "the model has no routed experts"),
    ("moe-tp4-ep1-pp1", "256 / 4 = 64, 64 % 128 = 64"),
    ("moe-tp2-ep2-pp1-deepep", "--moe-a2a-backend deepep"),
    ("mova-tp4-ep1-pp1", "256 / 4 = 64, 64 % 128 = 64"),
]


@pytest.mark.parametrize(("name", "words"), IMPOSSIBLE)
def test_an_impossible_topology_is_refused_on_every_rank_before_a_weight_is_read(results, name, words):
    """There is no weight to read in its directory."""
    for rank in results[name]["ranks"]:
        assert words in rank.get("refused", ""), rank
