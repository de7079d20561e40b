"""Normalisations over the last dimension. Statistics are float32 whatever the input."""

import torch
import torch.nn.functional as F

from penstock.ops.linear import Weight
from penstock.ops.table import register


@register("rms_norm", "reference", rank=0)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0,
             reader: Weight | None = None) -> torch.Tensor:  # noqa: ARG001
    """x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension (Zhang and Sennrich 2019).

    x is [..., W] with its last dimension contiguous and otherwise any strides; weight [W]. offset 1 is Gemma's. The product
    with the weight is done in float32 and rounded once. Returns x's dtype and shape, contiguous. `reader`: the matrix that the
    result is multiplied with first, for implementations that round activations for it on the way."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype).contiguous()


@register("add_rms_norm", "reference", rank=0)
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float = 0.0, reader: Weight | None = None) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG001
    """(rms_norm(x + residual), x + residual). Both [T, W]; the sum may be written into `residual`. Where
    `ExpertsOps.leaves_parts`, x may be [T, P, W], of which it takes the sum over P, rounded to x's dtype."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


@register("layer_norm", "reference", rank=0)
def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm (Ba et al. 2016) of [T, W]."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
