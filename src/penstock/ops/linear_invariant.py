"""Batch-invariant GEMMs on NVIDIA GPUs: the bits of a row's result depend on that row alone, not on number or place.

Every tile uses the same tensor core instruction (on Hopper wgmma, whose first operand has rows by 64: of few rows of x it is
the weight), in order, by 16 along K, into a float32 accumulator. Tile size and operand order do not change the order of
summation, so the tile may depend on the number of rows. Split-K depends on the matrix alone (few columns): every tile sums each
part separately and adds them in order, by one program or several. Tests on GPUs compare bits over all tiles and sizes."""

import torch

from penstock.ops import gpu
from penstock.ops.linear import Weight
from penstock.ops.linear_triton import BOXED, BOXED_GATED, Tile, TritonLinear, boxable, few_rows, launch, parts
from penstock.ops.table import register

_LEAST = Tile(64, 64, 128, group=8)
_MANY = {BOXED: 1.0, Tile(128, 128, 64, group=8): 0.6, Tile(128, 64, 64, stages=5, group=8): 0.4, _LEAST: 0.26}
_MANY_GATED = {BOXED_GATED: 1.0, BOXED_GATED._replace(wide=64, stages=4): 0.6, Tile(128, 128, 64, warps=8, group=8): 1.0,
               _LEAST: 0.4}
_MANY_DIVIDED = {BOXED._replace(wide=128, stages=4, joined=True): 1.0, BOXED._replace(wide=64, deep=128, joined=True): 0.7,
                 Tile(128, 64, 64, group=8, joined=True): 1.9, Tile(128, 64, 64, swap=True, group=8): 2.0, _LEAST: 1.6}
"""For more than 64 rows: each tile's time over all of K, relative to the first. Split programs take longer: they store sums."""
_EXACT = Tile(32, 32, 32, stages=2)
"""For float32, which has no exact tensor core instruction."""


def choose(rows: int, n: int, k: int, dtype: torch.dtype, gated: bool, boxes: bool) -> Tile:
    """The tile for n output columns. It changes only at powers of two of `rows`, so that a few sizes exercise every tile.

    `Tile.split` depends on n, k, dtype and gated alone."""
    if dtype == torch.float32:
        return _EXACT
    split = 1 if gated else parts(n, k, gated)
    if rows <= 64:
        if split > 1:
            return Tile(max(16, gpu.covering(rows)), 64, 128, split, stages=6, swap=True, ahead=3)
        return few_rows(rows, n, k, gated, divide=False)
    rows = gpu.covering(rows)
    options = _MANY_GATED if gated else _MANY if split == 1 else _MANY_DIVIDED

    def time(tile: Tile) -> float:
        programs = 1 if tile.joined else split
        tiles = -(-rows // tile.tall) * -(-n // tile.wide)
        return -(-tiles * programs // gpu.MULTIPROCESSORS) * options[tile] / programs

    return min((tile for tile in options if boxes or not tile.boxed), key=time)._replace(split=split)


@register("linear", "triton-invariant", rank=5, supports=gpu.supports)
class InvariantLinear(TritonLinear):
    """LinearOps (ops/linear.py) for any number of rows and any alignment, all by Triton."""

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
