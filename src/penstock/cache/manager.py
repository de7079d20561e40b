"""The whole face of the cache to the scheduler: match, grow, settle, fork, release, drain.

Every method either does all of what it says or nothing. Page edits and copies gather here until `drain` hands them to the
plan being made. Execution is in order: what a plan reads may be given away as soon as the NEXT plan is made.

Who owns a page: `pool` counts the live sequences that hold it and whether the index keeps it. Whole pages of a running
sequence are kept as soon as they are certain (`settle`), the rest of its last page when it ends (`release`). A page that is
kept, or has two holders, is never written: `grow` copies it first. So a match may end inside a page, and that page is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import numpy as np

from penstock.cache import keys
from penstock.cache.eviction import Evictor, LeastRecent, Policy
from penstock.cache.joining import Joining
from penstock.cache.pool import Pools
from penstock.cache.prefix import Node, Prefix, Trail
from penstock.cache.reach import reach
from penstock.core.layout import CacheLayout
from penstock.core.plan import Ints, Move
from penstock.core.sequence import PageRun, Sequence
from penstock.core.state import Everything

_TOKEN = 4
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


class Mark:
    """What the cache knows of a sequence beyond its pages."""

    __slots__ = ("deepest", "forked", "generation", "indexed", "leader", "node", "packed", "upto")

    def __init__(self) -> None:
        self.packed = bytearray()
        """Its known tokens as int32, as far as they were needed."""
        self.node: Node | None = None
        """Where in the tree position `indexed` lies or ends; None as long as nothing of it is there."""
        self.indexed = 0
        """Positions that the tree has, a multiple of the page."""
        self.deepest: Node | None = None
        """A node in which or above which all pages lie that it holds and the tree keeps."""
        self.forked = False
        """It has shared its pages with a fork: the tree may keep some of them that it did not add itself."""
        self.generation = 0
        """The cache's, when its pages began. Those of an older generation are not kept."""
        self.leader: Sequence | None = None
        """The sequence that is computing what this one needs, and waits for until position `upto` is computed."""
        self.upto = 0


class Cache:
    """Pages of every live sequence, and those that are kept for later ones."""

    def __init__(self, layout: CacheLayout, *, policy: Policy | None = None, sharing: bool = True, model: str = "",
                 quota: float = 1.0) -> None:
        """`sharing`: whether pages are found again. `model`: what names the weights, for content keys. `quota`: the fraction
        of the arena that the contexts of one tenant may occupy once their requests have ended."""
        self.layout = layout
        self.sharing = sharing
        self.pools = Pools(layout)
        self.index = Prefix(self.pools, model)
        self.evictor = Evictor(self.index, policy or LeastRecent(), int(layout.nbytes * quota) if quota < 1 else None)
        self.joining = Joining(layout.page)
        self._keeps = [group.keep for group in layout.groups]
        self._simple = all(keep == Everything() for keep in self._keeps)
        self.exact = any(keep.exact for keep in self._keeps)
        """Whether some state is a snapshot: then segments should end at page borders (`border`)."""
        self._shift = [-(-keep.ahead // layout.page) for keep in self._keeps]
        """For each group: its page i depends on tokens up to slot i + shift of the tree, and is found there."""
        self._edits: list[list[int]] = [[] for _ in layout.groups]
        self._moves: list[Move] = []
        self._generation = 0

    # -- finding what is there

    def match(self, sequence: Sequence, reuse: Reuse = Reuse.TOKENS) -> int:
        """Positions of a sequence without pages whose entries are in the cache already; the sequence then holds them.

        The last known token is never matched: its logits are needed. A sequence whose prompt is to be scored matches nothing. A
        fork comes with its pages.
        """
        if sequence.pages:
            return sequence.planned
        mark = self._begin(sequence)
        if reuse is Reuse.NOTHING:
            mark.generation, sequence.due = -1, _NEVER
        if not self.sharing or sequence.scoring or reuse is Reuse.NOTHING:
            return 0
        request = sequence.request
        root = self.index.roots.get((request.adapter, request.salt))
        if root is None:
            return 0
        trail = self.index.walk(root, self._packed(sequence, len(sequence.tokens)))
        limit, page = len(sequence.tokens) - 1, self.layout.page
        n, places = self._reach(trail, limit)
        if reuse is Reuse.PAGES and n % page:
            n, places = self._reach(trail, n - n % page)
        if not n:
            return 0
        sequence.pages = [self._hold(g, places[g], n) for g in range(len(self._keeps))]
        last = next(node for node in trail.nodes if node.end >= n)
        self.index.touch(last)
        mark.deepest = last
        mark.indexed = n - n % page
        mark.node = self.index.locate(last, mark.indexed) if mark.indexed else None
        sequence.due = mark.indexed + page
        return n

    def _hold(self, g: int, places: list[int], n: int) -> PageRun:
        """Takes hold of a group's pages that a context needs to continue at n."""
        run, page = PageRun(), self.layout.page
        run.ids = places[:-(-n // page)]
        run.ids += [-1] * (n // page - len(run.ids))
        if len(run.ids) > n // page and run.ids[-1] < 0:
            # Nothing of this page is needed, as at the start of a chunk: it will be a new one.
            run.ids.pop()
        run.first = min(self._keeps[g].needed(n)[0] // page, len(run.ids))
        self.pools.share(g, [place for place in run.ids[run.first:] if place >= 0])
        return run

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether another sequence is computing what this one, which has no pages, would otherwise compute itself."""
        mark = self._mark(sequence)
        if mark.leader is not None:
            if self.joining.leads(mark.leader) and mark.leader.computed < mark.upto:
                return True
            mark.leader = None
        if not self.sharing or sequence.scoring or sequence.pages or len(sequence.tokens) <= self.layout.page:
            return False
        packed = self._packed(sequence, len(sequence.tokens))
        root = self.index.roots.get((sequence.request.adapter, sequence.request.salt))
        found = self.joining.find(sequence, packed, self.index.walk(root, packed).matched if root is not None else 0)
        if found is None:
            return False
        mark.leader, mark.upto = found
        return True

    @staticmethod
    def _mark(sequence: Sequence) -> Mark:
        if sequence.mark is None:
            sequence.mark = Mark()
        assert isinstance(sequence.mark, Mark)
        return sequence.mark

    def _begin(self, sequence: Sequence) -> Mark:
        """A sequence starts to have pages."""
        mark = self._mark(sequence)
        mark.node, mark.deepest, mark.indexed, mark.forked = None, None, 0, False
        mark.generation = self._generation
        sequence.due = self.layout.page if self.sharing else _NEVER
        return mark

    def _packed(self, sequence: Sequence, upto: int) -> bytearray:
        """At least the first `upto` tokens of a sequence."""
        mark = self._mark(sequence)
        have = len(mark.packed) // _TOKEN
        if have < upto:
            mark.packed += keys.packed(sequence.tokens[have:upto])
        return mark.packed

    def _reach(self, trail: Trail, limit: int) -> tuple[int, list[list[int]]]:
        """How far a context can continue from what lies on its way, and for each group the pages there, by page index."""
        places: list[list[int]] = []
        for g, shift in enumerate(self._shift):
            ids: list[int] = []
            for node, slots in zip(trail.nodes, trail.slots, strict=True):
                ids += node.pages[g][:slots]
            places.append(ids[shift:])
        if self._simple:
            return min(trail.matched, limit), places
        sealed = -1
        if trail.nodes and trail.nodes[-1].end == trail.matched:
            sealed = trail.matched
        found = reach(self._keeps, [np.array(ids, np.int32) for ids in places], self.layout.page, trail.matched, limit, sealed)
        return found, places

    # -- pages for what is to be computed

    def grow(self, sequence: Sequence, upto: int) -> bool:
        """Makes positions [planned, upto) of a sequence with a row writable, in all groups or in none.

        Pages that no position from `planned` on can need are given back first. A page with other holders, or that the index
        keeps, is copied before it is written to.
        """
        if not sequence.pages:
            sequence.pages = [PageRun() for _ in self.layout.groups]
        # What flies may still make pages behind a window worth keeping; where there is no room for them they go before.
        taken = self._take(sequence, upto, certain=True)
        if taken is None and not self._simple:
            taken = self._take(sequence, upto, certain=False)
        if taken is None:
            return False
        for g, (pages, copy) in enumerate(taken):
            self._install(g, sequence, pages, copy, -(-upto // self.layout.page))
        sequence.room = len(sequence.pages[0].ids) * self.layout.page
        return True

    def _take(self, sequence: Sequence, upto: int, certain: bool) -> list[tuple[list[int], bool]] | None:
        """For each group the new pages, and whether the last of them is for a copy; None and nothing taken if there is no
        room."""
        start, page, found = sequence.planned, self.layout.page, list[tuple[list[int], bool]]()
        for g in range(len(self._keeps)):
            self._drop_behind(g, sequence, start, certain)
        for g, run in enumerate(sequence.pages):
            at, have = start // page, len(run.ids)
            copy = run.first <= at < have and self.pools.shared(g, run.ids[at])
            count = -(-upto // page) - have
            if self._keeps[g].exact:
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
        that have come to the index if they ever will: what flies may still make one worth keeping."""
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
            at, shift = set(idle), self._shift[g]
            self.evictor.loosen(g, [(i + shift, ids[i]) for i in range(first, end) if ids[i] in at], self._deepest(sequence))

    def _deepest(self, sequence: Sequence) -> Node:
        """A node in which or above which all kept pages of a sequence lie; it has some."""
        mark = self._mark(sequence)
        if mark.deepest is None or mark.forked:
            root = self.index.roots[sequence.request.adapter, sequence.request.salt]
            mark.deepest = self.index.walk(root, self._packed(sequence, len(sequence.tokens))).nodes[-1]
        return mark.deepest

    def _install(self, g: int, sequence: Sequence, taken: list[int], copy: bool, pages: int) -> None:
        run, row, edits = sequence.pages[g], sequence.row, self._edits[g]
        if copy:
            at = sequence.planned // self.layout.page
            target = taken.pop()
            self._moves.append(Move(g, run.ids[at], target))
            self._give(g, sequence, at, at + 1)
            run.ids[at] = target
            deepest = self._mark(sequence).deepest
            if deepest is not None:
                self.evictor.offer(deepest)
            edits += (row, at, target)
        # An exact state has a page where the segment ends, and none on the way.
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
        mark = self._mark(sequence)
        if self.sharing:
            self.joining.lead(sequence, self._packed(sequence, len(sequence.tokens)))
        node = mark.deepest
        while node is not None:
            node.uses += 1
            node = node.parent
        for g, run in enumerate(sequence.pages):
            for i in range(run.first, len(run.ids)):
                if run.ids[i] >= 0:
                    self._edits[g] += (sequence.row, i, run.ids[i])

    # -- what is certain is kept

    def settle(self, sequence: Sequence) -> None:
        """Called when `sequence.computed` has come to `sequence.due`: its whole pages can be found from here on.

        Where the index has pages of equal contents already, they replace the sequence's own.
        """
        mark, page = self._mark(sequence), self.layout.page
        upto = sequence.computed - sequence.computed % page
        sequence.due = upto + page
        self.joining.settled(sequence)
        if mark.generation != self._generation or upto <= mark.indexed:
            return
        data = self._packed(sequence, upto)
        if mark.node is None or mark.node.gone or mark.node.end < mark.indexed:
            self._relocate(sequence, mark)
        assert mark.node is not None
        first, last = mark.indexed // page, upto // page
        pages = [self._settled(sequence, g, first, last) for g in range(len(self._keeps))]
        fresh = data[mark.indexed * _TOKEN:upto * _TOKEN]
        mark.node, spent = self.index.insert(mark.node, mark.indexed, fresh, pages, sequence)
        mark.indexed, mark.deepest = upto, mark.node
        for g, ids in enumerate(pages):
            self._adopt(g, sequence, first - self._shift[g], ids)
        for node in spent:
            self._forget(node)
        if not self._simple and self.evictor.removable(mark.node):
            self.evictor.offer(mark.node)
        self.evictor.settle_quota(mark.node.label.account)

    def _relocate(self, sequence: Sequence, mark: Mark) -> None:
        """Finds a sequence's place in the tree anew: it has none yet, or what was there has been evicted."""
        request = sequence.request
        root = self.index.root(request.adapter, request.salt, request.tenant)
        trail = self.index.walk(root, mark.packed[:mark.indexed * _TOKEN])
        mark.indexed = trail.matched - trail.matched % self.layout.page
        mark.node = self.index.locate(trail.nodes[-1], mark.indexed) if mark.indexed else root

    def _settled(self, sequence: Sequence, g: int, first: int, last: int) -> list[int]:
        """A group's pages for slots [first, last) of the tree, as far as the sequence holds them and they are whole."""
        run, shift = sequence.pages[g], self._shift[g]
        ids = [run.ids[i] if i >= run.first else -1 for i in range(max(0, first - shift), last - shift)]
        ids = [-1] * (last - first - len(ids)) + ids
        if self._keeps[g].exact:
            # Only a segment that ended on the border has left the state of the border behind.
            sealed = ids[-1] if sequence.computed % self.layout.page == 0 else -1
            ids = [-1] * (len(ids) - 1) + [sealed]
        return ids

    def _adopt(self, g: int, sequence: Sequence, first: int, ids: list[int]) -> None:
        """The sequence's pages from index `first` on become `ids`, where they differ."""
        run = sequence.pages[g]
        for i, page in enumerate(ids, first):
            if page >= 0 and i >= run.first and page != run.ids[i] and run.ids[i] >= 0:
                self.pools.share(g, [page])
                self.pools.give(g, [run.ids[i]])
                run.ids[i] = page
                if sequence.row >= 0:
                    self._edits[g] += (sequence.row, i, page)

    # -- forks and ends

    def fork(self, parent: Sequence, child: Sequence, upto: int) -> int:
        """The child holds the parent's pages of positions [0, upto) too; nothing is copied until one of them writes. Returns
        where it continues: at `upto`, or at 0 if the parent's state has gone on and cannot be cut; then the child matches as
        others do.
        """
        if self.exact:
            return 0
        pages = -(-upto // self.layout.page)
        child.pages = []
        parent.room = child.room = 0
        theirs, mark = self._mark(parent), self._begin(child)
        mark.node, mark.generation = theirs.node, theirs.generation
        mark.forked = theirs.forked = True
        mark.indexed = min(theirs.indexed, upto - upto % self.layout.page)
        child.due = mark.indexed + self.layout.page if self.sharing else _NEVER
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
        mark = self._mark(sequence)
        if mark.generation == self._generation and self.sharing and keep and sequence.computed:
            if sequence.computed >= sequence.due:
                self.settle(sequence)
            self._keep_rest(sequence, mark)
        self.joining.done(sequence)
        for g, run in enumerate(sequence.pages):
            self._give(g, sequence, run.first, len(run.ids))
        sequence.pages = []
        sequence.room = 0
        sequence.due = _NEVER
        if mark.deepest is not None:
            self._used(sequence, mark.deepest)
        for node in (mark.node, mark.deepest):
            if node is not None:
                if not keep:
                    self._forget(node, upwards=True)
                self.evictor.offer(node)

    def _used(self, sequence: Sequence, node: Node) -> None:
        """A context has come to its end, or pauses, at this node."""
        if node.gone:
            return
        self.index.touch(node)
        at: Node | None = node
        while at is not None:
            at.longest = max(at.longest, sequence.computed)
            at.author = None
            at = at.parent

    def _keep_rest(self, sequence: Sequence, mark: Mark) -> None:
        """Keeps the last page of a context that ends inside it, unless the index has all of it already or others go on with
        it."""
        page, computed = self.layout.page, sequence.computed
        if mark.node is None or mark.node.gone or mark.node.end < mark.indexed:
            self._relocate(sequence, mark)
        assert mark.node is not None
        slot = computed // page
        if computed % page == 0 or mark.indexed != slot * page:
            return
        pages = []
        for g, keep in enumerate(self._keeps):
            run, i = sequence.pages[g], slot - self._shift[g]
            there = i >= run.first and i < len(run.ids)
            if keep.exact:
                there = there and sequence.planned == computed
            if keep.ahead:
                there = there and (i + 1) * page + keep.ahead <= computed
            there = there and run.ids[i] >= 0 and not self.pools.shared(g, run.ids[i])
            pages.append([run.ids[i] if there else -1])
        data = self._packed(sequence, computed)[mark.indexed * _TOKEN:computed * _TOKEN]
        if all(ids[0] < 0 for ids in pages):
            return
        mark.deepest, spent = self.index.rest(mark.node, mark.indexed, data, pages)
        for node in spent:
            self._forget(node)

    def _forget(self, node: Node, upwards: bool = False) -> None:
        """Takes a leaf that nobody holds out of the tree, as far as nobody holds it; `upwards`, then its parent if that is
        one."""
        while self.evictor.removable(node):
            last, parent = node.slots - 1, node.parent
            for g, ids in enumerate(node.pages):
                if ids[last] >= 0:
                    self.index.drop(node, g, last)
            self.index.cut(node)
            if node.gone and parent is not None:
                self.evictor.offer(parent)
                if not upwards:
                    return
                node = parent

    def reset(self) -> None:
        """Nothing computed so far is found again. Sequences that run keep their pages to themselves."""
        self._generation += 1
        self.joining.clear()
        self.index.clear()

    # -- what the plan is told

    def drain(self) -> tuple[list[Ints], list[Move]]:
        """The page edits ([edits, 3] for each group) and copies since the last call, for the plan being made."""
        edits = [np.array(flat, np.int32).reshape(-1, 3) for flat in self._edits]
        moves, self._moves = self._moves, []
        for flat in self._edits:
            flat.clear()
        return edits, moves

    @property
    def usage(self) -> float:
        """Fraction of the arena that live sequences hold."""
        return self.pools.slabs_live / max(1, self.layout.slabs)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that every page is free, held or kept exactly as the sequences and the index say, and the shape of the
        index."""
        held: list[dict[int, int]] = [{} for _ in self.layout.groups]
        for sequence in sequences:
            for g, run in enumerate(sequence.pages):
                for i in range(run.first, len(run.ids)):
                    if run.ids[i] >= 0:
                        held[g][run.ids[i]] = held[g].get(run.ids[i], 0) + 1
        self.pools.check(held, self.index.check())
        self.evictor.check()
