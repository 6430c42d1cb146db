"""The ledger of a strict load: what this rank must consume of a checkpoint, what it did, and all that was wrong.

The engine's loaders resolve names and some shapes; they do not see a missing, repeated, wrongly typed or NaN
tensor. A model whose quantisation config was admitted for a strict format carries a :class:`Ledger`:

* :func:`guard` attaches it when the model is built. From then on ``forward`` refuses, and so does the engine every
  online weight update, unless the format allows them; then ``weight_update`` announces each to the ledger.
* :func:`watch` stands between the iterator of ``load_weights`` and its consumer. It checks every tensor before
  any slicing, hands on the good ones, and at the end of the stream raises one report of all defects.
* :meth:`Ledger.adopt` is another source for the same parameters: a verified copy of them.
* :func:`seal` proves after post-processing which modules are quantised, and gives ``forward`` back.

So a way to fill parameters that does not pass through here leaves a model that refuses to serve. What writes to them
on purpose while the model serves (the engine's weight checker can) is not seen. Which tensors
exist, of what class, and who owns them, is the business of a :class:`CheckpointFormat`; this module knows none.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from sglang.srt.model_loader import checkpoint_files

#: Load formats that go through DefaultModelLoader and ``load_weights``, and "presharded", which is ``presharded_copy``
#: for a model with a ledger. Sharded states, remote sources and the rest fill parameters past it, from what has no
#: identity to compare.
LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "presharded")

#: Defects of one kind that a report prints; it counts all.
SHOWN = 10

#: Elements tested at once; bounds the temporaries of the scan to some 200 MB.
CHUNK = 1 << 25

#: dtype -> (integer dtype of its width, bits that are all set in every value that is not finite). E4M3 (``fn``)
#: has no infinity, and two NaN codes: 0x7f and 0xff.
NOT_FINITE = {
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
}

#: What a scale may be: a normal FP32 number, and finite times the largest E4M3 code.
SCALES = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 448)


class TensorClass(NamedTuple):
    """What all tensors of one class have in common.

    ``stored`` are the dtypes that the checkpoint may hold it in, ``held`` the dtype of the engine's parameter;
    every stored value must be exact in it. A ``positive`` tensor (a scale) must be a normal number above zero, and
    small enough that no product with an E4M3 code (at most 448) overflows.
    """

    stored: tuple[torch.dtype, ...]
    held: torch.dtype
    positive: bool = False


class Expected(NamedTuple):
    """One tensor of the checkpoint: its class, its full shape before any slicing, and where a rank keeps its share.

    That is ``parameter[expert]`` when stacked, and of that, when several tensors are fused, ``span`` of ``parts``
    equal parts of the rows from ``part`` on; ``parameter`` is None for a tensor of another rank. One flat tuple,
    since there are tens of thousands of them.
    """

    tensor_class: TensorClass
    shape: tuple[int, ...]
    parameter: str | None
    expert: int | None = None
    part: int = 0
    parts: int = 1
    span: int = 1


class CheckpointFormat(Protocol):
    """A strict format, as an admission function attaches it to the quantisation config."""

    name: str
    #: Whether a model that serves may take the weights of another checkpoint.
    updatable: bool

    def inventory(self, model: torch.nn.Module) -> dict[str, Expected]:
        """Every tensor of the checkpoint by name, with the places of the rank that ``model`` is built for."""

    def scope_faults(self, model: torch.nn.Module) -> list[tuple[str, str]]:
        """(module, what is wrong with it) for every live module that is not quantised as the format says."""


class CheckpointRefused(ValueError):
    """A checkpoint or a model is not fit to be served; the message says which tensors and what to do."""


class State(Enum):
    """What has become of the model's weights."""

    BUILT = "its weights were never loaded by the strict loader: start the server with --load-format auto"
    LOADING = "its load did not come to an end: restart the server"
    FAILED = "its checkpoint was refused: restart the server with an intact one"
    LOADED = "its weights were not post-processed: load them with DefaultModelLoader"
    READY = "its weights are loaded already"


class Ledger:
    """The books of one model; see the module's text. Not thread-safe, as ``load_weights`` is not."""

    def __init__(self, checkpoint_format: CheckpointFormat):
        self.format = checkpoint_format
        self.state = State.BUILT
        #: The config of the checkpoint that was loaded.
        self.declared: dict | None = None
        #: The announced update that is under way, if any (``weight_update.Update``).
        self.update: Any = None
        self._defects: dict[tuple[str, str], str] = {}
        self._held: dict[str, torch.dtype] = {}
        # For load_report.
        self.began, self.expected, self.consumed, self.scales = time.monotonic(), 0, 0, set()

    def check_files(self, folder: str, files: Iterable[str], safetensors: bool) -> None:
        """Compare index and shard headers of a checkpoint directory before its first tensor is read.

        Disagreements are kept for the report at the end of the stream. A shard that cannot be read ends the
        load here. Raises :class:`CheckpointRefused`.
        """
        self._refuse_unless(State.BUILT, State.LOADING)
        defects, readable = checkpoint_files.examine(folder, files, safetensors)
        if self.update is not None:
            self.update.check_directory(folder, files, defects)
            return
        self.declared = checkpoint_files.declared(folder)
        for kind, name, text in defects:
            self._note(kind, name, text)
        if not readable:
            self._fail()

    def watch(self, model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator:
        """Return the stream of good tensors of ``weights``; its end raises the report, if there is any defect.

        ``weights`` yields (name, whole tensor on any device). A second call raises before it is touched.
        """
        self._refuse_unless(State.BUILT)
        if self.update is not None:
            weights = self.update.check(weights)
            self._close(model)
        self.state = State.LOADING
        return self._stream(model, weights)

    def adopt(self, model: torch.nn.Module, checkpoint: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill a just built model from a verified copy of its own parameters instead of the ``checkpoint`` directory.

        ``parameters`` yields (parameter name, tensor of its shape and dtype on any device). What a load proves at
        its end is proved here too. Raises :class:`CheckpointRefused`; the model then never serves.
        """
        self._refuse_unless(State.BUILT)
        self.state = State.LOADING
        self.declared = checkpoint_files.declared(checkpoint)
        _poison(model)
        left = dict(model.named_parameters())
        for name, tensor in parameters:
            parameter = left.pop(name, None)
            if parameter is None:
                self._note("parameter", name, "is no parameter of this rank, or comes a second time")
            elif (tensor.dtype, tensor.shape) != (parameter.dtype, parameter.shape):
                self._note("parameter", name, f"comes as {tensor.dtype} {tuple(tensor.shape)}")
            else:
                parameter.data.copy_(tensor)
        for name in left:
            self._note("parameter", name, "is not in the copy")
        self._check_model(model, self.format.inventory(model), [])
        if self._defects:
            self._fail(before="The copy of this checkpoint cannot be restored: remove the copy. ")
        self.state = State.LOADED

    def seal(self, model: torch.nn.Module) -> None:
        """After post-processing: prove the quantised scope again and let a completely loaded model serve."""
        if self.state is not State.LOADED:
            return
        self._check_parameters(model, self._held)
        self._check_scope(model)
        if self._defects:
            self._fail()
        if os.environ.get("HORIZON_LOAD_REPORT"):
            from sglang.srt.model_loader import load_report

            load_report.write(self, model)
        if os.environ.get("HORIZON_MODULE_OUTPUTS"):
            from sglang.srt.model_loader import module_outputs

            module_outputs.register(model)
        self.state = State.READY
        del model.forward  # the instance's refusal; the class has the real one

    def _stream(self, model, weights):
        # Until the end: the inventory alone has enough objects to start full collections of the engine's.
        with checkpoint_files.without_collection():
            yield from self._checked(model, weights, self.format.inventory(model))
        if self._defects:
            self._fail()
        self.state = State.LOADED

    def _checked(self, model, weights, expected):
        _poison(model)
        seen: set[str] = set()
        consumed: list[str] = []
        # A consumer that raises or gives up closes this generator: the state stays LOADING, and the model refuses.
        try:
            for name, tensor in weights:
                entry = expected.get(name)
                if entry is None:
                    self._note("unexpected", name, f"{tensor.dtype} {tuple(tensor.shape)} is no tensor of this model")
                elif name in seen:
                    self._note("duplicate", name, "comes a second time")
                else:
                    seen.add(name)
                    if tensor.dtype not in entry.tensor_class.stored:
                        wanted = " or ".join(map(str, entry.tensor_class.stored))
                        self._note("dtype", name, f"is {tensor.dtype}, must be {wanted}")
                    elif tensor.shape != entry.shape:
                        self._note("shape", name, f"is {tuple(tensor.shape)}, must be {entry.shape}")
                    elif entry.parameter is not None:
                        yield name, tensor
                        consumed.append(name)
        except CheckpointRefused:
            raise
        except Exception as error:
            self._note("unreadable", "the checkpoint", f"cannot be read on: {type(error).__name__}: {error}")
            self._fail(error)
        for name, entry in expected.items():
            if entry.parameter is not None and name not in seen:
                self._note("missing", name, f"{entry.tensor_class.stored[0]} {entry.shape} is in no shard")
        self._check_model(model, expected, consumed)

    def _check_model(self, model, expected, consumed) -> None:
        self._held = {entry.parameter: entry.tensor_class.held for entry in expected.values()}
        self._held.pop(None, None)
        self.scales = {entry.parameter for entry in expected.values() if entry.tensor_class.positive}
        self.expected, self.consumed = sum(e.parameter is not None for e in expected.values()), len(consumed)
        self._check_parameters(model, self._held)
        self._check_values(model, expected, consumed)
        self._check_scope(model)

    def _check_parameters(self, model, held) -> None:
        """Every parameter must have a source in the inventory and still be of the dtype that holds it exactly."""
        parameters = dict(model.named_parameters())
        for name in parameters.keys() - held.keys():
            self._note("parameter", name, "is a parameter that no tensor of the format fills")
        for name in held.keys() - parameters.keys():
            self._note("parameter", name, "is not a parameter of the model as it was built")
        for name in held.keys() & parameters.keys():
            if parameters[name].dtype != held[name]:
                self._note("parameter", name, f"is held as {parameters[name].dtype}, must be {held[name]}")

    def _check_values(self, model, expected, consumed) -> None:
        """Find NaN codes, values that are not finite, scales that are not positive, and elements never written.

        The parameters themselves are scanned on their device, one flag each, and the flags are read once.
        """
        positive = {entry.parameter for entry in expected.values() if entry.tensor_class.positive}
        parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        flags = [bad_values(data, name in positive, count=False) for name, data in parameters.items()]
        if not flags:
            return
        raised = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
        flagged = {name for name, bad in zip(parameters, raised, strict=True) if bad}
        if not flagged:
            return
        unexplained = {name: int(bad_values(parameters[name], name in positive)) for name in flagged}
        for name in consumed:
            entry = expected[name]
            if entry.parameter not in flagged:
                continue
            window = _window(parameters[entry.parameter], entry)
            if bad := int(bad_values(window, entry.tensor_class.positive)):
                unexplained[entry.parameter] -= bad
                fault = "not finite, positive and in range" if entry.tensor_class.positive else "NaN or infinite"
                self._note("value", name, f"{bad:,} of {window.numel():,} values are {fault}")
        # What no good tensor reached is explained when a bad or missing one belongs there.
        excused = {
            entry.parameter
            for name, entry in expected.items()
            if any((kind, name) in self._defects for kind in ("missing", "dtype", "shape"))
        }
        for name, left in unexplained.items():
            if left and name not in excused:
                self._note("parameter", name, f"{left:,} of {parameters[name].numel():,} elements were never written")

    def _check_scope(self, model) -> None:
        for module, text in self.format.scope_faults(model):
            self._note("scope", module, text)

    def _note(self, kind: str, name: str, text: str) -> None:
        self._defects.setdefault((kind, name), text)

    def _refuse_unless(self, *allowed: State) -> None:
        if self.state not in allowed and not (self.update is not None and self.state is State.READY):
            raise CheckpointRefused(
                f"This {self.format.name} model takes no weights a second time, {self.state.value}."
                if self.state is not State.READY
                else f"This {self.format.name} model takes no weights a second time: restart the server to serve "
                "another checkpoint."
            )

    def _fail(self, cause: BaseException | None = None, before: str = "") -> None:
        self.state = State.FAILED
        raise CheckpointRefused(before + report(self.format.name, self._defects)) from cause

    def _close(self, model) -> None:
        # On the instance, so that a model that may serve pays nothing for it.
        @functools.wraps(type(model).forward)
        def refuse(*args, **kwargs):
            raise CheckpointRefused(f"This {self.format.name} model does not serve, {self.state.value}.")

        model.forward = refuse


def guard(model: torch.nn.Module) -> None:
    """Attach a ledger to a just built model when its quantisation config was admitted for a strict format."""
    checkpoint_format = getattr(model.quant_config, "checkpoint_format", None)
    if checkpoint_format is None:
        return
    model.checkpoint_ledger = Ledger(checkpoint_format)
    model.checkpoint_ledger._close(model)
    if checkpoint_format.updatable:
        return
    # The engine asks for this attribute before every kind of online update, also those that write parameters
    # without calling load_weights.
    model._derived_weight_cache_error = (
        f"Online weight updates are refused for {checkpoint_format.name}: restart the server with the new checkpoint."
    )


def watch(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """Pass ``weights`` through the model's ledger; a model without one gets them back untouched."""
    ledger = getattr(model, "checkpoint_ledger", None)
    return weights if ledger is None else ledger.watch(model, weights)


def seal(model: torch.nn.Module) -> None:
    """Let the model serve if its ledger says that it is complete; a model without one is left alone."""
    ledger = getattr(model, "checkpoint_ledger", None)
    if ledger is not None:
        ledger.seal(model)


def report(format_name: str, defects: dict[tuple[str, str], str]) -> str:
    """All defects as text: one sentence, then a line for each kind and for the first ones of it."""
    kinds: dict[str, list[str]] = {}
    for (kind, name), text in defects.items():
        kinds.setdefault(kind, []).append(_printable(f"{name}: {text}"))
    tensors = len({name for _, name in defects})
    lines = [
        f"The checkpoint is not a complete {format_name} checkpoint ({len(defects):,} defect(s) in {tensors:,} "
        "place(s)): download it again, or load one that passes `make inspect`."
    ]
    for kind in sorted(kinds):
        lines.append(f"{kind} ({len(kinds[kind]):,}):")
        lines += [f"  {text}" for text in sorted(kinds[kind])[:SHOWN]]
        if len(kinds[kind]) > SHOWN:
            lines.append(f"  ... and {len(kinds[kind]) - SHOWN:,} more")
    return "\n".join(lines)


def _printable(line: str) -> str:
    """Names of tensors and files, and errors of a reader: no line break of theirs may look like a line of ours."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def bad_values(data: torch.Tensor, positive: bool, count: bool = True) -> torch.Tensor:
    """Number of elements (or, without ``count``, whether there are any) that are not finite, on ``data``'s device.

    With ``positive`` also those outside :data:`SCALES`. Returns a 0-dimensional tensor: reading it is the
    caller's one synchronisation. A dtype without an entry in :data:`NOT_FINITE` has no bad value.
    """
    total = torch.zeros((), dtype=torch.int64 if count else torch.bool, device=data.device)
    if data.dtype not in NOT_FINITE:
        return total
    if data.dtype == torch.float8_e4m3fn and data.numel() and not count:
        # Most of a checkpoint. The NaN codes are the largest byte, as a signed and as an unsigned number: two
        # reductions without temporaries take a quarter of the time of the general way.
        codes = data.reshape(-1)
        return (codes.view(torch.int8).amax() == 0x7F) | (codes.view(torch.uint8).amax() == 0xFF)
    integer, mask = NOT_FINITE[data.dtype]
    for chunk in data.reshape(-1).split(CHUNK):
        bad = (chunk.view(integer) & mask) == mask
        if positive:
            bad |= (chunk < SCALES[0]) | (chunk > SCALES[1])
        total = total + bad.sum() if count else total | bad.any()
    return total


def _poison(model: torch.nn.Module) -> None:
    """Fill every parameter with NaN or infinity, so that the scan afterwards also finds what was never written."""
    for parameter in model.parameters():
        if parameter.dtype in NOT_FINITE:
            integer, mask = NOT_FINITE[parameter.dtype]
            parameter.data.view(integer).fill_(mask)


def _window(data: torch.Tensor, entry: Expected) -> torch.Tensor:
    """The share of a parameter that one checkpoint tensor fills."""
    if entry.expert is not None:
        data = data[entry.expert]
    rows = data.shape[0]
    return data.narrow(0, rows * entry.part // entry.parts, rows * entry.span // entry.parts)
