"""Self-attention with keys and values in the paged cache: its description, and the layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock.core.state import Everything, Field, StateSpec, Window
from penstock.layers.build import Build
from penstock.layers.linear import Linear, LinearSpec
from penstock.layers.norm import RMSNormSpec
from penstock.layers.parameter import Parameter, Piece, Split
from penstock.layers.rope import RopeSpec
from penstock.layers.step import StateView, Step, Works
from penstock.ops.attention import Geometry


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMSNorm of queries and keys before the rotation: of each head alone, or of all heads together (`whole`)."""

    norm: RMSNormSpec
    whole: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention with grouped queries. `window` 0 sees all, `softcap` 0 caps nothing, `rope` None turns nothing."""

    width: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    rope: RopeSpec | None = None
    window: int = 0
    softcap: float = 0.0
    norm: QueryKeyNorm | None = None
    bias: bool = False
    output_bias: bool = False

    name = "attention"

    @property
    def qkv(self) -> LinearSpec:
        size = self.head_size
        outputs = (Piece("q", self.heads * size, size), Piece("k", self.kv_heads * size, size),
                   Piece("v", self.kv_heads * size, size))
        return LinearSpec(self.width, outputs, self.bias, Split.ROWS)

    @property
    def output(self) -> LinearSpec:
        return LinearSpec(self.heads * self.head_size, (Piece("o", self.width),), self.output_bias, Split.COLUMNS,
                          self.head_size)

    def parameters(self, path: str) -> Iterator[Parameter]:
        yield from self.qkv.parameters(f"{path}.qkv")
        if self.norm is not None:
            heads, kv_heads = (self.heads, self.kv_heads) if self.norm.whole else (1, 1)
            yield from self.norm.norm.parameters(f"{path}.q_norm", heads * self.head_size)
            yield from self.norm.norm.parameters(f"{path}.k_norm", kv_heads * self.head_size)
        yield from self.output.parameters(f"{path}.o")

    def states(self, dtype: str) -> tuple[StateSpec, ...]:
        shape = (self.kv_heads, self.head_size)
        keep = Window(self.window) if self.window else Everything()
        return (StateSpec((Field("k", shape, dtype), Field("v", shape, dtype)), keep),)

    def build(self, path: str, build: Build) -> Attention:
        return Attention(self, path, build)


class Attention:
    """x [T, W] -> [T, W]. Every token's key and value are written to the cache, and its query reads those before it."""

    looks_around = True
    group: int
    work: int

    def __init__(self, spec: AttentionSpec, path: str, build: Build) -> None:
        self.spec = spec
        self.qkv = Linear(spec.qkv, f"{path}.qkv", build)
        self.o = Linear(spec.output, f"{path}.o", build)
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None
        if spec.rope is not None:
            self.cos, self.sin = build.rope(spec.rope)
        self.q_norm: torch.Tensor | None = None
        self.k_norm: torch.Tensor | None = None
        self.whole_norm = spec.norm is not None and spec.norm.whole
        self.eps, self.offset = 1e-6, 0.0
        if spec.norm is not None:
            self.q_norm, self.k_norm = (build.values.tensor(f"{path}.{name}.weight") for name in ("q_norm", "k_norm"))
            self.eps, self.offset = spec.norm.norm.eps, spec.norm.norm.offset
        self._kernels = build.kernels

    @property
    def linears(self) -> Sequence[Linear]:
        return self.qkv, self.o

    def attach(self, views: Sequence[StateView], works: Works) -> None:
        (view,) = views
        self.group, self.k, self.v = view.group, view["k"], view["v"]
        _, kv_heads, page, size = self.k.shape
        geometry = Geometry(self.spec.heads, kv_heads, size, page, self.spec.window, self.k.element_size(),
                            plain=not self.spec.softcap)
        self.work = works.index(view.group, geometry, self._kernels.attention)

    def detach(self) -> None:
        del self.k, self.v

    def __call__(self, x: torch.Tensor, step: Step, ends: torch.Tensor | None = None) -> torch.Tensor:
        spec, kernels = self.spec, self._kernels
        group = step.groups[self.group]
        tokens, heads, kv_heads = x.shape[0], spec.heads, spec.kv_heads
        qkv = self.qkv(x, step).view(tokens, heads + 2 * kv_heads, spec.head_size)
        q, k, v = qkv[:, :heads], qkv[:, heads:heads + kv_heads], qkv[:, heads + kv_heads:]
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.whole_norm and q_norm is not None and k_norm is not None:
            q = kernels.rms_norm(q.flatten(1), q_norm, self.eps, self.offset).view_as(q)
            k = kernels.rms_norm(k.flatten(1), k_norm, self.eps, self.offset).view_as(k)
            q_norm = k_norm = None
        q = kernels.rope_write(q, k, v, step.positions, group.slots, self.k, self.v, self.cos, self.sin,
                               q_norm, k_norm, self.eps, self.offset)
        out = kernels.attention.apply(q, self.k, self.v, group.table, step.query_start, step.context, spec.scale, spec.window,
                                      spec.softcap, work=step.work[self.work], library=step.library[self.work])
        out = out.view(tokens, -1)
        return self.o(out if ends is None else out.index_select(0, ends), step)
