"""A product with one packed weight, several of a checkpoint's matrices stacked into it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.layers.spec import LinearSpec
from penstock.ops.linear import Weight
from penstock.ops.registry import Kernels


class Values(dict[str, Weight | torch.Tensor]):
    """Loaded parameters by path: packed matrices and plain tensors."""

    def matrix(self, path: str) -> Weight:
        found = self[path]
        assert isinstance(found, Weight), path
        return found

    def tensor(self, path: str) -> torch.Tensor:
        found = self[path]
        assert isinstance(found, torch.Tensor), path
        return found


class Linear:
    """x [T, K] -> [T, N] in x's dtype."""

    def __init__(self, spec: LinearSpec, path: str, values: Values, kernels: Kernels) -> None:
        self.weight = values.matrix(f"{path}.weight")
        self.bias = values.tensor(f"{path}.bias") if spec.bias else None
        self._apply = kernels.linear.apply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x, self.weight, self.bias)


Product = tuple[Linear, Callable[[torch.Tensor], torch.Tensor]]
"""A layer, and what does its product, perhaps with more: x [T, K] -> [T, any]."""
