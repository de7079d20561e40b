"""Rows and steps are shared by clients' requests: one with many choices, prompts or beams gives rows back where others wait for
one, and its rows take turns beside requests with few."""

import math
from bisect import bisect_right

from penstock.core.sequence import Sequence
from penstock.core.steptime import Load, StepTime
from penstock.scheduler.queues import Queues

_SHARES = 16
"""The sequences of one request may always hold a row of so many."""
_BESIDE = 0.25
"""Part of a step that further rows of requests with many may add to those of requests with few."""


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
            self._ranks = sorted({sequence.request.owner: queues.policy.rank(sequence) for order in
                                  (queues.running, queues.waiting) for sequence in order}.values())

    def left(self, sequence: Sequence) -> int:
        """The rows that its request may still take; below 0 if it has too many."""
        if not self._ranks:
            return self._rows
        sharing = bisect_right(self._ranks, self._queues.policy.rank(sequence)) + self._more
        return max(self._rows // sharing, self._least) - self._queues.held[sequence.request.owner]


class Turns:
    """Chooses the rows of requests with many that sit a step out. They keep row and pages, so that a turn costs nothing."""

    def __init__(self, queues: Queues, times: StepTime) -> None:
        self._queues, self._times = queues, times
        self._least = max(1, len(queues.rows) // _SHARES)
        self._at = 0
        """The place of the next turn among the rows of requests with many."""

    def resting(self, running: list[Sequence]) -> set[Sequence]:
        """The sequences that sit the next step out. None, where no request has few rows, or nobody watches."""
        queues, times, held = self._queues, self._times, self._queues.held
        if max(held.values(), default=0) <= self._least or not times.known:
            return set()
        entering = queues.rows and not queues.crowded and any(owner not in held for owner in queues.asking)
        if not (entering or min(held.values()) <= self._least) or queues.policy.tightest(queues.running.groups) == math.inf:
            return set()
        few, many = list[Sequence](), list[Sequence]()
        for sequence in running:
            if sequence.goal - sequence.planned == 1:
                (few if held[sequence.request.owner] <= self._least else many).append(sequence)
        first = len(few) + min(len(many), self._least)
        each = sum(sequence.planned for sequence in few + many) / max(1, len(few + many))
        longest = (1 + _BESIDE) * times.seconds(Load(first, first, first * each))
        rows = bisect_right(range(first, len(few + many) + 1), longest, key=lambda n: times.seconds(Load(n, n, n * each)))
        count, at = first + max(0, rows - 1) - len(few), self._at % max(1, len(many))
        self._at = at + count
        return set((many[at:] + many[:at])[count:])
