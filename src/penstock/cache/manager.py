"""The whole face of the cache to the scheduler: match, grow, commit, fork, release, drain.

Every method either does all of what it says or nothing. Page edits, copies and transfers gather here until `drain` hands them
to the plan being made. Execution is in order: what a plan reads may be given away as soon as the NEXT plan is made.

Who owns a page: `pool` counts the live sequences that hold it and whether the index keeps it. Whole pages of a running
sequence are kept as soon as they are certain (`commit`), the rest of its last page when it ends (`release`). A page that is
kept, or has two holders, is never written: `grow` copies it first. So a match may end inside a page, and that page is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np

from penstock.cache.events import Sink
from penstock.cache.eviction import POLICIES, Evictor
from penstock.cache.indexing import Indexer
from penstock.cache.joining import Joining
from penstock.cache.loading import Loading
from penstock.cache.lookup import Lookup
from penstock.cache.news import News
from penstock.cache.pool import Pools
from penstock.cache.prefix import Node, Prefix
from penstock.cache.sequence_state import SequenceState, packed, state_of
from penstock.cache.tiers import Tiers
from penstock.core.layout import CacheLayout
from penstock.core.plan import Move, StepPlan
from penstock.core.request import TierStats
from penstock.core.sequence import PageRun, Sequence
from penstock.core.transfer import LoadResult, WriteResult

POLICY = "adaptive"
"""The default eviction policy (`cache/eviction.py`); chosen by bench/cache_replay.py."""

_NEVER = 1 << 62
"""A number of positions that no sequence comes to."""


class Reuse(Enum):
    """How much a sequence may share with others."""

    TOKENS = 1
    """All that is there, by token."""
    PAGES = 2
    """Whole pages only, so that none must be copied."""
    NOTHING = 3
    """Nothing found and nothing kept: as many pages as `core/layout.py::CacheLayout.pages_for` says are enough for it."""


class Cache:
    """Pages of every live sequence, and those that are kept for later ones."""

    def __init__(self, layout: CacheLayout, *, policy: str = POLICY, sharing: bool = True, model: str | None = "",
                 quota: float = 1.0, tiers: Tiers | None = None, sink: Sink | None = None) -> None:
        """`sharing`: whether pages are found again. `model`: what names the weights, for content keys; None if that is not
        known yet (`name`). `quota`: the fraction of the arena that the contexts of one tenant may occupy once their requests
        have ended. `tiers`: what is behind the device. `sink` is told what can be found."""
        self.layout = layout
        self.sharing = sharing
        self.tiers = tiers
        self.pools = Pools(layout)
        self.index = Prefix(self.pools, model)
        self.evictor = Evictor(self.index, POLICIES[policy](layout), int(layout.nbytes * quota) if quota < 1 else None)
        self.lookup = Lookup(self.index, layout)
        self.joining = Joining(layout.page)
        self.loading = Loading(self.lookup, self.evictor, self.pools, tiers) if tiers is not None else None
        self._news = News(self.index, tiers, sink) if tiers is not None or sink is not None else None
        self._edits: list[list[int]] = [[] for _ in layout.groups]
        self._moves: list[Move] = []
        self._indexer = Indexer(self.lookup, self.evictor, self.pools, self._edits)
        self._keeps = [group.keep for group in layout.groups]
        self.exact = any(keep.exact for keep in self._keeps)
        """Whether some state serves to continue at one position alone."""
        self._generation = 0
        self._hits = 0
        self._loaded = 0
        """Bytes."""

    @property
    def model(self) -> str | None:
        """The name of the weights in content keys; None if it is not known yet."""
        return self.index.model

    def name(self, model: str) -> None:
        """The weights have got their name: from now on pages are saved to tiers, loaded and announced. Those that the device
        has already are offered and announced at once."""
        assert self.index.model is None
        self.index.model = model
        if self._news is not None:
            self._news.open()

    # -- finding what is there

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence without pages should not start yet: another is computing what it would otherwise compute itself,
        or pages of it are being loaded."""
        if not self.sharing or sequence.scoring or sequence.pages or len(sequence.tokens) <= self.layout.page:
            return False
        if self._follows(sequence):
            return True
        return self.loading is not None and self.index.model is not None and self._loads(sequence, self.loading)

    def _loads(self, sequence: Sequence, loading: Loading) -> bool:
        """Whether it waits for pages to be loaded. It does not ask for any before there is room for it: what the device has of
        it now may be gone by then."""
        asks = state_of(sequence).ticket is not None or not self.pools.slabs_live or self.has_room(sequence, sequence.goal)
        return asks and loading.ask(sequence)

    def _follows(self, sequence: Sequence) -> bool:
        state = state_of(sequence)
        if state.leader is not None:
            if self.joining.leads(state.leader) and state.leader.computed < state.upto:
                return True
            state.leader = None
        if not self.joining:
            return False
        data, root = packed(sequence, len(sequence.tokens)), self._root(sequence)
        found = self.joining.find(sequence, data, self.index.walk(root, data).matched if root is not None else 0)
        if found is not None:
            state.leader, state.upto = found
        return found is not None

    def _root(self, sequence: Sequence) -> Node | None:
        return self.index.roots.get((sequence.request.adapter, sequence.request.salt))

    def match(self, sequence: Sequence, reuse: Reuse = Reuse.TOKENS) -> int:
        """Positions of a sequence without pages whose entries are in the cache already; the sequence then holds them.

        The last known token is never matched: its logits are needed. A sequence whose prompt is to be scored matches nothing. A
        fork comes with its pages.
        """
        if sequence.pages:
            return sequence.planned
        state, page = self._begin(sequence, reuse), self.layout.page
        if not self.sharing or sequence.scoring or reuse is Reuse.NOTHING:
            return 0
        found = self.lookup.find(self._root(sequence), packed(sequence, len(sequence.tokens)), len(sequence.tokens) - 1)
        n = found.reach
        if reuse is Reuse.PAGES and n % page:
            n = self.lookup.continues(found.places, found.trail, n - n % page)
        if not n:
            return 0
        sequence.pages = [self._hold(g, found.places[g], n) for g in range(len(self._keeps))]
        state.deepest = state.origin = found.trail.nodes[-1]
        state.indexed = n - n % page
        if state.indexed:
            # The part beyond the match was not used now, so it may be evicted before the part that was.
            node = self.index.locate(state.deepest, state.indexed)
            state.node = self.index.split(node, (state.indexed - node.start) // page) if state.indexed < node.end else node
            self.index.touch(state.node, self.evictor.now)
        sequence.due = state.indexed + page
        return n

    def _begin(self, sequence: Sequence, reuse: Reuse = Reuse.TOKENS) -> SequenceState:
        """A sequence starts to have pages."""
        state, private = state_of(sequence), reuse is Reuse.NOTHING or not self.sharing
        state.node, state.deepest, state.origin, state.indexed, state.forked = None, None, None, 0, False
        state.generation = -1 if private else self._generation
        sequence.due = _NEVER if private else self.layout.page
        return state

    def _hold(self, g: int, places: list[int], n: int) -> PageRun:
        """Takes hold of a group's pages that a context needs to continue at n."""
        run, page = PageRun(), self.layout.page
        run.ids = places[:-(-n // page)]
        run.ids += [-1] * (n // page - len(run.ids))
        run.first = min(self._keeps[g].needed(n)[0] // page, len(run.ids))
        self.pools.share(g, [place for place in run.ids[run.first:] if place >= 0])
        return run

    # -- pages for what is to be computed

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Makes positions [planned, upto) of a sequence with a row writable, in all groups or in none.

        Pages that no position from `planned` on can need are given back first. A page with other holders, or that the index
        keeps, is copied before it is written to.
        """
        if not sequence.pages:
            sequence.pages = [PageRun() for _ in self.layout.groups]
        elif self.lookup.simple and self._next_page(sequence, upto):
            return True
        # Steps in flight may still make pages behind a window worth keeping; without room for them they are given back now.
        taken = self._take(sequence, upto, certain=True)
        if taken is None and not self.lookup.simple:
            taken = self._take(sequence, upto, certain=False)
        if taken is None:
            return False
        for g, (pages, copy) in enumerate(taken):
            self._install(g, sequence, pages, copy, -(-upto // self.layout.page))
        sequence.room = len(sequence.pages[0].ids) * self.layout.page
        return True

    def _next_page(self, sequence: Sequence, upto: int) -> bool:
        """Fast path of `grow`: one page for a sequence that has come to the border of its last one, with full attention
        alone. False, and nothing done, if it is something else that is wanted or there is no room."""
        ids, page = sequence.pages[0].ids, self.layout.page
        index = len(ids)
        if sequence.planned != index * page or upto > (index + 1) * page or not self._make_room(0, 1):
            return False
        taken = self.pools.take(0, 1)
        ids += taken
        self._edits[0] += (sequence.row, index, taken[0])
        sequence.room = (index + 1) * page
        return True

    def _take(self, sequence: Sequence, upto: int, certain: bool) -> list[tuple[list[int], bool]] | None:
        """For each group the new pages, and whether the last of them is for a copy; None and nothing taken if there is no
        room."""
        start, page, found = sequence.planned, self.layout.page, list[tuple[list[int], bool]]()
        for g in range(len(self._keeps)):
            self._drop_behind(g, sequence, start - sequence.slack, certain)
        for g, run in enumerate(sequence.pages):
            at, have = start // page, len(run.ids)
            copy = run.first <= at < have and self.pools.shared(g, run.ids[at])
            count = -(-upto // page) - have
            if self._keeps[g].exact:
                # The state lies where the segment ends; nothing lies on the way.
                count = min(count, 1)
            count = max(count, 0) + copy
            if count and not self._make_room(g, count):
                for other, (pages, _) in enumerate(found):
                    self.pools.give(other, pages)
                return None
            found.append((self.pools.take(g, count) if count else [], copy))
        return found

    def _make_room(self, group: int, count: int) -> bool:
        pools = self.pools
        return pools.available(group) >= count or self.evictor.evict(lambda: pools.available(group) >= count)

    def has_room(self, sequence: Sequence, upto: int) -> bool:
        """Whether idle slabs would do for all of positions [planned, upto), computed at once, with nothing else growing."""
        slabs = 0
        for g, group in enumerate(self.layout.groups):
            held = len(sequence.pages[g].ids) if sequence.pages else 0
            pages = min(-(-upto // self.layout.page) - held, self.layout.pages_for(group, upto, upto)) + 1
            slabs += -(-pages // group.per_slab)
        return slabs <= self.pools.slabs_idle

    def _drop_behind(self, g: int, sequence: Sequence, start: int, certain: bool) -> None:
        """Gives back the pages that lie wholly behind everything `start` and later positions need; with `certain`, only those
        that have come to the index if they ever will."""
        run, page = sequence.pages[g], self.layout.page
        alive = min(self._keeps[g].needed(start)[0] // page, len(run.ids))
        if certain and self.sharing:
            alive = min(alive, sequence.computed // page)
        if alive > run.first:
            self._give(g, sequence, run.first, alive)
            run.first = alive

    def _give(self, g: int, sequence: Sequence, first: int, end: int) -> None:
        """Lets go of the pages with these indices; those that the index keeps become candidates for eviction."""
        ids = sequence.pages[g].ids
        idle = self.pools.give(g, [page for page in ids[first:end] if page >= 0])
        if idle:
            deepest = self._deepest(sequence)
            if self.evictor.bounded[g]:
                at, shift = set(idle), self.lookup.shift[g]
                self.evictor.loosen(g, [(i + shift, ids[i]) for i in range(first, end) if ids[i] in at], deepest)

    def _deepest(self, sequence: Sequence) -> Node:
        """A node in which or above which all kept pages of a sequence lie; it has some."""
        state = state_of(sequence)
        if state.deepest is None or state.forked:
            state.deepest = self.index.walk(self.index.roots[sequence.request.adapter, sequence.request.salt],
                                           packed(sequence, len(sequence.tokens))).nodes[-1]
        return state.deepest

    def _install(self, g: int, sequence: Sequence, taken: list[int], copy: bool, pages: int) -> None:
        run, row, edits = sequence.pages[g], sequence.row, self._edits[g]
        if copy:
            at = sequence.planned // self.layout.page
            target = taken.pop()
            self._moves.append(Move(g, run.ids[at], target))
            self._give(g, sequence, at, at + 1)
            run.ids[at] = target
            edits += (row, at, target)
            deepest = state_of(sequence).deepest
            if deepest is not None:
                self.evictor.offer(deepest)
        run.ids += [-1] * (pages - len(run.ids) - len(taken))
        for page in taken:
            edits += (row, len(run.ids), page)
            run.ids.append(page)

    def border(self, start: int, end: int) -> int:
        """Where a segment [start, end) had better end: at the last page border in it, if some state is a snapshot, so that it
        can be found there again."""
        last = end - end % self.layout.page
        return last if self.exact and self.sharing and start < last else end

    def enter(self, sequence: Sequence) -> None:
        """A sequence has been given a row: the worker is told its pages, and others may wait for what it will compute."""
        state = state_of(sequence)
        if state.generation == self._generation:
            self.joining.lead(sequence, packed(sequence, len(sequence.tokens)))
        for g, run in enumerate(sequence.pages):
            for i in range(run.first, len(run.ids)):
                if run.ids[i] >= 0:
                    self._edits[g] += (sequence.row, i, run.ids[i])

    def count_hit(self, sequence: Sequence) -> dict[str, int]:
        """Called once, when a sequence has its first row: what it has found counts as used once more. Returns where its
        `planned` positions came from, by tier."""
        state, left, found = state_of(sequence), sequence.planned, dict[str, int]()
        node = state.node
        while node is not None:
            node.uses += 1
            node = node.parent
        for tier, positions in state.loaded.items():
            if left and positions:
                found[tier] = min(left, positions)
                left -= found[tier]
        if left:
            found["device"] = left
        self._hits += left
        return found

    # -- what is certain, forks, ends

    def commit(self, sequence: Sequence) -> None:
        """Called when `sequence.computed` has come to `sequence.due`: its whole pages can be found from here on."""
        sequence.due = sequence.computed - sequence.computed % self.layout.page + self.layout.page
        self.joining.advanced(sequence)
        if state_of(sequence).generation == self._generation:
            self._indexer.add(sequence)

    def fork(self, parent: Sequence, child: Sequence, upto: int) -> int:
        """The child holds the parent's pages of positions [0, upto) too; nothing is copied until one of them writes. Returns
        where it continues: at `upto`, or at 0 if the parent's state has gone on and cannot be cut; then the child matches as
        others do."""
        if self.exact:
            return 0
        pages = -(-upto // self.layout.page)
        child.pages = []
        parent.room = child.room = 0
        theirs, state = state_of(parent), self._begin(child)
        state.node, state.origin, state.generation = theirs.node, theirs.origin, theirs.generation
        state.forked = theirs.forked = True
        state.indexed = min(theirs.indexed, upto - upto % self.layout.page)
        child.due = min(parent.due, state.indexed + self.layout.page)
        for g, run in enumerate(parent.pages):
            mine = PageRun()
            mine.first = run.first
            mine.ids = run.ids[:pages]
            self.pools.share(g, mine.ids[mine.first:])
            child.pages.append(mine)
        return upto

    def release(self, sequence: Sequence, keep: bool = True) -> None:
        """Gives back all of a sequence's pages. What is certain of them can be found from now on; with `keep` False, what it
        had computed must not be found any more, because it is broken."""
        if not sequence.pages:
            return
        state = state_of(sequence)
        if keep and sequence.computed and state.generation == self._generation:
            self._indexer.end(sequence)
        self.joining.done(sequence)
        for g, run in enumerate(sequence.pages):
            self._give(g, sequence, run.first, len(run.ids))
        sequence.pages = []
        sequence.room = 0
        sequence.due = _NEVER
        state.until = 0.0
        if state.deepest is None:
            return
        self._indexer.used(sequence, state.deepest)
        if not keep:
            self._forget(state.deepest)
        for node in (state.node, state.deepest, state.origin):
            if node is not None:
                self.evictor.offer(node)
        self.evictor.enforce_quota(state.deepest.label.account)

    def _forget(self, node: Node) -> None:
        """Takes what is broken out of the index, and offers it to no tier."""
        if self._news is None:
            self._indexer.forget(node, upwards=True)
        else:
            with self._news.broken():
                self._indexer.forget(node, upwards=True)

    def reset(self) -> None:
        """Nothing computed so far is found again, in no tier. Sequences that run keep their pages to themselves."""
        self._generation += 1
        self.joining.clear()
        if self.loading is not None:
            self.loading.reset()
        self.index.clear()
        if self._news is not None:
            self._news.cleared()
        if self.tiers is not None:
            self.tiers.clear()

    # -- plans and what came of them

    @property
    def pending(self) -> bool:
        """Whether a plan is due though nothing is to be computed: pages are to be moved, or are on their way."""
        offered = self._news is not None and self._news.offered
        return bool(self.loading) or offered or (self.tiers is not None and self.tiers.pending)

    @property
    def writing(self) -> bool:
        """Whether pages are on their way to or from other tiers. Nobody who has no request needs to wait for it, but it ends
        only if plans are made."""
        return self.pending or (self.tiers is not None and self.tiers.writing)

    def drain(self, plan: StepPlan) -> None:
        """Puts the page edits, copies and transfers since the last call into a plan."""
        plan.edits = [np.array(flat, np.int32).reshape(-1, 3) for flat in self._edits]
        plan.moves, self._moves = self._moves, []
        for flat in self._edits:
            flat.clear()
        if self._news is not None:
            self._news.flush()
        if self.tiers is not None:
            plan.transfers += self.tiers.drain()

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult], positions: int,
               seconds: float) -> None:
        """Takes the results of a plan's transfers, and the time that its step of so many positions took."""
        if self.tiers is None or self.loading is None:
            return
        for result in load_results:
            self._loaded += self.loading.land(result)
        self.tiers.report(load_results, write_results)
        if positions:
            self.tiers.computed(positions, seconds)

    # -- figures and checks

    @property
    def usage(self) -> float:
        """Fraction of the arena that live sequences hold."""
        return self.pools.slabs_live / max(1, self.layout.slabs)

    def stats(self) -> list[TierStats]:
        """Figures of the device and of the tiers behind it."""
        behind = self.tiers.stats() if self.tiers is not None else []
        # Pages that leave the device go to the nearest tier.
        device = TierStats("device", self.layout.nbytes, self.pools.slabs_used * self.layout.slab_bytes,
                           sum(self.pools.kept_pages), self._hits, self.index.kept, sum(self.evictor.evicted), self._loaded,
                           behind[0].bytes_in if behind else 0)
        return [device, *behind]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that every page is free, held or kept exactly as the sequences and the index say, and the shape of the
        index."""
        held: list[dict[int, int]] = [{} for _ in self.layout.groups]

        def count(g: int, pages: Iterable[int]) -> None:
            for page in pages:
                if page >= 0:
                    held[g][page] = held[g].get(page, 0) + 1

        for sequence in sequences:
            for g, run in enumerate(sequence.pages):
                count(g, run.ids[run.first:])
        for load in self.loading.held() if self.loading is not None else []:
            for g, ids in enumerate(load):
                count(g, ids)
        self.pools.check(held, self.index.check())
        self.evictor.check()
