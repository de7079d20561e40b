"""Activations on NVIDIA GPUs where no GEMM epilogue computes them: each element is read and written once."""

import math

import torch

from penstock.ops import gpu
from penstock.ops.coded_forms import attached
from penstock.ops.linear import Weight
from penstock.ops.table import register

_BLOCK = 1024


def _launch(x: torch.Tensor, kind: str, gated: bool, reader: Weight | None = None) -> torch.Tensor:
    from penstock.ops.activation_kernel import apply  # Triton: heavy, and not everywhere

    flat = x.reshape(-1, x.shape[-1])
    rows, width = flat.shape[0], flat.shape[1] // 2 if gated else flat.shape[1]
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    align = math.gcd(16, flat.stride(0))
    codes, scales, fixed, span, most = attached(out, reader)
    block = max(_BLOCK, span)
    pieces = -(-width // block)
    # With many programs, those that wait for the previous kernel would take the place of working ones.
    linked = gpu.linked(x.device) and rows * pieces <= 8 * gpu.multiprocessors(x.device)
    apply[(rows, pieces)](flat, out, codes, scales, fixed, flat.stride(0) // align, rows, width=width, block=block, align=align,
                          kind=kind, gated=gated, span=span, most=most, linked=linked,
                          num_warps=min(16, 4 * block // _BLOCK), launch_pdl=linked)
    return out


@register("gated", "triton", rank=10, supports=gpu.supports)
def gated(x: torch.Tensor, kind: str, reader: Weight | None = None) -> torch.Tensor:
    """`reader`: the matrix that the result [rows, k] is multiplied with."""
    return _launch(x, kind, True, reader)


@register("activation", "triton", rank=10, supports=gpu.supports)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return _launch(x, kind, False)
