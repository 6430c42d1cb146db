"""Refuses requests of which the scheduler would die: bounds of the vocabulary, checked before it gets them."""

from __future__ import annotations


def check(obj, input_ids: list[int] | None, vocab_size: int) -> None:
    """Raise ``ValueError`` (HTTP 400) for token ids outside the vocabulary and for more log-probabilities than it has.

    The former are an IndexError of the embedding in the scheduler (on a GPU a device assertion), the latter one
    of ``topk``; either ends the server for every client.
    """
    outside = next((token for token in input_ids or () if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary: valid are 0 to {vocab_size - 1}")
    wanted = getattr(obj, "top_logprobs_num", None)
    if isinstance(wanted, int) and wanted > vocab_size:
        raise ValueError(f"{wanted} log-probabilities a token were asked for, and the vocabulary has {vocab_size}")
