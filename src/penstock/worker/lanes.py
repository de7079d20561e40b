"""Copies between device and host concurrently with steps: each lane is a thread, on a GPU with its own CUDA stream.

On a GPU, host memory must be pinned, or copies would serialise with each other and with the steps. The number of copies in
flight is bounded, because a full driver queue blocks every thread that uses the GPU."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of equal length in bytes."""

_PIECE_BYTES, _PIECE_COPIES = 16 << 20, 64
"""Limits of one piece: bytes (0.3 ms of a PCIe 5 link) and number of copies."""
_PIECES = 4
"""Maximum pieces in flight, enough to keep the link busy while the thread wakes up."""


class Fence:
    """A point behind some copies, or behind work enqueued on a stream. Thread-safe."""

    def __init__(self, future: Future[torch.cuda.Event | None]) -> None:
        """The future's result is the CUDA event behind the enqueued work, or None if the work is done, as on a CPU."""
        self._future = future

    def hold(self) -> None:
        """Makes work enqueued on the current stream from now on wait for the fence. Blocks the caller until the fence's
        own work is enqueued; on a CPU, until it is done."""
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self) -> None:
        """Blocks until the work is done."""
        event = self._future.result()
        if event is not None:
            event.synchronize()

    def passed(self) -> bool:
        """Whether the work is done."""
        if not self._future.done():
            return False
        event = self._future.result()
        return event is None or event.query()


def moment(device: torch.device) -> Fence:
    """Returns a fence behind everything enqueued on the current stream; on a CPU it has passed."""
    future: Future[torch.cuda.Event | None] = Future()
    future.set_result(_event() if device.type == "cuda" else None)
    return Fence(future)


def _event() -> torch.cuda.Event:
    # Blocking events let waiting threads sleep; spinning would take a core from the engine.
    event = torch.cuda.Event(blocking=True)
    event.record()
    return event


class Lane:
    """Runs copies in order on its own thread, because starting one costs about 10 us of host time."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pieces: deque[torch.cuda.Event] = deque()
        """Events at the ends of the pieces in flight."""
        self.hurry = False
        """While true, the limit of pieces in flight is lifted, because a caller waits until all copies are enqueued."""

    def run(self, copies: Iterable[Copy], after: Sequence[Fence]) -> Fence:
        """Enqueues copies behind all earlier ones and behind the fences `after`. Returns a fence behind them."""
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
        """Finishes all copies and ends the thread."""
        self._thread.shutdown()
        if self._stream is not None:
            self._stream.synchronize()


def _cut(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Groups copies into pieces and splits large ones."""
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
