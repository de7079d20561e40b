"""Norms: their descriptions, and the layers in two forms: of a tensor, and of the stream after a branch's result is added."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from penstock.layers.build import Build
from penstock.layers.parameter import Parameter
from penstock.ops.linear import Weight
from penstock.parallel.group import Group


@dataclass(frozen=True)
class RMSNormSpec:
    """x / rms(x) * (offset + weight); without a `weight`, which only queries and keys may lack, x / rms(x)."""

    eps: float
    offset: float = 0.0
    weight: bool = True

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{path}.weight", (width,), rest=1.0 - self.offset)


@dataclass(frozen=True)
class LayerNormSpec:
    """(x - mean) / deviation * (offset + weight) + bias; either may be missing."""

    eps: float
    bias: bool = True
    weight: bool = True
    offset: float = 0.0

    def parameters(self, path: str, width: int) -> Iterator[Parameter]:
        if self.weight:
            yield Parameter(f"{path}.weight", (width,), rest=1.0 - self.offset)
        if self.bias:
            yield Parameter(f"{path}.bias", (width,))


@dataclass(frozen=True)
class NoNormSpec:
    """x itself, where a decoder has no norm of its own."""

    def parameters(self, _path: str, _width: int) -> Iterator[Parameter]:
        yield from ()


NormSpec = RMSNormSpec | LayerNormSpec | NoNormSpec


class RMSNorm:
    def __init__(self, spec: RMSNormSpec, path: str, build: Build) -> None:
        self.weight = build.values.tensor(f"{path}.weight")
        self.eps = spec.eps
        self.offset = spec.offset
        self._norm = build.kernels.rms_norm
        self._add_norm = build.kernels.add_rms_norm
        self.reader: Weight | None = None
        """The matrix that results are multiplied with first."""
        self.ranks: Group | None = None
        """The ranks whose parts `add` is given, if it is not given their sum."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.eps, self.offset, self.reader)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); `residual` may be overwritten."""
        if self.ranks is not None:
            return self.ranks.add_norm(x, residual, self.weight, self.eps, self.offset,
                                       partial(self._add_norm, reader=self.reader))
        return self.add_own(x, residual)

    def add_own(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`add`, of which x is all."""
        return self._add_norm(x, residual, self.weight, self.eps, self.offset, self.reader)


class LayerNorm:
    def __init__(self, spec: LayerNormSpec, path: str, build: Build) -> None:
        self.weight = build.values.tensor(f"{path}.weight") if spec.weight else None
        if self.weight is not None and spec.offset:
            self.weight = self.weight + spec.offset
        self.bias = build.values.tensor(f"{path}.bias") if spec.bias else None
        self.eps = spec.eps
        self._norm = build.kernels.layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, W], last dimension contiguous."""
        return self._norm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        total = x + residual
        return self(total), total


class NoNorm:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + residual, x + residual)."""
        total = x + residual
        return total, total


Norm = RMSNorm | LayerNorm | NoNorm


def build_norm(spec: NormSpec, path: str, build: Build) -> Norm:
    """The layer of a spec."""
    if isinstance(spec, NoNormSpec):
        return NoNorm()
    return RMSNorm(spec, path, build) if isinstance(spec, RMSNormSpec) else LayerNorm(spec, path, build)
