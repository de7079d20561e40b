"""Norms, each in two forms: of a tensor, and of the stream after adding what a branch gave."""

from __future__ import annotations

import torch

from penstock.layers.linear import Values
from penstock.layers.spec import LayerNormSpec, NormSpec, RMSNormSpec
from penstock.ops.registry import Kernels


class RMSNorm:
    def __init__(self, spec: RMSNormSpec, path: str, values: Values, kernels: Kernels) -> None:
        self.weight = values.tensor(f"{path}.weight")
        self.eps = spec.eps
        self.offset = spec.offset
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.eps, self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `residual` may be overwritten."""
        return self._add_norm(x, residual, self.weight, self.eps, self.offset)


class LayerNorm:
    def __init__(self, spec: LayerNormSpec, path: str, values: Values, kernels: Kernels) -> None:
        self.weight = values.tensor(f"{path}.weight")
        self.bias = values.tensor(f"{path}.bias")
        self.eps = spec.eps
        self._norm = kernels.layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        total = x + residual
        return self(total), total


Norm = RMSNorm | LayerNorm


def build_norm(spec: NormSpec, path: str, values: Values, kernels: Kernels) -> Norm:
    """The layer of a spec."""
    if isinstance(spec, RMSNormSpec):
        return RMSNorm(spec, path, values, kernels)
    return LayerNorm(spec, path, values, kernels)
