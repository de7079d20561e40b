"""The seam of drafters: whoever guesses a row's next tokens, on the device, at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.core.plan import Ints
from penstock.worker.rows import Rows


@dataclass(slots=True)
class Drafting:
    """What a drafter is told: S rows that have just got tokens."""

    rows: Rows
    """Drafts are written to `rows.tokens` [row, position] behind the known tokens: at `length`, `length` + 1, ..."""
    row: torch.Tensor
    """[S] int32, on the device."""
    length: torch.Tensor
    """[S] int32, on the device: how many tokens each row knows."""
    count: Ints
    """[S] how many to write, on the host; 0 for none. All of them are checked, so what is left unwritten is checked, too."""
    hidden: torch.Tensor
    """[>= L, width] hidden states of the tokens behind which this step chose: those of a row are consecutive."""
    first: torch.Tensor
    """[S] int32, on the device: which of them is each row's first. That of its last kept token is as many lines behind it as
    tokens were kept before that one."""


class Drafter(Protocol):
    """Writes drafts. How many is decided by `scheduler/drafting.py::DraftPolicy`; whether they are right, by `verify.py`."""

    def propose(self, drafting: Drafting) -> None:
        """Enqueues whatever finds the drafts and writes them. Nothing here waits for the device."""
        ...
