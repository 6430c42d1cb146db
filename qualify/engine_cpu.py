"""Runs SGLang's own model construction and loading without a GPU: one rank, gloo on the loopback interface.

The compute capability is faked, so that the engine selects the quantisation methods of that GPU; nothing is
ever launched on it. Needs the engine's Python environment. Call :func:`start` before anything else imports
``sglang``; it works once per process, and all functions here share that one world.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

#: Compute capability that the engine is told: H200.
CAPABILITY = (9, 0)

_started = False


def start(capability: tuple[int, int] = CAPABILITY) -> None:
    """Initialise the engine's process-wide state for one CPU rank; a second call does nothing."""
    global _started
    if _started:
        return
    prepare_process(capability)
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    reset_context()
    publish(ServerArgs(model_path="none"), role="test", ranks=SpawnRanks(world_rank=0))
    get_parallel().override_permanently(world_group=parallel_state._WORLD)
    parallel_state.initialize_model_parallel(backend="gloo")
    initialize_moe_config()
    _started = True


def prepare_process(capability: tuple[int, int] = CAPABILITY) -> None:
    """What must be done before the engine is imported, in a process that starts no world of its own."""
    prepare_environment()
    import torch

    torch.set_num_threads(1)
    torch.cuda.get_device_capability = lambda *args, **kwargs: capability
    _stub_vllm()


def load_model(directory: Path, *, overrides: dict[str, Any], dtype: str = "bfloat16"):
    """Load a checkpoint directory through ``DefaultModelLoader`` and return the model (``torch.nn.Module``).

    ``overrides`` is what ``--json-model-override-args`` would carry. Errors are the engine's own.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return DefaultModelLoader(LoadConfig()).load_model(
        model_config=_model_config(directory, overrides, dtype), device_config=DeviceConfig("cpu")
    )


def empty_model(directory: Path, *, overrides: dict[str, Any], dtype: str = "bfloat16"):
    """Construct the model of a checkpoint directory on the CPU, as the loader does, and load nothing into it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return DefaultModelLoader(LoadConfig()).initialize_model_for_startup(
        model_config=_model_config(directory, overrides, dtype), device_config=DeviceConfig("cpu")
    )


def build_model(
    config: dict[str, Any],
    *,
    overrides: dict[str, Any],
    dtype: str = "bfloat16",
    quantization: str | None = None,
):
    """Construct the model of a ``config.json`` on the meta device, as the loader does before it reads a
    weight.

    ``quantization`` is the engine's ``--quantization``. Errors are the engine's own.
    """
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        model_config = _model_config(Path(directory), overrides, dtype, quantization)
        load_config = LoadConfig()
        quant_config = loader._get_quantization_config(model_config, load_config)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            return loader._initialize_model(model_config, load_config, quant_config)


def _model_config(directory: Path, overrides: dict[str, Any], dtype: str, quantization: str | None = None):
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig(
        str(directory), dtype=dtype, quantization=quantization, model_override_args=json.dumps(overrides)
    )


def prepare_environment() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # Without a network the host name does not resolve, by which gloo would otherwise pick its interface.
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
    )
    # Libraries create caches below the home directory when they are imported; a container's user may have
    # none that it can write to.
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")
        atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


def _stub_vllm() -> None:
    """Provide the one vLLM symbol that the engine imports for rotary embeddings where it sees no GPU."""
    package = types.ModuleType("vllm")
    package._custom_ops = types.ModuleType("vllm._custom_ops")
    package._custom_ops.rotary_embedding = None  # never called: nothing runs forward here
    sys.modules.setdefault("vllm", package)
    sys.modules.setdefault("vllm._custom_ops", package._custom_ops)
