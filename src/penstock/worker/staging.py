"""Staging buffers for small arrays between host and device: pinned memory with a GPU, plain memory on a CPU."""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.plan import MOST_DEPTH
from penstock.ops.step import bring

_SLOTS = MOST_DEPTH + 1
"""Host buffers per device buffer: more than the plans that can be in flight."""


class Staging:
    """One device buffer of int32, refilled each step from one of several host buffers: the last one may still be read."""

    def __init__(self, device: torch.device, bring: Callable[..., None] = bring) -> None:
        """`bring`: as in ops/step.py."""
        self._bring = bring
        self._device = device
        self._there = torch.empty(0, dtype=torch.int32, device=device)
        self._slots: deque[_Slot] = deque()

    def reserve(self, size: int) -> None:
        """Makes the buffer at least `size` elements long. It moves, so captured graphs must come later."""
        if size <= len(self._there):
            return
        self._there = torch.empty(size, dtype=torch.int32, device=self._device)
        count = 1 if self._device.type == "cpu" else _SLOTS
        self._slots = deque(_Slot(size, self._there) for _ in range(count))

    def host(self, size: int) -> npt.NDArray[np.int32]:
        """Returns the array to fill before `send`, with room for `size` elements."""
        if size > len(self._there):
            self.reserve(max(size, 2 * len(self._there)))
        self._slots.rotate(-1)
        slot = self._slots[0]
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot.array

    def send(self, size: int) -> None:
        """Enqueues a copy of the first `size` elements on the current stream."""
        slot = self._slots[0]
        if slot.copied is None:
            return
        self._bring(slot.memory[:size], self._there[:size])
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
    """Pinned host memory that GPU kernels write to directly. A copy would queue behind the saves of pages, because a GPU runs
    the copies of one direction in order, and all later steps would wait for it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        """size: maximum elements per step. Memory is reused after as many steps as can be in flight."""
        self.memory = torch.empty((MOST_DEPTH + 2) * size, dtype=dtype, pin_memory=True)
        self._at = 0

    def take(self, size: int) -> torch.Tensor:
        """Reserves `size` elements; returns a view of `memory`."""
        if self._at + size > len(self.memory):
            self._at = 0
        self._at += size
        return self.memory[self._at - size:self._at]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Enqueues a copy to pinned host memory, valid once the device has run it; on a CPU returns the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class Arriving:
    """A tensor on its way to the host, which may be waited for before the rest of the step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._there = to_host(tensor)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def numpy(self) -> npt.NDArray[np.int32]:
        """Waits for it."""
        if self._event is not None:
            self._event.synchronize()
        found: npt.NDArray[np.int32] = self._there.numpy()
        return found


def upload(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Enqueues a copy of an array that may be freed or changed at once; on a CPU returns a tensor of its memory."""
    tensor = torch.from_numpy(array)
    # Pinned memory returns to torch's pool only after the copy from it has run.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
