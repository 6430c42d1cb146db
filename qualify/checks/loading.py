"""Compares a loaded K2-Horizon model with the checkpoint it was loaded from, parameter by parameter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from qualify.models import k2_horizon_sglang
from qualify.models.k2_horizon import BLOCK

#: What the tests pass as ``--json-model-override-args``: SGLang's public cookbook declares 2 for the 36B.
PROVENANCE = {"xllm_source_router_gemm_partitions": 2}


def read_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint directory with the safetensors library: name -> CPU tensor."""
    source = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in source, f"{name} is in two shards"
                source[name] = file.get_tensor(name)
    return source


def faults(model: torch.nn.Module, directory: Path) -> list[str]:
    """Return one line per difference between the model's parameters and the checkpoint; empty when equal.

    Every runtime parameter must be covered by checkpoint tensors completely, every checkpoint tensor must be
    in a parameter once, dtypes are those of the checkpoint (router biases and BF16 scales widened to float32), FP8
    codes and scales are byte-equal, and the dequantised weights are equal to the dequantised source.
    """
    config = json.loads((directory / "config.json").read_text())
    source = read_checkpoint(directory)
    expected = k2_horizon_sglang.parameters(config)
    loaded = dict(model.named_parameters(remove_duplicate=False))
    found = [f"{name}: the model has no such parameter" for name in expected.keys() - loaded.keys()]
    found += [f"{name}: a parameter without a source" for name in loaded.keys() - expected.keys()]
    unused = set(source)
    for name in expected.keys() & loaded.keys():
        covered = 0
        for piece in expected[name]:
            if piece.source not in unused:
                found.append(f"{piece.source}: not in the checkpoint, or placed twice")
                continue
            unused.remove(piece.source)
            covered += source[piece.source].numel()
            found += _piece_faults(name, loaded, piece, source)
        if covered != loaded[name].numel():
            found.append(f"{name}: {covered:,} of {loaded[name].numel():,} elements have a source")
    found += [f"{name}: in the checkpoint, but in no parameter" for name in unused]
    return sorted(found)


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 ``(out, in)`` times its FP32 scale ``(ceil(out/128), ceil(in/128))`` -> float32 ``(out, in)``."""
    rows, columns = codes.shape
    spread = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float() * spread


def _piece_faults(name, loaded, piece, source) -> list[str]:
    tensor = source[piece.source]
    held = _window(loaded[name], piece, tensor.shape[0])
    if held.shape != tensor.shape:
        return [f"{piece.source}: has shape {tuple(tensor.shape)}, {name} keeps {tuple(held.shape)}"]
    wanted = tensor.float() if k2_horizon_sglang.WIDENED.fullmatch(name) else tensor
    if held.dtype != wanted.dtype:
        return [f"{piece.source}: is {wanted.dtype}, {name} keeps {held.dtype}"]
    if not torch.equal(held.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)):
        return [f"{piece.source}: differs in {name}"]
    if tensor.dtype == torch.float8_e4m3fn:
        # The scale is looked up through the runtime parameter, at the block rows that belong to this weight.
        suffix = "_scale_inv" if f"{piece.source}_scale_inv" in source else "_scale"
        scale = source[piece.source + suffix]
        block_piece = k2_horizon_sglang.Piece(piece.source, piece.row // BLOCK, piece.expert)
        held_scale = _window(loaded[name + suffix], block_piece, scale.shape[0])
        if not torch.equal(dequantise(held, held_scale), dequantise(tensor, scale)):
            return [f"{piece.source}: dequantises to other values in {name}"]
    return []


def _window(parameter: torch.Tensor, piece, rows: int) -> torch.Tensor:
    stacked = parameter.data if piece.expert is None else parameter.data[piece.expert]
    return stacked[piece.row : piece.row + rows]
