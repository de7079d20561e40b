"""One layer of the decoder: branches around the residual stream, in the order that a BlockSpec says.

The stream is carried as a sum not yet done, `residual + delta`, so that the addition can be part of the next norm's kernel.
"""

from __future__ import annotations

import torch

from penstock.layers.attention import Attention, RopeTable
from penstock.layers.linear import Product, Values
from penstock.layers.mlp import MLP
from penstock.layers.norm import build_norm
from penstock.layers.spec import AttentionSpec, BlockSpec, BranchSpec
from penstock.layers.step import Step
from penstock.ops.registry import Kernels


class Branch:
    """scale * post(body(pre(x)))."""

    def __init__(self, spec: BranchSpec, path: str, values: Values, kernels: Kernels, table: RopeTable | None) -> None:
        path = f"{path}.{spec.body.name}"
        self.body: Attention | MLP
        if isinstance(spec.body, AttentionSpec):
            self.body = Attention(spec.body, path, values, kernels, table)
        else:
            self.body = MLP(spec.body, path, values, kernels)
        self.pre = build_norm(spec.pre, f"{path}.pre", values, kernels) if spec.pre is not None else None
        self.post = build_norm(spec.post, f"{path}.post", values, kernels) if spec.post is not None else None
        self.scale = spec.scale

    def enter(self, delta: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the body's input, the stream) for the stream `residual + delta`. `residual` may be overwritten."""
        if delta is None:
            return (residual if self.pre is None else self.pre(residual)), residual
        if self.pre is None:
            total = delta + residual
            return total, total
        return self.pre.add(delta, residual)

    def leave(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None) -> torch.Tensor:
        """What the branch adds to the stream, given the body's input; with `ends`, at those tokens alone."""
        out = self.body(x, step, ends)
        if self.post is not None:
            out = self.post(out)
        return out if self.scale == 1.0 else out * self.scale


class Block:
    """One layer. `attention` is its one attention."""

    def __init__(self, spec: BlockSpec, path: str, values: Values, kernels: Kernels, table: RopeTable | None) -> None:
        self.stages = [[Branch(branch, path, values, kernels, table) for branch in stage] for stage in spec.stages]
        (self.attention,) = (b.body for stage in self.stages for b in stage if isinstance(b.body, Attention))

    @property
    def products(self) -> list[Product]:
        """All of its products."""
        return [product for stage in self.stages for branch in stage for product in branch.body.products]

    def __call__(self, delta: torch.Tensor | None, residual: torch.Tensor, step: Step,
                 ends: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and gives the stream as (delta, residual), all [T, W]; with `ends` [E], gives it at those tokens alone."""
        for first, *others in self.stages:
            x, residual = first.enter(delta, residual)
            # Once attention has read all tokens, nothing of a layer looks at another token than its own.
            at = ends if any(branch.body is self.attention for branch in (first, *others)) else None
            delta = first.leave(x, step, at)
            for branch in others:
                x, _ = branch.enter(None, residual)
                delta = delta + branch.leave(x, step, at)
            if at is not None:
                residual, ends = residual.index_select(0, at), None
        assert delta is not None
        return delta, residual
