"""In-flight prefix sharing: a request waits for a running one that is prefilling the same prefix instead of prefilling it too.

A leader is a running sequence that still prefills. A follower waits, without batch row or pages, until its leader has computed
the shared prefix, ended or was preempted; then it matches the cache as usual. Leaders never wait: no deadlock."""

from penstock.cache.prefix import TOKEN, common
from penstock.core.request import Sequence

Begin = tuple[str, str, bytes]
"""Adapter, salt and the tokens of the first page."""


class Joining:
    """The leaders, by the first page of their contexts."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._leaders: dict[Begin, dict[Sequence, tuple[bytearray, int]]] = {}
        """Leader -> its packed tokens and the position at which it stops being a leader."""
        self._begins: dict[Sequence, Begin] = {}

    def __bool__(self) -> bool:
        return bool(self._begins)

    def lead(self, sequence: Sequence, packed: bytearray) -> None:
        """Registers a sequence that starts to run with these known tokens."""
        goal = len(packed) // TOKEN // self.page * self.page
        if goal > sequence.planned:
            begin = self._begin(sequence, packed)
            self._begins[sequence] = begin
            self._leaders.setdefault(begin, {})[sequence] = packed, goal

    def done(self, sequence: Sequence) -> None:
        """Unregisters a leader that has finished its prefill or lost its pages."""
        begin = self._begins.pop(sequence, None)
        if begin is not None:
            leaders = self._leaders[begin]
            del leaders[sequence]
            if not leaders:
                del self._leaders[begin]

    def clear(self) -> None:
        self._leaders.clear()
        self._begins.clear()

    def leads(self, sequence: Sequence) -> bool:
        """True if a sequence is still prefilling tokens that others may wait for."""
        return sequence in self._begins

    def advanced(self, sequence: Sequence) -> None:
        """Called when a sequence has committed more tokens; unregisters it at the end of its prefill."""
        begin = self._begins.get(sequence)
        if begin is not None and sequence.computed >= self._leaders[begin][sequence][1]:
            self.done(sequence)

    def find(self, sequence: Sequence, packed: bytearray, have: int) -> tuple[Sequence, int] | None:
        """The leader that shares the longest prefix with a context, and the length of that prefix, rounded down to a page
        boundary that leaves at least one token to compute. None if it is no longer than the `have` positions already cached."""
        best: tuple[Sequence, int] | None = None
        width, have = self.page * TOKEN, have - have % self.page
        limit = (len(packed) // TOKEN - 1) // self.page * self.page
        following = packed[have * TOKEN:have * TOKEN + width]
        for leader, (theirs, goal) in self._leaders.get(self._begin(sequence, packed), {}).items():
            # A leader whose next page differs shares no page beyond those that are cached.
            if theirs[have * TOKEN:have * TOKEN + width] == following:
                upto = min(common(packed, 0, theirs) // width * self.page, limit, goal)
                if upto > max(have, leader.computed, best[1] if best else 0):
                    best = leader, upto
        return best

    def _begin(self, sequence: Sequence, packed: bytearray) -> Begin:
        return sequence.request.namespace, sequence.request.salt, bytes(packed[:self.page * TOKEN])
