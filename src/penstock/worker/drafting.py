"""The interface of drafters, which propose the next tokens of rows on the device at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.core.plan import Ints
from penstock.worker.rows import Rows


@dataclass(slots=True)
class Drafting:
    """The input of a drafter: S rows that have just received tokens."""

    rows: Rows
    """Drafts are written to `rows.tokens` [row, position] behind the known tokens: at `length`, `length` + 1, ..."""
    row: torch.Tensor
    """[S] int32, on the device."""
    length: torch.Tensor
    """[S] int32, on the device: number of known tokens of each row."""
    count: Ints
    """[S] number of tokens to draft, on the host; may be 0. All of these positions are verified, whether written or not."""
    hidden: torch.Tensor
    """[>= L, width] hidden states from which this step chose tokens; the states of one row are consecutive."""
    first: torch.Tensor
    """[S] int32, on the device: index in `hidden` of each row's first state. The state that chose the row's last token is at
    first + (tokens kept before that one)."""


class Drafter(Protocol):
    """Writes draft tokens. `scheduler/drafting.py::DraftPolicy` decides how many, and `verify.py` verifies them."""

    def propose(self, drafting: Drafting) -> None:
        """Enqueues the kernels that compute and write the drafts, without synchronising the device."""
        ...
