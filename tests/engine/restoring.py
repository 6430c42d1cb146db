"""Loads a checkpoint directory through ``--load-format presharded``, and tells whether it came from a copy."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from qualify import engine_cpu


def load_presharded(directory: Path, copies: Path | str, *, overrides: dict | None = None, **extra):
    """Return (model, whether it was restored) as the engine loads ``directory`` with its copies in ``copies``.

    ``extra`` goes into ``--model-loader-extra-config``. Errors are the engine's own.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import get_model

    read = []
    with get_model().override(load_format="presharded"), counted(read):
        model_config = engine_cpu._model_config(directory, overrides or {}, "bfloat16")
        config = LoadConfig(
            load_format="presharded", model_loader_extra_config={"presharded_path": str(copies)} | extra
        )
        loader = get_model_loader(config, model_config)
        model = loader.load_model(model_config=model_config, device_config=DeviceConfig("cpu"))
    return model, not read


@contextmanager
def counted(read: list):
    """Append to ``read`` whenever a loader opens the tensors of a checkpoint."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    original = DefaultModelLoader._get_weights_iterator

    def counting(self, source, *args, **kwargs):
        read.append(source)
        return original(self, source, *args, **kwargs)

    DefaultModelLoader._get_weights_iterator = counting
    try:
        yield
    finally:
        DefaultModelLoader._get_weights_iterator = original


def flip(path: Path) -> None:
    """Change the last byte of a file, and nothing else of it."""
    with path.open("r+b") as file:
        last = file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(last)
        file.write(bytes([byte ^ 1]))


def updater(model, path: str = "served"):
    """The engine's weight updater of a model on the CPU, which was loaded from ``path``."""
    import torch
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    config = SimpleNamespace(
        model_path=path, dtype=torch.bfloat16, revision=None, hf_config=model.config, quantization=None
    )
    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={"custom": None},
        get_model=lambda: model,
        update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )
