"""The E2M1-K32 tensor format and the K orders in which the kernels read activations.

Format (ModelOpt ``W4A16_NVFP4`` with ``group_size: 32``), per projection ``[N, K]``, K % 32 == 0:

    weight          uint8          [N, K/2]   low nibble = even k, high nibble = odd k
    weight_scale    float8_e4m3fn  [N, K/32]  linear, one scale per 32 consecutive k
    weight_scale_2  float32        []         multiplier (not an inverse)

value = E2M1[code] * float(weight_scale) * weight_scale_2, codes 0..7 = 0 .5 1 1.5 2 3 4 6, bit 3 = sign.
"""

from dataclasses import dataclass

import torch

GROUP = 32
K_ALIGN = 128
MAX_SCALE_CODE = 0x7E  # 448; above it E4M3 has NaN (0x7F) and the negative numbers
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def w4a16_element(position: int) -> int:
    """Element of a block of 128 that the BF16 kernel expects at ``position``.

    A thread ``t`` of a quad owns one 16-byte scale group; word ``w`` of it holds codes n0..n7, unpacked as
    the pairs (n0,n4) (n1,n5) (n2,n6) (n3,n7).  Position bits, low to high: pair half, t (2), pair number (2), w (2).
    """
    half, t, pair, w = position & 1, position >> 1 & 3, position >> 3 & 3, position >> 5 & 3
    return 32 * t + 8 * w + pair + 4 * half


W4A16_ORDER = tuple(w4a16_element(p) for p in range(128))
DECODE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
FP8_ORDER = tuple(range(0, 32, 2)) + tuple(range(1, 32, 2))


def reorder(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """``x`` [..., K] with every block of ``len(order)`` along K stored in ``order`` (reference, any device)."""
    index = torch.tensor(order, device=x.device)
    raw = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    out = raw.unflatten(-1, (-1, len(order)))[..., index].flatten(-2).contiguous()
    return out.view(x.dtype)


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Exact weights [..., N, K] in ``dtype`` from uint8 [..., N, K/2], E4M3 [..., N, K/32], float32 [...]."""
    table = torch.tensor(E2M1_VALUES, dtype=dtype, device=weight.device)
    codes = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
    values = table[codes.long()]
    scales = scale.view(torch.float8_e4m3fn).to(dtype).repeat_interleave(GROUP, -1)
    return values * scales * global_scale.to(dtype)[..., None, None]


@dataclass(frozen=True)
class E2M1Experts:
    """Weights of one MoE layer, the checkpoint's own bytes (nothing repacked).

    w13        uint8 [E, 2*I, H/2]    gate rows, then up rows
    w13_scale  float8_e4m3fn or uint8 [E, 2*I, H/32]
    w13_global float32 [E]            gate and up share it
    w2         uint8 [E, H, I/2]
    w2_scale   float8_e4m3fn or uint8 [E, H, I/32]
    w2_global  float32 [E]

    global_experts: experts of the layer over all ranks of expert parallelism (None: all of them are here). Tiles are
    picked by the mean load of an expert, and a batch's routes go to all of them.

    Raises ValueError, naming the tensor, if a dtype, shape, stride or alignment does not fit, or a scale code is
    not one of 0x00 to 0x7e: the kernels read the sign and NaN as part of another number.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w13_global: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w2_global: torch.Tensor
    global_experts: int | None = None

    def __post_init__(self):
        if self.w13.dim() != 3 or self.w2.dim() != 3:
            raise ValueError("w13 and w2 must have three dimensions [experts, rows, packed columns].")
        e, n13, h = self.w13.shape[0], self.w13.shape[1], self.w13.shape[2] * 2
        i = n13 // 2
        if not e or not h or not i or n13 % 2 or h % K_ALIGN or i % K_ALIGN:
            raise ValueError(
                f"w13 {tuple(self.w13.shape)}: there must be an expert, and hidden size {h} and intermediate size "
                f"{n13 / 2:g} must be multiples of {K_ALIGN}."
            )
        if self.global_experts is not None and self.global_experts < e:
            raise ValueError(f"global_experts is {self.global_experts}, and w13 alone holds {e}.")
        expected = {
            "w13": (e, 2 * i, h // 2),
            "w13_scale": (e, 2 * i, h // GROUP),
            "w13_global": (e,),
            "w2": (e, h, i // 2),
            "w2_scale": (e, h, i // GROUP),
            "w2_global": (e,),
        }
        for name, shape in expected.items():
            t = getattr(self, name)
            if tuple(t.shape) != shape:
                raise ValueError(f"{name} is {tuple(t.shape)}, expected {shape} (one scale per {GROUP} columns).")
            kind = (
                (torch.float32,)
                if name.endswith("global")
                else (torch.uint8, torch.float8_e4m3fn)
                if name.endswith("scale")
                else (torch.uint8,)
            )
            if t.dtype not in kind:
                raise ValueError(f"{name} is {t.dtype}, expected {' or '.join(str(k) for k in kind)}.")
            if not t.is_contiguous() or t.data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and 16-byte aligned.")
            if t.device != self.w13.device:
                raise ValueError(f"{name} is on {t.device}, w13 on {self.w13.device}.")
            if name.endswith("scale") and t.view(torch.uint8).max() > MAX_SCALE_CODE:
                raise ValueError(f"{name} has a negative or NaN E4M3 scale: codes must be 0x00 to {MAX_SCALE_CODE:#x}.")

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.w2.shape[2] * 2
