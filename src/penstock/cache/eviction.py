"""What goes first when pages are needed: the one home of that decision.

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
from dataclasses import dataclass
from typing import Protocol

from penstock.cache.prefix import Account, Node, Prefix
from penstock.core.request import DEFAULT_PRIORITY


class Policy(Protocol):
    """An order among stretches of equal priority."""

    def kind(self, node: Node) -> int:
        """Candidates of one kind go in the order of their last use. Small numbers; may change only when the node is used."""
        ...

    def worth(self, kind: int, age: int) -> float:
        """How much keeping a candidate of this kind is worth that was last used `age` ticks of the clock ago: least goes
        first."""
        ...


class LeastRecent:
    """LRU."""

    def kind(self, node: Node) -> int:
        return 0

    def worth(self, kind: int, age: int) -> float:
        return -age


@dataclass(frozen=True)
class TailFirst:
    """T-LRU: a conversation's last tokens go first as long as what its next turn must then compute stays within a budget.

    Of a context of L tokens a page may go early if the tokens before it still cover L + question - budget: then the next
    turn, a `question` longer, computes at most `budget` tokens before it answers. Both in tokens.
    """

    page: int
    budget: int = 1024
    question: int = 256

    def kind(self, node: Node) -> int:
        return 0 if node.end - self.page >= node.longest + self.question - self.budget else 1

    def worth(self, kind: int, age: int) -> float:
        return kind * float(1 << 60) - age


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
        for priority in sorted(self._heaps):
            best: tuple[float, Node] | None = None
            for kind, heap in list(self._heaps[priority].items()):
                node_ = self._head(priority, kind, heap)
                if node_ is None:
                    del self._heaps[priority][kind]
                    continue
                worth = self._evictor.policy.worth(kind, self._evictor.index.clock - node_.used)
                if best is None or worth < best[0]:
                    best = worth, node_
            if best is not None:
                return best[1]
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
        self.now = 0.0
        """Seconds of `time.time()` at the plan being made."""
        self.evicted = [0] * index.groups
        """Pages given up so far, for each group."""
        self._quota = quota
        self._leaves = _Candidates(self)
        self._own: dict[int, _Candidates] = {}
        """With a quota, for each account by its identity."""
        self._keeps = [group.keep for group in index.pools.layout.groups]
        self._bounded = [keep.needed(1 << 30)[0] > 0 for keep in self._keeps]
        """Whether losing a page of a group strands no other, because it does not need everything."""
        self._loose: OrderedDict[tuple[int, int], tuple[int, Node]] = OrderedDict()
        """Pages of such groups that nobody holds, by (group, page), in the order in which they were let go: the slot counted
        from the root, and a node in which it lies or below."""
        self._ends: list[tuple[int, int, int, tuple[int, int], int, Node]] = []
        """Those of them with which a context could go on at the end of a node: (priority, last use, serial number, and the
        same)."""
        self._serial = 0

    def priority(self, node: Node) -> int:
        """Its priority now."""
        return node.priority if node.until > self.now else DEFAULT_PRIORITY

    def removable(self, node: Node) -> bool:
        """Whether a node's last slot can go."""
        if node.children or node.gone or node.parent is None:
            return False
        pools = self.index.pools
        return all(ids[-1] < 0 or not pools.holders(g, ids[-1]) for g, ids in enumerate(node.pages))

    def offer(self, node: Node) -> None:
        """A node may have become a candidate: somebody let go of it, or it has lost its last child."""
        if node.parent is not None and not node.gone and not node.children:
            self._leaves.push(node)
            if self._quota is not None:
                self._own.setdefault(id(node.label.account), _Candidates(self)).push(node)

    def loosen(self, group: int, places: list[tuple[int, int]], node: Node) -> None:
        """Nobody holds these kept pages any more, given as (slot from the root, page); `node` is one in or below which they
        lie."""
        if self._bounded[group]:
            for slot, page in places:
                self._loose[group, page] = slot, node
                self._loose.move_to_end((group, page))
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

    def settle_quota(self, account: Account) -> None:
        """Gives up pages of a tenant until it occupies no more than it may, as far as nobody holds them."""
        if self._quota is None or account.nbytes <= self._quota or id(account) not in self._own:
            return
        own, quota = self._own[id(account)], self._quota
        while account.nbytes > quota and (leaf := own.first()) is not None:
            self._trim(leaf, lambda: account.nbytes <= quota)

    def _trim(self, leaf: Node, enough: Callable[[], bool]) -> None:
        """Gives up the last slots of a leaf, as many as it takes and as rank alike."""
        kind, parent = self.policy.kind(leaf), leaf.parent
        assert parent is not None
        while True:
            last = leaf.slots - 1
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
            place, (slot, node) = self._loose.popitem(last=False)
            found = self._find(place, slot, node)
            if found is None:
                continue
            page = self.index.page
            if slot < self._keeps[place[0]].needed(found.end)[0] // page:
                self._drop(found, place[0], slot - found.start // page)
                return True
            self._serial += 1
            heapq.heappush(self._ends, (self.priority(found), found.used, self._serial, place, slot, found))
        return False

    def _first_end(self) -> tuple[int, int, int, tuple[int, int], int, Node] | None:
        """The first of `_ends` that still is what its entry says."""
        while self._ends:
            priority, used, serial, place, slot, node = self._ends[0]
            found = self._find(place, slot, node)
            if found is not None and (priority, used) == (self.priority(found), found.used):
                return priority, used, serial, place, slot, found
            heapq.heappop(self._ends)
            if found is not None:
                heapq.heappush(self._ends, (self.priority(found), found.used, serial, place, slot, found))
        return None

    def _evict_single(self, place: tuple[int, int], slot: int, node: Node) -> None:
        self._drop(node, place[0], slot - node.start // self.index.page)

    def _find(self, place: tuple[int, int], slot: int, node: Node) -> Node | None:
        """The node with this page in this slot, if it still is there and nobody holds it."""
        group, page = place
        position = slot * self.index.page
        while (node.gone or node.start > position) and node.parent is not None:
            node = node.parent
        at = slot - node.start // self.index.page
        if node.gone or not 0 <= at < node.slots or node.pages[group][at] != page:
            return None
        return None if self.index.pools.holders(group, page) else node

    def _drop(self, node: Node, group: int, slot: int) -> None:
        self.evicted[group] += 1
        self.index.drop(node, group, slot)

    def check(self) -> None:
        """Asserts that everything that may go can be found here."""
        listed = {id(node) for node in self._leaves.nodes()}
        loose = set(self._loose) | {entry[3] for entry in self._ends}
        for node in self.index.nodes():
            assert not self.removable(node) or id(node) in listed, "a leaf that nobody holds is not a candidate"
            for g, ids in enumerate(node.pages):
                for page in ids:
                    if page >= 0 and self._bounded[g] and not self.index.pools.holders(g, page):
                        assert (g, page) in loose, "a page that nobody holds is not a candidate"
