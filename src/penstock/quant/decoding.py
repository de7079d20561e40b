"""Matrices of any scheme on any device, without a kernel of their own: tiles of rows are decoded whenever they are read.

It saves memory, not time: every step decodes the whole matrix. A kernel that is registered for the scheme takes its place."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.ops.linear import StoredWeight, Weight, rows_of
from penstock.ops.registry import Kernels

if TYPE_CHECKING:
    from penstock.quant.scheme import Scheme

_TILE = 1 << 22
"""Elements that are decoded at a time: 16 MB in float32, on a GPU little beside a step and long enough for a GEMM."""


class Decoded(StoredWeight):
    """The stored tensors, and tiles of rows as views of them."""

    __slots__ = ("tiles",)

    def __init__(self, scheme: "Scheme", parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(scheme, parts, shape, dtype)
        grain = scheme.grain[0] or self.n
        step = max(grain, _TILE // self.k // grain * grain)
        ends = [(first, min(first + step, self.n)) for first in range(0, self.n, step)]
        self.tiles = [(first, last, rows_of(scheme, parts, shape, dtype, first, last)) for first, last in ends]


class Decoding:
    """The operation `linear` by the kernels for plain matrices, tile by tile."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def pack(self, scheme: "Scheme", parts: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        return Decoded(scheme, parts, shape, dtype)

    def apply(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        x = weight.scheme.inputs(x, weight.parts)
        out = torch.empty(x.shape[0], weight.n, dtype=out_dtype or x.dtype, device=x.device)
        for first, last, parts in weight.tiles:
            ops = self._kernels.linear_for("plain", last - first, weight.k) or self._kernels.linear
            tile = ops.pack(weight.scheme.decode(parts, weight.dtype))
            out[:, first:last] = ops.apply(x, tile, None if bias is None else bias[first:last], out_dtype)
        return out

    def gated(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        return self._kernels.gated(self.apply(x, weight, bias), kind)

    def gather(self, ids: torch.Tensor, weight: Any) -> torch.Tensor:
        scheme, ids = weight.scheme, ids.long()
        if scheme.grain[0] != 1:
            return torch.cat([scheme.decode(parts, weight.dtype) for _, _, parts in weight.tiles]).index_select(0, ids)
        axes = {part.suffix: part.rows for part in scheme.parts(weight.n, weight.k, str(weight.dtype).removeprefix("torch."))}
        rows = {suffix: part if axes[suffix] is None else part.index_select(axes[suffix], ids)
                for suffix, part in weight.parts.items()}
        found: torch.Tensor = scheme.decode(rows, weight.dtype)
        return found
