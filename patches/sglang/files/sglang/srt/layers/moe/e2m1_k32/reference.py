"""Float64 references of both paths in plain PyTorch, for tests and the benchmark.  Independent of the kernels."""

from collections.abc import Callable

import torch

from .layout import GROUP, E2M1Experts, dequantize


def random_experts(
    num_experts: int,
    hidden: int,
    intermediate: int,
    device: torch.device | str,
    generator: torch.Generator,
    zero_scales: float = 0.0,
) -> E2M1Experts:
    """Random bytes in the checkpoint's format; a share ``zero_scales`` of the group scales is zero.

    All 16 codes, the E4M3 scales of 2**-5 .. 30 (bytes 0x10 .. 0x5f), and global scales that give weights
    of a trained model's size.  Drawn on the CPU when ``generator`` is a CPU generator.
    """

    def bytes_of(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=generator.device, generator=generator)

    def scale(*shape: int) -> torch.Tensor:
        s = bytes_of(*shape, low=0x10, high=0x60)
        if zero_scales:
            s[torch.rand(shape, device=generator.device, generator=generator) < zero_scales] = 0
        return s.view(torch.float8_e4m3fn)

    def global_scale() -> torch.Tensor:
        return (torch.rand(num_experts, device=generator.device, generator=generator) + 0.5) * 2e-3

    e, h, i = num_experts, hidden, intermediate
    tensors = (
        bytes_of(e, 2 * i, h // 2, low=0, high=256),
        scale(e, 2 * i, h // GROUP),
        global_scale(),
        bytes_of(e, h, i // 2, low=0, high=256),
        scale(e, h, i // GROUP),
        global_scale(),
    )
    return E2M1Experts(*(t.to(device) for t in tensors))


def nearest_bf16(t: torch.Tensor) -> torch.Tensor:
    """``t`` rounded to BF16, in float64."""
    return t.to(torch.bfloat16).double()


def emulate_fp8(x: torch.Tensor) -> torch.Tensor:
    """``x`` [T, K] quantised to E4M3 with scale amax / 448 per row (1 for a zero row, NaN if an element is) and back,
    in float64."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / 448.0)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


def moe_reference(
    x: torch.Tensor,
    experts: E2M1Experts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    fp8: bool = False,
    rounded: Callable[[torch.Tensor], torch.Tensor] = nearest_bf16,
) -> torch.Tensor:
    """Float64 [T, H] with exact weights.  ``rounded`` is applied where the kernels round to BF16 (pass the
    identity for no rounding); ``fp8`` quantises both GEMMs' activations as the FP8 path does."""
    act = emulate_fp8 if fp8 else torch.Tensor.double
    tokens = x.shape[0]
    out = torch.zeros(tokens, experts.hidden_size, dtype=torch.float64, device=x.device)
    xa = act(x) if tokens else x.double()
    for e in range(experts.num_experts):
        token, slot = (topk_ids == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        w13 = dequantize(experts.w13[e], experts.w13_scale[e], experts.w13_global[e])
        w2 = dequantize(experts.w2[e], experts.w2_scale[e], experts.w2_global[e])
        gate, up = (xa[token] @ w13.T).chunk(2, -1)
        h = rounded(torch.nn.functional.silu(gate) * up)
        y = act(h) @ w2.T * topk_weights[token, slot].double()[:, None]
        out.index_add_(0, token, rounded(y))
    return rounded(out)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """||result - reference|| / ||reference|| (0 if both are zero); NaN stays NaN."""
    norm = reference.double().norm()
    diff = (result.double() - reference.double()).norm()
    return float(diff / norm) if norm > 0 else float(diff)
