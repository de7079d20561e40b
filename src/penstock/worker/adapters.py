"""LoRA adapters on one device: in host memory, in slots of the device, and what a step adds for its rows.

Slot 0 is the model without an adapter. The engine decides which adapter is in which slot (`scheduler/queues.py`)."""

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.core.plan import Ints, StepPlan
from penstock.layers.step import BASE, Adapted, Apart, Base
from penstock.models.adapters import APART, EMBEDDING, HEAD, Weights
from penstock.ops.linear import Weight
from penstock.ops.lora import Groups, LoraOps, Slabs, size, write
from penstock.worker.rows import Staging, upload


class Adapters:
    def __init__(self, rows: int, slabs: Slabs | None, ops: LoraOps, device: torch.device) -> None:
        """`slabs`: None if adapters are not served."""
        self.slabs = slabs
        self._ops = ops
        self._device = device
        self.host: dict[str, Weights] = {}
        """By digest. The engine's thread adds and removes them, no plan names one that it removed."""
        self._slot = np.zeros(rows, np.int32)
        """[row] the slot of its adapter."""
        self._from = np.zeros(rows, np.int64)
        """[row] the first position that its adapter computes."""
        self._apart: dict[int, dict[str, tuple[torch.Tensor | None, ...]]] = {}
        """`Weights.apart` on the device, by slot."""
        self._ends: dict[str, set[int]] = {EMBEDDING: set(), HEAD: set(), APART: set()}
        """Slots whose adapters change the model's ends, or what is apart."""
        self._used = False
        """Whether a slot was ever filled."""
        self._staging = {captured: Staging(device) for captured in (False, True)}
        self._last: dict[bool, tuple[list[tuple[bytes, int]], list[LowRankDelta]]] = {}
        """The last result of `_grouped` for a captured step and for another: decode steps of the same rows are grouped once."""

    def apply(self, plan: StepPlan) -> None:
        """Fills slots and notes the slots of entering rows."""
        if plan.adapters:
            self._last.clear()
        for slot, name in plan.adapters:
            assert self.slabs is not None
            self._used = True
            weights = self.host[name]
            self.slabs.fill(slot - 1, weights.matrices)
            for path, slots in self._ends.items():
                slots.discard(slot)
                if path in weights.ends:
                    slots.add(slot)
            self._apart[slot] = {path: tuple(None if one is None else one.to(self._device, non_blocking=True) for one in each)
                                 for path, each in weights.apart.items()}
        for enter in plan.enter:
            self._slot[enter.row], self._from[enter.row] = enter.adapter, enter.adapted_from

    def adapted(self, plan: StepPlan, *ends: str) -> bool:
        """Whether one of the plan's rows has an adapter; with `ends`, one that changes one of them."""
        if not self._used:
            return False
        slots = self._slot[plan.rows]
        if not ends:
            return bool(slots.any())
        return any(self._ends[end] and not self._ends[end].isdisjoint(slots.tolist()) for end in ends)

    def reserve(self, tokens: int) -> None:
        """Gives the groups of captured steps of up to so many tokens a fixed address."""
        if self.slabs is not None:
            self._last.clear()
            self._staging[True].reserve(2 * size(tokens, len(self.slabs.data)))

    def deltas(self, plan: StepPlan, tokens: int, ends: int, segments: npt.NDArray[np.int64],
               captured: bool = False, own: npt.NDArray[np.int64] | None = None) -> "tuple[LowRankDelta, LowRankDelta]":
        """Deltas of a step's tokens, padded to `tokens`, and of its logits rows, which belong to `segments` and are padded to
        `ends`. `captured`: for a graph, which finds those of the newest call. `own`: the only tokens that are wanted."""
        slots, begins = self._slot[plan.rows] - 1, self._from[plan.rows]
        each = np.repeat(slots, plan.counts)
        if begins.any():
            place = np.repeat(plan.starts - begins - np.cumsum(plan.counts) + plan.counts, plan.counts) + np.arange(len(each))
            each[place < 0] = -1
        if own is not None:
            each, tokens = np.pad(each, (0, tokens - len(each)), constant_values=-1)[own], len(own)
        # A token is chosen only after positions that the adapter computes.
        whole, lines = self._grouped(captured, (each, tokens), (slots[segments[:ends]], ends))
        return whole, lines

    def head(self, plan: StepPlan, segments: npt.NDArray[np.integer], rows: int) -> Adapted:
        """The deltas of logits rows of these segments, padded to `rows`."""
        if not self.adapted(plan, HEAD):
            return BASE
        (delta,) = self._grouped(False, (self._slot[plan.rows][segments] - 1, rows))
        return Base(delta)

    def _grouped(self, captured: bool, *each: tuple[Ints, int]) -> "list[LowRankDelta]":
        """Uploads the groups of rows with such slots, padded to so many."""
        assert self.slabs is not None
        count, staging = len(self.slabs.data), self._staging[captured]
        asked = [(slots.tobytes(), rows) for slots, rows in each]
        if captured in self._last and self._last[captured][0] == asked:
            return self._last[captured][1]
        places = list(accumulate((size(rows, count) for _, rows in each), initial=0))
        host = staging.host(places[-1])
        for at, (slots, rows) in zip(places, each, strict=False):
            write(host[at:], slots, rows, count)
        staging.send(places[-1])
        there = staging.device(places[-1])
        found = []
        for at, (slots, rows) in zip(places, each, strict=False):
            found.append(LowRankDelta(self._ops, self.slabs, Groups.of(there[at:], rows, count),
                                      {} if captured else self._changes(slots)))
        self._last[captured] = asked, found
        return found

    def _changes(self, slots: Ints) -> dict[str, list[tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]]]:
        """`LowRankDelta`'s for rows with these slots (-1: none)."""
        present = set((slots + 1).tolist())
        found: dict[str, list[tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]]] = {
            end: [] for end, having in self._ends.items() if not having.isdisjoint(present)}
        for slot in sorted(present & self._apart.keys()) if found else ():
            rows = upload(np.flatnonzero(slots == slot - 1).astype(np.int32), self._device).long()
            for path, matrices in self._apart[slot].items():
                found.setdefault(path, []).append((rows, matrices))
        return found


class LowRankDelta:
    """Adds x A^T B^T to the results of the rows of each adapter (LoRA, Hu et al. 2021): a `layers/step.py::Delta`."""

    def __init__(self, ops: LoraOps, slabs: Slabs, groups: Groups, changes: Mapping[str, Apart]) -> None:
        """`changes`: has the changed ends of the model, and by path (rows, matrices) of adapters that are no mere product."""
        self._ops, self._slabs, self._groups, self._changes = ops, slabs, groups, changes

    def apart(self, path: str) -> Apart:
        return self._changes.get(path, ())

    def shrink(self, path: str, x: torch.Tensor) -> torch.Tensor | None:
        return self._ops.shrink(x, path, self._slabs, self._groups) if path in self._slabs.layout.targets else None

    def expand(self, path: str, low: torch.Tensor | None, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if low is not None:
            self._ops.expand(low, path, self._slabs, self._groups, out, bias)
        return out

    def product(self, path: str, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, kind: str | None
                ) -> torch.Tensor | None:
        if path not in self._slabs.layout.targets:
            return None
        return self._ops.product(x, path, self._slabs, self._groups, weight, bias, kind)

    def embed(self, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if EMBEDDING in self._changes:
            out = self.expand(EMBEDDING, self._ops.look_up(tokens, EMBEDDING, self._slabs, self._groups), out, None)
            for rows, (matrix,) in self._changes[EMBEDDING]:
                assert matrix is not None
                out[rows] = matrix[tokens[rows].long()]
        return out

    def head(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if HEAD in self._changes:
            out = self.expand(HEAD, self.shrink(HEAD, x), out, bias)
            for rows, (matrix,) in self._changes[HEAD]:
                assert matrix is not None
                out[rows] = F.linear(x[rows], matrix, bias).float()
        return out
