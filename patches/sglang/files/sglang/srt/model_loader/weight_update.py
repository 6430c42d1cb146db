"""Online updates of a strictly loaded model: the whole of another checkpoint, checked before anything is written.

The engine writes what it is given into a model that serves: a part of a checkpoint, tensors of other dtypes, raw
parameters. Where the format allows updates at all, :func:`guarded` announces one to the model's ledger, and an
:class:`Update` says beforehand whether what comes is complete. What is refused then leaves the old weights and a
model that serves. What fails later leaves half an update, and a model that never serves again. The ranks of a
tensor-parallel group write all or none: each wants the whole checkpoint, also what others own, and waits for what the
others say.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader import checkpoint_files
from sglang.srt.model_loader.checkpoint_ledger import LOAD_FORMATS, CheckpointRefused, State, bad_values, report
from sglang.srt.runtime_context import get_parallel

#: What an update from disk may be read with.
FROM_DISK = LOAD_FORMATS

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}


class Update:
    """One announced update of ``model``; the ledger asks it before the first tensor is written."""

    def __init__(self, ledger: Any, model: torch.nn.Module):
        self._ledger = ledger
        self._expected = ledger.format.inventory(model)
        self._directory_fits = False
        self.voted = False

    def check_directory(self, folder: str, files: Iterable[str], defects: list[tuple[str, str, str]]) -> None:
        """Refuse a directory whose config, names, dtypes or shapes are not those of the model that serves.

        ``defects`` are those that its files have in themselves. The config matters because the engine reads the new
        weights and keeps the old config. Values are checked after the copy, as in a first load.
        """
        found = {(kind, name): text for kind, name, text in defects}
        if checkpoint_files.declared(folder) != self._ledger.declared:
            found["config", "config.json"] = "is not that of the model that serves: restart the server for another one"
        if not any(kind == "unreadable" for kind, _ in found):
            headers = {}
            for path in files:
                headers.update(checkpoint_files.read_header(Path(path)))
            found |= self._differences(
                {
                    name: (_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
                    for name, entry in headers.items()
                }
            )
        self._refuse(found)
        self._directory_fits = True

    def check(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return ``weights`` if they are a checked directory's, or a list that is the whole of a good checkpoint.

        ``weights`` are (name, whole tensor on any device).
        """
        if not isinstance(weights, list | tuple):
            if self._directory_fits:
                return weights
            raise CheckpointRefused(
                f"This {self._ledger.format.name} model takes an update as a directory or as a list of all tensors, "
                "and this is a stream that nobody has checked: update from disk."
            )
        found = self._differences({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights})
        seen = set()
        for name, tensor in weights:
            if name in seen:
                found["duplicate", name] = "comes a second time"
            seen.add(name)
            entry = self._expected.get(name)
            if entry is None or ("dtype", name) in found:
                continue
            if bad_values(tensor, entry.tensor_class.positive, count=False):
                found["value", name] = "has values that are NaN, infinite or no scale"
        self._refuse(found)
        return weights

    def _differences(self, offered: dict[str, tuple[Any, tuple[int, ...]]]) -> dict[tuple[str, str], str]:
        """What a first load would say of names, dtypes and shapes."""
        found = {}
        for name, (dtype, shape) in offered.items():
            entry = self._expected.get(name)
            if entry is None:
                found["unexpected", name] = f"{dtype} {shape} is no tensor of this model"
            elif dtype not in entry.tensor_class.stored:
                found["dtype", name] = f"is {dtype}, must be {' or '.join(map(str, entry.tensor_class.stored))}"
            elif shape != entry.shape:
                found["shape", name] = f"is {shape}, must be {entry.shape}"
        for name, entry in self._expected.items():
            if name not in offered:
                found["missing", name] = f"{entry.tensor_class.stored[0]} {entry.shape} is not there"
        return found

    def _refuse(self, found: dict[tuple[str, str], str]) -> None:
        verdicts = self.vote(not found)
        if found:
            raise CheckpointRefused(
                f"The update is refused, and the model keeps its weights. {report(self._ledger.format.name, found)}"
            )
        if not all(verdicts):
            raise CheckpointRefused(
                "The update is refused, and the model keeps its weights: "
                f"rank {verdicts.index(False)} of this tensor-parallel group refuses it, see its log."
            )

    def vote(self, good: bool) -> list[bool]:
        """Tell the other ranks of the tensor-parallel group, and return what all of them say."""
        self.voted = True
        return get_parallel().tp_group.all_gather_object(good)


def guarded(*load_formats: str | None) -> Callable:
    """Decorate a method of the engine's weight updater: announce its update to the ledger of a strict model.

    ``load_formats`` are those whose tensors pass through ``load_weights``; others write parameters directly and are
    refused. Returns the engine's (done, message); raises where the model is no longer whole, since the engine would
    go on to replay its graphs with it. A model without a ledger, or of a format without updates, is left to the engine.
    """

    def decorate(update: Callable) -> Callable:
        signature = inspect.signature(update)

        @functools.wraps(update)
        def call(self, *args, **kwargs):
            ledger = getattr(self.get_model(), "checkpoint_ledger", None)
            if ledger is None or not ledger.format.updatable:
                return update(self, *args, **kwargs)
            load_format = signature.bind(self, *args, **kwargs).arguments.get("load_format")
            if load_format not in load_formats:
                return False, (
                    f"This {ledger.format.name} model is updated from disk, or from a list of all tensors of a "
                    f"checkpoint, and not by {update.__name__} with load format {load_format}."
                )
            announced = Update(ledger, self.get_model())
            if ledger.state is not State.READY:
                announced.vote(False)
                return False, f"This {ledger.format.name} model takes no update, {ledger.state.value}."
            path = self.model_config.model_path
            ledger.update = announced
            try:
                done, message = update(self, *args, **kwargs)
            except CheckpointRefused as refused:
                if ledger.state is not State.READY:
                    raise
                done, message = False, str(refused)
            finally:
                ledger.update = None
                if not announced.voted:
                    announced.vote(False)
            if ledger.state not in (State.READY, State.LOADED):
                raise CheckpointRefused(
                    f"This {ledger.format.name} model serves no more, {ledger.state.value}: {message}"
                )
            if not done:
                self.model_config.model_path = path
            return done, message

        return call

    return decorate
