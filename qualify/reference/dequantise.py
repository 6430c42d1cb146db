"""Block FP8: weights back to float32, activations to E4M3 and back.

Source of the format: E4M3 is float8_e4m3fn (largest value 448, no infinity). A weight's scale covers 128 rows and 128
columns, the last ones fewer; it is the multiplier, also where the checkpoint calls it ``weight_scale_inv``. Activations
are quantised at run time per token and 128 columns with scale = max(abs) / 448.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from qualify.errors import Rejected

BLOCK = 128
E4M3_MAX = 448.0


def weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return float32 ``(out, in)`` of E4M3 ``codes`` (float8_e4m3fn, or uint8 with the same bits) and their scale.

    ``scale`` is BF16 or float32 ``(ceil(out / 128), ceil(in / 128))``; any other shape raises ``Rejected``.
    """
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    rows, columns = codes.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(scale.shape) != blocks:
        raise Rejected(f"a block-FP8 weight {rows}x{columns} needs a scale {blocks}, not {tuple(scale.shape)}")
    spread = scale.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return codes.float().mul_(spread)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations float32 ``(tokens, columns)``: float8_e4m3fn codes of that shape, float32 scales.

    Scales are ``(tokens, ceil(columns / 128))``; a group of zeros has scale 0 and codes 0.
    """
    tokens, columns = x.shape
    groups = pad(x, (0, -columns % BLOCK)).view(tokens, -1, BLOCK)
    scales = groups.abs().amax(-1) / E4M3_MAX
    scaled = torch.where(scales[..., None] > 0, groups / scales[..., None], 0)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(tokens, -1)[:, :columns], scales


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What an FP8 matrix product sees of ``x`` ``(tokens, columns)``: quantised and back, float32."""
    codes, scales = quantise(x)
    return codes.float() * scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
