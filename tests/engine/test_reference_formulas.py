"""The reference's formulas against numbers worked out by hand.

Used again and again: sigmoid(ln 3) = 3/4, sigmoid(ln 4) = 4/5, silu(ln 3) = 0.75 * 1.0986123 = 0.8239592, cos 1 =
0.5403023, sin 1 = 0.8414710, cos 0.1 = 0.9950042, sin 0.1 = 0.0998334.
"""

import math

import pytest
import torch

from qualify.errors import Rejected
from qualify.reference import dequantise, formulas
from qualify.reference.weights import Matrix

LN3, LN4 = 1.0986123, 1.3862944


def close(found, wanted, tolerance=2e-6):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("x", "groups", "wanted"),
    [
        # One group: mean square (1 + 1 + 49 + 49) / 4 = 25, root 5.
        ([1.0, 1, 7, 7], 1, [0.2, 0.4, 4.2, 5.6]),
        # Two: mean squares 1 and 49; four: every value alone.
        ([1.0, 1, 7, 7], 2, [1.0, 2, 3, 4]),
        ([1.0, -2, 7, 7], 4, [1.0, -2, 3, 4]),
        # Two, of values apart: (1 + 49) / 2 = 25 and (4 + 196) / 2 = 100.
        ([1.0, 7, 2, 14], 2, [0.2, 2.8, 0.6, 5.6]),
    ],
)
def test_rms_norm_has_one_mean_square_a_group(x, groups, wanted):
    close(formulas.rms_norm(torch.tensor([x]), torch.tensor([1.0, 2, 3, 4]), groups, eps=0), [wanted])


def test_rms_norm_adds_epsilon_to_the_mean_square():
    """3 / sqrt(9 + 16) = 0.6."""
    close(formulas.rms_norm(torch.tensor([[3.0, -3.0]]), torch.ones(2), 1, eps=16), [[0.6, -0.6]])


def test_softplus_gate_is_log2_of_one_plus_a_power_of_two():
    """log2(1 + 1) = 1, log2(1 + 3) = 2, log2(1 + 1/2) = 0.5849625; far out z itself and 0."""
    z = torch.tensor([0.0, 1.5849625, -1.0, 200.0, -200.0])
    close(formulas.gate(z, "softplus"), [1.0, 2.0, 0.5849625, 200.0, 0.0])


def test_silu_gate():
    close(formulas.gate(torch.tensor([LN3, 0.0, -LN3]), "silu"), [0.8239592, 0.0, -0.2746531])


ROUTER = {"logits": torch.tensor([[LN4, LN3, 0.0, -LN3]]), "bias": torch.tensor([0.0, -0.5, 0.0, 0.5])}


@pytest.mark.parametrize(
    ("options", "chosen", "weights"),
    [
        # Scores 0.8, 0.75, 0.5, 0.25; with the bias 0.8, 0.25, 0.5, 0.75: experts 0 and 3, 0.8 and 0.25 of 1.05.
        ({"top_k": 2, "scaling": 2.5}, [0, 3], [1.9047619, 0.5952381]),
        ({"top_k": 2, "scaling": 2.5, "normalise": False}, [0, 3], [2.0, 0.625]),
        # One of one is not normalised.
        ({"top_k": 1, "scaling": 2.5}, [0], [2.0]),
        # The fault: biased scores 0.8 and 0.75 of 1.55.
        ({"top_k": 2, "scaling": 2.5, "biased": True}, [0, 3], [1.2903226, 1.2096774]),
        # Softmax: powers 4, 3, 1, 1/3 of 8.3333333 are 0.48, 0.36, 0.12, 0.04; with the bias the last leads.
        ({"top_k": 2, "score": "softmax", "normalise": False}, [3, 0], [0.04, 0.48]),
    ],
)
def test_bias_decides_the_choice_and_not_the_weight(options, chosen, weights):
    found, mixing = formulas.route(**ROUTER, **options)
    assert found.tolist() == [chosen]
    close(mixing, [weights])


def test_a_router_without_bias_chooses_by_score():
    assert formulas.route(ROUTER["logits"], None, top_k=2)[0].tolist() == [[0, 1]]


def test_router_partitions_round_each_half_to_bf16():
    """BF16 has 8 bits: 257, between 256 and 258, goes to the even 256, and 259 to 260; 256, 1 and 3 are exact."""
    x, ones = torch.tensor([[256.0, 1.0], [256.0, 3.0]]), torch.ones(1, 2)
    assert formulas.router_logits(x, ones, 1).tolist() == [[256.0], [260.0]]
    assert formulas.router_logits(x, ones, 2).tolist() == [[257.0], [259.0]]
    # Each half is rounded, too: 257 + 257 is 512, not 514.
    assert formulas.router_logits(torch.tensor([[256.0, 1, 1, 256]]), torch.ones(1, 4), 2).tolist() == [[512.0]]


def rotated(size, rotated, pairing="halves"):
    """Position 1 of a head 1, 2, 3 ... with theta 100: angles 1 and 100^(-1/2) = 0.1 for four rotated dimensions."""
    heads = torch.arange(1.0, size + 1).expand(2, 1, size)
    found = formulas.rope(heads, 100.0, rotated, pairing)
    assert torch.equal(found[0], heads[0])  # position 0 turns by nothing
    return found[1, 0]


# (1, 3) by 1 and (2, 4) by 0.1: 1 * 0.5403023 - 3 * 0.8414710, 3 * 0.5403023 + 1 * 0.8414710, ...
FOUR = [-1.9841107, 1.5906748, 2.4623779, 4.1796834]


def test_rope_pairs_the_halves_of_a_head():
    close(rotated(4, 4), FOUR)


def test_partial_rope_pairs_over_the_whole_head():
    """(1, 5) by 1, (2, 6) by 0.1; 3, 4, 7, 8 pass."""
    close(rotated(8, 4), [-3.6670527, 1.3910080, 3.0, 4.0, 3.5429825, 6.1696920, 7.0, 8.0])


def test_the_wrong_pairings_are_what_they_say():
    close(rotated(8, 4, "slice"), [*FOUR, 5.0, 6.0, 7.0, 8.0])
    # (1, 2) by 1, (3, 4) by 0.1
    close(rotated(4, 4, "interleaved"), [-1.1426396, 1.9220756, 2.5856788, 4.2795172])


def test_rope_keeps_the_angle_of_a_late_position():
    """cos(100000) = -0.9993608, sin(100000) = 0.0357488."""
    found = formulas.rope(torch.tensor([1.0, 0.0]).expand(100_001, 1, 2), 100.0, 2)[-1, 0]
    close(found, [-0.9993608, 0.0357488])


def test_attention_is_causal_grouped_and_scaled():
    """D = 4, scale 1/2. Token 1 scores 0 and 2 ln 3 / 2 = ln 3: weights 1/4 and 3/4; its second head the reverse.
    Token 0 sees itself alone, whatever its query."""
    q = torch.zeros(2, 2, 4)
    q[0], q[1, 0, 0], q[1, 1, 0] = 50.0, 2 * LN3, -2 * LN3
    k, v = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)
    k[1, 0, 0], v[0, 0, 0], v[1, 0, 1] = 1.0, 4.0, 8.0
    found = formulas.attention(q, k, v)
    close(found, [[4.0, 0, 0, 0, 4, 0, 0, 0], [1.0, 6, 0, 0, 3, 2, 0, 0]])


def test_neighbouring_query_heads_share_a_kv_head():
    """Four query heads, two KV heads: 0 and 1 read the first, 2 and 3 the second. Token 1 weighs the two with 1/4
    and 3/4, head 1 the other way round: 4 / 4 + 8 * 3/4 = 7, 4 * 3/4 + 8 / 4 = 5, and 70 of the tenfold values."""
    q, k, v = torch.zeros(2, 4, 4), torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)
    q[1, :, 0] = 2 * LN3 * torch.tensor([1, -1, 1, 1])
    k[1, :, 0] = 1
    v[:, :, 0] = torch.tensor([[4.0, 40], [8, 80]])
    found = formulas.attention(q, k, v).view(2, 4, 4)[..., 0]
    close(found, [[4.0, 4, 40, 40], [7.0, 5, 70, 70]])


def matrix(value, fp8=False):
    return Matrix(torch.tensor([[value]]), fp8)


def test_mlp():
    """3 * silu(ln 3) * 2 = 3 * 0.8239592 * 2 = 4.9437554."""
    found = formulas.mlp(torch.ones(1, 1), matrix(LN3), matrix(2.0), matrix(3.0), quantised=False)
    close(found, [[4.9437554]])


def test_experts_are_weighted_after_they_are_computed():
    """Expert n gives x^2 times 10^n. Token 1: 0.5 * 1 + 0.25 * 100 = 25.5; token 2: 1 * 400 + 2 * 40 = 480."""
    called = []

    def expert(number, rows):
        called.append((number, rows.flatten().tolist()))
        return rows**2 * 10**number

    x, chosen, weights = (
        torch.tensor([[1.0], [2.0]]),
        torch.tensor([[0, 2], [2, 1]]),
        torch.tensor([[0.5, 0.25], [1, 2]]),
    )
    close(formulas.mix(x, chosen, weights, 1, 4, expert), [[25.5], [480.0]])
    assert called == [(0, [1.0]), (1, [2.0]), (2, [1.0, 2.0])]


# --- block FP8 ----------------------------------------------------------------------------------------------------


def test_e4m3_codes():
    """Sign, four bits of exponent with bias 7, three of mantissa: 0x38 is 1, 0x3C 1.5, 0xC0 -2, 0x7E 448, 0x01 2^-9."""
    codes = torch.tensor([[0x38, 0x3C, 0xC0, 0x7E, 0x01, 0x00]], dtype=torch.uint8)
    wanted = [[2.0, 3.0, -4.0, 896.0, 2 * 0.001953125, 0.0]]
    close(dequantise.weight(codes, torch.tensor([[2.0]])), wanted, 0)
    close(dequantise.weight(codes.view(torch.float8_e4m3fn), torch.tensor([[2.0]], dtype=torch.bfloat16)), wanted, 0)


def test_each_block_has_its_scale_and_the_last_ones_are_ragged():
    ones = torch.full((130, 257), 0x38, dtype=torch.uint8)
    found = dequantise.weight(ones, torch.tensor([[1.0, 2, 3], [4.0, 5, 6]]))
    places = [(0, 0), (127, 127), (127, 128), (0, 255), (0, 256), (128, 0), (129, 128), (129, 256)]
    assert [found[place].item() for place in places] == [1, 1, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("shape", [(3, 2), (2, 1), (1, 1)])
def test_a_scale_of_another_shape_is_refused(shape):
    with pytest.raises(Rejected, match="needs a scale"):
        dequantise.weight(torch.zeros(130, 257, dtype=torch.uint8), torch.ones(shape))


def test_activations_are_quantised_per_token_and_128_columns():
    """Group 1 of token 0: largest 448, scale 1. E4M3 has steps of 2 from 16 to 32, of 1/8 from 1 to 2 and 2^-9 near 0:
    17 goes to the even 16, 19 to 20, 1.0625 to 1, 0.0009 to 0, 0.0011 to 2^-9. Group 2, ragged: largest 896, scale 2;
    100 / 2 = 50 lies between 48 and 52, even is 48: 96. Token 1 is 0, and 1792 in the second group: scale 4."""
    x = torch.zeros(2, 130)
    x[0, :6] = torch.tensor([-448.0, 17.0, 19.0, 1.0625, 0.0009, 0.0011])
    x[0, 128:] = torch.tensor([896.0, 100.0])
    x[1, 129] = 1792.0
    codes, scales = dequantise.quantise(x)
    assert scales.tolist() == [[1.0, 2.0], [0.0, 4.0]]
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn
    found = dequantise.rounded(x)
    assert found[0, :6].tolist() == [-448.0, 16.0, 20.0, 1.0, 0.0, 0.001953125]
    assert found[0, 128:].tolist() == [896.0, 96.0]
    assert found[1].tolist() == [0.0] * 129 + [1792.0]


def test_only_fp8_weights_see_quantised_activations():
    x = torch.tensor([[448.0, 17.0]])
    ones = Matrix(torch.ones(1, 2), fp8=True)
    assert formulas.linear(x, ones, quantised=True).item() == 464  # 448 + 16
    assert formulas.linear(x, ones, quantised=False).item() == 465
    assert formulas.linear(x, ones._replace(fp8=False), quantised=True).item() == 465


def test_the_constants_of_this_file():
    assert math.isclose(LN3, math.log(3), rel_tol=1e-7) and math.isclose(LN4, math.log(4), rel_tol=1e-7)
