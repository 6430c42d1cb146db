"""Writes the tiny checkpoints of ``tests.engine.ownership`` and runs all of its cases in one process."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from qualify.models import DENSE_CONFIG, MOVA_CONFIG, k2_horizon
from qualify.synth import layout
from qualify.synth.command import synthesise
from tests.engine.ownership import TIMEOUT

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path) -> dict:
    """Case name -> what every rank reported. One process imports the engine and forks the ranks of all cases."""
    write_checkpoints(folder)
    out = folder / "results.json"
    command = [sys.executable, "-B", "-m", "tests.engine.ownership", "--checkpoints", str(folder), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT * 5, check=False)
    assert out.is_file(), done.stderr[-4000:]
    return json.loads(out.read_text())


def write_checkpoints(folder: Path) -> None:
    """The three tiny checkpoints, and a dense one with fewer KV heads than ranks and an odd vocabulary."""
    for name, source in (("dense", DENSE_CONFIG), ("moe", "375b-a23b"), ("mova", MOVA_CONFIG)):
        synthesise(source, folder / name, tiny=True)
    config = layout.derive_config(json.loads(DENSE_CONFIG.read_text()), tiny=True, layers=None)
    config |= {"num_key_value_heads": 2, "vocab_size": 1000}
    write_random(folder / "kv2", config)


def write_random(directory: Path, config: dict) -> None:
    """A checkpoint of random values, every scale positive and every code finite."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtypes = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    tensors = {}
    for name, tensor in k2_horizon.tensors(config).items():
        values = torch.rand(tensor.shape, generator=generator) + 0.01
        tensors[name] = values.to(dtypes[tensor.dtype])
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
