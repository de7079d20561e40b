"""In-flight sharing: a request waits for a running one that is computing the same beginning, instead of computing it again.

A leader is a running sequence with prompt left to compute. A follower waits, without row or pages, until its leader has
computed what both share, or has ended or been preempted; then it matches like anybody else. A leader never waits, so nobody
waits forever.
"""

from __future__ import annotations

from penstock.cache.prefix import TOKEN, common
from penstock.core.sequence import Sequence

Begin = tuple[str, str, bytes]
"""Adapter, salt and the tokens of the first page."""


class Joining:
    """Leaders by how their contexts begin."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._leaders: dict[Begin, dict[Sequence, tuple[bytearray, int]]] = {}
        """Each with its packed tokens and the position at which it is done."""
        self._begins: dict[Sequence, Begin] = {}

    def __bool__(self) -> bool:
        """Whether there is any leader."""
        return bool(self._begins)

    def lead(self, sequence: Sequence, packed: bytearray) -> None:
        """A sequence starts to run with these known tokens."""
        goal = len(packed) // TOKEN // self.page * self.page
        if goal > sequence.planned:
            begin = self._begin(sequence, packed)
            self._begins[sequence] = begin
            self._leaders.setdefault(begin, {})[sequence] = packed, goal

    def done(self, sequence: Sequence) -> None:
        """A sequence no longer leads: it has computed what it knew, or has lost its pages."""
        begin = self._begins.pop(sequence, None)
        if begin is not None:
            leaders = self._leaders[begin]
            del leaders[sequence]
            if not leaders:
                del self._leaders[begin]

    def clear(self) -> None:
        """Nobody waits for anybody."""
        self._leaders.clear()
        self._begins.clear()

    def leads(self, sequence: Sequence) -> bool:
        """Whether a sequence still has work that others may wait for."""
        return sequence in self._begins

    def advanced(self, sequence: Sequence) -> None:
        """A sequence has computed more."""
        begin = self._begins.get(sequence)
        if begin is not None and sequence.computed >= self._leaders[begin][sequence][1]:
            self.done(sequence)

    def find(self, sequence: Sequence, packed: bytearray, have: int) -> tuple[Sequence, int] | None:
        """The leader that will have computed most of a context's beginning, and up to where (a page border that leaves a
        token to compute); None if that is no more than the `have` positions that can be found already."""
        best: tuple[Sequence, int] | None = None
        width, have = self.page * TOKEN, have - have % self.page
        limit = (len(packed) // TOKEN - 1) // self.page * self.page
        following = packed[have * TOKEN:have * TOKEN + width]
        for leader, (theirs, goal) in self._leaders.get(self._begin(sequence, packed), {}).items():
            # Contexts that differ within the next page share no further page.
            if theirs[have * TOKEN:have * TOKEN + width] == following:
                shared = common(packed, 0, theirs) // width * self.page
                upto = min(shared, limit, goal)
                if upto > max(have, leader.computed, best[1] if best else 0):
                    best = leader, upto
        return best

    def _begin(self, sequence: Sequence, packed: bytearray) -> Begin:
        return sequence.request.adapter, sequence.request.salt, bytes(packed[:self.page * TOKEN])
