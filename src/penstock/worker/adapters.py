"""LoRA adapters on one device: read into host memory, put into slots of the device, and what a step adds for its rows.

Slot 0 is the model without an adapter. The engine decides which adapter is in which slot (`scheduler/adapters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.core.plan import StepPlan
from penstock.models.adapters import Deltas
from penstock.worker.staging import upload


class Adapters:
    """All adapters of one worker."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        self.host: dict[str, Deltas] = {}
        """Matrices in host memory, by digest. The engine's thread adds and removes them, no plan names one that it removed."""
        self._slots: dict[int, Deltas] = {}
        self._slot = np.zeros(rows, np.int32)
        """[row] the slot of its adapter."""

    def apply(self, plan: StepPlan) -> None:
        """Fills slots and notes the slots of entering rows."""
        for slot, name in plan.adapters:
            self._slots[slot] = {path: [type(one)(one.row, self._there(one.a), self._there(one.b)) for one in ones]
                                 for path, ones in self.host[name].items()}
        for enter in plan.enter:
            self._slot[enter.row] = enter.adapter

    def _there(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix if self._device.type == "cpu" else matrix.pin_memory().to(self._device, non_blocking=True)

    def delta(self, plan: StepPlan) -> LowRankDelta | None:
        """Deltas of the step's rows; None if none of them has an adapter. The step must compute all tokens of all layers."""
        if not self.adapted(plan):
            return None
        of = np.repeat(self._slot[plan.rows], plan.counts)
        found = []
        for slot in np.unique(of[of > 0]).tolist():
            tokens = np.flatnonzero(of == slot).astype(np.int32)
            found.append(_Group(self._slots[slot], upload(tokens, self._device).long()))
        return LowRankDelta(found)

    def adapted(self, plan: StepPlan) -> bool:
        """Whether one of the plan's rows has an adapter."""
        return bool(self._slots) and bool(self._slot[plan.rows].any())


@dataclass(frozen=True)
class _Group:
    """The tokens of a step that have the same adapter."""

    deltas: Deltas
    tokens: torch.Tensor
    """[t] int64."""


class LowRankDelta:
    """Adds x A^T B^T to the results of the tokens of each adapter (LoRA, Hu et al. 2021)."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def __call__(self, path: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        for group in self._groups:
            parts = group.deltas.get(path)
            if parts is None:
                continue
            mine = x.index_select(0, group.tokens)
            for part in parts:
                rows = out[:, part.row:part.row + part.b.shape[0]]
                rows.index_add_(0, group.tokens, (mine @ part.a.t()) @ part.b.t())
        return out
