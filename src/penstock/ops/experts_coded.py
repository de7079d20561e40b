"""Stacks of quantized experts on NVIDIA GPUs: they stay as ops/coded_forms.py packs a single matrix, and one kernel serves.

`ops/experts_triton.py` decides on the tiles. The kernel is in ops/experts_coded_kernels.py."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.errors import ModelError
from penstock.ops import gpu
from penstock.ops.coded_forms import CodedWeight, coded, joined
from penstock.ops.coded_triton import fitting, quantized
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.experts_hosted import HostedStack
from penstock.ops.linear import rows_of

if TYPE_CHECKING:
    from penstock.ops.experts_triton import Sorted
    from penstock.ops.linear_triton import Tile

_AT_ONCE = 1 << 26
"""Elements that are packed at a time: packing takes some bytes of memory for each."""


class CodedStack(Stack):
    """Matrices of one scheme, one behind the other as the rows of `coded`."""

    __slots__ = ("coded",)
    coded: CodedWeight

    def __init__(self, coded_: CodedWeight, count: int, n: int, k: int, dtype: torch.dtype, grouped: ExpertsOps) -> None:
        super().__init__(coded_.data, count, n, k, dtype, grouped)
        self.coded = coded_
        self.nbytes = coded_.nbytes

    def matrix(self, place: int) -> list[torch.Tensor]:
        if self.coded.four and self.n % 64:
            raise ModelError(f"experts of {self.n} rows of 4-bit codes cannot be moved, because they share panels of 64 rows; "
                             "leave out enable_eplb")
        rows = slice(place * self.n, (place + 1) * self.n)
        codes = self.coded.data.view(torch.uint8).flatten()
        lines = [] if self.coded.words is None else [line[rows] for line in self.coded.words]
        gains = [] if self.coded.gains is None else [self.coded.gains[rows]]
        size = self.n * self.coded.data.shape[1] * self.coded.data.element_size()
        return [codes[place * size:(place + 1) * size], *(one.view(torch.uint8) for one in (*lines, *gains))]


def pack(scheme: Any, parts: Mapping[str, torch.Tensor], count: int, shape: tuple[int, int], dtype: torch.dtype,
         grouped: ExpertsOps, slots: int = 0, device: torch.device | None = None) -> Stack:
    """`count` matrices of `shape`, whose parts are joined by rows. With `slots` all codes are in pinned host memory, those of
    so many matrices on the `device` too, where all scales are."""
    n, k = shape
    # Borders of what is packed at a time are those of panels of 4-bit codes.
    least = 128 // math.gcd(n, 128)
    step = max(least, _AT_ONCE // (n * k) // least * least)
    each, host = list[CodedWeight](), None
    for first in range(0, count, step):
        some = min(step, count - first)
        own = rows_of(scheme, parts, (count * n, k), dtype, first * n, (first + some) * n)
        piece = coded(scheme, {suffix: part.to(device or part.device) for suffix, part in own.items()}, (some * n, k), dtype)
        each.append(piece)
        if slots:
            if piece.four and n % 64:
                raise ModelError(f"experts of {n} rows of 4-bit codes cannot be in host memory, because they share panels of "
                                 "64 rows; leave out experts_on_device")
            codes, piece.data = piece.data[:some * n].view(some, n, -1), piece.data[:0]
            if host is None:
                host = codes.new_empty(count, *codes.shape[1:], device="meta" if codes.is_meta else "cpu",
                                       pin_memory=codes.is_cuda)
            host[first:first + some].copy_(codes)
    if host is None:
        return CodedStack(joined(each), count, n, k, dtype, grouped)
    return HostedStack(host, slots, each[0].data.device, grouped, joined(each))


def product(tile: "Tile", x: torch.Tensor, stack: Stack, bias: torch.Tensor | None, picks: torch.Tensor,
            scales: torch.Tensor, found: "Sorted | None", out: torch.Tensor, glu: Glu | None, inward: bool) -> None:
    """Launches one grouped GEMM: gated with a `glu`, weighted without. x: the tokens, or results by pick or place."""
    from penstock.ops import experts_coded_kernels as kernels  # Triton: heavy, and not everywhere

    weight, total, count = stack.coded, picks.numel(), picks.shape[1]
    assert weight is not None
    where = stack.where if isinstance(stack, HostedStack) else None
    gated, n = glu is not None, stack.n // 2 if glu is not None else stack.n
    if gated and inward:  # a row for each pick, with its weight in it
        x, count = (x[:, None] * scales[..., None]).to(x.dtype).flatten(0, 1), 1
    codes, xs = (x, x) if weight.scaled == "none" else quantized(x, weight)
    kind = glu or Glu()
    shared: dict[str, Any] = {
        "count": count, "wide": tile.wide, "unit": weight.unit, "units": fitting(weight, tile.deep),
        "even": stack.k == weight.padded, "kind": weight.kind, "form": weight.form, "half": weight.half, "parts": weight.scales,
        "scaled": weight.scaled, "four": weight.four, "stages": tile.stages, "fast": x.device.type != "cpu", "gated": gated,
        "activation": kind.kind, "alpha": kind.alpha, "limit": kind.limit, "shift": kind.shift, "inward": inward,
        "num_warps": tile.warps, "num_stages": tile.stages, **gpu.linked(x.device, total <= 4096)}
    read = codes, xs, stack.data, where, weight.words, weight.gains, weight.table, bias, out, picks
    sizes = codes.stride(0), codes.shape[0], weight.padded, weight.spread
    if tile.tall == 1:
        kernels.picked[(-(-n // tile.wide), total)](*read, scales, n, stack.k, *sizes, **shared)
        return
    grid = (-(-n // tile.wide), len(found.tile_expert) if found is not None else stack.count)
    kernels.product[grid](*read, *(found[:4] if found else (picks,) * 4), scales, total, n, stack.k, *sizes,
                          arranged=found is not None, block=gpu.covering(max(total, 16)) if found is None else 16,
                          tall=tile.tall, high=found.high if found else 0, **shared)
