"""Norms on NVIDIA GPUs by one kernel, which reads and writes each row once. This module chooses block sizes and grids."""

import math

import torch

from penstock.ops import gpu
from penstock.ops.coded_forms import attached
from penstock.ops.linear import Weight
from penstock.ops.table import register

_VECTOR = 16
"""Bytes of a row per thread, however many rows there are: how a row is divided over threads decides the order of its sum, and
so its bits. 32 bytes took the same time with 8,192 rows on an H200."""


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
            offset: float, centred: bool, reader: Weight | None = None) -> torch.Tensor:
    """The norm of x [rows, width] + residual, contiguous; residual then holds the sum."""
    from penstock.ops.norm_kernel import normalise  # Triton: heavy, and not everywhere

    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    block = gpu.covering(width)
    tall = max(1, 1024 // block)  # narrow rows share a program
    warps = min(16, max(1, tall * block * x.element_size() // (_VECTOR * 32)))
    stride = x.stride(0) if residual is None else residual.stride(0)
    align = math.gcd(16, x.stride(0), stride)
    linked = gpu.linked(x.device)
    codes, scales, fixed, span, most = attached(out, reader)
    normalise[(-(-rows // tall),)](
        x, residual, weight, bias, out, codes, scales, fixed, rows, x.stride(0) // align, stride // align, float(eps),
        float(offset), width=width, block=block, tall=tall, align=align, centred=centred, span=min(span, block), most=most,
        linked=linked, num_warps=warps, launch_pdl=linked)
    return out


@register("rms_norm", "triton", rank=10, supports=gpu.supports)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0,
             reader: Weight | None = None) -> torch.Tensor:
    out = _launch(x.reshape(-1, x.shape[-1]), None, weight, None, eps, offset, False, reader)
    return out if x.dim() == 2 else out.view(x.shape)


@register("add_rms_norm", "triton", rank=10, supports=gpu.supports)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float = 0.0, reader: Weight | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _launch(x, residual, weight, None, eps, offset, False, reader), residual


@register("layer_norm", "triton", rank=10, supports=gpu.supports)
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return _launch(x, None, weight, bias, eps, 0.0, True)
