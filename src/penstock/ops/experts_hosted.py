"""Experts in host memory: all matrices of a layer are pinned there, some have a slot on the device as well.

A kernel copies the picked experts that have no slot over PCIe into a stage that all layers share, so nothing is decided on the
host and a CUDA graph can hold it; `where` says where the grouped GEMMs read an expert. In short steps the CPU computes some of
them instead (ops/experts_helped.py). Between steps, experts picked more often get others' slots (`Residency.promote`)."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.coded_forms import CodedWeight
from penstock.ops.experts import ExpertsOps, Glu, Stack
from penstock.ops.experts_helped import Absent, Helper, helper

_EVERY = 4096
"""The number of picks from which on all experts without a slot are copied: nearly all are picked."""
_PROGRAMS = 16
"""That copy one expert."""
_BLOCK = 4096
"""32-bit words that one of them copies at a time."""
_GAIN = 1.25
"""An expert must be picked so many times as often as the one whose slot it takes."""


class Stages(dict[tuple[int, int, torch.dtype], torch.Tensor]):
    """Shared by layers: stages by rows, columns and type of their matrices, and the CPU's side by tokens' width and type."""

    def __init__(self) -> None:
        super().__init__()
        self.helpers: dict[tuple[int, torch.dtype, bool], Helper | None] = {}


class HostedStack(Stack):
    """E matrices [n, k]: `host` [E, n, k], and `data` [slots, n, k] on the device, in which at first the first ones are.

    If they are quantized, `host` and `data` have codes, and `coded` the rest for all E, on the device."""

    __slots__ = ("coded", "host", "stage", "where")

    def __init__(self, host: torch.Tensor, slots: int, device: torch.device, grouped: ExpertsOps,
                 coded: CodedWeight | None = None) -> None:
        count, n, columns = host.shape
        assert n * columns % 16 == 0 and 0 < slots < count, (host.shape, slots)
        k, dtype, beside = (columns, host.dtype, 0) if coded is None else (coded.k, coded.dtype, coded.nbytes)
        super().__init__(host[:slots].to(device, copy=True), count, n, k, dtype, grouped)
        self.host, self.coded = host, coded
        self.nbytes += beside
        self.where = torch.empty(count, dtype=torch.int64, device=device)
        """[E] at which element from the beginning of `data` on an expert's matrix begins: there, or in the stage."""
        self.stage: torch.Tensor
        """[E - slots, n, k] on the device."""


class Residency:
    """The experts of a layer that have a slot."""

    def __init__(self, up: HostedStack, down: HostedStack, stages: Stages, glu: Glu, up_bias: torch.Tensor | None,
                 down_bias: torch.Tensor | None, inward: bool) -> None:
        """`stages` has those of other layers, and gets this one's. The others as `ExpertsOps.apply` takes them."""
        self.stacks = up, down
        slots, device = len(up.data), up.data.device
        for stack in self.stacks:
            key, size = (stack.n, stack.k, stack.host.dtype), up.count - slots
            if key not in stages or len(stages[key]) < size:
                stages[key] = torch.empty(size, *stack.host.shape[1:], dtype=stack.host.dtype, device=device)
            stack.stage = stages[key]
        self.slot = np.full(up.count, -1)
        """[E] of each expert; -1: it has none."""
        self.slot[:slots] = np.arange(slots)
        self._missing = torch.empty(up.count - slots, dtype=torch.int32, device=device)
        self._scores = np.zeros(up.count)
        self._tell()
        biases = (None if bias is None else bias.to(up.host.device) for bias in (up_bias, down_bias))
        self._absent = Absent(self._missing, (up.host, down.host, glu, *biases, inward))
        quantized = up.coded is not None or down.coded is not None
        kind = up.k, up.dtype, quantized
        if kind not in stages.helpers:
            # The CPU sums in another order than the GPU, and 16 rows at a time, and reads codes that are packed in another way.
            alone = quantized or up.grouped.invariant or up.n % 16 or down.n % 16
            stages.helpers[kind] = found = None if alone else helper(up.k, up.dtype, device)
            if found is not None and device.type == "cuda":
                found.measure(self._absent, self.fetch)
        self.helper = stages.helpers[kind]

    def _tell(self) -> None:
        """Copies to the device where each expert is."""
        missing = np.flatnonzero(self.slot < 0)
        _send(self._missing, missing)
        for stack in self.stacks:
            size = stack.host[0].numel()
            where = self.slot * size
            where[missing] = (stack.stage.data_ptr() - stack.data.data_ptr()) // stack.data.element_size()
            where[missing] += np.arange(len(missing)) * size
            _send(stack.where, where)

    def begin(self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor,
              whole: bool) -> tuple[torch.Tensor, Callable[[torch.Tensor], None] | None]:
        """Enqueues what brings the result of `picks` [T, K] about, besides the operation itself: copies, and the CPU's part.
        Returns the picks that the operation is to compute, and what adds the others' results to its own. `whole`: all are."""
        join = None
        if self.helper is not None and not whole and self.helper.serves(picks):
            picks, join = self.helper.share(self._absent, x, picks, weights)
        self.fetch(picks)
        return picks, join

    def fetch(self, picks: torch.Tensor) -> None:
        """Enqueues the copies of those of `picks` [T, K] that have no slot."""
        from penstock.ops.experts_kernels import fetch  # Triton: heavy, and not everywhere

        total = picks.numel()
        pairs = [one.view(torch.int32) for stack in self.stacks for one in (stack.host, stack.stage)]
        every = total >= _EVERY
        fetch[(len(self._missing), _PROGRAMS)](
            picks, total, self._missing, *pairs, *(stack.host[0].nbytes // 4 for stack in self.stacks),
            every=every, most=_EVERY if not every else 1, block=_BLOCK, num_warps=8)

    def promote(self, picked: npt.NDArray[np.int64], most: int) -> int:
        """Gives slots to experts without one that were picked more often than others, of late above all; at most `most`.
        `picked` [E]: since the last call. Returns how many. Copies are enqueued on the current stream."""
        self._scores = self._scores / 2 + picked
        coming = sorted(np.flatnonzero(self.slot < 0), key=lambda expert: -self._scores[expert])
        going = sorted(np.flatnonzero(self.slot >= 0), key=lambda expert: self._scores[expert])
        moved = 0
        for new, old in zip(coming[:most], going, strict=False):
            if self._scores[new] <= _GAIN * self._scores[old] + 1:
                break
            place = self.slot[new], self.slot[old] = self.slot[old], -1
            for stack in self.stacks:
                stack.data[place[0]].copy_(stack.host[new], non_blocking=True)
            moved += 1
        if moved:
            self._tell()
        return moved


def _send(target: torch.Tensor, numbers: npt.NDArray[np.int64]) -> None:
    found = torch.from_numpy(numbers).to(target.dtype)
    target.copy_(found.pin_memory() if target.is_cuda else found, non_blocking=True)
