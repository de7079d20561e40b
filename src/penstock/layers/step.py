"""What a layer sees of the step it runs in: a ragged batch on the device. Built by `worker/step.py`, read only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.ops.attention import Geometry, Span


@dataclass(slots=True)
class GroupStep:
    """One cache group's part of a step."""

    table: torch.Tensor
    """[S, columns] int32: page ids of each segment's row."""
    slots: torch.Tensor
    """[T] int64: where each token's entry is written, page id x page size + offset; -1 for padding."""


@dataclass(slots=True)
class Step:
    """T tokens of S segments, segment after segment, and perhaps padding: empty segments, and tokens that belong to none."""

    tokens: torch.Tensor
    """[T] int32."""
    positions: torch.Tensor
    """[T] int32."""
    query_start: torch.Tensor
    """[S + 1] int32: where each segment's tokens begin."""
    context: torch.Tensor
    """[S] int32: positions of the row that exist after this step, those of the segment included."""
    groups: list[GroupStep]
    work: dict[Geometry, torch.Tensor | None]
    """What `kernels.attention.prepare` gave for each geometry that the model has."""
    ends: torch.Tensor | None = None
    """[E] int32: the only tokens whose hidden states are wanted after the last layer; None: those of all."""
    whole: dict[Geometry, list[Span]] = field(default_factory=dict)
    """The prompts that were named to `prepare`; a geometry may be missing."""


@dataclass(slots=True)
class KVView:
    """One layer's window into the arena, and the group whose table and slots it goes by."""

    group: int
    k: torch.Tensor
    """[pages, KV heads, page, head size], strided."""
    v: torch.Tensor

    def geometry(self, heads: int, window: int, plain: bool = True) -> Geometry:
        """That of a layer of `heads` query heads which keeps its entries here."""
        _, kv_heads, page, size = self.k.shape
        return Geometry(heads, kv_heads, size, page, window, self.k.element_size(), plain)
