"""Sampling on NVIDIA GPUs: launches the Triton kernels of ops/sample_kernels.py and ops/threshold_kernels.py.

The result of a line (a row of logits) does not depend on the others: maxima are exact in any order, sums have fixed borders."""

from __future__ import annotations

import math

import torch

from penstock.ops import gpu
from penstock.ops.sample import SampleOps
from penstock.ops.table import register

kernels, filters = gpu.Kernels("sample_kernels"), gpu.Kernels("threshold_kernels")
_RACE, _TILE, _KNOWN, _EDITS = 1024, 4096, 1024, 64
"""Elements per program: to choose; to filter, allow and score; of a row's tokens; of its edits."""
_PARTS = 256
"""A line has at most so many parts, unless the vocabulary is huge: one compiled kernel serves all numbers of lines."""
_SLOTS = 32
"""The most alternatives that the kernels of `score` find: more than core/sampling.py's MAX_LOGPROBS, for beams."""
_PAIRS = 1024
"""Pairs of a line and a named token that are scored at a time. Bounds the memory of their partial results."""
_GROUP = 32
"""Logits rows whose tokens are counted at a time, which bounds the memory of penalties."""


def _strided(logits: torch.Tensor) -> tuple[int, dict[str, int], dict[str, bool]]:
    """The stride of lines, compile-time constants about it and the vocabulary that allow vectorised loads, and `gpu.linked`."""
    stride = logits.stride(0)
    align = math.gcd(16, stride)
    return stride // align, {"vocab": logits.shape[1], "align": align}, gpu.linked(logits.device)


class TritonSample(SampleOps):
    """SampleOps without synchronisation. Logits rows are contiguous; their stride may be anything."""

    def candidates(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor, position: torch.Tensor,
                   threshold: torch.Tensor | None = None, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        lines, device = len(logits), logits.device
        stride, shape, link = _strided(logits)
        tiles = -(-shape["vocab"] // _RACE)
        # Eight programs per multiprocessor saturate memory; beyond that each takes several tiles.
        each = -(-tiles * lines // (8 * gpu.multiprocessors(device)))
        parts = -(-tiles // each)
        values = torch.empty((lines, parts), dtype=torch.float32, device=device)
        places = torch.empty((lines, parts), dtype=torch.int32, device=device)
        kernels.race[(lines, parts)](logits, stride, each, table, row, position, threshold, first, values, places, tile=_RACE,
                                     fast=device.type != "cpu", num_warps=4, **shape, **link)
        return values, places

    def elect(self, values: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
              position: torch.Tensor, out: torch.Tensor | None = None, shift: torch.Tensor | None = None) -> torch.Tensor:
        lines, parts = values.shape
        out = torch.empty(lines, dtype=torch.int32, device=values.device) if out is None else out
        kernels.decide[(lines,)](values, places, parts, row, position, tokens, tokens.shape[1], out, shift,
                                 wide=max(_PARTS, gpu.covering(parts)), num_warps=1, **gpu.linked(values.device))
        return out

    def threshold(self, logits: torch.Tensor, table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        lines, device = len(logits), logits.device
        stride, shape, link = _strided(logits)
        tiles = -(-shape["vocab"] // _TILE)
        # Two programs fit on a multiprocessor; with many lines each takes several tiles.
        each = -(-tiles * lines // (4 * gpu.multiprocessors(device)))
        parts = -(-tiles // each)
        partial = torch.empty((lines, parts, 3), dtype=torch.float32, device=device)
        counters = torch.empty(lines, dtype=torch.int32, device=device)
        first, second = (torch.empty((lines, filters.STATE), dtype=torch.float64, device=device) for _ in range(2))
        tallies, finer = (torch.empty((lines, tiles, filters.PIVOTS), dtype=torch.float32, device=device) for _ in range(2))
        kept = torch.empty((lines, _TILE), dtype=torch.float32, device=device)
        out = torch.empty(lines, dtype=torch.float32, device=device)
        grid, shared = (lines, parts), (logits, stride, each, table, row)
        how = {**shape, **link, "tile": _TILE, "num_warps": 8}
        filters.extremes[grid](*shared, partial, counters, **how)
        how |= {"wide": gpu.covering(tiles), "room": _TILE}
        filters.narrow[grid](*shared, partial, first, first, tallies, opening=True, **how)
        filters.narrow[grid](*shared, tallies, first, second, finer, opening=False, **how)
        filters.gather[grid](*shared, second, finer, counters, kept, **how)
        filters.solve[(lines,)](logits, stride, table, row, second, finer, counters, kept, out, **how)
        return out

    def penalize(self, logits: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
                 position: torch.Tensor, lines: torch.Tensor) -> None:
        length = tokens.shape[1]
        stride, shape, link = _strided(logits)
        counts = torch.zeros((min(_GROUP, len(lines)), shape["vocab"]), dtype=torch.int32, device=logits.device)
        for first in range(0, len(lines), _GROUP):
            grid = (min(_GROUP, len(lines) - first), -(-length // _KNOWN))
            shared = (lines, first, table, row, position, tokens, length, counts)
            kernels.count[grid](*shared, tile=_KNOWN, vocab=shape["vocab"], **link)
            # Leaves the counts at zero.
            kernels.penalize[grid](*shared, logits, stride, tile=_KNOWN, **shape, **link)

    def edit(self, logits: torch.Tensor, table: torch.Tensor, lists: torch.Tensor, tokens: torch.Tensor, row: torch.Tensor,
             position: torch.Tensor, lines: torch.Tensor) -> None:
        stride, shape, link = _strided(logits)
        grid = (len(lines), -(-shape["vocab"] // _TILE))
        kernels.allow[grid](lines, table, lists, row, logits, stride, tile=_TILE, num_warps=8, **shape, **link)
        kernels.edit[(len(lines),)](lines, table, lists, row, position, tokens, tokens.shape[1], logits, stride, tile=_EDITS,
                                    align=shape["align"], num_warps=1, **link)

    def mask(self, logits: torch.Tensor, bits: torch.Tensor, lines: torch.Tensor) -> None:
        stride, shape, link = _strided(logits)
        kernels.mask[(len(lines), -(-shape["vocab"] // _TILE))](lines, bits, bits.shape[1], logits, stride, tile=_TILE,
                                                                 num_warps=8, **shape, **link)

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int,
              lines: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if top > _SLOTS or (top and tokens.dim() > 1):
            return super().score(logits, tokens, top, lines)
        if tokens.dim() > 1:
            each = torch.arange(len(tokens), dtype=torch.int32, device=logits.device) if lines is None else lines
            pairs = zip(tokens.flatten().split(_PAIRS), each[:, None].expand(tokens.shape).flatten().split(_PAIRS), strict=True)
            blocks = zip(*(self.score(logits, some, 0, where) for some, where in pairs), strict=True)
            ids, values, ranks = (torch.cat(block).view(tokens.shape) for block in blocks)
            return ids, values, ranks
        stride, shape, link = _strided(logits)
        count, parts, top = len(tokens), -(-shape["vocab"] // _TILE), min(top, shape["vocab"])

        def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(sizes, dtype=dtype, device=logits.device)

        found = (empty(count, parts, dtype=torch.float32), empty(count, parts, dtype=torch.float32),
                 empty(count, parts, dtype=torch.int32), empty(count, parts, _SLOTS, dtype=torch.int64))
        ids, values, ranks = (empty(count, 1 + top, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.int32))
        kernels.survey[(count, parts)](logits, stride, lines, tokens, top, *found, tile=_TILE, slots=_SLOTS, num_warps=8,
                                       **shape, **link)
        kernels.score[(count,)](logits, stride, parts, lines, tokens, top, *found, ids, values, ranks, wide=gpu.covering(parts),
                                slots=_SLOTS, align=shape["align"], num_warps=8, **link)
        return ids, values, ranks


register("sample", "triton", rank=10, supports=gpu.supports)(TritonSample())
