"""The feed-forward layer, gated or plain."""

from __future__ import annotations

import torch

from penstock.layers.linear import Linear, Product, Values
from penstock.layers.spec import MLPSpec
from penstock.layers.step import Step
from penstock.ops.registry import Kernels


class MLP:
    """x [T, W] -> [T, W]; looks at no other position."""

    def __init__(self, spec: MLPSpec, path: str, values: Values, kernels: Kernels) -> None:
        self.up = Linear(spec.input, f"{path}.gate_up" if spec.gated else f"{path}.up", values, kernels)
        self.down = Linear(spec.output, f"{path}.down", values, kernels)
        self._kind = spec.activation
        self._gated = spec.gated
        self._kernels = kernels

    @property
    def products(self) -> list[Product]:
        return [(self.up, self._widen), (self.down, self.down)]

    def __call__(self, x: torch.Tensor, _step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        """With `ends` [E], of those tokens alone."""
        return self.down(self._widen(x if ends is None else x.index_select(0, ends)))

    def _widen(self, x: torch.Tensor) -> torch.Tensor:
        if self._gated:
            return self._kernels.linear.gated(x, self.up.weight, self.up.bias, self._kind)
        return self._kernels.activation(self.up(x), self._kind)
