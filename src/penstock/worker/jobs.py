"""Loads under way and what threads have to tell of their ends."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from penstock.core.transfer import Load, LoadResult, PageName, WriteResult

LOG = logging.getLogger("penstock")

_SILENT_SECONDS = 10.0
"""Between two lines of log about failures."""


class Reports:
    """Results of transfers, collected from threads."""

    def __init__(self) -> None:
        self.write_results: deque[WriteResult] = deque()
        self._load_results: list[LoadResult] = []
        self._ends: dict[int, float] = {}
        """When the last load from each place ended."""
        self._some = threading.Condition()
        self._complained = -_SILENT_SECONDS

    def land(self, ticket: int, ok: bool, began: float, furthest: int, lost: tuple[PageName, ...],
             missed: tuple[int, ...]) -> None:
        """A load has ended that began then and whose furthest place was this."""
        now = time.perf_counter()
        with self._some:
            since = max(began or now, self._ends.get(furthest, 0.0))
            self._ends[furthest] = now
            self._load_results.append(LoadResult(ticket, ok, now - since, lost, missed))
            self._some.notify_all()

    def wait(self, seconds: float) -> None:
        """Returns when there is a result, or after so long."""
        with self._some:
            self._some.wait_for(lambda: bool(self._load_results), seconds)

    def take(self) -> tuple[list[LoadResult], list[WriteResult]]:
        """The results since the last call."""
        with self._some:
            load_results, self._load_results = self._load_results, []
        return load_results, [self.write_results.popleft() for _ in range(len(self.write_results))]

    def complain(self, what: str) -> None:
        """Logs a failure, at most one in a while: a disk that fails does so often."""
        now = time.monotonic()
        if now - self._complained >= _SILENT_SECONDS:
            self._complained = now
            LOG.warning("%s (others like this in the next %.0f s are not told)", what, _SILENT_SECONDS)


class Job:
    """A load under way, in parts that threads do. It lands when all are done, or when it is given up and no thread is between
    `wanted` and the end of its part, as only there pages of the device are written."""

    def __init__(self, load: Load, places: Sequence[int], reports: Reports) -> None:
        """`places`: for each part, where its pages come from: a store's number, or a negative one for the host."""
        self.ticket = load.ticket
        self.deadline = time.perf_counter() + load.patience
        self.given_up = False
        self._reports = reports
        self._left = Counter(places)
        """Parts that have not ended, by place."""
        self._writing = 0
        self._take_result = False
        self._lost: list[PageName] = []
        self._missed: set[int] = set()
        self._began = 0.0
        self._furthest = -1
        self._lock = threading.Lock()

    def begin(self, place: int) -> None:
        """A part begins that comes from `place`: larger numbers are further away."""
        with self._lock:
            self._began = self._began or time.perf_counter()
            self._furthest = max(self._furthest, place)

    def wanted(self) -> bool:
        """Whether a part should write its pages; if so, `end` says when it has."""
        with self._lock:
            wanted = not self.given_up
            self._writing += wanted
            return wanted

    def end(self, place: int, wrote: bool, failed: bool = False) -> None:
        """A part has ended, and was `wanted` or not. It has `failed` if its place gave no answer; there is no use in the other
        parts then."""
        with self._lock:
            if failed:
                self.given_up = True
                self._missed.add(place)
            self._left[place] -= 1
            self._writing -= wrote
            self._land_if_over()

    def lose(self, name: PageName) -> None:
        """A page is not to be had. Those before it are of use without it."""
        with self._lock:
            self._lost.append(name)

    def give_up(self, late: bool = False) -> None:
        """It is no longer wanted, or takes too long (`late`)."""
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
