"""Activations of the feed-forward layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from penstock.ops.table import register

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x)}
"""By Penstock's names. gelu is exact; gelu_tanh is the approximation of Hendrycks and Gimpel 2016."""


@register("gated", "reference", rank=0)
def gated(x: torch.Tensor, kind: str) -> torch.Tensor:
    """kind(x[:, :F]) * x[:, F:] for x [T, 2F]: SwiGLU, GeGLU (Shazeer 2020). Returns [T, F]."""
    half = x.shape[-1] // 2
    return ACTIVATIONS[kind](x[..., :half]) * x[..., half:]


@register("activation", "reference", rank=0)
def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """kind(x) for x [T, F]."""
    return ACTIVATIONS[kind](x)
