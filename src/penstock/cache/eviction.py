"""Eviction: decides which cached pages are evicted first when pages are needed.

Only pages without a holder can be evicted, and no eviction may leave other pages unreachable: full-attention pages are evicted
page by page from the leaves of the tree. Pages of sliding windows, attention chunks and snapshots strand no other page and are
evicted singly; those that only a context branching off inside a node could use are evicted before all others.

Among candidates the lowest retention priority goes first (`core/request.py::Span`; an expired span counts as none). Among
candidates of equal priority, a `Policy` sorts them into kinds and compares the least recently used candidate of each kind."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from operator import itemgetter

from penstock.cache.prefix import TOKEN, Account, Node, Prefix
from penstock.core.request import DEFAULT_PRIORITY
from penstock.core.state import CacheLayout


class Policy:
    """The eviction order among nodes of equal priority; this base class is LRU."""

    blocks: list[int]
    """The number of the index's blocks that were used once, and of those used again (`Prefix.blocks`)."""

    def kind(self, node: Node) -> int:  # noqa: ARG002 (other policies look at it)
        """The node's kind. Candidates of one kind are evicted in LRU order. May change only when the node is used or cut."""
        return 0

    def worth(self, kind: int, age: int) -> float:  # noqa: ARG002 (other policies look at it)
        """The value of keeping a candidate of this kind that was last used `age` clock ticks ago. The lowest goes first."""
        return -age

    def added(self, node: Node, first: int) -> bool:  # noqa: ARG002 (other policies look at it)
        """Called after the blocks of a node from `first` on were computed and added to the index. Returns whether the node
        counts as used again, because the index had its blocks before."""
        return False

    def evicted(self, node: Node) -> None:
        """Called before the last block of a node is evicted."""


class TailFirst(Policy):
    """T-LRU: evicts the last tokens of a conversation first, as long as the prefill of its next turn stays within a budget.

    A page of a context of L tokens may be evicted early if the tokens before it still cover L + 256 - 1024: then the next turn,
    which is 256 tokens longer, prefills at most 1024 tokens."""

    def __init__(self, page: int) -> None:
        self._page = page

    def kind(self, node: Node) -> int:
        return 0 if node.end - self._page >= node.longest + 256 - 1024 else 1

    def worth(self, kind: int, age: int) -> float:
        return kind * float(1 << 60) - age


class CostAware(Policy):
    """Keeps pages that are expensive to recompute: cost x uses / (bytes x age), as in Greedy-Dual-Size-Frequency.

    Computing a position costs its GEMMs with the weights, the same for every position, plus attention over all positions before
    it; at position `_EVEN` both cost the same (about 32k for an 8B model). The bytes are those of groups that have the page."""

    _EVEN = 32_768
    _KINDS = 4
    """Use counts are capped at this number. Depths are bucketed by powers of two."""

    def __init__(self, layout: CacheLayout) -> None:
        self._weights = [group.stride for group in layout.groups]

    def kind(self, node: Node) -> int:
        nbytes = sum(weight for weight, ids in zip(self._weights, node.pages, strict=True) if ids[-1] >= 0)
        return (node.end.bit_length() * 9 + 8 * nbytes // sum(self._weights)) * self._KINDS + min(node.uses, self._KINDS - 1)

    def worth(self, kind: int, age: int) -> float:
        rest, uses = divmod(kind, self._KINDS)
        depth, share = divmod(rest, 9)
        return (1 + uses) * (1 + (1 << depth) / self._EVEN) / (max(1, share) * (age + 1))


class Adaptive(Policy):
    """ARC (Megiddo and Modha 2003): a balance between blocks that were used once and blocks that were used again.

    A ghost list remembers the token fingerprints of evicted blocks for a while. If a block returns that had been used once, the
    target for the number of such blocks grows; if one returns that had been used again, it shrinks. The kind that exceeds its
    share is evicted first, from the least recently used block on. Only every fourth block is sampled for the ghost list."""

    _WATCHED = 4
    _GRACE = 100
    """Below this age in clock ticks (two for each request of an idle engine) only recency counts: ARC alone finds up to two
    points less than LRU in conversations and agents' calls."""

    def __init__(self, page: int, pages: int) -> None:
        """`page` is the page size in tokens, `pages` the number of pages in the arena."""
        self._page = page
        self._pages = pages
        self.target = 0.0
        """The number of blocks used once above which they are evicted first."""
        self._gone: OrderedDict[int, int] = OrderedDict()
        """The ghost list: fingerprint of an evicted block -> its kind, oldest first."""
        self._counts = [0, 0]
        """The number of ghosts of each kind."""

    def kind(self, node: Node) -> int:
        return 1 if node.uses else 0

    def worth(self, kind: int, age: int) -> float:
        excess = 0 if self.blocks[0] > self.target else 1
        return -age - (1 << 40) if kind == excess and age >= self._GRACE else -age

    def added(self, node: Node, first: int) -> bool:
        again = False
        for block in self._watched(node, first) if self._gone else ():
            kind = self._gone.pop(self._fingerprint(node, block), None)
            if kind is not None:
                again = True
                step = self._WATCHED * max(1.0, self._counts[1 - kind] / self._counts[kind])
                self._counts[kind] -= 1
                self.target = min(float(self._pages), max(0.0, self.target + (-step if kind else step)))
        return again

    def evicted(self, node: Node) -> None:
        block = node.blocks - 1
        if block in self._watched(node, block):
            seen, kind = self._fingerprint(node, block), self.kind(node)
            self._counts[kind] += 1
            before = self._gone.pop(seen, None)
            if before is not None:
                self._counts[before] -= 1
            self._gone[seen] = kind
            if len(self._gone) * self._WATCHED > self._pages:
                self._counts[self._gone.popitem(last=False)[1]] -= 1

    def _watched(self, node: Node, first: int) -> range:
        """The sampled blocks of a node from `first` on: every fourth block, counted from the root."""
        return range(first + (-(node.start // self._page + first)) % self._WATCHED, node.blocks, self._WATCHED)

    def _fingerprint(self, node: Node, block: int) -> int:
        width = self._page * TOKEN
        return hash((node.start + block * self._page, bytes(node.tokens[block * width:(block + 1) * width])))


class _Candidates:
    """A priority queue of leaves in eviction order. Outdated entries are dropped when they surface (lazy deletion)."""

    def __init__(self, evictor: "Evictor") -> None:
        self._evictor = evictor
        self._heaps: dict[int, dict[int, list[tuple[int, int, Node]]]] = {}
        """By priority, then by kind: (last use, serial number, node)."""
        self._lapsing: list[tuple[float, int, Node]] = []
        """A heap of nodes by the time at which their retention priority expires."""
        self._numbers = count()

    def push(self, node: Node) -> None:
        evictor = self._evictor
        priority = evictor.priority(node)
        kinds = self._heaps.setdefault(priority, {})
        heapq.heappush(kinds.setdefault(evictor.policy.kind(node), []), (node.used, next(self._numbers), node))
        if priority != DEFAULT_PRIORITY:
            heapq.heappush(self._lapsing, (node.until, next(self._numbers), node))

    def nodes(self) -> Iterator[Node]:
        """All queued nodes, including outdated entries that have not surfaced yet."""
        for kinds in self._heaps.values():
            for heap in kinds.values():
                yield from (node for _, _, node in heap)

    def first(self) -> Node | None:
        """The candidate to evict first; it stays in the queue."""
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
            # `_head` moves entries with an outdated rank to the heap of their new rank, which may have a lower priority.
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
    """Chooses and evicts pages of an index. Code that releases pages reports the new candidates (`offer`, `loosen`)."""

    def __init__(self, index: Prefix, policy: Policy, quota: int | None) -> None:
        """`quota` is the number of bytes that one tenant's contexts may occupy after their requests end; None for no limit."""
        self.index = index
        self.policy = policy
        index.added, policy.blocks = policy.added, index.blocks
        self.now = 0.0
        """The time of the plan being made, in seconds of `time.time()`."""
        self.evicted = [0] * index.groups
        """The number of evicted pages of each group so far."""
        self._quota = quota
        self._leaves = _Candidates(self)
        self._own: dict[int, _Candidates] = {}
        """With a quota: the candidates of each tenant, by the identity of its account."""
        self._keeps = [group.keep for group in index.pools.layout.groups]
        self.bounded = [keep.needed(1 << 30)[0] > 0 for keep in self._keeps]
        """For each group: True if it does not need all earlier positions, so evicting one page strands no other."""
        self._loose: OrderedDict[tuple[int, int], tuple[int, Node]] = OrderedDict()
        """Pages of `bounded` groups without a holder: (group, page) -> (block counted from the root, a node that contains the
        block or is below it), in the order in which they were released."""
        self._ends: list[tuple[int, int, int, tuple[int, int], int, Node]] = []
        """A heap of loose pages that continue a node's end: (priority, last use, serial number, (group, page), block, node)."""
        self._numbers = count()

    def priority(self, node: Node) -> int:
        return node.priority if node.until > self.now else DEFAULT_PRIORITY

    def removable(self, node: Node) -> bool:
        """True if a node's last block can be evicted."""
        if node.children or node.gone or node.parent is None:
            return False
        pools = self.index.pools
        return all(ids[-1] < 0 or not pools.holders(g, ids[-1]) for g, ids in enumerate(node.pages))

    def offer(self, node: Node) -> None:
        """Queues a node that may have become a candidate, because a holder released it or it has lost its last child."""
        while node.gone and node.parent is not None:
            node = node.parent
        if node.parent is not None and not node.children:
            self._leaves.push(node)
            if self._quota is not None:
                self._own.setdefault(id(node.label.account), _Candidates(self)).push(node)

    def loosen(self, group: int, places: list[tuple[int, int]], node: Node) -> None:
        """Queues kept pages of a `bounded` group without holders: (block from the root, page), in `node` or its ancestors."""
        for block, page in places:
            self._loose[group, page] = block, node
            self._loose.move_to_end((group, page))
        while node.gone and node.parent is not None:
            node = node.parent
        if self.removable(node):
            self.offer(node)

    def evict(self, enough: Callable[[], bool]) -> bool:
        """Evicts pages until `enough()` is True; False if no candidate is left."""
        while not enough():
            if self._evict_spare():
                continue
            leaf, end = self._leaves.first(), self._first_end()
            if end is not None and (leaf is None or end[:2] < (self.priority(leaf), leaf.used)):
                heapq.heappop(self._ends)
                place, block, node = end[3:]
                self._drop(node, place[0], block - node.start // self.index.page)
            elif leaf is not None:
                self._trim(leaf, enough)
            else:
                return False
        return True

    def make_room(self, group: int, count: int) -> bool:
        """Evicts until `count` pages of a group can be allocated; False if that is not possible."""
        pools = self.index.pools
        return pools.available(group) >= count or self.evict(lambda: pools.available(group) >= count)

    def enforce_quota(self, account: Account) -> None:
        """Evicts pages of a tenant that have no holder until it is within its quota."""
        if self._quota is None or account.nbytes <= self._quota or id(account) not in self._own:
            return
        own, quota = self._own[id(account)], self._quota
        while account.nbytes > quota and (leaf := own.first()) is not None:
            self._trim(leaf, lambda: account.nbytes <= quota)

    def _trim(self, leaf: Node, enough: Callable[[], bool]) -> None:
        """Evicts the last blocks of a leaf until `enough()` is True, the leaf's kind changes or a block has a holder."""
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
        """Evicts one page that only a context branching off inside a node could use; False if there is none."""
        while self._loose:
            place, (block, node) = self._loose.popitem(last=False)
            found = self._find(place, block, node)
            if found is None:
                continue
            page = self.index.page
            if block < self._keeps[place[0]].needed(found.end)[0] // page:
                self._drop(found, place[0], block - found.start // page)
                return True
            heapq.heappush(self._ends, (self.priority(found), found.used, next(self._numbers), place, block, found))
        return False

    def _first_end(self) -> tuple[int, int, int, tuple[int, int], int, Node] | None:
        """The first entry of `_ends` that is still valid; outdated entries are dropped or requeued."""
        while self._ends:
            priority, used, serial, place, block, node = self._ends[0]
            found = self._find(place, block, node)
            if found is not None and (priority, used) == (self.priority(found), found.used):
                return priority, used, serial, place, block, found
            heapq.heappop(self._ends)
            if found is not None:
                heapq.heappush(self._ends, (self.priority(found), found.used, serial, place, block, found))
        return None

    def _find(self, place: tuple[int, int], block: int, node: Node) -> Node | None:
        """The node that has this page in this block; None if the page is gone or has a holder."""
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
        """Asserts that every evictable page is queued."""
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
    "tail": lambda layout: TailFirst(layout.page)}
