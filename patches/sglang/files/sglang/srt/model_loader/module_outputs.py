"""Records what the modules of a served K2-Horizon model get and give during one prefill, for a comparison elsewhere.

``HORIZON_MODULE_OUTPUTS=FOLDER`` lets the ledger register the recorder when it seals the model. It then does nothing
until ``FOLDER/armed.json`` (``{"input_ids": [...]}``) is there and a request of exactly these tokens, alone in its
batch and with nothing of it in the prefix cache, is prefilled. That one pass runs eagerly: hooks do not fire inside a
CUDA graph that is replayed. At its end ``FOLDER/pass`` holds ``layer-000.safetensors`` and so on, and
``final.safetensors``, each tensor in the dtype in which the engine had it, and ``armed.json`` is gone. What could not
be recorded is said in ``FOLDER/failed``. Without the variable nothing happens; with several ranks nothing is recorded,
because outputs of row parallel modules are then partial sums.

Tensors of a layer, T tokens (a dot separates module and what of it):

=====================  ==========================  ==============================================================
attention.input        [T, hidden]                 what ``self_attn`` gets, the output of the first norm
attention.output       [T, hidden]                 after ``o_proj``
values.output          [T, KV heads * head_dim]    MoVA layers: the mixed value
value_router.*         logits [T, value experts] float32; weights, ids [T, chosen]
router.*               MoE layers: logits [T, experts] float32; weights (scaled), ids [T, chosen]
ffn.input, ffn.output  [T, hidden]                 after the second norm; of the MLP or of routed and shared experts
norm.input             [T, hidden]                 residual stream before the layer
ffn_norm.input         [T, hidden]                 residual stream between attention and FFN
=====================  ==========================  ==============================================================

``final.input`` and ``final.output`` [T, hidden] are those of the last norm.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

VARIABLE = "HORIZON_MODULE_OUTPUTS"


def register(model: torch.nn.Module) -> None:
    """Let ``model`` (``XllmForCausalLM``) be recorded when its folder says so. Called after every strict load."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if hasattr(model, "module_outputs") or (distributed and torch.distributed.get_world_size() > 1):
        return
    recorder = model.module_outputs = Recorder(model, Path(os.environ[VARIABLE]))
    model.model.register_forward_pre_hook(recorder.begin)
    model.model.register_forward_hook(recorder.end, always_call=True)
    _keep_armed_passes_eager(recorder)


def _keep_armed_passes_eager(recorder: Recorder) -> None:
    """The prefill graph, where there is one, is not replayed for the batch that is to be recorded."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    stock = PrefillCudaGraphRunner.can_run_graph

    def can_run_graph(self, forward_batch):
        return not recorder.wants(forward_batch.input_ids, forward_batch) and stock(self, forward_batch)

    PrefillCudaGraphRunner.can_run_graph = can_run_graph


class Recorder:
    """The hooks of one model; between :meth:`begin` and :meth:`end` of a wanted pass its modules have hooks too."""

    def __init__(self, model: torch.nn.Module, folder: Path):
        self.decoder, self.folder = model.model, folder
        # The function that the attention calls is one of the model's module, not a module with hooks.
        self.namespace = vars(sys.modules[_definition(model)])
        self.armed, self.new = folder / "armed.json", folder / ".pass"
        self.handles: list = []
        self.kept: dict[str, torch.Tensor] = {}
        self.failure = ""

    def wants(self, input_ids: torch.Tensor, forward_batch) -> bool:
        """Is this batch the one that is waited for?"""
        if not self.armed.exists() or not forward_batch.forward_mode.is_extend() or forward_batch.batch_size != 1:
            return False
        if any(forward_batch.extend_prefix_lens_cpu or ()):
            return False
        return input_ids.tolist() == json.loads(self.armed.read_text())["input_ids"]

    def begin(self, decoder, args) -> None:
        """Before the first layer of any pass."""
        from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope

        # In a graph the decoder is called, too, and its body does not run.
        if is_in_prefill_graph_scope() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        if not self.wants(args[0], args[2]):
            return
        self.kept, self.failure = {}, ""
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir()
        for number, layer in enumerate(decoder.layers):
            self._hook(number, layer)
        self._after(decoder.norm, lambda _, args, out: self._stream("final", args, out))
        self._stock_topk = self.namespace.get("mova_router_topk")
        if self._stock_topk is not None:
            self.namespace["mova_router_topk"] = self._topk

    def end(self, decoder, args, output) -> None:
        """After the last layer, also where one has failed (``output`` is then None)."""
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self._stock_topk is not None:
            self.namespace["mova_router_topk"] = self._stock_topk
        self._write("final", ("final.input", "final.output"))
        if self.failure:
            (self.folder / "failed").write_text(f"{self.failure}\n")
        else:
            shutil.rmtree(self.folder / "pass", ignore_errors=True)
            self.new.rename(self.folder / "pass")
        self.armed.unlink(missing_ok=True)

    def _hook(self, number: int, layer: torch.nn.Module) -> None:
        needed = ["attention.input", "attention.output", "ffn.input", "ffn.output", "norm.input", "ffn_norm.input"]

        def leaves(_module, _args, _output):
            self._write(f"layer-{number:03}", needed)

        self._after(layer.input_layernorm, lambda _, args, out: self._stream("norm", args, out))
        self._after(layer.post_attention_layernorm, lambda _, args, out: self._stream("ffn_norm", args, out))
        for name, module in (("attention", layer.self_attn), ("ffn", layer.mlp)):
            # Its input is copied before the call: the experts write their output over it.
            self._before(module, lambda _, args, kwargs, name=name: self._keep(
                f"{name}.input", kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            ), kwargs=True)  # fmt: skip
            self._after(module, lambda _, args, out, name=name: self._keep(f"{name}.output", out))
        if hasattr(layer.self_attn, "v_experts"):
            needed += ["values.output", *(f"value_router.{what}" for what in ("logits", "weights", "ids"))]
            self._after(layer.self_attn.v_experts, lambda _, args, out: self._keep("values.output", out))
        if hasattr(layer.mlp, "experts"):
            needed += [f"router.{what}" for what in ("logits", "weights", "ids")]
            self._after(layer.mlp.gate, lambda _, args, out: self._keep("router.logits", out))
            self._before(layer.mlp.experts, self._routed, kwargs=True)
        self._after(layer, leaves)

    def _before(self, module, hook, kwargs: bool = False) -> None:
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=kwargs))

    def _after(self, module, hook) -> None:
        self.handles.append(module.register_forward_hook(hook))

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self.kept[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _stream(self, name: str, args, output) -> None:
        """A norm's input: the residual stream, which a fused norm adds up and returns beside its output."""
        both = isinstance(output, tuple)
        self._keep(f"{name}.input", output[1] if both else args[0])
        if name == "final":
            self._keep("final.output", output[0] if both else output)

    def _routed(self, _module, args, kwargs) -> None:
        chosen = kwargs["topk_output"] if "topk_output" in kwargs else args[1]
        self._keep("router.weights", chosen.topk_weights)
        self._keep("router.ids", chosen.topk_ids)

    def _topk(self, router_logits, *args, **kwargs):
        # Copied before the call, as every input is.
        self._keep("value_router.logits", router_logits)
        weights, ids = self._stock_topk(router_logits, *args, **kwargs)
        self._keep("value_router.weights", weights)
        self._keep("value_router.ids", ids)
        return weights, ids

    def _write(self, name: str, needed) -> None:
        """Write what was kept since the last call. The first failure stays, whatever it is: the server goes on."""
        kept, self.kept = self.kept, {}
        try:
            if missing := [key for key in needed if key not in kept]:
                raise ValueError(f"{name} was not recorded whole: nothing of {', '.join(missing)} was seen")
            save_file(kept, self.new / f"{name}.safetensors")
        except Exception as error:
            self.failure = self.failure or str(error)


def _definition(model: torch.nn.Module) -> str:
    """Name of the Python module in which the class of the attention is defined."""
    return type(model.model.layers[0].self_attn).__module__
