"""Loads in flight, and the results that the movers' threads report."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from penstock.core.transfer import Load, LoadResult, PageName, WriteResult

LOG = logging.getLogger("penstock")

_SILENT_SECONDS = 10.0
"""Minimum seconds between two log messages about failures."""


class Reports:
    """Results of transfers, collected from threads."""

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
        """Waits for a result, at most `seconds`."""
        with self._some:
            self._some.wait_for(lambda: bool(self._load_results), seconds)

    def take(self) -> tuple[list[LoadResult], list[WriteResult]]:
        """Returns the results since the last call."""
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
