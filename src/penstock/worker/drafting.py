"""The interface of drafters, which write the tokens that a step verifies. They run on the device, before its forward pass.

A step that is planned while the one before still runs does not know that one's tokens; a drafter finds them on the device.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import Ints, StepPlan, Want
from penstock.worker.rows import Rows
from penstock.worker.staging import upload


class Drafting:
    """The input of a drafter: the step's plan, and its D segments whose drafts are missing (possibly none)."""

    def __init__(self, plan: StepPlan, rows: Rows) -> None:
        self.plan = plan
        self.rows = rows
        """Drafts are written to `rows.tokens` [row, position] behind the known tokens: at `length`, `length` + 1, ..."""

    @cached_property
    def segments(self) -> npt.NDArray[np.int64]:
        """[D] indices of the plan's segments."""
        checked = (self.plan.wants & int(Want.EACH)) > 0
        if self.plan.proposals:
            checked &= ~np.isin(self.plan.rows, [proposal.row for proposal in self.plan.proposals])
        return np.flatnonzero(checked)

    @cached_property
    def count(self) -> Ints:
        """[D] number of tokens to draft, at least 1. All of these positions are verified, whether written or not."""
        return self.plan.counts[self.segments] - 1

    @property
    def row(self) -> torch.Tensor:
        """[D] int32, on the device."""
        return self._there[0]

    @property
    def length(self) -> torch.Tensor:
        """[D] int32, on the device: number of known tokens of each row."""
        return self._there[1]

    @cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        plan, picked = self.plan, self.segments
        slack = np.zeros_like(self.count) if plan.slack is None else plan.slack[picked]
        row, known, unsure = upload(np.stack((plan.rows[picked], plan.starts[picked] + 1, slack)), self.rows.device)
        return row, torch.where(unsure > 0, self.rows.length[row.long()], known)


class Drafter(Protocol):
    """Writes draft tokens. `scheduler/drafting.py::DraftPolicy` decides how many, and `verify.py` verifies them."""

    def propose(self, drafting: Drafting) -> None:
        """Enqueues the kernels that compute and write the drafts, without synchronising the device. Called before each step's
        forward pass, so that drafters with a cache of their own can follow the rows; pages exist for all of the plan's
        positions."""
        ...
