"""Projections. `Linear` is the only place where one is computed, so an adapter's delta and a rank's collective have one home.

A checkpoint's matrices may be joined (q, k and v; gate and up), and an activation may follow in the kernel (`Activated`)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from penstock.layers.build import Build
from penstock.layers.parameter import Parameter, Piece, Split
from penstock.layers.step import Adapted, Delta
from penstock.ops.linear import Joined, Weight
from penstock.quant.scheme import PLAIN


@dataclass(frozen=True)
class LinearSpec:
    """x times one matrix, the rows of `outputs` stacked in order, and perhaps a bias."""

    inputs: int
    outputs: tuple[Piece, ...]
    bias: bool = False
    split: Split = Split.WHOLE
    unit: int = 1
    """Inputs that stay together on one rank, if they are split."""
    groups: int = 0
    """Runs of such inputs, as in `Piece`."""

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.outputs)

    def parameters(self, path: str) -> Iterator[Parameter]:
        """`path` is that of the joined parameter; pieces are its siblings."""
        for kind, shape in (("weight", (self.rows, self.inputs)), ("bias", (self.rows,))):
            if kind == "bias" and not self.bias:
                continue
            parent = path.rpartition(".")[0]
            pieces = tuple(replace(piece, name=f"{parent}.{piece.name}.{kind}") for piece in self.outputs)
            # A bias is added to the sum over ranks, so ranks that divide the inputs have it whole.
            split = Split.WHOLE if kind == "bias" and self.split is Split.COLUMNS else self.split
            columns = self.split is Split.COLUMNS
            yield Parameter(f"{path}.{kind}", shape, PLAIN if kind == "weight" else None, pieces if len(pieces) > 1 else (),
                            split=split, unit=self.unit if columns else self.outputs[0].unit,
                            groups=self.groups if columns else self.outputs[0].groups if len(pieces) == 1 else 0)


def matrix(spec: LinearSpec, path: str, build: Build) -> Weight:
    """A projection's matrix, or its pieces as one where each is stored in its own way."""
    if f"{path}.weight" in build.values:
        return build.values.matrix(f"{path}.weight")
    parent = path.rpartition(".")[0]
    return Joined([build.values.matrix(f"{parent}.{piece.name}.weight") for piece in spec.outputs], build.kernels.gated)


class Linear:
    """x [T, K] -> [T, N] in x's dtype."""

    _plain = True
    """Whether the result has x's dtype."""

    def __init__(self, spec: LinearSpec, path: str, build: Build) -> None:
        self.path = path
        self.weight = matrix(spec, path, build)
        self.bias = build.values.tensor(f"{path}.bias") if spec.bias else None
        self._apply = self.weight.ops.apply
        self._reduce = build.group.reduce if build.group is not None and spec.split is Split.COLUMNS else None
        self._leaves = False
        members = self.weight.members if isinstance(self.weight, Joined) else (self.weight,)
        self.shape: tuple[object, ...] = (*(type(one.ops) for one in members), self.weight.n, self.weight.k, self.bias is None)
        """Equal for projections that launch the same kernels for the same rows."""

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        """`step` says which rows have which adapter."""
        if step.delta is not None:
            return self._adapted(x, step.delta)
        if self._leaves and step.runs is not None:
            borders = step.runs.borders
            return step.runs.leave(lambda run: self._apply(x[slice(*borders[run])], self.weight, None))
        if self._reduce is None:
            return self._apply(x, self.weight, self.bias)
        return self._whole(self._apply(x, self.weight, None))

    def _adapted(self, x: torch.Tensor, delta: Delta) -> torch.Tensor:
        # Each rank adds its inputs' and columns' part. The first factor precedes the GEMM, which loads weights meanwhile.
        bias = self.bias if self._reduce is None else None
        out = delta.product(self.path, x, self.weight, bias, None) if self._plain else None
        if out is None:
            low = delta.shrink(self.path, x)
            out = delta.expand(self.path, low, self._apply(x, self.weight, bias), bias)
        return out if self._reduce is None else self._whole(out)

    def leave_sum(self) -> bool:
        """From now on returns this rank's part, which the caller sums over ranks; False if there is no such sum."""
        if self._reduce is None or self.bias is not None:
            return False
        self._reduce, self._leaves = None, True
        return True

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of what each computed with its inputs."""
        assert self._reduce is not None
        out = self._reduce(part)
        return out if self.bias is None else out + self.bias


class Activated(Linear):
    """activation(x W^T + b); gated, with the two halves g and u of the projection: activation(g) * u."""

    def __init__(self, spec: LinearSpec, path: str, build: Build, kind: str, gated: bool) -> None:
        super().__init__(spec, path, build)
        self._kind = kind
        self._fused = self.weight.ops.gated if gated else None
        self._activate = build.kernels.gated if gated else build.kernels.activation
        self.shape = (*self.shape, kind, gated)

    def __call__(self, x: torch.Tensor, step: Adapted) -> torch.Tensor:
        if self._fused is not None:
            out = (self._fused(x, self.weight, self.bias, self._kind) if step.delta is None else
                   step.delta.product(self.path, x, self.weight, self.bias, self._kind))
            if out is not None:
                return out
        return self._activate(super().__call__(x, step), self._kind)
