"""Copies between the device and the host beside the steps: a queue of them on a GPU is a stream, on a CPU a thread.

A lane carries out what it is given in order. On a GPU the host's memory must be pinned, or copies would wait for each other
and for the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""(to, from): bytes of equal length."""


class Mark(Protocol):
    """A moment in a lane."""

    def hold_steps(self) -> None:
        """Steps launched from now on begin after it. On a GPU the caller does not wait."""
        ...

    def wait(self) -> None:
        """Returns when the lane has come this far; any thread may ask."""
        ...

    def passed(self) -> bool:
        """Whether the lane has come this far."""
        ...


class Lane(Protocol):
    """A queue of copies."""

    def run(self, copies: Sequence[Copy]) -> Mark:
        """Does these copies after all that was given to the lane and to the device's steps before; the mark is at their end."""
        ...

    def close(self) -> None:
        """Finishes what was given to it."""
        ...


class ThreadLane:
    """On a CPU: what steps do is done when `run` is called."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-saves")

    def run(self, copies: Sequence[Copy]) -> Mark:
        return _Done(self._thread.submit(copy_all, copies))

    def close(self) -> None:
        self._thread.shutdown()


class _Done:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def hold_steps(self) -> None:
        self._future.result()

    def wait(self) -> None:
        self._future.result()

    def passed(self) -> bool:
        return self._future.done()


class StreamLane:
    """On a GPU. `run` and `hold_steps` are called with the steps' stream as the current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, copies: Sequence[Copy]) -> Mark:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy_all(copies)
            return StreamMark()

    def close(self) -> None:
        self._stream.synchronize()


class StreamMark:
    """The moment that the current stream has come to when it is made."""

    def __init__(self) -> None:
        # Waiting threads sleep: spinning ones would take a core from the engine.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()

    def hold_steps(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()

    def passed(self) -> bool:
        return self._event.query()


@torch.inference_mode()
def copy_all(copies: Iterable[Copy]) -> None:
    """Copies in order; on a GPU, enqueues them in the current stream."""
    for to, source in copies:
        to.copy_(source, non_blocking=True)


def pin(memory: torch.Tensor) -> None:
    """Makes a GPU able to read and write host memory at full speed and unattended.

    Registered in place: torch's own pinned allocations are rounded up to a power of two.
    """
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unpin(address: int) -> None:
    """Before memory that was pinned is freed."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
