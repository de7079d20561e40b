"""Eviction: which pages go first when pages are needed. The one home of that decision.

Only what nobody holds can go, and nothing goes whose loss would leave pages that can no longer be reached: stretches of full
attention are given up from the leaves of the tree, page by page. Pages of windows, chunks and snapshots strand nothing and go
singly; those that only a context branching off in the middle of a stretch could use go before all others.

Among candidates the lower priority goes first (`core/request.py::Span`; a span that has run out counts as none). Among equals
a `Policy` sorts them into kinds and compares the least recently used of each kind.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter

from penstock.cache.prefix import TOKEN, Account, Node, Prefix
from penstock.core.layout import CacheLayout
from penstock.core.request import DEFAULT_PRIORITY


class Policy:
    """An order among stretches of equal priority; this one is LRU."""

    def kind(self, node: Node) -> int:  # noqa: ARG002 (other policies look at it)
        """Candidates of one kind go in the order of their last use. May change only when the node is used or cut."""
        return 0

    def worth(self, kind: int, age: int) -> float:  # noqa: ARG002 (other policies look at it)
        """How much it is worth to keep a candidate of this kind that was last used `age` ticks of the clock ago: least goes
        first."""
        return -age

    def added(self, node: Node, first: int) -> None:
        """Blocks of a node from `first` on have been computed and are kept."""

    def evicted(self, node: Node) -> None:
        """The last block of a node is given up."""


class TailFirst(Policy):
    """T-LRU: a conversation's last tokens go first as long as what its next turn must then compute stays within a budget.

    Of a context of L tokens a page may go early if the tokens before it still cover L + question - budget: then the next
    turn, a `question` longer, computes at most `budget` tokens before it answers. Both in tokens.
    """

    def __init__(self, page: int, budget: int = 1024, question: int = 256) -> None:
        self._page = page
        self._slack = question - budget

    def kind(self, node: Node) -> int:
        return 0 if node.end - self._page >= node.longest + self._slack else 1

    def worth(self, kind: int, age: int) -> float:
        return kind * float(1 << 60) - age


class CostAware(Policy):
    """Keeps the pages that are dear to compute again: cost times uses, over bytes times age (as in Greedy-Dual-Size-Frequency).

    A position costs the products with the weights, the same for all, and attention to all before it; `_EVEN` is the position at
    which both cost the same (of an 8B model about 32k). A page's bytes are those of the groups that still have it.
    """

    _EVEN = 32_768
    _KINDS = 4
    """Uses beyond this count as this many, and depths are told apart by the power of two."""

    def __init__(self, layout: CacheLayout) -> None:
        self._weights = [group.stride for group in layout.groups]

    def kind(self, node: Node) -> int:
        nbytes = sum(weight for weight, ids in zip(self._weights, node.pages, strict=True) if ids[-1] >= 0)
        share = 8 * nbytes // sum(self._weights)
        return (node.end.bit_length() * 9 + share) * self._KINDS + min(node.uses, self._KINDS - 1)

    def worth(self, kind: int, age: int) -> float:
        rest, uses = divmod(kind, self._KINDS)
        depth, share = divmod(rest, 9)
        return (1 + uses) * (1 + (1 << depth) / self._EVEN) / (max(1, share) * (age + 1))


class Adaptive(Policy):
    """Least recently used, but what has been found before counts as younger than it is, by a factor that learns.

    As in ARC (Megiddo and Modha 2003), what was given up is remembered for a while, by its tokens alone: if something comes
    back that had been found before, such things should have been kept longer and the factor grows; if something comes back
    that had been used only once, it shrinks. It counts from `_ENOUGH` on; until then this is LRU. Only every fourth block is
    watched.
    """

    _WATCHED = 4
    _STEP = 2.0
    """Doublings of the factor if all that fits came back at once."""
    _LEAST, _ENOUGH, _MOST = 0.25, 3.0, 8.0
    _GRACE = 64
    """Ticks of the clock up to which only recency counts: an arena that holds no more than a few contexts is best with LRU."""

    def __init__(self, page: int, pages: int) -> None:
        """For an arena of so many pages."""
        self._page = page
        self._room = max(1, pages // self._WATCHED)
        self.factor = 1.0
        self._gone: OrderedDict[int, int] = OrderedDict()
        """Fingerprint of a block -> its kind, oldest first."""
        self._counts = [0, 0]

    def kind(self, node: Node) -> int:
        return 1 if node.uses else 0

    def worth(self, kind: int, age: int) -> float:
        if not kind or age < self._GRACE or self.factor < self._ENOUGH:
            return -age
        return -(self._GRACE + (age - self._GRACE) / self.factor)

    def added(self, node: Node, first: int) -> None:
        if not self._gone:
            return
        for block in self._watched(node, first):
            kind = self._gone.pop(self._fingerprint(node, block), None)
            if kind is not None:
                node.uses = max(node.uses, 1)
                self._learn(kind)

    def evicted(self, node: Node) -> None:
        block = node.blocks - 1
        if block in self._watched(node, block):
            seen, kind = self._fingerprint(node, block), self.kind(node)
            self._counts[kind] += 1
            before = self._gone.pop(seen, None)
            if before is not None:
                self._counts[before] -= 1
            self._gone[seen] = kind
            if len(self._gone) > self._room:
                self._counts[self._gone.popitem(last=False)[1]] -= 1

    def _learn(self, kind: int) -> None:
        other = self._counts[1 - kind]
        weight = max(1.0, other / max(1, self._counts[kind]))
        self._counts[kind] -= 1
        doublings = self._STEP * weight / self._room
        self.factor = min(self._MOST, max(self._LEAST, self.factor * 2 ** (doublings if kind else -doublings)))

    def _watched(self, node: Node, first: int) -> range:
        """The blocks of a node from `first` on that are watched: every fourth, counted from the root."""
        at = node.start // self._page
        return range(first + (-(at + first)) % self._WATCHED, node.blocks, self._WATCHED)

    def _fingerprint(self, node: Node, block: int) -> int:
        width = self._page * TOKEN
        return hash((node.start + block * self._page, bytes(node.tokens[block * width:(block + 1) * width])))


class _Candidates:
    """Leaves in the order in which they should go. Entries are checked when they surface: nobody has to take them out."""

    def __init__(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._heaps: dict[int, dict[int, list[tuple[int, int, Node]]]] = {}
        """By priority, then by kind: (last use, serial number, node)."""
        self._lapsing: list[tuple[float, int, Node]] = []
        """Nodes by the time at which their priority ends."""
        self._serial = 0

    def push(self, node: Node) -> None:
        evictor = self._evictor
        priority = evictor.priority(node)
        self._serial += 1
        kinds = self._heaps.setdefault(priority, {})
        heapq.heappush(kinds.setdefault(evictor.policy.kind(node), []), (node.used, self._serial, node))
        if priority != DEFAULT_PRIORITY:
            heapq.heappush(self._lapsing, (node.until, self._serial, node))

    def nodes(self) -> Iterator[Node]:
        """Everything that was pushed and has not surfaced as outdated."""
        for kinds in self._heaps.values():
            for heap in kinds.values():
                yield from (node for _, _, node in heap)

    def first(self) -> Node | None:
        """The candidate to go first; it stays in its place."""
        while self._lapsing and self._lapsing[0][0] <= self._evictor.now:
            node = heapq.heappop(self._lapsing)[2]
            if self._evictor.removable(node):
                self.push(node)
        while self._heaps:
            priority = min(self._heaps)
            kinds, best = self._heaps[priority], list[tuple[float, Node]]()
            for kind in list(kinds):
                head = self._head(priority, kind, kinds[kind])
                if head is not None:
                    best.append((self._evictor.policy.worth(kind, self._evictor.index.clock - head.used), head))
            # Entries with an outdated rank were moved to the heap of their new rank, which may be one not looked at.
            if best and min(self._heaps) == priority:
                return min(best, key=itemgetter(0))[1]
            for kind in [kind for kind, heap in kinds.items() if not heap]:
                del kinds[kind]
            if not kinds:
                del self._heaps[priority]
        return None

    def _head(self, priority: int, kind: int, heap: list[tuple[int, int, Node]]) -> Node | None:
        evictor = self._evictor
        while heap:
            used, _, node = heap[0]
            removable = evictor.removable(node)
            if removable and node.used == used and evictor.priority(node) == priority and evictor.policy.kind(node) == kind:
                return node
            heapq.heappop(heap)
            if removable:
                self.push(node)
        return None


class Evictor:
    """Chooses and gives up pages of an index. Whoever lets go of pages tells it what may go now."""

    def __init__(self, index: Prefix, policy: Policy, quota: int | None) -> None:
        """`quota`: bytes that the contexts of one tenant may occupy after their requests have ended; None for no limit."""
        self.index = index
        self.policy = policy
        index.added = policy.added
        self.now = 0.0
        """Seconds of `time.time()` at the plan being made."""
        self.evicted = [0] * index.groups
        """Pages given up so far, for each group."""
        self._quota = quota
        self._leaves = _Candidates(self)
        self._own: dict[int, _Candidates] = {}
        """With a quota, for each account by its identity."""
        self._keeps = [group.keep for group in index.pools.layout.groups]
        self.bounded = [keep.needed(1 << 30)[0] > 0 for keep in self._keeps]
        """Whether losing a page of a group strands no other, because it does not need everything."""
        self._loose: OrderedDict[tuple[int, int], tuple[int, Node]] = OrderedDict()
        """Pages of such groups that nobody holds, by (group, page), in the order in which they were let go: the block counted
        from the root, and a node in which it lies or below."""
        self._ends: list[tuple[int, int, int, tuple[int, int], int, Node]] = []
        """Those of them with which a context could go on at the end of a node: (priority, last use, serial number, and the
        same)."""
        self._serial = 0

    def priority(self, node: Node) -> int:
        """Its priority now."""
        return node.priority if node.until > self.now else DEFAULT_PRIORITY

    def removable(self, node: Node) -> bool:
        """Whether a node's last block can go."""
        if node.children or node.gone or node.parent is None:
            return False
        pools = self.index.pools
        return all(ids[-1] < 0 or not pools.holders(g, ids[-1]) for g, ids in enumerate(node.pages))

    def offer(self, node: Node) -> None:
        """A node may have become a candidate: somebody let go of it, or it has lost its last child."""
        while node.gone and node.parent is not None:
            node = node.parent
        if node.parent is not None and not node.children:
            self._leaves.push(node)
            if self._quota is not None:
                self._own.setdefault(id(node.label.account), _Candidates(self)).push(node)

    def loosen(self, group: int, places: list[tuple[int, int]], node: Node) -> None:
        """Nobody holds these kept pages of a `bounded` group any more, given as (block from the root, page); `node` is one in
        or below which they lie."""
        for block, page in places:
            self._loose[group, page] = block, node
            self._loose.move_to_end((group, page))
        while node.gone and node.parent is not None:
            node = node.parent
        if self.removable(node):
            self.offer(node)

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Gives up pages until it is enough; False if nothing is left that could go."""
        while not enough():
            if self._evict_spare():
                continue
            leaf, end = self._leaves.first(), self._first_end()
            if end is not None and (leaf is None or end[:2] < (self.priority(leaf), leaf.used)):
                heapq.heappop(self._ends)
                self._evict_single(*end[3:])
            elif leaf is not None:
                self._trim(leaf, enough)
            else:
                return False
        return True

    def enforce_quota(self, account: Account) -> None:
        """Gives up pages of a tenant until it occupies no more than it may, as far as nobody holds them."""
        if self._quota is None or account.nbytes <= self._quota or id(account) not in self._own:
            return
        own, quota = self._own[id(account)], self._quota
        while account.nbytes > quota and (leaf := own.first()) is not None:
            self._trim(leaf, lambda: account.nbytes <= quota)

    def _trim(self, leaf: Node, enough: Callable[[], bool]) -> None:
        """Gives up the last blocks of a leaf, as many as it takes and as rank alike."""
        kind, parent = self.policy.kind(leaf), leaf.parent
        assert parent is not None
        while True:
            last = leaf.blocks - 1
            self.policy.evicted(leaf)
            for g, ids in enumerate(leaf.pages):
                if ids[last] >= 0:
                    self._drop(leaf, g, last)
            self.index.cut(leaf)
            if leaf.gone:
                self.offer(parent)
                return
            if enough() or not self.removable(leaf) or self.policy.kind(leaf) != kind:
                return

    def _evict_spare(self) -> bool:
        """One page that only a context branching off inside a stretch could use, if there is one."""
        while self._loose:
            place, (block, node) = self._loose.popitem(last=False)
            found = self._find(place, block, node)
            if found is None:
                continue
            page = self.index.page
            if block < self._keeps[place[0]].needed(found.end)[0] // page:
                self._drop(found, place[0], block - found.start // page)
                return True
            self._serial += 1
            heapq.heappush(self._ends, (self.priority(found), found.used, self._serial, place, block, found))
        return False

    def _first_end(self) -> tuple[int, int, int, tuple[int, int], int, Node] | None:
        """The first of `_ends` that still is what its entry says."""
        while self._ends:
            priority, used, serial, place, block, node = self._ends[0]
            found = self._find(place, block, node)
            if found is not None and (priority, used) == (self.priority(found), found.used):
                return priority, used, serial, place, block, found
            heapq.heappop(self._ends)
            if found is not None:
                heapq.heappush(self._ends, (self.priority(found), found.used, serial, place, block, found))
        return None

    def _evict_single(self, place: tuple[int, int], block: int, node: Node) -> None:
        self._drop(node, place[0], block - node.start // self.index.page)

    def _find(self, place: tuple[int, int], block: int, node: Node) -> Node | None:
        """The node with this page in this block, if it still is there and nobody holds it."""
        group, page = place
        position = block * self.index.page
        while (node.gone or node.start > position) and node.parent is not None:
            node = node.parent
        at = block - node.start // self.index.page
        if node.gone or not 0 <= at < node.blocks or node.pages[group][at] != page:
            return None
        return None if self.index.pools.holders(group, page) else node

    def _drop(self, node: Node, group: int, block: int) -> None:
        self.evicted[group] += 1
        self.index.drop(node, group, block)

    def check(self) -> None:
        """Asserts that everything that may go can be found here."""
        listed = {id(node) for node in self._leaves.nodes()}
        loose = set(self._loose) | {entry[3] for entry in self._ends}
        for node in self.index.nodes():
            assert not self.removable(node) or id(node) in listed, "a leaf that nobody holds is not a candidate"
            for g, ids in enumerate(node.pages):
                for page in ids:
                    if page >= 0 and self.bounded[g] and not self.index.pools.holders(g, page):
                        assert (g, page) in loose, "a page that nobody holds is not a candidate"


POLICIES: dict[str, Callable[[CacheLayout], Policy]] = {
    "adaptive": lambda layout: Adaptive(layout.page, layout.slabs * max(group.per_slab for group in layout.groups)),
    "cost": CostAware,
    "lru": lambda _layout: Policy(),
    "tail": lambda layout: TailFirst(layout.page),
}
"""By the name of the option."""
