"""Copies between the device and the host beside the steps: threads that start them, on a GPU in streams of their own.

On a GPU the host's memory must be pinned, or copies would wait for each other and for the steps. And only some may be under
way: a driver whose queue is full keeps everybody waiting who wants something of the GPU.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""(to, from): bytes of equal length."""

_PIECE_BYTES, _PIECE_COPIES = 16 << 20, 64
"""So much is started at a time, 0.3 ms of a PCIe 5 link, in so many copies at most."""
_PIECES = 4
"""So many may be under way: some are being copied while the thread wakes up that another has ended."""


class Fence:
    """The end of some copies, or of what a stream had been told when it was made. Any thread may ask."""

    def __init__(self, future: Future[torch.cuda.Event | None]) -> None:
        """The future gives the event behind what was enqueued; None if it is done, as on a CPU."""
        self._future = future

    def hold(self) -> None:
        """What the current stream is told from now on begins after it. The caller waits until everything is enqueued; on a CPU,
        until it is done."""
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self) -> None:
        """Returns when it is done."""
        event = self._future.result()
        if event is not None:
            event.synchronize()

    def passed(self) -> bool:
        """Whether it is done."""
        if not self._future.done():
            return False
        event = self._future.result()
        return event is None or event.query()


def moment(device: torch.device) -> Fence:
    """A mark behind everything enqueued on the current stream; on a CPU all of that is done."""
    future: Future[torch.cuda.Event | None] = Future()
    future.set_result(_event() if device.type == "cuda" else None)
    return Fence(future)


def _event() -> torch.cuda.Event:
    # Waiting threads sleep: spinning ones would take a core from the engine.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


class Lane:
    """Carries out copies in order. Starting one costs some 10 us of a thread, which is why it is not the engine's."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pieces: deque[torch.cuda.Event] = deque()
        """The ends of what may be under way."""
        self.hurry = False
        """While somebody waits for all of it to be started, it is, however much."""

    def run(self, copies: Iterable[Copy], after: Sequence[Fence]) -> Fence:
        """Does these copies behind those that it was given before, and behind these fences."""
        return Fence(self._thread.submit(self._run, copies, after))

    @torch.inference_mode()
    def _run(self, copies: Iterable[Copy], after: Sequence[Fence]) -> torch.cuda.Event | None:
        with torch.cuda.stream(self._stream):
            for fence in after:
                fence.hold()
            for piece in _cut(copies):
                while len(self._pieces) >= _PIECES and not self.hurry:
                    self._pieces.popleft().synchronize()
                for to, source in piece:
                    to.copy_(source, non_blocking=True)
                if self._stream is not None:
                    self._pieces.append(_event())
            return _event() if self._stream is not None else None

    def close(self) -> None:
        """Finishes what was given to it."""
        self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()


def _cut(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """The same copies in pieces, the larger ones cut."""
    piece, size = list[Copy](), 0
    for whole in copies:
        large = whole[0].nbytes > _PIECE_BYTES
        for to, source in zip(*(half.split(_PIECE_BYTES) for half in whole), strict=True) if large else [whole]:
            piece.append((to, source))
            size += to.nbytes
            if size >= _PIECE_BYTES or len(piece) >= _PIECE_COPIES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


class Pinned:
    """Host memory that a GPU reads and writes at full speed and unattended, as long as this lives.

    Registered in place: torch's own pinned allocations are rounded up to a power of two.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        torch.cuda.check_error(code)
        # Also where nobody calls `release`: the next owner of the address could not pin it otherwise.
        self.release = weakref.finalize(self, _unregister, memory.data_ptr())


def _unregister(address: int) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))
