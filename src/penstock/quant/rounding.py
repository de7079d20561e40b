"""GPTQ (Frantar et al. 2022): columns are rounded one after another, and later ones are changed to make up for each error."""

import torch

from penstock.ops.bits import pack, spread
from penstock.quant.integer import Grouped, Int8
from penstock.quant.scheme import Scheme

_BLOCK = 128
"""Columns whose corrections of later columns are added in one product."""


def serves(scheme: Scheme) -> bool:
    """Whether the scheme's codes are integers with scales that do not depend on the order of rounding."""
    return isinstance(scheme, Int8) or (isinstance(scheme, Grouped) and not scheme.ordered)


def gptq(scheme: Scheme, matrix: torch.Tensor, moments: torch.Tensor, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """The scheme's parts of a matrix [n, k] whose products with inputs x change least; moments [k, k]: the sum of x x^T.

    Columns come by falling moments, as act-order does, but groups and their scales are those of the original order, so that the
    format needs no order. `damping` is a share of the mean moment."""
    n, k = matrix.shape
    assert isinstance(scheme, Int8 | Grouped)
    parts = scheme.encode(matrix)
    scale, zero, low, high = _grid(scheme, parts, n, k)
    moments = moments.double().clone()
    weight = matrix.double().clone()
    dead = moments.diagonal() == 0
    moments.diagonal()[dead] = 1.0
    weight[:, dead] = 0.0
    moments.diagonal().add_(damping * moments.diagonal().mean())
    order = moments.diagonal().argsort(descending=True)
    weight, scale, zero, moments = weight[:, order], scale[:, order], zero[:, order], moments[order][:, order]
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    codes = torch.empty_like(weight)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        errors = torch.empty(n, end - begin, dtype=weight.dtype, device=weight.device)
        for at in range(begin, end):
            code = (torch.round(weight[:, at] / scale[:, at]) + zero[:, at]).clamp(low, high)
            error = (weight[:, at] - (code - zero[:, at]) * scale[:, at]) / inverse[at, at]
            weight[:, at:end] -= error[:, None] * inverse[at, at:end]
            codes[:, at], errors[:, at - begin] = code, error
        weight[:, end:] -= errors @ inverse[begin:end, end:]
    found = torch.empty_like(codes)
    found[:, order] = codes
    if isinstance(scheme, Int8):
        return {**parts, "weight": found.to(torch.int8)}
    return {**parts, "weight": pack(found.to(torch.uint8), scheme.bits)}


def _grid(scheme: Int8 | Grouped, parts: dict[str, torch.Tensor], n: int, k: int
          ) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Scale and zero of each element [n, k], the smallest and the largest code."""
    if isinstance(scheme, Int8):
        scale = parts["scale"].double()[:, None].expand(n, k)
        return scale, torch.zeros_like(scale), -127.0, 127.0
    size, middle = scheme.group or k, 1 << scheme.bits - 1
    scale = spread(parts["scale"].double(), size, k)
    zero = spread(parts["zero"].double(), size, k) if scheme.zeros else torch.full_like(scale, middle)
    return scale, zero, 0.0, 2.0 * middle - 1
