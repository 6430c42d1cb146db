"""MoE kernels for E2M1 weights with E4M3 scales per 32 (``e2m1-k32``): W4A16 and FP8 activations."""

from .layout import E2M1Experts, dequantize
from .moe import fused_experts

__all__ = ["E2M1Experts", "dequantize", "fused_experts"]
