"""The scan of loaded values: every chunk, the range of a scale, and elements that nobody wrote."""

import pytest
import torch

from tests.engine.mutations import DOWN, DOWN_SCALE, EXPERTS, ROUTER, SCALE

TINY, MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LARGEST = torch.tensor(MAX / 448)
ABOVE = torch.nextafter(LARGEST, torch.tensor(MAX))
SUBNORMAL = torch.nextafter(torch.tensor(TINY), torch.tensor(0.0))


@pytest.mark.parametrize("position", [0, 999, 1000, 1999, 2499])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_every_chunk_is_scanned(monkeypatch, dtype, position):
    from sglang.srt.model_loader import checkpoint_ledger

    monkeypatch.setattr(checkpoint_ledger, "CHUNK", 1000)
    data = torch.ones(50, 50).to(dtype)
    assert checkpoint_ledger.bad_values(data, positive=False) == 0
    data.view(-1)[position] = torch.nan
    assert checkpoint_ledger.bad_values(data, positive=False) == 1
    assert checkpoint_ledger.bad_values(data, positive=False, count=False)


def test_the_bad_values_of_all_chunks_are_added_up(monkeypatch):
    from sglang.srt.model_loader import checkpoint_ledger

    monkeypatch.setattr(checkpoint_ledger, "CHUNK", 1000)
    data = torch.ones(2500)
    data[[5, 1005, 1006, 2499]] = torch.tensor([0.0, -1.0, torch.inf, torch.nan])
    assert checkpoint_ledger.bad_values(data, positive=True) == 4
    assert checkpoint_ledger.bad_values(data, positive=False) == 2


@pytest.mark.parametrize("value", [TINY, 1e-5, 1.0, LARGEST], ids=["smallest normal", "usual", "one", "max / 448"])
def test_a_scale_in_range_is_good(value):
    from sglang.srt.model_loader.checkpoint_ledger import bad_values

    scale = torch.as_tensor(value, dtype=torch.float32)[None]
    assert torch.isfinite(scale * 448).all()
    assert bad_values(scale, positive=True) == 0


@pytest.mark.parametrize(
    "value",
    [ABOVE, 3e38, SUBNORMAL, 1e-45, 0.0, -0.0, -1.0],
    ids=["above max / 448", "3e38", "subnormal", "smallest subnormal", "zero", "minus zero", "negative"],
)
def test_a_scale_out_of_range_is_bad_and_no_other_tensor_is(value):
    from sglang.srt.model_loader.checkpoint_ledger import bad_values

    scale = torch.as_tensor(value, dtype=torch.float32)[None]
    assert bad_values(scale, positive=True) == 1
    assert bad_values(scale, positive=False) == 0


def test_the_range_of_scales_ends_where_the_product_with_the_largest_code_overflows():
    assert torch.isfinite(LARGEST * torch.finfo(torch.float8_e4m3fn).max)
    assert torch.isinf(ABOVE * torch.finfo(torch.float8_e4m3fn).max)


def test_scales_out_of_range_are_counted_in_a_load(empty, source, refusal):
    scale = torch.tensor([TINY, LARGEST, ABOVE, SUBNORMAL, 3e38, 1.0]).view(2, 3)
    assert source[SCALE].shape == scale.shape
    report = refusal(empty.load_weights, (source | {SCALE: scale}).items())
    assert report.split("\n")[1:] == ["value (1):", f"  {SCALE}: 3 of 6 values are not finite, positive and in range"]


def test_a_scale_that_the_engine_does_not_write_is_reported(empty, source, refusal, monkeypatch):
    """Scales are built as numbers that look right: only the poison shows that nobody wrote them."""
    scale = empty.get_parameter(f"{EXPERTS}.w2_weight_scale_inv")
    scale.data.fill_(1)
    original = scale.weight_loader

    def forgetful(param, loaded_weight, name, shard_id, expert_id):
        if expert_id != 3:
            original(param, loaded_weight, name, shard_id=shard_id, expert_id=expert_id)

    monkeypatch.setattr(scale, "weight_loader", forgetful)
    report = refusal(empty.load_weights, source.items())
    assert report.split("\n")[1:] == [
        "value (1):",
        f"  {DOWN_SCALE}: 6 of 6 values are not finite, positive and in range",
    ]


def test_a_bias_that_the_engine_does_not_write_is_reported(empty, source, refusal, monkeypatch):
    bias = empty.get_parameter(f"{ROUTER}.bias")
    bias.data.zero_()
    monkeypatch.setattr(bias, "weight_loader", lambda param, loaded_weight: None, raising=False)
    report = refusal(empty.load_weights, source.items())
    assert report.split("\n")[1:] == ["value (1):", f"  {ROUTER}.bias: 16 of 16 values are NaN or infinite"]


@pytest.fixture
def roomy(empty):
    """The built model with room for a 17th expert in one parameter, which no tensor of the checkpoint fills."""
    parameter = empty.get_parameter(f"{EXPERTS}.w2_weight")
    parameter.data = torch.zeros(17, *parameter.shape[1:], dtype=parameter.dtype)
    return empty


def test_elements_that_no_tensor_belongs_to_are_reported(roomy, source, refusal):
    report = refusal(roomy.load_weights, source.items())
    assert report.split("\n")[1:] == [
        "parameter (1):",
        f"  {EXPERTS}.w2_weight: 98,304 of 1,671,168 elements were never written",
    ]


def test_elements_of_a_missing_tensor_are_not_reported_twice(roomy, source, refusal):
    stream = dict(source)
    del stream[DOWN]
    report = refusal(roomy.load_weights, stream.items())
    assert report.split("\n")[1:] == ["missing (1):", f"  {DOWN}: torch.float8_e4m3fn (384, 256) is in no shard"]
