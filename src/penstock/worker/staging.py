"""Small arrays on their way between host and device: pinned where there is a device to wait for, plain memory where not."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import MOST_DEPTH

_SLOTS = MOST_DEPTH + 1
"""Host copies of one buffer: more than the plans that can be in flight."""


class Staging:
    """One device buffer, filled again for each step from one of several host buffers, which a copy may still be reading."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._there = torch.empty(0, dtype=dtype, device=device)
        self._slots: deque[_Slot] = deque()

    def reserve(self, size: int) -> None:
        """Makes the buffer at least `size` elements long. It moves, so captured graphs must come later."""
        if size <= len(self._there):
            return
        self._there = torch.empty(size, dtype=self._dtype, device=self._device)
        count = 1 if self._device.type == "cpu" else _SLOTS
        self._slots = deque(_Slot(size, self._there) for _ in range(count))

    def host(self, size: int) -> npt.NDArray[np.int32]:
        """The array to fill before `send`, with room for `size` elements."""
        if size > len(self._there):
            self.reserve(max(size, 2 * len(self._there)))
        self._slots.rotate(-1)
        slot = self._slots[0]
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot.array

    def send(self, size: int) -> None:
        """Copies the first `size` elements over, in the order of the current stream."""
        slot = self._slots[0]
        if slot.copied is None:
            return
        self._there[:size].copy_(slot.memory[:size], non_blocking=True)
        slot.copied.record()

    def device(self, size: int) -> torch.Tensor:
        """The first `size` elements on the device, at the same address until `reserve` has to grow them."""
        return self._there[:size]


class _Slot:
    def __init__(self, size: int, there: torch.Tensor) -> None:
        cuda = there.is_cuda
        self.memory = torch.empty(size, dtype=there.dtype, pin_memory=True) if cuda else there
        self.array: npt.NDArray[np.int32] = self.memory.numpy()
        self.copied = torch.cuda.Event() if cuda else None


class Outbox:
    """Memory of the host that a GPU's kernels write to. A copy would wait behind those of pages that are being saved, as a GPU
    makes its copies of one direction in order, and all later steps would wait behind it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        """size: the most elements of a step. What was taken is used again after as many steps as can be in flight."""
        self.memory = torch.empty((MOST_DEPTH + 2) * size, dtype=dtype, pin_memory=True)
        self._at = 0

    def take(self, size: int) -> torch.Tensor:
        """Room for so many: a view of `memory`."""
        if self._at + size > len(self.memory):
            self._at = 0
        self._at += size
        return self.memory[self._at - size:self._at]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose content is there once the device has come so far; on a CPU, the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
