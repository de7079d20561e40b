"""Drafts from the row's own tokens: the continuation of the latest place where its last tokens occurred before.

Prompt lookup decoding (Saxena 2023). It pays where answers repeat their prompt: editing, code, extraction. Rows are searched on
the device, so that it works on tokens that the host does not know yet.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.core.plan import Ints
from penstock.worker.drafting import Drafter, Drafting, Host, LoadedDrafter
from penstock.worker.staging import upload

_CELLS = 1 << 20
"""Tokens that are searched at once, which bounds the memory that it takes."""
SCRATCH = 48 * _CELLS
"""Bytes of it."""


class NGram(Drafter):
    """Finds the longest agreement of a row's last tokens with an earlier place: of at least `shortest` tokens; those beyond
    `longest` do not count. Of equal ones it takes the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, drafting: Drafting) -> None:
        if not len(drafting.segments):
            return
        row, length, count = drafting.row.long(), drafting.length.long(), drafting.count
        width = int(drafting.plan.starts[drafting.segments].max()) + 1
        most = max(1, _CELLS // width)
        for at in range(0, len(count), most):
            part = slice(at, at + most)
            self._propose(drafting.rows.tokens, row[part], length[part], count[part], width)

    def _propose(self, tokens: torch.Tensor, row: torch.Tensor, length: torch.Tensor, count: Ints, width: int) -> None:
        """Searches rows of at most `width` known tokens."""
        known = tokens[row, :width]
        last = length[:, None] - 1
        column = torch.arange(width, device=known.device)
        agreed = torch.zeros(known.shape, dtype=torch.int64, device=known.device)
        alive = column < last
        for back in range(self._longest):
            token = known.gather(1, (last - back).clamp(min=0))
            equal = torch.zeros_like(alive)
            equal[:, back:] = known[:, :width - back] == token
            alive = alive & equal
            agreed += alive
        best, _ = torch.where(agreed >= self._shortest, agreed * width + column, -1).max(1)
        places = np.stack((np.repeat(np.arange(len(count), dtype=np.int32), count),
                           np.concatenate([np.arange(one, dtype=np.int32) for one in count])))
        segment, offset = upload(places, known.device).long()
        end = best[segment] % width
        # A continuation that reaches the end goes on from its beginning, as if the text were periodic.
        source = end + 1 + offset % (length[segment] - 1 - end).clamp(min=1)
        drafts = torch.where(best[segment] >= 0, known[segment, source.clamp(max=width - 1)], 0)
        tokens[row[segment], length[segment] + offset] = drafts


class LoadedNGram(LoadedDrafter):
    """Has neither weights nor states."""

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__()
        self._drafter = NGram(shortest, longest)

    def start(self, host: Host) -> Drafter:  # noqa: ARG002
        return self._drafter
