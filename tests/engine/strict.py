"""Shared by the tests of the strict loader: a stream nobody may read, a refused call, a forward pass."""

import pytest


class Untouchable:
    """An iterator that fails the test when anybody asks it for a tensor."""

    def __iter__(self):
        pytest.fail("the iterator of a refused load was touched")


def refusal(action, *args, **kwargs):
    """The ledger's refusal of a call."""
    from sglang.srt.model_loader.checkpoint_ledger import CheckpointRefused

    with pytest.raises(CheckpointRefused) as caught:
        action(*args, **kwargs)
    return str(caught.value)


def forward(model):
    """A forward pass, which a model that may not serve refuses before it looks at its inputs."""
    return model.forward(None, None, None)
