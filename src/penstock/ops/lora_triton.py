"""Adapters' deltas on NVIDIA GPUs: the launches of ops/lora_kernels.py."""

import math
from typing import Any

import torch

from penstock.ops import gpu
from penstock.ops.linear import Weight
from penstock.ops.linear_triton import Tile, TritonLinear, choose, launch, suits
from penstock.ops.lora import MOST_PIECES, WIDE, Groups, LoraOps, Slabs
from penstock.ops.table import register

kernels = gpu.Kernels("lora_kernels")
_SPAN, _MOST_PARTS = 1024, 32
"""Columns of x that a program of few rows sums up, and the most parts that the columns are cut into."""
_DEEP = 128
"""Columns of x that a dot product takes."""
_PROGRAMS = 2048
"""The most programs of a launch: about as many as run at once. More would be launched for tiles that a step may not have."""
_FEW, _LOW, _ONE = 64, 16, 64
"""The most rows whose deltas are added one row a program, and the largest ranks for which that is faster, also of one row."""
_JOINED_ABOVE = 256
"""Rows above which one program sums up all parts, in the same order."""


class TritonLora(LoraOps):
    """Bits of a row depend on neither the other rows nor their number: K is cut into parts as K alone says."""

    def shrink(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups) -> torch.Tensor:
        target, rows, k = slabs.layout.targets[path], len(x), x.shape[1]
        parts, span = cut(k)
        joined = rows > _JOINED_ABOVE
        low = torch.empty(1 if joined else parts, rows, len(target.pieces), slabs.rank, dtype=torch.float32, device=x.device)
        if not rows:
            return low
        most = groups.tiles.stride(0)
        align = math.gcd(16, x.stride(0)) if rows > 1 else 16
        ranks = _ranks(slabs.rank)
        programs = (1 if joined else parts) * len(target.pieces) * -(-slabs.rank // ranks)
        # As many columns of A and x as fit into registers.
        ahead = 0 if joined else min(span // _DEEP, max(1, 64 // ranks))
        kernels.shrink[(programs, _walkers(groups, programs))](
            x, slabs.data, slabs.facts, groups.number, groups.tiles, groups.order, low, x.stride(0) // align,
            slabs.data.stride(0), slabs.facts.stride(0), k, target.down, target.facts, rows, most, pieces=len(target.pieces),
            rank=slabs.rank, ranks=ranks, deep=_DEEP, span=span, parts=parts, joined=joined, tall=groups.tall, align=align,
            ahead=ahead, num_warps=4, **gpu.linked(x.device))
        return low

    def expand(self, low: torch.Tensor, path: str, slabs: Slabs, groups: Groups, out: torch.Tensor,
               bias: torch.Tensor | None) -> None:
        target, rows = slabs.layout.targets[path], len(out)
        if not rows:
            return
        blocks, most = slabs.blocks[path], groups.tiles.stride(0)
        wide = min(WIDE, max(64, 4096 // groups.tall))
        programs = len(blocks) * (WIDE // wide)
        kernels.expand[(programs, _walkers(groups, programs))](
            low, slabs.data, slabs.gains, slabs.facts, blocks, groups.number, groups.tiles, groups.order, out, bias,
            out.stride(0), slabs.data.stride(0), slabs.gains.stride(0), slabs.facts.stride(0), target.rows, target.up,
            target.gains, target.facts, rows, most, pieces=len(target.pieces), rank=slabs.rank, ranks=_ranks(slabs.rank),
            parts=len(low), scaled=MOST_PIECES, even=all(piece % 16 == 0 for piece in target.pieces),
            tall=groups.tall, block=WIDE, wide=wide, num_warps=4, **gpu.linked(out.device))

    def product(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups, weight: Weight, bias: torch.Tensor | None,
                kind: str | None) -> torch.Tensor | None:
        pieces, rows, n, ranks = slabs.layout.targets[path].pieces, len(x), weight.n, _ranks(slabs.rank)
        tile = choose(rows, n, weight.k, False) if weight.ops is TritonLinear and suits(x, weight) else None
        if tile is None or rows > _FEW or slabs.rank > (_ONE if rows == 1 else _LOW) or (
                kind is not None and pieces not in ((n,), (n // 2, n // 2))):
            return None
        target = slabs.layout.targets[path]
        low, full = self._low_and_base(tile, x, path, slabs, groups, weight, bias)
        # Fewer programs take less time, as long as their rows' B fit into registers.
        out, tall, wide = full, 1 if rows <= 8 else 8, max(64, (4096 if rows <= 8 else 2048) // ranks)
        blocks = sum(-(-piece // WIDE) for piece in pieces)
        if kind is not None:
            out, blocks = full.new_empty(rows, n // 2), -(-n // 2 // WIDE)
        kernels.expand_rows[(blocks * (WIDE // wide), -(-rows // tall))](
            low, slabs.data, slabs.gains, slabs.facts, slabs.blocks[path], groups.order, groups.slot, full, out, bias,
            slabs.data.stride(0), slabs.gains.stride(0), slabs.facts.stride(0), n, target.up, target.gains, target.facts, rows,
            pieces=len(pieces), rank=slabs.rank, ranks=ranks, parts=len(low), scaled=MOST_PIECES,
            even=all(piece % 16 == 0 for piece in pieces) and n % 32 == 0, block=WIDE, wide=wide, tall=tall, kind=kind,
            num_warps=4, **gpu.linked(x.device))
        return out

    @staticmethod
    def _low_and_base(tile: Tile, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups, weight: Weight,
                      bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x A^T as `shrink` leaves it, and x W^T + bias, computed at the same time: by one launch for one row, otherwise by a
        GEMM that need not wait for the launch before it."""
        target, rows, (parts, span) = slabs.layout.targets[path], len(x), cut(x.shape[1])
        low = torch.empty(parts, rows, len(target.pieces), slabs.rank, dtype=torch.float32, device=x.device)
        ranks = min(_LOW, _ranks(slabs.rank))
        programs = parts * len(target.pieces) * -(-slabs.rank // ranks)
        same: dict[str, Any] = {"pieces": len(target.pieces), "rank": slabs.rank, "ranks": ranks, "span": span}
        where = slabs.data.stride(0), slabs.facts.stride(0)
        if rows == 1:
            adapters = (programs, slabs.data, slabs.facts, groups.slot, low, *where, target.down, target.facts)
            return low, launch(tile, x, weight, bias, x.dtype, helpers=programs, adapters=adapters, early=1, **same)
        align = math.gcd(16, x.stride(0))
        kernels.shrink_rows[(programs, rows)](
            x, slabs.data, slabs.facts, groups.order, groups.slot, low, rows, x.stride(0) // align, *where, x.shape[1],
            target.down, target.facts, ahead=min(4, -(-span * ranks // 4096)), align=align, num_warps=4,
            **gpu.linked(x.device), **same)
        return low, launch(tile, x, weight, bias, x.dtype, late=True)


def _walkers(groups: Groups, programs: int) -> int:
    """Programs for each of `programs` that divide the tiles."""
    return max(1, min(groups.tiles.shape[1], _PROGRAMS // programs))


def _ranks(rank: int) -> int:
    """Ranks that a program takes at once."""
    return min(64, gpu.covering(rank))


def cut(k: int) -> tuple[int, int]:
    """(parts, columns of a part): the same for any number of rows, so that sums are added up in the same order."""
    parts = max(1, min(_MOST_PARTS, k // _SPAN))
    span = -(-k // parts // _DEEP) * _DEEP
    return -(-k // span), span


register("lora", "triton", rank=10, supports=gpu.supports)(TritonLora())
