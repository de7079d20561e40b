"""Adapters' deltas on NVIDIA GPUs: the launches of ops/lora_kernels.py."""

from __future__ import annotations

import math

import torch

from penstock.ops import gpu
from penstock.ops.lora import MOST_PIECES, WIDE, Groups, LoraOps, Slabs
from penstock.ops.registry import register

_SPAN, _MOST_PARTS = 1024, 32
"""Columns of x that a program of few rows sums up, and the most parts that the columns are cut into."""
_DEEP = 128
"""Columns of x that a dot product takes."""
_PROGRAMS = 2048
"""The most programs of a launch: about as many as run at once. More would be launched for tiles that a step may not have."""
_JOINED_ABOVE = 256
"""Rows above which one program sums up all parts, in the same order."""


class TritonLora(LoraOps):
    """Bits of a row depend on neither the other rows nor their number: K is cut into parts as K alone says."""

    def shrink(self, x: torch.Tensor, path: str, slabs: Slabs, groups: Groups) -> torch.Tensor:
        from penstock.ops.lora_kernels import shrink as kernel  # Triton: heavy, and not everywhere

        target, rows, k = slabs.layout.targets[path], len(x), x.shape[1]
        parts, span = cut(k)
        joined = rows > _JOINED_ABOVE
        low = torch.empty(1 if joined else parts, rows, len(target.pieces), slabs.rank, dtype=torch.float32, device=x.device)
        if not rows:
            return low
        linked, most = gpu.linked(x.device), groups.tiles.shape[1]
        align = math.gcd(16, x.stride(0)) if rows > 1 else 16
        ranks = _ranks(slabs.rank)
        programs = (1 if joined else parts) * len(target.pieces) * -(-slabs.rank // ranks)
        # As many columns of A and x as fit into registers.
        ahead = 0 if joined else min(span // _DEEP, max(1, 64 // ranks))
        kernel[(programs, _walkers(most, programs))](
            x, slabs.data, slabs.facts, groups.number, groups.tiles, groups.order, low, x.stride(0) // align,
            slabs.data.stride(0), slabs.facts.stride(0), k, target.down, target.facts, rows, most, pieces=len(target.pieces),
            rank=slabs.rank, ranks=ranks, deep=_DEEP, span=span, parts=parts, joined=joined, tall=groups.tall, align=align,
            ahead=ahead, linked=linked, num_warps=4, launch_pdl=linked)
        return low

    def expand(self, low: torch.Tensor, path: str, slabs: Slabs, groups: Groups, out: torch.Tensor,
               bias: torch.Tensor | None) -> None:
        from penstock.ops.lora_kernels import expand as kernel

        target, rows = slabs.layout.targets[path], len(out)
        if not rows:
            return
        linked, blocks, most = gpu.linked(out.device), slabs.blocks[path], groups.tiles.shape[1]
        wide = min(WIDE, max(64, 4096 // groups.tall))
        programs = len(blocks) * (WIDE // wide)
        kernel[(programs, _walkers(most, programs))](
            low, slabs.data, slabs.gains, slabs.facts, blocks, groups.number, groups.tiles, groups.order, out, bias,
            out.stride(0), slabs.data.stride(0), slabs.gains.stride(0), slabs.facts.stride(0), target.rows, target.up,
            target.gains, target.facts, rows, most, pieces=len(target.pieces), rank=slabs.rank, ranks=_ranks(slabs.rank),
            parts=len(low), scaled=MOST_PIECES, even=all(piece % 16 == 0 for piece in target.pieces),
            tall=groups.tall, block=WIDE, wide=wide, linked=linked, num_warps=4, launch_pdl=linked)


def _walkers(most: int, programs: int) -> int:
    """Programs for each of `programs` that divide the tiles, of which there may be `most`."""
    return max(1, min(most, _PROGRAMS // programs))


def _ranks(rank: int) -> int:
    """Ranks that a program takes at once."""
    return min(64, gpu.covering(rank))


def cut(k: int) -> tuple[int, int]:
    """(parts, columns of a part): the same for any number of rows, so that sums are added up in the same order."""
    parts = max(1, min(_MOST_PARTS, k // _SPAN))
    span = -(-k // parts // _DEEP) * _DEEP
    return -(-k // span), span


register("lora", "triton", rank=10, supports=gpu.supports)(TritonLora())
