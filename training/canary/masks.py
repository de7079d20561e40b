"""Keeps the documents of a training row apart: masks and positions for transformers' models and for the heads. Owns no
weights.
"""

from __future__ import annotations

from typing import Any

import torch
from training.canary.data import BEGIN
from training.canary.documents import LONG


def documents_of(marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(document, position), each [B, L], of marked rows [B, L]: documents are counted from 1, positions begin anew in each."""
    places = torch.arange(marked.shape[1], device=marked.device)
    begins = (marked & BEGIN) > 0
    return begins.cumsum(1), places - torch.where(begins, places, 0).cummax(1).values


def seen_within(document: torch.Tensor) -> torch.Tensor:
    """[B, L, L]: whether a query (row) may see a key (column): not after it, and of its document."""
    places = torch.arange(document.shape[1], device=document.device)
    return (places[:, None] >= places) & (document[:, :, None] == document[:, None, :])


def bias(seen: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """[B, 1, L, L]: what to add to attention's scores."""
    return torch.where(seen, 0.0, torch.finfo(kind).min).to(kind)[:, None]


def attention(marked: torch.Tensor, window: int | None, packed: bool, kind: torch.dtype) -> dict[str, Any]:
    """Arguments of transformers' models for marked rows [B, L]; none where a row is one document, or nothing can be masked.

    `window` is the reach of the architecture's sliding layers, `packed` whether it has masks to keep documents apart.
    """
    length = marked.shape[1]
    single = length == LONG.length or not packed
    if single and window is None:
        return {}
    places = torch.arange(length, device=marked.device)
    if single:
        seen, positions = (places[:, None] >= places)[None], None
    else:
        document, positions = documents_of(marked)
        seen = seen_within(document)
    full = bias(seen, kind)
    if window is None:
        return {"attention_mask": full, "position_ids": positions}
    near = places[:, None] - places < window
    return {"attention_mask": {"full_attention": full, "sliding_attention": bias(seen & near, kind)},
            **({} if positions is None else {"position_ids": positions})}
