"""The whole face of the cache to the scheduler: match, grow, settle, fork, release, drain.

Every method either does all of what it says or nothing. Page edits and copies gather here until `drain` hands them to the
plan being made. Execution is in order: what a plan reads may be given away as soon as the NEXT plan is made.
"""

from __future__ import annotations

import numpy as np

from penstock.cache.pool import Pools
from penstock.core.layout import CacheLayout
from penstock.core.plan import Ints, Move
from penstock.core.sequence import PageRun, Sequence


class Cache:
    """Pages of every live sequence."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.pools = Pools(layout)
        self._edits: list[list[int]] = [[] for _ in layout.groups]
        self._moves: list[Move] = []

    def match(self, sequence: Sequence) -> int:
        """Positions of a sequence without pages whose entries are in the cache already; the sequence then holds them.

        A sequence forked from a live one comes with its pages (`fork`); there is no index of finished contexts yet, so all
        others start at 0. The last known token is never matched: its logits are needed.
        """
        return sequence.planned if sequence.pages else 0

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Makes positions [planned, upto) of a sequence with a row writable, in all groups or in none.

        Pages that no position from `planned` on can need are given back first. A page with other holders is copied before
        it is written to.
        """
        start, page = sequence.planned, self.layout.page
        if not sequence.pages:
            sequence.pages = [PageRun() for _ in self.layout.groups]
        wanted: list[tuple[int, list[int], bool]] = []
        for g, run in enumerate(sequence.pages):
            self._drop_behind(g, run, start)
            at = start // page
            copy = run.first <= at < len(run.ids) and self.pools.shared(g, run.ids[at])
            count = -(-upto // page) - len(run.ids) + copy
            taken = self.pools.take(g, count) if count > 0 else []
            if taken is None:
                for other, pages, _ in wanted:
                    for mine in pages:
                        self.pools.give(other, mine)
                return False
            wanted.append((g, taken, copy))
        for g, taken, copy in wanted:
            self._install(g, sequence, taken, copy)
        sequence.room = len(sequence.pages[0].ids) * page
        return True

    def has_room(self, sequence: Sequence, upto: int) -> bool:
        """Whether free slabs would do for all of positions [planned, upto), computed at once, with nothing else growing."""
        slabs = 0
        for g, group in enumerate(self.layout.groups):
            held = len(sequence.pages[g].ids) if sequence.pages else 0
            pages = min(-(-upto // self.layout.page) - held, self.layout.pages_for(group, upto, upto)) + 1
            slabs += -(-pages // group.per_slab)
        return slabs <= self.layout.slabs - self.pools.slabs_used

    def _drop_behind(self, g: int, run: PageRun, start: int) -> None:
        """Gives back the pages that lie wholly behind everything `start` and later positions need."""
        alive = min(self.layout.groups[g].keep.needed(start)[0] // self.layout.page, len(run.ids))
        for i in range(run.first, alive):
            self.pools.give(g, run.ids[i])
        run.first = max(run.first, alive)

    def _install(self, g: int, sequence: Sequence, taken: list[int], copy: bool) -> None:
        run, row, edits = sequence.pages[g], sequence.row, self._edits[g]
        if copy:
            at = sequence.planned // self.layout.page
            target = taken.pop()
            self._moves.append(Move(g, run.ids[at], target))
            self.pools.give(g, run.ids[at])
            run.ids[at] = target
            edits += (row, at, target)
        for page in taken:
            edits += (row, len(run.ids), page)
            run.ids.append(page)

    def enter(self, sequence: Sequence) -> None:
        """Tells the worker the pages of a sequence that has just been given a row."""
        for g, run in enumerate(sequence.pages):
            for i in range(run.first, len(run.ids)):
                self._edits[g] += (sequence.row, i, run.ids[i])

    def settle(self, sequence: Sequence) -> None:
        """Called when positions below `sequence.computed` are certain: from here on their whole pages may be shared."""

    def fork(self, parent: Sequence, child: Sequence, upto: int) -> None:
        """The child holds the parent's pages of positions [0, upto) too. Nothing is copied until one of them writes."""
        pages = -(-upto // self.layout.page)
        child.pages = []
        parent.room = child.room = 0
        for g, run in enumerate(parent.pages):
            mine = PageRun()
            mine.first = run.first
            mine.ids = run.ids[:pages]
            for i in range(mine.first, len(mine.ids)):
                self.pools.share(g, mine.ids[i])
            child.pages.append(mine)

    def release(self, sequence: Sequence) -> None:
        """Gives back all of a sequence's pages."""
        for g, run in enumerate(sequence.pages):
            for i in range(run.first, len(run.ids)):
                self.pools.give(g, run.ids[i])
        sequence.pages = []
        sequence.room = 0

    def drain(self) -> tuple[list[Ints], list[Move]]:
        """The page edits ([edits, 3] for each group) and copies since the last call, for the plan being made."""
        edits = [np.array(flat, np.int32).reshape(-1, 3) for flat in self._edits]
        moves, self._moves = self._moves, []
        for flat in self._edits:
            flat.clear()
        return edits, moves

    @property
    def usage(self) -> float:
        """Fraction of the arena that is held."""
        return self.pools.slabs_used / max(1, self.layout.slabs)

    def check(self, sequences: list[Sequence]) -> None:
        """Asserts that the pages held are exactly those of `sequences`."""
        held: list[dict[int, int]] = [{} for _ in self.layout.groups]
        for sequence in sequences:
            for g, run in enumerate(sequence.pages):
                for i in range(run.first, len(run.ids)):
                    held[g][run.ids[i]] = held[g].get(run.ids[i], 0) + 1
        self.pools.check(held)
