"""Requests of which the scheduler would die are refused where the length of the prompt is checked."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers import request_bounds
from sglang.srt.managers.tokenizer_manager import TokenizerManager

VOCABULARY = 100


def validate(ids, **fields) -> None:
    """The engine's own check of one request, as far as the hook."""
    manager = SimpleNamespace(
        _validate_joint_schema_request=lambda obj, input_ids: None,
        model_config=SimpleNamespace(vocab_size=VOCABULARY), context_len=50, num_reserved_tokens=0,
        allow_auto_truncate=False, validate_total_tokens=False,
    )  # fmt: skip
    obj = SimpleNamespace(sampling_params={}, **fields)
    TokenizerManager._validate_one_request(manager, obj, ids)


@pytest.mark.parametrize("ids", [[0, 100], [-1], [1 << 40]])
def test_ids_outside_the_vocabulary(ids):
    with pytest.raises(ValueError, match=f"token id {ids[-1]} is outside the vocabulary: valid are 0 to 99"):
        validate(ids)


def test_more_log_probabilities_than_tokens():
    with pytest.raises(ValueError, match="101 log-probabilities a token"):
        validate([1], top_logprobs_num=101)


@pytest.mark.parametrize("ids", [[0, 99], [], None])
def test_what_is_in_bounds_passes(ids):
    request_bounds.check(SimpleNamespace(top_logprobs_num=VOCABULARY), ids, VOCABULARY)
    request_bounds.check(SimpleNamespace(), ids, VOCABULARY)
