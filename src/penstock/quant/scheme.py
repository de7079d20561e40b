"""Schemes: the tensors that hold an [n, k] matrix, their meaning, and how a kernel gets them.

A new scheme is one file with a frozen dataclass. Loading, dummy weights, the memory plan and `penstock info` follow from it. A
kernel for it is registered as the operation `linear.<name>` (`ops/registry.py::Kernels.linear_for`); where none can serve, the
matrix stays as stored, and `Decoding` decodes all of it, in tiles of rows, at every step: that saves memory, not time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from penstock.core.state import DTYPE_BYTES
from penstock.ops.bits import blocks
from penstock.ops.experts import Stack
from penstock.ops.linear import Joined, StoredWeight, Weight, rows_of
from penstock.ops.registry import Kernels

Activation = Literal["none", "token", "group", "tensor"]
"""Not quantized; a scale for each token; for each 128 columns of one; one scale that the checkpoint gives."""

FP8_MAX = 448.0
GROUP = 128
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


def rounded(x: torch.Tensor, activation: Activation, scale: torch.Tensor | None, dtype: torch.dtype,
            peak: float = 0.0) -> torch.Tensor:
    """Activations x [T, k] rounded to codes of `dtype` (FP8 or int8) times a scale, in x's dtype: a scheme's product is that of
    these with the decoded matrix, and kernels that multiply codes give it up to the order of sums. `peak`: of codes."""
    if activation == "none":
        return x
    groups, least, most = blocks(x, GROUP if activation == "group" else x.shape[-1]).float(), -FP8_MAX, FP8_MAX
    if dtype is torch.int8:
        least, most = -128.0, 127.0
    if scale is None:
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / (peak or most)
    codes = groups / scale
    codes = (torch.round(codes) if dtype is torch.int8 else codes).clamp(least, most).to(dtype)
    return (codes.float() * scale).to(x.dtype).flatten(-2)[..., :x.shape[-1]].contiguous()


@dataclass(frozen=True)
class Part:
    """One stored tensor of an [n, k] matrix. `dtype` is a torch name; `suffix` follows the matrix's path in a checkpoint."""

    suffix: str
    shape: tuple[int, ...]
    dtype: str
    rows: int | None = 0
    """The axis of the rows (outputs), on which fused matrices join and ranks cut by rows. None: all rows share the tensor."""
    columns: int | None = 1
    """The axis along which the matrix's columns (inputs) lie, or None."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Scheme(Protocol):
    """A way to store matrices. Frozen and comparable: it is part of a model's description."""

    @property
    def name(self) -> str:
        """As users see it, and as kernels are registered for it."""

    @property
    def grain(self) -> tuple[int, int]:
        """Rows and columns that cannot be separated: matrices are joined, and ranks cut, at multiples of them. 0: none can."""

    def parts(self, n: int, k: int, dtype: str, /) -> tuple[Part, ...]:
        """The tensors of an [n, k] matrix in a model of `dtype`; of one joined by rows, each part is joined along its axis."""

    def encode(self, matrix: torch.Tensor, /) -> dict[str, torch.Tensor]:
        """The parts, by suffix, of a matrix [n, k] in the model's dtype, rounded to nearest: for random weights and
        quantization at load. ModelError if the shape cannot be stored so."""

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype, /) -> torch.Tensor:
        """The parts' matrix [n, k], in float32 rounded once to `dtype`: the scheme's definition, and its kernels' oracle."""

    def inputs(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], /) -> torch.Tensor:
        """Activations [T, k] as the product takes them: rounded as the scheme quantizes them, or x itself."""


class Weights:
    """The members of a scheme that stores weights alone, in no blocks."""

    @property
    def grain(self) -> tuple[int, int]:
        return 1, 1

    def inputs(self, x: torch.Tensor, _parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return x


@dataclass(frozen=True)
class Plain(Weights):
    """The numbers themselves, in the model's dtype."""

    name = "plain"

    def parts(self, n: int, k: int, dtype: str) -> tuple[Part, ...]:
        return (Part("weight", (n, k), dtype),)

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": matrix}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return parts["weight"].to(dtype)


PLAIN = Plain()


@dataclass(frozen=True)
class Factored(Weights):
    """A matrix of another scheme with a factor for each column, by which a product multiplies its inputs instead."""

    inner: Scheme

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def grain(self) -> tuple[int, int]:
        return 0, self.inner.grain[1]

    def parts(self, n: int, k: int, dtype: str) -> tuple[Part, ...]:
        return *self.inner.parts(n, k, dtype), Part("factor", (k,), "float32", None, 0)

    def encode(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**self.inner.encode(matrix), "factor": torch.ones(matrix.shape[-1], device=matrix.device)}

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return (self.inner.decode(parts, torch.float32) * parts["factor"]).to(dtype)


def pack(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor], dtype: torch.dtype,
         kernels: Kernels, stack: int = 0, resident: int = 0, device: torch.device | None = None) -> Weight:
    """The matrix of `shape` as the kernel that is bound for (linear, scheme, shape) reads it; with `stack`, so many matrices
    joined by rows as the operation `experts` reads them, the first `resident` of which are on the `device`, the rest not."""
    if resident:
        grouped = kernels.experts if scheme == PLAIN else kernels.experts_for(scheme.name)
        assert grouped is not None, scheme.name
        return grouped.pack_stored(scheme, parts, stack, (shape[0] // stack, shape[1]), dtype, resident, device)
    if stack:
        return _pack_stack(scheme, stack, shape, parts, dtype, kernels)
    if isinstance(scheme, Factored):
        return Joined([pack(scheme.inner, shape, parts, dtype, kernels)], kernels.gated, parts["factor"].to(dtype))
    plain = scheme == PLAIN
    ops: Any = kernels.linear_for(scheme.name, shape[0], shape[1]) or (kernels.linear if plain else Decoding(kernels))
    weight: Weight = ops.pack(parts["weight"]) if plain else ops.pack(scheme, parts, shape, dtype)
    weight.ops = ops
    return weight


def _pack_stack(scheme: Scheme, stack: int, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor], dtype: torch.dtype,
                kernels: Kernels) -> Stack:
    """By the kernel of the scheme's stacks; else on a CPU matrix by matrix as its own kernel reads them, elsewhere decoded."""
    n, k = shape[0] // stack, shape[1]
    if scheme == PLAIN:
        return kernels.experts.pack(parts["weight"].view(stack, n, k))
    if (grouped := kernels.experts_for(scheme.name)) is not None:
        return grouped.pack_stored(scheme, parts, stack, (n, k), dtype)
    each = [rows_of(scheme, parts, shape, dtype, i * n, (i + 1) * n) for i in range(stack)]
    device = next(iter(parts.values())).device
    if device.type == "cpu":
        return kernels.experts.pack_each([pack(scheme, (n, k), one, dtype, kernels) for one in each], dtype)
    whole = torch.empty(stack, n, k, dtype=dtype, device=device)
    for matrix, one in zip(whole, each, strict=True):
        matrix.copy_(scheme.decode(one, dtype))
    return kernels.experts.pack(whole)


def empty(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, kernels: Kernels,
          stack: int = 0, resident: int = 0) -> Weight:
    """The same without its numbers: for a rehearsal on meta tensors."""
    parts = {part.suffix: torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=device)
             for part in scheme.parts(shape[0], shape[1], str(dtype).removeprefix("torch."))}
    return pack(scheme, shape, parts, dtype, kernels, stack, resident, device)
