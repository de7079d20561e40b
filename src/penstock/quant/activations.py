"""Activations that a scheme quantizes before a product. The scheme's definition of the product is: these numbers times the
decoded matrix. Kernels that multiply codes give the same up to the order of sums."""

from typing import Literal

import torch

from penstock.ops.bits import blocks

Activation = Literal["none", "token", "group", "tensor"]
"""Not quantized; a scale for each token; for each 128 columns of one; one scale that the checkpoint gives."""

FP8_MAX = 448.0
GROUP = 128


def rounded(x: torch.Tensor, activation: Activation, scale: torch.Tensor | None, dtype: torch.dtype,
            peak: float = 0.0) -> torch.Tensor:
    """x [T, k] rounded to codes of `dtype` (FP8 or int8) times a scale, in x's dtype. `peak`: of codes, if not usual."""
    if activation == "none":
        return x
    groups, least, most = blocks(x, GROUP if activation == "group" else x.shape[-1]).float(), -FP8_MAX, FP8_MAX
    if dtype is torch.int8:
        least, most = -128.0, 127.0
    if scale is None:
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (peak or most)
    codes = groups / scale
    codes = (torch.round(codes) if dtype is torch.int8 else codes).clamp(least, most).to(dtype)
    return (codes.float() * scale).to(x.dtype).flatten(-2)[..., :x.shape[-1]].contiguous()
