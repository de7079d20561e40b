"""Copies between device and host concurrently with steps, loads in flight, and the results that the movers' threads report.

Each lane is a thread, on a GPU with its own CUDA stream. There host memory must be pinned, or copies serialise with each other
and the steps. The number of copies in flight is bounded, as a full driver queue blocks every thread that uses the GPU."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from penstock.core.plan import Load, LoadResult, PageName, WriteResult

LOG = logging.getLogger("penstock")

_SILENT_SECONDS = 10.0
"""Minimum seconds between two log messages about failures."""


class Reports:
    def __init__(self) -> None:
        self.write_results: deque[WriteResult] = deque()
        self._load_results: list[LoadResult] = []
        self._ends: dict[int, float] = {}
        """Time at which the last load from each place ended."""
        self._some = threading.Condition()
        self._complained = -_SILENT_SECONDS

    def land(self, ticket: int, ok: bool, began: float, furthest: int, lost: tuple[PageName, ...],
             missed: tuple[int, ...]) -> None:
        """Reports the end of a load that began at `began` and whose furthest place was `furthest`."""
        now = time.perf_counter()
        with self._some:
            since = max(began or now, self._ends.get(furthest, 0.0))
            self._ends[furthest] = now
            self._load_results.append(LoadResult(ticket, ok, now - since, lost, missed))
            self._some.notify_all()

    def wait(self, seconds: float) -> None:
        with self._some:
            self._some.wait_for(lambda: bool(self._load_results), seconds)

    def take(self) -> tuple[list[LoadResult], list[WriteResult]]:
        with self._some:
            load_results, self._load_results = self._load_results, []
        return load_results, [self.write_results.popleft() for _ in range(len(self.write_results))]

    def complain(self, what: str) -> None:
        """Logs a failure, rate-limited, because a failing disk fails often."""
        now = time.monotonic()
        if now - self._complained >= _SILENT_SECONDS:
            self._complained = now
            LOG.warning("%s (further failures in the next %.0f s are not logged)", what, _SILENT_SECONDS)


class Job:
    """A load in flight, in parts that threads carry out. It ends when all parts are done, or when it is given up and no thread
    is between `wanted` and `end`, where device pages are written."""

    def __init__(self, load: Load, places: Sequence[int], reports: Reports) -> None:
        """places: the source of each part: the index of a store, or a negative number for the host."""
        self.ticket = load.ticket
        self.deadline = time.perf_counter() + load.patience
        self.given_up = False
        self._reports = reports
        self._left = Counter(places)
        """Number of unfinished parts by place."""
        self._writing = 0
        self._take_result = False
        self._lost: list[PageName] = []
        self._missed: set[int] = set()
        self._began = 0.0
        self._furthest = -1
        self._lock = threading.Lock()

    def begin(self, place: int) -> None:
        """Begins a part that comes from `place`; larger numbers are further away."""
        with self._lock:
            self._began = self._began or time.perf_counter()
            self._furthest = max(self._furthest, place)

    def wanted(self) -> bool:
        """Whether a part should write its pages. If true, the caller must call `end` with `wrote`."""
        with self._lock:
            wanted = not self.given_up
            self._writing += wanted
            return wanted

    def end(self, place: int, wrote: bool, failed: bool = False) -> None:
        """Ends a part. `wrote`: `wanted` was true for it. `failed`: its place did not answer, so the load is given up."""
        with self._lock:
            if failed:
                self.given_up = True
                self._missed.add(place)
            self._left[place] -= 1
            self._writing -= wrote
            self._land_if_over()

    def lose(self, name: PageName) -> None:
        """Reports a page that could not be read. The pages before it remain usable."""
        with self._lock:
            self._lost.append(name)

    def give_up(self, late: bool = False) -> None:
        """Gives up the load, because no request needs it any more or because it takes too long (`late`)."""
        with self._lock:
            if late and not self.given_up:
                self._missed.update(place for place, count in self._left.items() if count)
            self.given_up = True
            self._land_if_over()

    def _land_if_over(self) -> None:
        if not self._take_result and not self._writing and (self.given_up or not self._left.total()):
            self._take_result = True
            missed = tuple(sorted(place for place in self._missed if place >= 0))
            self._reports.land(self.ticket, not self.given_up, self._began, self._furthest, tuple(self._lost), missed)


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
        """Makes work enqueued on the current stream from now on wait for the fence. Blocks the caller until the fence's own
        work is enqueued; on a CPU, until it is done."""
        event = self._future.result()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait(self) -> None:
        event = self._future.result()
        if event is not None:
            event.synchronize()

    def passed(self) -> bool:
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
