"""Rows and steps are shared: a request with many choices, prompts or beams gives rows back to waiting ones and takes turns."""

import math
from bisect import bisect_right

from penstock.core.request import Sequence
from penstock.core.steptime import Load
from penstock.scheduler.pace import HAD, LIVELY, Pace
from penstock.scheduler.queues import Queues

_SHARES = 16
"""The sequences of one request may always hold a row of so many."""
_BESIDE = 0.2
"""Part of the steps of requests with few rows that those of requests with many may add to them."""


class Shares:
    """The number of rows that the sequences of each request may hold: equal for all that are as important or more, as of
    the plan being made. All, where nobody waits or nobody holds many."""

    def __init__(self, queues: Queues, more: int = 0) -> None:
        """`more`: further requests, about to wait."""
        self._queues, self._more = queues, more
        self._rows = len(queues.rows) + len(queues.running)
        self._least = max(1, self._rows // _SHARES)
        self._ranks: list[float] = []
        """Of all requests, ascending."""
        if (queues.waiting or more) and max(queues.held.values(), default=0) > self._least:
            self._ranks = sorted(queues.ranks.values())

    def left(self, owner: str) -> int:
        """The rows that a request may still take; below 0 if it has too many."""
        if not self._ranks:
            return self._rows
        sharing = bisect_right(self._ranks, self._queues.ranks[owner]) + self._more
        return max(self._rows // sharing, self._least) - self._queues.held[owner]

    def below(self) -> set[str]:
        """The requests that wait and have less than their share. None, where nobody holds many."""
        return {owner for owner in self._queues.asking if self.left(owner) > 0} if self._ranks else set()

    def above(self) -> list[Sequence]:
        """The running sequences of requests with more than their share, the last in order first."""
        return [sequence for sequence in reversed(list(self._queues.running)) if self.left(sequence.request.owner) < 0]


class Turns:
    """Chooses the rows of requests with many that sit a step out. They keep row and pages, so that a turn costs nothing."""

    def __init__(self, queues: Queues, pace: Pace) -> None:
        self._queues, self._pace = queues, pace
        self._least = max(1, len(queues.rows) // _SHARES)
        self._at = 0
        """The place of the next turn among the rows of requests with many."""
        self._saved = 0.0
        """Seconds that these have left unused of their part; below 0: that they had while no small request was in."""

    def resting(self, running: list[Sequence], now: float) -> tuple[set[Sequence], bool]:
        """The sequences that sit the next step out, and whether that is for small requests that are expected: for those a step
        takes a `Pace.piece` at most. None, where no request has few rows or is expected, or nobody watches."""
        queues, times, held, asking = self._queues, self._pace.times, self._queues.held, self._queues.asking
        if max(held.values(), default=0) <= self._least or not times.known or (
                queues.policy.tightest(queues.running.groups) == math.inf):
            return set(), False

        def small(owner: str) -> bool:
            return held[owner] + asking[owner] <= self._least

        beside = any(map(small, held)) or (queues.rows and not queues.crowded and any(map(small, asking)))
        if beside:
            self._pace.lively = now + LIVELY
        elif now >= self._pace.lively:
            self._saved = self._pace.had(self._saved, HAD)
            return set(), False
        few, many = list[Sequence](), list[Sequence]()
        for sequence in running:
            if sequence.goal - sequence.planned == 1:
                (few if small(sequence.request.owner) else many).append(sequence)
        first, least = len(few), min(len(many), self._least)
        each = sum(sequence.planned for sequence in few + many) / max(1, len(few + many))

        def seconds(rows: int) -> float:
            return times.seconds(Load(rows, rows, rows * each))

        alone = seconds(first)
        if beside and seconds(first + len(many)) <= (1 + _BESIDE) * alone:
            return set(), False
        self._saved = self._saved + _BESIDE * alone if beside else self._pace.had(self._saved)
        longest = alone + self._saved if beside else max(self._pace.piece, seconds(least))
        count = max(0, bisect_right(range(first, first + len(many) + 1), longest, key=seconds) - 1)
        count = count if count >= least else 0
        self._saved = min(self._saved, 0.0) if count else self._saved
        at = self._at % max(1, len(many))
        self._at = at + count
        return set((many[at:] + many[:at])[count:]), not beside and count < len(many)
