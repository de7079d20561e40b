"""Products on NVIDIA GPUs whose bits for a row depend on nothing but the row: not on how many there are, nor where it stands.

Every tile multiplies by the same kind of instruction (on Hopper wgmma, whose first operand has 64 rows or a multiple: for few
rows of x that is the weight), in steps of 16 along K, in order, into one float32 sum. The tile's size and which operand comes
first change what is multiplied together, not the order within a sum; so the rows may choose the tile, but K is never divided
among programs. That sums then have the same bits is tested on the GPU, over all tiles and sizes.
"""

from __future__ import annotations

import torch

from penstock.ops import gpu
from penstock.ops.linear import Weight
from penstock.ops.linear_triton import BOXED, BOXED_GATED, Tile, TritonLinear, boxable, few_rows, launch
from penstock.ops.registry import register

_MANY = (BOXED, Tile(128, 128, 64, group=8), Tile(128, 64, 64, stages=5, group=8), Tile(64, 64, 128, group=8))
_MANY_GATED = (BOXED_GATED, Tile(128, 128, 64, warps=8, group=8), Tile(64, 64, 128, group=8))
"""For more than 64 rows the first that can be had and makes enough programs."""
_EXACT = Tile(32, 32, 32, stages=2)
"""For float32, whose products are done one by one."""
_PROGRAMS = 96
"""So many keep a large GPU busy."""


def choose(rows: int, n: int, k: int, dtype: torch.dtype, gated: bool, boxes: bool) -> Tile:
    """The tile for n output columns. It changes only where rows pass a power of two, so that few numbers of rows show all."""
    if dtype == torch.float32:
        return _EXACT
    if rows <= 64:
        return few_rows(rows, n, k, gated, divide=False)
    rows = gpu.covering(rows)
    options = [tile for tile in (_MANY_GATED if gated else _MANY) if boxes or not tile.boxed]
    enough = (tile for tile in options if -(-rows // tile.tall) * -(-n // tile.wide) >= _PROGRAMS)
    return next(enough, options[-1])


@register("linear", "triton-invariant", rank=-1, supports=gpu.supports)
class InvariantLinear(TritonLinear):
    """LinearOps (ops/linear.py) for any rows of any alignment, all by Triton."""

    @staticmethod
    def apply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None,
              out_dtype: torch.dtype | None = None) -> torch.Tensor:
        tile = choose(x.shape[0], weight.n, weight.k, x.dtype, False, boxable(x, weight, weight.n))
        return launch(tile, x, weight, bias, x.dtype if out_dtype is None else out_dtype)

    @staticmethod
    def gated(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        n = weight.n // 2
        tile = choose(x.shape[0], n, weight.k, x.dtype, True, boxable(x, weight, n))
        return launch(tile, x, weight, bias, x.dtype, kind)
