"""Rows are shared by clients' requests: one with many choices, prompts or beams gives rows back where others wait for one."""

from __future__ import annotations

from bisect import bisect_right

from penstock.core.sequence import Sequence
from penstock.scheduler.queues import Queues

_SHARES = 16
"""The sequences of one request may always hold a row of so many."""


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
