"""Products on NVIDIA GPUs whose bits for a row depend on nothing but the row: not on how many there are, nor where it stands.

Every tile multiplies by the same kind of instruction (on Hopper wgmma, whose first operand has 64 rows or a multiple: for few
rows of x that is the weight), in steps of 16 along K, in order, into one float32 sum. The tile's size and which operand comes
first change what is multiplied together, not the order within a sum; so the rows may choose the tile, but K is never divided
among programs. That sums then have the same bits is tested on the GPU, over all tiles and sizes.
"""

from __future__ import annotations

import torch

from penstock.ops.linear import Weight
from penstock.ops.linear_triton import Tile, TritonLinear, boxable, launch, supports
from penstock.ops.registry import register

_PROGRAMS = 132
"""About as many programs as a large GPU has multiprocessors are enough to keep it busy."""

_FEW = {tall: Tile(tall, 64, 128, stages=4, swap=True) for tall in (16, 32, 64)}
_MANY = (Tile(128, 256, 64, warps=8, stages=3, group=8), Tile(128, 128, 64, warps=8, stages=3, group=8),
         Tile(64, 128, 64, stages=4, group=8), Tile(64, 64, 64, stages=4, group=8))
"""Tiles for up to 64 rows, and for more, the widest first; the two widest also boxed."""


def choose(rows: int, n: int, gated: bool, boxable: bool) -> Tile:
    """For few rows the lowest tile; else the widest one that makes enough programs for n output columns, or the narrowest."""
    if rows <= 64:
        return next(tile for tall, tile in _FEW.items() if rows <= tall)
    for tile in _MANY[1:] if gated else _MANY:
        if -(-rows // tile.tall) * -(-n // tile.wide) >= _PROGRAMS * 3 // 4:
            break
    return tile._replace(boxed=boxable and tile.warps == 8)


@register("linear", "triton-invariant", rank=-1, supports=supports)
class InvariantLinear(TritonLinear):
    """LinearOps (ops/linear.py) for any rows of any alignment, all by Triton."""

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        tile = choose(x.shape[0], weight.n, False, boxable(x, weight, weight.n))
        return launch(tile, x, weight, bias, x.dtype if out_dtype is None else out_dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        tile = choose(x.shape[0], weight.n // 2, True, boxable(x, weight, weight.n // 2))
        return launch(tile, x, weight, bias, x.dtype, kind)
