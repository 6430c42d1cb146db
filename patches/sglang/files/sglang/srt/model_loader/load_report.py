"""What one rank holds after a strict load, seen from inside the engine, as a file for whoever qualifies the image.

``HORIZON_LOAD_REPORT=FOLDER`` makes every rank write ``FOLDER/rank-N.json`` when its ledger seals the model: after
post-processing, before it may serve. Without the variable nothing happens.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from sglang.srt.model_loader.checkpoint_ledger import Ledger, bad_values

VARIABLE = "HORIZON_LOAD_REPORT"
SCHEMA = "horizon-images/load-report/v1"


def write(ledger: Ledger, model: torch.nn.Module) -> Path:
    """Write the report of this rank and return its path. Raises OSError where it cannot be written.

    Values are counted anew, on the parameters as they are now: what the ledger found at the end of the stream says
    nothing of what post-processing made of them.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    # Before the count below, which takes time and memory of its own. From the model's construction on: reading,
    # checking, copying, post-processing.
    seconds = round(time.monotonic() - ledger.began, 3)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    parameters = [
        {
            "name": name,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "shape": list(parameter.shape),
            "scale": name in ledger.scales,
            "invalid": int(bad_values(parameter.data, name in ledger.scales)),
        }
        for name, parameter in model.named_parameters()
    ]
    report = {
        "schema": SCHEMA,
        "format": ledger.format.name,
        "rank": rank,
        "ranks": torch.distributed.get_world_size() if distributed else 1,
        # Of the tensors that the format promises this rank: how many came and were copied.
        "tensors": {"expected": ledger.expected, "consumed": ledger.consumed},
        "parameters": parameters,
        "seconds": seconds,
        "peak_gpu_bytes": peak,
    }
    folder = Path(os.environ[VARIABLE])
    path, new = folder / f"rank-{rank}.json", folder / f".rank-{rank}.{os.getpid()}"
    new.write_text(json.dumps(report) + "\n")
    return new.replace(path)
