"""What a layer sees of the step it runs in: a ragged batch on the device. Built by `worker/step.py`, read only."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class GroupStep:
    """One cache group's part of a step."""

    table: torch.Tensor
    """[S, columns] int32: page ids of each segment's row."""
    slots: torch.Tensor
    """[T] int64: where each token's entry is written, page id x page size + offset."""


@dataclass(slots=True)
class Step:
    """T tokens of S segments, segment after segment."""

    tokens: torch.Tensor
    """[T] int64."""
    positions: torch.Tensor
    """[T] int32."""
    query_start: torch.Tensor
    """[S + 1] int32: where each segment's tokens begin."""
    context: torch.Tensor
    """[S] int32: positions of the row that exist after this step, those of the segment included."""
    groups: list[GroupStep]


@dataclass(slots=True)
class KVView:
    """One layer's window into the arena, and the group whose table and slots it goes by."""

    group: int
    k: torch.Tensor
    """[pages, KV heads, page, head size], strided."""
    v: torch.Tensor
