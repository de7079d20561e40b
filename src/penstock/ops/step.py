"""From segments to flat arrays: the token and position of each query, and the cache slot that its entry is written to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from penstock.ops import attention_work
from penstock.ops.table import register


@dataclass(slots=True)
class GroupStep:
    """One cache group's part of a step."""

    table: torch.Tensor
    """[S, columns] int32: page ids of each segment's row; entries beyond its context may be anything."""
    slots: torch.Tensor
    """[T] int64: where each token's entry is written, page id x page size + offset; -1 for padding."""


@dataclass(slots=True)
class StepTensors:
    """T tokens of S segments."""

    tokens: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int32."""
    groups: list[GroupStep]


@register("bring", "reference", rank=0)
def bring(host: torch.Tensor, there: torch.Tensor) -> None:
    """Enqueues a copy of int32 host [N], pinned if the device is a GPU, to there [N]."""
    there.copy_(host, non_blocking=True)


@register("build_step", "reference", rank=0, capturable=False)
def build_step(known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
               query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors:
    """Token t of segment s stands at position start[s] + t - query_start[s] of row[s].

    known [R, L] int32: the rows' tokens. tables: for each cache group [R, C] int32, row -> page ids. row, start [S] and
    query_start [S + 1] int32. `tokens` T >= query_start[S]: tokens beyond it are padding, with token 0, position 0, slot -1.
    `columns` bounds the pages of any segment's context."""
    at = torch.arange(tokens, dtype=torch.int32, device=known.device)
    segment = torch.searchsorted(query_start[1:], at, right=True).clamp_(max=len(row) - 1)
    inside = at < query_start[-1]
    position = (start[segment] + at - query_start[segment]).masked_fill_(~inside, 0)
    mine, place = row[segment].long(), position.long()
    ids = known[mine, place].masked_fill_(~inside, 0)
    index, offset = place // page, place % page
    return StepTensors(ids, position, [GroupStep(table[row.long(), :columns], (
        table[mine, index].long() * page + offset).masked_fill_(~inside, -1)) for table in tables])


@register("build_step", "numpy", rank=5, capturable=False,
          supports=lambda facts, _dtype: None if facts.kind == "cpu" else "it reads the host's memory")
def build_on_host(known: torch.Tensor, tables: list[torch.Tensor], row: torch.Tensor, start: torch.Tensor,
                  query_start: torch.Tensor, page: int, tokens: int, columns: int) -> StepTensors:
    """As the reference. For a few integers NumPy takes half of PyTorch's time and keeps the GIL, so need not wait for it."""
    rows, begins = row.numpy(), query_start.numpy()
    end = int(begins[-1])
    segment = np.repeat(np.arange(len(rows)), np.diff(begins))
    position = start.numpy()[segment] + np.arange(end, dtype=np.int32) - begins[segment]
    mine, index, offset = rows[segment], position // page, position % page
    ids, positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
    ids[:end], positions[:end] = known.numpy()[mine, position], position
    slots = np.full((len(tables), tokens), -1, np.int64)
    for out, table in zip(slots, tables, strict=True):
        out[:end] = table.numpy()[mine, index].astype(np.int64) * page + offset
    return StepTensors(torch.from_numpy(ids), torch.from_numpy(positions), [
        GroupStep(torch.from_numpy(table.numpy()[rows, :columns]), out)
        for table, out in zip(tables, torch.from_numpy(slots), strict=True)])


class Moving(NamedTuple):
    """A step's array: S segments [S] and L logits rows [L] whose places the device corrects, int32."""

    row: torch.Tensor
    start: torch.Tensor
    context: torch.Tensor
    slack: torch.Tensor
    """Above 0: the host does not know the segment's start."""
    behind: torch.Tensor
    """Positions by which such a segment begins before its row's last known token."""
    left: torch.Tensor
    """Passes of one token that are to come, the host having filled in the last of them; 0: no passes follow each other."""
    line_row: torch.Tensor
    """-1: padding, or a segment whose passes are over."""
    line_position: torch.Tensor
    line_segment: torch.Tensor


@register("move_step", "reference", rank=0)
def move_step(of: Moving, work: Sequence[torch.Tensor], length: torch.Tensor | None) -> None:
    """Moves segments, their logits rows and attention's work items [n, FIELDS] in `work` to where they are, in place.

    length [row] int32, numbers of known tokens: to where a step, or the first of its passes, begins. None: a pass has ended.
    Segments with passes to come go on by one position; the others stay, and nothing is chosen for them."""
    segment = of.line_segment.long()
    if length is None:
        of.left.sub_(1)
        by = (of.left > 0).int()
        of.line_row.masked_fill_(by[segment] == 0, -1)
    else:
        sure = (1 - of.left).clamp(max=0)
        by = torch.where(of.slack > 0, length[of.row.long()] - 1 - of.behind - of.start, sure)
    for items in work:
        attention_work.move(items, by)
    of.line_position.add_(by[segment])
    of.start.add_(by)
    of.context.add_(by)
