"""From segments to flat arrays: the token and position of each query, and the cache slot that its entry is written to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.ops.registry import register


@dataclass(slots=True)
class StepTensors:
    """T tokens of S segments. The lists have one tensor a cache group."""

    tokens: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int32."""
    tables: list[torch.Tensor]
    """[S, columns] int32: page ids of each segment's row; entries beyond its context may be anything."""
    slots: list[torch.Tensor]
    """[T] int64: page id x page size + offset."""


@register("build_step", "reference", rank=0, capturable=False)
def build_step(known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
               query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors:
    """Token t of segment s stands at position start[s] + t - query_start[s] of row[s].

    known [R, L] int32: the rows' tokens. tables: for each cache group [R, C] int32, row -> page ids. row, start [S] and
    query_start [S + 1] int32. `tokens` T >= query_start[S]: tokens beyond it are padding, with token 0, position 0, slot -1.
    `columns` bounds the pages of any segment's context.
    """
    at = torch.arange(tokens, dtype=torch.int32, device=known.device)
    segment = torch.searchsorted(query_start[1:], at, right=True).clamp_(max=len(row) - 1)
    inside = at < query_start[-1]
    position = (start[segment] + at - query_start[segment]).masked_fill_(~inside, 0)
    mine, place = row[segment].long(), position.long()
    ids = known[mine, place].masked_fill_(~inside, 0)
    index, offset = place // page, place % page
    slots = [(table[mine, index].long() * page + offset).masked_fill_(~inside, -1) for table in tables]
    return StepTensors(ids, position, [table[row.long(), :columns] for table in tables], slots)
