"""Self-attention of one layer over its window into the paged cache."""

from __future__ import annotations

import torch

from penstock.layers.linear import Linear, Product, Values
from penstock.layers.spec import AttentionSpec
from penstock.layers.step import KVView, Step
from penstock.ops.attention import Geometry
from penstock.ops.registry import Kernels

RopeTable = tuple[torch.Tensor, torch.Tensor]


class Attention:
    """x [T, W] -> [T, W]. Reads and writes the cache through `view`, which `attach` sets."""

    view: KVView
    geometry: Geometry

    def __init__(self, spec: AttentionSpec, path: str, values: Values, kernels: Kernels, table: RopeTable | None) -> None:
        self.spec = spec
        self.qkv = Linear(spec.qkv, f"{path}.qkv", values, kernels)
        self.o = Linear(spec.output, f"{path}.o", values, kernels)
        self.cos = table[0] if table is not None else None
        self.sin = table[1] if table is not None else None
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None
        self.whole_norm = spec.norm is not None and spec.norm.whole
        self.eps, self.offset = 1e-6, 0.0
        if spec.norm is not None:
            self.q_norm, self.k_norm = values.tensor(f"{path}.q_norm.weight"), values.tensor(f"{path}.k_norm.weight")
            self.eps, self.offset = spec.norm.norm.eps, spec.norm.norm.offset
        self._kernels = kernels

    @property
    def products(self) -> list[Product]:
        return [(self.qkv, self.qkv), (self.o, self.o)]

    def attach(self, view: KVView) -> None:
        """Gives the layer its window into the cache."""
        self.view = view
        self.geometry = view.geometry(self.spec.heads, self.spec.window, plain=not self.spec.softcap)

    def detach(self) -> None:
        """Lets go of the cache."""
        del self.view

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Every token's entry is written; with `ends` [E], results are given for those tokens alone."""
        spec, kernels, view = self.spec, self._kernels, self.view
        group = step.groups[view.group]
        tokens, heads, kv_heads = x.shape[0], spec.heads, spec.kv_heads
        qkv = self.qkv(x).view(tokens, heads + 2 * kv_heads, spec.head_size)
        q, k, v = qkv[:, :heads], qkv[:, heads:heads + kv_heads], qkv[:, heads + kv_heads:]
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.whole_norm and q_norm is not None and k_norm is not None:
            q = kernels.rms_norm(q.flatten(1), q_norm, self.eps, self.offset).view_as(q)
            k = kernels.rms_norm(k.flatten(1), k_norm, self.eps, self.offset).view_as(k)
            q_norm = k_norm = None
        q = kernels.rope_write(q, k, v, step.positions, group.slots, view.k, view.v, self.cos, self.sin,
                               q_norm, k_norm, self.eps, self.offset)
        out = kernels.attention.apply(q, view.k, view.v, group.table, step.query_start, step.context, spec.scale, spec.window,
                                      spec.softcap, work=step.work[self.geometry],
                                      whole=step.whole.get(self.geometry, ()))
        out = out.view(tokens, -1)
        return self.o(out if ends is None else out.index_select(0, ends))
