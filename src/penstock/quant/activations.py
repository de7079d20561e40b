"""Activations that a scheme quantizes before a product. The scheme's definition of the product is: these numbers times the
decoded matrix. Kernels that multiply codes give the same up to the order of sums."""

from typing import Literal

import torch

from penstock.ops.bits import blocks

Activation = Literal["none", "token", "group", "tensor"]
"""Not quantized; a scale for each token; for each 128 columns of one; one scale that the checkpoint gives."""

FP8_MAX = 448.0
GROUP = 128


def fp8(x: torch.Tensor, activation: Activation, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] rounded to float8_e4m3fn times a scale, in x's dtype."""
    if activation == "none":
        return x
    if activation == "group":
        return _fp8(blocks(x, GROUP), None).flatten(-2)[..., :x.shape[-1]].contiguous()
    return _fp8(x, scale)


def _fp8(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    codes = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def int8(x: torch.Tensor, activation: Activation, scale: torch.Tensor | None) -> torch.Tensor:
    """x [T, k] rounded to int8 times a scale, in x's dtype."""
    if activation == "none":
        return x
    if scale is None:
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (torch.round(x.float() / scale).clamp(-128, 127) * scale).to(x.dtype)
