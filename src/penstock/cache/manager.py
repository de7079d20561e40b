"""The KV cache manager, the cache's interface to the scheduler: match, grow, commit, fork, release, drain.

Every method succeeds completely or changes nothing. Block table edits, page copies and transfers are collected here until
`drain` moves them into the plan being made. As plans execute in order, a page that one reads may be reallocated by the next.

Ownership: `pool` counts the live sequences that hold a page and whether the prefix index keeps it: a running sequence's whole
pages once their tokens are committed (`commit`), its partial last page when it ends (`release`). A page that is kept, or has
two holders, is never written in place: `grow` copies it first (copy-on-write). So a match may end inside a page."""

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from enum import Enum

import numpy as np

from penstock.cache.events import Sink
from penstock.cache.eviction import POLICIES, Evictor
from penstock.cache.indexing import Indexer
from penstock.cache.joining import Joining
from penstock.cache.loading import Loading
from penstock.cache.news import News
from penstock.cache.pool import Pools
from penstock.cache.prefix import Lookup, Node, Prefix
from penstock.cache.sequence_state import SequenceState, packed, state_of
from penstock.cache.tiers.hierarchy import Hierarchy
from penstock.core.plan import LoadResult, Move, StepPlan, WriteResult
from penstock.core.request import PageRun, Sequence, TierStats
from penstock.core.state import CacheLayout, Snapshot

POLICY = "adaptive"
"""The default eviction policy (`cache/eviction.py`); chosen by bench/cache_replay.py."""

_NEVER = 1 << 62
"""A number of positions that no sequence reaches."""


class Reuse(Enum):
    """The granularity at which a sequence may reuse cached entries."""

    TOKENS = 1
    """Reuse every matching token; the match may end inside a page, which is then copied."""
    PAGES = 2
    """Reuse whole pages only, so that no page must be copied."""
    NOTHING = 3
    """Match nothing and keep nothing: the sequence then needs no more pages than `core/state.py::CacheLayout.pages_for`."""


class Cache:
    """The pages of every live sequence, and the pages kept for reuse by later requests."""

    def __init__(self, layout: CacheLayout, *, policy: str = POLICY, sharing: bool = True, model: str | None = "",
                 quota: float = 1.0, tiers: Hierarchy | None = None, sink: Sink | None = None) -> None:
        """`sharing` enables the prefix cache. `model` identifies the weights in content keys; None if it is not known yet
        (`name` sets it). `quota` is the fraction of the arena that one tenant's contexts may occupy after their requests have
        ended. `tiers` are the tiers behind device memory. `sink` receives the KV events."""
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
        """True if some group keeps snapshots, such as recurrent state, from which only their own position can continue."""
        self.back = min((min(keep.back, layout.page - 1) for keep in self._keeps if isinstance(keep, Snapshot)), default=_NEVER)
        """The most drafts that may be rejected. A segment with them touches at most two pages."""
        self._generation = 0
        self._hits = 0
        self._loaded = 0
        """Bytes loaded from other tiers."""

    def name(self, model: str) -> None:
        """Sets the identity of the weights. From now on pages are saved to tiers, loaded from them and published as KV events;
        pages that are on the device already are offered and published at once."""
        assert self.index.model is None
        self.index.model = model
        if self._news is not None:
            self._news.open()

    # -- prefix matching

    def must_wait(self, sequence: Sequence) -> bool:
        """True if a sequence without pages should not start yet: another computes the same prefix, or pages of it load."""
        if not self.sharing or sequence.computes_all or sequence.pages or len(sequence.tokens) <= self.layout.page:
            return False
        if self._follows(sequence):
            return True
        return self.loading is not None and self.index.model is not None and self._loads(sequence, self.loading)

    def _loads(self, sequence: Sequence, loading: Loading) -> bool:
        """True if the sequence waits for pages to be loaded. It requests a load only when there is room for the whole
        sequence: otherwise its pages on the device may be evicted before it starts."""
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
        return self.index.roots.get((sequence.request.namespace, sequence.request.salt))

    def match(self, sequence: Sequence, reuse: Reuse = Reuse.TOKENS) -> int:
        """Finds the longest cached prefix of a sequence without pages, takes its pages for the sequence, returns its length.

        The last known token is never matched, because its logits are needed. A sequence of which all positions must be
        computed matches nothing. A fork has pages already and continues where it is planned."""
        if sequence.pages:
            return sequence.planned
        state, page = self._begin(sequence, reuse), self.layout.page
        if not self.sharing or sequence.computes_all or reuse is Reuse.NOTHING:
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
            # Split the node at the match: the part beyond it was not used and may be evicted first.
            node = self.index.locate(state.deepest, state.indexed)
            state.node = self.index.split(node, (state.indexed - node.start) // page) if state.indexed < node.end else node
            self.index.touch(state.node, self.evictor.now)
        sequence.due = state.indexed + page
        return n

    def _begin(self, sequence: Sequence, reuse: Reuse = Reuse.TOKENS) -> SequenceState:
        """Resets the cache's state of a sequence that is about to get pages."""
        state, private = state_of(sequence), reuse is Reuse.NOTHING or not self.sharing
        state.node, state.deepest, state.origin, state.indexed, state.forked = None, None, None, 0, False
        state.generation = -1 if private else self._generation
        sequence.due = _NEVER if private else self.layout.page
        return state

    def _hold(self, g: int, places: list[int], n: int) -> PageRun:
        """Adds the sequence as a holder of those of a group's pages that are needed to continue at position n."""
        run, page = PageRun(), self.layout.page
        run.ids = places[:-(-n // page)]
        run.ids += [-1] * (n // page - len(run.ids))
        run.first = min(self._keeps[g].needed(n)[0] // page, len(run.ids))
        self.pools.share(g, [place for place in run.ids[run.first:] if place >= 0])
        return run

    # -- page allocation

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Allocates writable pages for positions [planned, upto) of a sequence with a batch row, in all groups or in none.

        Returns False if there is no room. Pages that no position from `planned` on needs are released first. A page that has
        other holders, or that the index keeps, is copied before it is written (copy-on-write)."""
        if not sequence.pages:
            sequence.pages = [PageRun() for _ in self.layout.groups]
        elif self.lookup.simple and self._next_page(sequence, upto):
            return True
        # In-flight steps may still commit pages behind the window to the index; if there is no room, release those pages now.
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
        """Fast path of `grow` for models with full attention alone: allocates one page for a sequence that has filled its last
        one. Returns False and changes nothing in every other case, or if there is no room."""
        ids, page = sequence.pages[0].ids, self.layout.page
        index = len(ids)
        if sequence.planned != index * page or upto > (index + 1) * page or not self.evictor.make_room(0, 1):
            return False
        taken = self.pools.take(0, 1)
        ids += taken
        self._edits[0] += (sequence.row, index, taken[0])
        sequence.room = (index + 1) * page
        return True

    def _take(self, sequence: Sequence, upto: int, certain: bool) -> list[tuple[list[int], bool]] | None:
        """Allocates each group's new pages; True: the last is a copy-on-write's target. None, with nothing taken: no room."""
        start, page, found = sequence.planned, self.layout.page, list[tuple[list[int], bool]]()
        for g in range(len(self._keeps)):
            self._drop_behind(g, sequence, start - sequence.slack, certain)
        for g, run in enumerate(sequence.pages):
            at, have = start // page, len(run.ids)
            copy = run.first <= at < have and self.pools.shared(g, run.ids[at])
            count = -(-upto // page) - have
            if self._keeps[g].exact:
                # Only the end of the segment has a snapshot, so pages in between hold nothing.
                count = min(count, 1)
            count = max(count, 0) + copy
            if count and not self.evictor.make_room(g, count):
                for other, (pages, _) in enumerate(found):
                    self.pools.give(other, pages)
                return None
            found.append((self.pools.take(g, count) if count else [], copy))
        return found

    def has_room(self, sequence: Sequence, upto: int) -> bool:
        """True if the slabs without a held page suffice to compute positions [planned, upto) at once, while no other grows."""
        slabs = 0
        for g, group in enumerate(self.layout.groups):
            held = len(sequence.pages[g].ids) if sequence.pages else 0
            pages = min(-(-upto // self.layout.page) - held, self.layout.pages_for(group, upto, upto)) + 1
            slabs += -(-pages // group.per_slab)
        return slabs <= self.layout.slabs - self.pools.slabs_live

    def _drop_behind(self, g: int, sequence: Sequence, start: int, certain: bool) -> None:
        """Releases the pages that no position from `start` on needs, such as pages behind a sliding window. With `certain`,
        only pages below the committed position, which the index has by now if it will ever have them."""
        run, page = sequence.pages[g], self.layout.page
        alive = min(self._keeps[g].needed(start)[0] // page, len(run.ids))
        if certain and self.sharing:
            alive = min(alive, sequence.computed // page)
        if alive > run.first:
            self._give(g, sequence, run.first, alive)
            run.first = alive

    def _give(self, g: int, sequence: Sequence, first: int, end: int) -> None:
        """Releases the pages with indices [first, end). Pages that the index keeps become eviction candidates."""
        ids = sequence.pages[g].ids
        idle = self.pools.give(g, [page for page in ids[first:end] if page >= 0])
        if idle:
            deepest = self._deepest(sequence)
            if self.evictor.bounded[g]:
                at, shift = set(idle), self.lookup.shift[g]
                self.evictor.loosen(g, [(i + shift, ids[i]) for i in range(first, end) if ids[i] in at], deepest)

    def _deepest(self, sequence: Sequence) -> Node:
        """A node such that all kept pages of the sequence are in it or in its ancestors; the sequence must have some."""
        state = state_of(sequence)
        if state.deepest is None or state.forked:
            state.deepest = self.index.walk(self.index.roots[sequence.request.namespace, sequence.request.salt],
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

    def chunk(self, sequence: Sequence, count: int) -> int:
        """Returns the length of a segment of at most the next `count` positions. With snapshot state it ends at a page boundary
        if there is one, so that the snapshot taken there can be reused."""
        start, end = sequence.planned, sequence.planned + count
        last = end - end % self.layout.page
        return last - start if self.exact and self.sharing and start < last else count

    def enter(self, sequence: Sequence) -> None:
        """Called when a sequence gets a batch row: sends its block table to the worker, and lets others wait for its prefix."""
        if state_of(sequence).generation == self._generation:
            self.joining.lead(sequence, packed(sequence, len(sequence.tokens)))
        for g, run in enumerate(sequence.pages):
            for i in range(run.first, len(run.ids)):
                if run.ids[i] >= 0:
                    self._edits[g] += (sequence.row, i, run.ids[i])

    def count_hit(self, sequence: Sequence) -> dict[str, int]:
        """Called once, at a sequence's first row: counts a use of the matched nodes; returns `planned` positions by tier."""
        state, left, found = state_of(sequence), sequence.planned, dict[str, int]()
        node = state.node
        while node is not None:
            self.index.use(node)
            node = node.parent
        for tier, positions in state.loaded.items():
            if left and positions:
                found[tier] = min(left, positions)
                left -= found[tier]
        if left:
            found["device"] = left
        self._hits += left
        return found

    # -- commit, fork, release

    def commit(self, sequence: Sequence) -> None:
        """Called when `sequence.computed` reaches `sequence.due`: adds the sequence's whole pages to the prefix index."""
        sequence.due = sequence.computed - sequence.computed % self.layout.page + self.layout.page
        self.joining.advanced(sequence)
        if state_of(sequence).generation == self._generation:
            self._indexer.add(sequence)

    def fork(self, parent: Sequence, child: Sequence, upto: int) -> int:
        """Shares the parent's pages of positions [0, upto) with the child; one is copied when either writes to it. Returns
        where the child continues: `upto`, or 0 for snapshot states, which cannot be rewound: it then matches as any."""
        if self.exact:
            return 0
        pages = -(-upto // self.layout.page)
        parent.room = child.room = 0
        theirs, state = state_of(parent), self._begin(child)
        state.node, state.origin, state.generation = theirs.node, theirs.origin, theirs.generation
        state.forked = theirs.forked = True
        state.indexed = min(theirs.indexed, upto - upto % self.layout.page)
        child.due = min(parent.due, state.indexed + self.layout.page)
        child.pages = [PageRun(run.ids[:pages], run.first) for run in parent.pages]
        for g, run in enumerate(child.pages):
            self.pools.share(g, run.ids[run.first:])
        return upto

    def release(self, sequence: Sequence, keep: bool = True) -> None:
        """Releases all pages of a sequence. Its committed tokens are added to the index first; with `keep` False its contents
        are invalid (for example NaN), so they are removed from the index instead."""
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
            # Without offering them to any tier.
            with nullcontext() if self._news is None else self._news.broken():
                self._indexer.forget(state.deepest, upwards=True)
        for node in (state.node, state.deepest, state.origin):
            if node is not None:
                self.evictor.offer(node)
        self.evictor.enforce_quota(state.deepest.label.account)

    def reset(self) -> None:
        """Empties the prefix cache in every tier. Running sequences keep their pages, but these never enter the index."""
        self._generation += 1
        self.joining.clear()
        if self.loading is not None:
            self.loading.reset()
        self.index.clear()
        if self._news is not None:
            self._news.cleared()
        if self.tiers is not None:
            self.tiers.clear()

    # -- plans and their results

    @property
    def pending(self) -> bool:
        """True if a plan is needed even without tokens to compute, because pages wait to be moved or are being loaded."""
        offered = self._news is not None and self._news.offered
        return bool(self.loading) or offered or (self.tiers is not None and self.tiers.pending)

    @property
    def writing(self) -> bool:
        """True while pages are in flight to or from other tiers. None waits for it, but transfers need plans to progress."""
        return self.pending or (self.tiers is not None and self.tiers.writing)

    def drain(self, plan: StepPlan) -> None:
        """Moves the block table edits, page copies and transfers since the last call into a plan."""
        plan.edits = [np.array(flat, np.int32).reshape(-1, 3) for flat in self._edits]
        plan.moves, self._moves = self._moves, []
        for flat in self._edits:
            flat.clear()
        if self._news is not None:
            self._news.flush()
        if self.tiers is not None:
            plan.transfers += self.tiers.drain()

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult]) -> None:
        if self.tiers is None or self.loading is None:
            return
        for result in load_results:
            self._loaded += self.loading.land(result)
        self.tiers.report(load_results, write_results)

    # -- figures and checks

    @property
    def usage(self) -> float:
        """The fraction of the arena's slabs that live sequences hold."""
        return self.pools.slabs_live / max(1, self.layout.slabs)

    def stats(self) -> list[TierStats]:
        behind = self.tiers.stats() if self.tiers is not None else []
        # Pages that leave the device go to the nearest tier.
        device = TierStats("device", self.layout.nbytes, self.pools.slabs_used * self.layout.slab_bytes,
                           sum(self.pools.kept_pages), self._hits, self.index.kept, sum(self.evictor.evicted), self._loaded,
                           behind[0].bytes_in if behind else 0)
        return [device, *behind]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that every page is free, held or kept exactly as sequences and index say, and the index's shape."""
        held = [Counter[int]() for _ in self.layout.groups]
        holders = [[run.ids[run.first:] for run in sequence.pages] for sequence in sequences]
        for pages in [*holders, *(self.loading.held() if self.loading is not None else [])]:
            for g, ids in enumerate(pages):
                held[g].update(page for page in ids if page >= 0)
        self.pools.check(held, self.index.check())
        self.evictor.check()
