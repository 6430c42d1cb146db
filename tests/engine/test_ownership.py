"""Every rank of real process groups holds exactly its share of the checkpoint; impossible topologies fail unread."""

import pytest

from tests.engine.ownership import CASES

WORKING = [case for case in CASES if case.works and not case.lacks]
INCOMPLETE = [case for case in CASES if case.lacks]


@pytest.mark.parametrize("case", WORKING, ids=[case.name for case in WORKING])
def test_every_rank_holds_its_share_and_nothing_else(ownership, case):
    ranks = ownership[case.name]["ranks"]
    assert len(ranks) == case.tp * case.pp
    for rank in ranks:
        assert rank.get("differences") == [], rank


@pytest.mark.parametrize("case", WORKING, ids=[case.name for case in WORKING])
def test_all_ranks_together_hold_every_tensor(ownership, case):
    ranks = ownership[case.name]["ranks"]
    stages = {tuple(rank["layers"]) for rank in ranks}
    assert len(stages) == case.pp
    covered = sorted(layer for first, end in stages for layer in range(first, end))
    assert covered == list(range(len(covered)))
    held = {name for rank in ranks for name in rank["tensors"]}
    assert held == set(ownership[case.name]["names"])


@pytest.mark.parametrize("case", [case for case in WORKING if case.tp > 1], ids=lambda case: case.name)
def test_the_comparison_tells_ranks_apart(ownership, case):
    """The control: what a neighbour must hold is not what a rank holds."""
    assert not any(rank["like_neighbour"] for rank in ownership[case.name]["ranks"])


@pytest.mark.parametrize("case", INCOMPLETE, ids=lambda case: case.name)
def test_a_lost_tensor_is_refused_where_it_belongs_and_there_alone(ownership, case):
    """The other rank owns other experts or another stage: it needs nothing of what is not there, and loads."""
    owner = 0 if "experts.3." in case.lacks or ".layers.0." in case.lacks else 1
    ranks = ownership[case.name]["ranks"]
    assert "missing (1):" in ranks[owner].get("refused", ""), ranks[owner]
    assert f"  {case.lacks}: " in ranks[owner]["refused"]
    assert ranks[1 - owner].get("differences") == [], ranks[1 - owner]


@pytest.mark.parametrize("case", [case for case in WORKING if case.restored], ids=lambda case: case.name)
def test_a_restored_rank_came_from_its_copy_and_sees_its_own_damage(ownership, case):
    """That it holds its share is tested with the others."""
    first, last = ownership[case.name]["ranks"]
    assert first["restores"] == last["restores"] == [False, True]
    assert first["damaged"] is None
    assert "holds other bytes for" in last["damaged"]


@pytest.mark.parametrize("case", [case for case in WORKING if case.restored], ids=lambda case: case.name)
def test_ranks_update_all_or_none(ownership, case):
    """The tensor that rank 1 lacks, both refuse; then both hold their share of the whole update. MoVA takes neither."""
    wanted = [False, False, False] if case.model == "mova" else [False, True, True]
    for rank in ownership[case.name]["ranks"]:
        assert rank["updates"] == wanted


IMPOSSIBLE = [
    ("dense-tp2-ep2-pp1", "the model has no routed experts"),
    ("moe-tp4-ep1-pp1", "256 / 4 = 64, 64 % 128 = 64"),
    ("moe-tp2-ep1-pp1-deepep-normal", "use --ep-size 2"),
    ("mova-tp4-ep1-pp1", "256 / 4 = 64, 64 % 128 = 64"),
]


@pytest.mark.parametrize(("name", "words"), IMPOSSIBLE)
def test_an_impossible_topology_is_refused_on_every_rank_before_a_weight_is_read(ownership, name, words):
    """There is no weight to read in its directory."""
    for rank in ownership[name]["ranks"]:
        assert words in rank.get("refused", ""), rank
