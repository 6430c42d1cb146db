"""Metrics of the comparison, each on numbers that one can check by eye."""

import math

import pytest
import torch

from qualify.errors import Rejected
from qualify.reference import compare

NAN = float("nan")


def test_logprob_errors():
    """Errors 0.1, 0.3, 0 ... of twenty: mean 0.4 / 20, the nineteenth of twenty in order is 0.1."""
    reference = torch.full((20,), -1.0)
    engine = reference.clone()
    engine[3], engine[7] = -1.1, -0.7
    found = compare.logprobs(engine, reference)
    assert found["mean_abs_logprob_error"] == pytest.approx(0.02, abs=1e-6)
    assert found["p95_abs_logprob_error"] == pytest.approx(0.1, abs=1e-6)
    assert found["max_abs_logprob_error"] == pytest.approx(0.3, abs=1e-6)


def test_nan_of_the_engine_survives_every_metric():
    reference, engine = torch.full((20, 2), -1.0), torch.full((20, 2), -1.0)
    engine[4] = NAN
    assert all(map(math.isnan, compare.logprobs(engine[:, 0], reference[:, 0]).values()))
    errors = compare.token_errors(engine, reference)
    assert all(map(math.isnan, compare.relative(errors).values()))
    assert compare.unequal_logits(engine, reference) == 1 / 20
    assert math.isnan(compare.by_expert(errors, torch.zeros(20, 1, dtype=torch.int64), 1)[0])


@pytest.mark.parametrize("shape", [(3,), (0,)])
def test_another_number_of_values_is_refused(shape):
    with pytest.raises(Rejected, match="the engine gave"):
        compare.logprobs(torch.zeros(shape), torch.zeros(4 if shape[0] else 0))


def test_top5_overlap_ignores_order():
    engine = torch.tensor([[5, 4, 3, 2, 1], [1, 2, 3, 9, 8]])
    reference = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    assert compare.top5_overlap(engine, reference) == pytest.approx((5 + 3) / 10)


def test_greedy_agreement_knows_ties():
    """Position 0 the same; 1 the second, 0.2 below; 2 the second, 0.3 below; 3 the third, 0.24 below, where the second
    ties too; 4 a token outside the five, where the first two tie."""
    ids = torch.tensor([[1, 2, 3, 4, 5]] * 5)
    top = torch.tensor([[-0.1, -3, -4, -5, -6], [-1, -1.2, -4, -5, -6], [-1, -1.3, -4, -5, -6]])
    top = torch.cat((top, torch.tensor([[-1, -1.1, -1.24, -5, -6], [-1, -1.1, -4, -5, -6]])))
    found = compare.greedy(torch.tensor([1, 2, 2, 3, 77]), ids, top)
    assert found["tie_aware_agreement"] == pytest.approx(3 / 5)
    assert found["ties"] == pytest.approx(3 / 5)  # 1, 3, 4
    assert found["non_tie_mismatch"] == pytest.approx(1 / 2)  # of 0 and 2


def test_token_errors_are_relative_to_the_reference():
    """(3, 4) against (3, 4 + 1): 1 / 5. Twice as much: 1. Nothing and nothing: 0; something and nothing: infinite."""
    reference = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    engine = torch.tensor([[3.0, 5.0], [2.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    assert compare.token_errors(engine, reference).tolist() == pytest.approx([0.2, 1.0, 0.0, float("inf")])


def test_one_wrong_expert_stands_out():
    """Token errors 0.4, 0.2, 0 by experts {0, 1}, {0, 2}, {1, 2}: 0 has 0.3, 1 has 0.2, 2 has 0.1, 3 has no token."""
    errors, chosen = torch.tensor([0.4, 0.2, 0.0]), torch.tensor([[0, 1], [2, 0], [1, 2]])
    found = compare.by_expert(errors, chosen, 4)
    assert found[:3].tolist() == pytest.approx([0.3, 0.2, 0.1]) and found[3].isnan()
    assert compare.coverage([chosen, chosen[:1]], 4).tolist() == [3, 3, 2, 0]


def test_routing_flips_compare_sets():
    one = torch.tensor([[0, 1], [2, 3], [4, 5]])
    other = torch.tensor([[1, 0], [2, 4], [4, 5]])
    assert compare.routing_flips(one, other) == 1
    assert compare.unequal_logits(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0000002]])) == 0.5
