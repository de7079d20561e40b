"""The prefix index: a radix tree over pages of tokens that maps contexts to their cached pages. It moves no bytes.

A node holds a run of tokens of all contexts through it, in blocks of a page each, and each block's page of each cache group.
Nodes are split only where contexts branch. Only a leaf may end inside a page, and that block is matched token by token.

`Lookup` finds the cached pages of a context, and the longest prefix from which the context can continue: the largest n at which
every cache group has the pages it needs (`reach`). It depends only on retention, so full attention, sliding windows, chunked
attention, recurrent snapshots, draft heads and every mixture of them follow the same rule."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cache import keys
from penstock.cache.pool import Pools
from penstock.core.request import DEFAULT_PRIORITY
from penstock.core.state import CacheLayout, Everything, Retention

TOKEN = 4
"""Bytes of a token in `Node.tokens`."""


class Node:
    """A node of the radix tree. `pages[g][i]` is the page of group g for block i, -1 where there is none."""

    __slots__ = ("author", "children", "gone", "keys", "label", "longest", "order", "pages", "parent", "priority", "seconds",
                 "start", "tokens", "until", "used", "uses")

    def __init__(self, parent: "Node | None", start: int, tokens: bytearray, pages: list[list[int]], label: "Label") -> None:
        self.parent = parent
        """None for roots."""
        self.gone = False
        """True after the node was removed from the tree. `parent` then still refers to its last parent."""
        self.start = start
        """The position of its first token, a multiple of the page."""
        self.tokens = tokens
        """int32 in native byte order."""
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        """By the tokens of the child's first block."""
        self.order: list[bytes] = []
        """The keys of `children`, sorted, so that the child with the longest common prefix is a neighbour."""
        self.label = label
        self.keys: list[keys.Key] = []
        """Content keys of its first blocks; computed lazily."""
        self.author: object = None
        """The sequence that is extending it; no other sequence may extend it in place."""
        self.used = 0
        """The index's clock at its last use."""
        self.uses = 0
        """The number of requests that have matched it."""
        self.longest = 0
        """The length of the longest context that ended in this node or below it."""
        self.priority = DEFAULT_PRIORITY
        """Its retention priority until `until`, in seconds of `time.time()`; a use before then extends that by `seconds`."""
        self.until = self.seconds = 0.0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens) // TOKEN

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


class Account:
    """The number of bytes that the index keeps for one tenant."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class Label(NamedTuple):
    """The namespace of a root: properties that all contexts below it share."""

    adapter: str
    salt: str
    account: Account


class Trail(NamedTuple):
    """The path of a context in the tree."""

    nodes: list[Node]
    """The nodes along the path, without the root."""
    blocks: list[int]
    """The number of matched blocks of each node; only the last block of the last node may match in part."""
    matched: int


class Prefix:
    """The radix trees of all namespaces. It marks the pages it keeps in `pools`; callers do all other page bookkeeping."""

    def __init__(self, pools: Pools, model: str | None) -> None:
        """`model` identifies the weights in content keys. While it is None, no keys can be computed."""
        layout = pools.layout
        self.pools = pools
        self.page = layout.page
        self.width = self.page * TOKEN
        self.groups = len(layout.groups)
        self.weights = [group.stride for group in layout.groups]
        self.model = model
        self.stored: Callable[[Node, int, list[int]], None] | None = None
        """Callback (node, group, blocks) after pages of these blocks were added to the index."""
        self.removed: Callable[[Node, int, int], None] | None = None
        """Callback (node, group, block) before the page of a block is removed."""
        self.added: Callable[[Node, int], bool] = lambda _node, _first: False
        """Callback (node, first) after blocks from `first` on were added to a node. Returns whether it counts as used again."""
        self.blocks = [0, 0]
        """The number of blocks in nodes that were used once, and in nodes that were used again."""
        self.accounts: dict[str, Account] = {}
        self.roots: dict[tuple[str, str], Node] = {}
        self.clock = 0
        """A logical clock that advances with every use."""
        self.kept = 0
        """The total number of pages ever added to the index."""

    def root(self, adapter: str, salt: str, tenant: str) -> Node:
        """The root of a namespace; created if missing."""
        found = self.roots.get((adapter, salt))
        if found is None:
            empty: list[list[int]] = [[] for _ in range(self.groups)]
            account = self.accounts.setdefault(tenant, Account())
            found = self.roots[adapter, salt] = Node(None, 0, bytearray(), empty, Label(adapter, salt, account))
        return found

    def walk(self, root: Node, data: bytearray) -> Trail:
        """Walks the tree from a root along the tokens (int32), as far as they match."""
        node, at, nodes, blocks = root, 0, [], []
        while at < len(data):
            child = node.children.get(bytes(data[at:at + self.width]))
            shared = len(child.tokens) if child is not None else 0
            if child is None:
                child, shared = self._nearest(node, bytes(data[at:at + self.width]))
                if child is None:
                    break
            elif data[at:at + shared] != child.tokens:
                shared = common(data, at, child.tokens)
            nodes.append(child)
            blocks.append(-(-shared // self.width))
            at += shared
            if shared < len(child.tokens):
                break
            node = child
        return Trail(nodes, blocks, at // TOKEN)

    def _nearest(self, node: Node, data: bytes) -> tuple[Node | None, int]:
        """The child whose first block has the longest common prefix with `data`, and that prefix's length in bytes. Called
        when no child's first block equals `data`."""
        at = bisect_left(node.order, data)
        best, most = None, 0
        for key in node.order[max(0, at - 1):at + 1]:
            shared = common(data, 0, key)
            if shared > most:
                best, most = node.children[key], shared
        return best, most

    def locate(self, node: Node, at: int) -> Node:
        """The node on the path to `node` that contains position `at`, a block boundary, or ends there."""
        while at <= node.start and node.parent is not None:
            node = node.parent
        return node

    def insert(self, node: Node, at: int, data: bytearray, pages: list[list[int]], author: object) -> tuple[Node, list[Node]]:
        """Adds whole blocks after position `at` of `node`; `pages[g]` has a held page for each block, -1 for none.

        Where the tree has a page already, it stays and replaces the entry in `pages`; otherwise the given page is kept. Returns
        the node that contains the last block, and the leaves with a partial page that the new blocks make redundant."""
        node, i, count, width, spent = self.locate(node, at), 0, len(data) // self.width, self.width, []
        while i < count:
            if at < node.end:
                first = (at - node.start) // self.page
                same = common(data, i * width, node.tokens[first * width:]) // width
                if not same:
                    node = self.split(node, first)
                    continue
                self._merge(node, first, pages, i, same)
                i, at = i + same, at + same * self.page
                continue
            key = bytes(data[i * width:(i + 1) * width])
            child = node.children.get(key)
            if child is not None:
                node = child
                continue
            spent += self._prefixes(node, key)
            node = self._append(node, at, data[i * width:], [ids[i:] for ids in pages], author)
            break
        return node, spent

    def grows(self, node: Node, author: object, at: int) -> bool:
        """True if `author` may extend this leaf in place at position `at`, its end."""
        return node.author is author and not node.children and not node.gone and node.end == at

    def append(self, node: Node, tokens: bytes | bytearray, page: int) -> None:
        """Adds one block to a leaf for which `grows` is True, in an index with a single cache group."""
        block = len(node.pages[0])
        node.tokens += tokens
        node.pages[0].append(page)
        self._keep(node, 0, block, [page])
        self._count(node, block)

    def _append(self, node: Node, at: int, data: bytearray, pages: list[list[int]], author: object) -> Node:
        if node.author is author and node.parent is not None and not node.children:
            node.tokens += data
            for g, ids in enumerate(pages):
                node.pages[g] += ids
        else:
            node = self._add(node, at, data, pages, author)
        first = node.blocks - len(pages[0])
        for g, ids in enumerate(pages):
            self._keep(node, g, first, ids)
        self._count(node, first)
        return node

    def _count(self, node: Node, first: int) -> None:
        self.blocks[node.uses > 0] += node.blocks - first
        if self.added(node, first) and not node.uses:
            self.use(node)

    def use(self, node: Node) -> None:
        if not node.uses and node.parent is not None:
            self.blocks[0] -= node.blocks
            self.blocks[1] += node.blocks
        node.uses += 1

    def _add(self, parent: Node, at: int, data: bytearray, pages: list[list[int]], author: object) -> Node:
        """Creates a leaf below `parent`. Its pages are not marked as kept yet."""
        node = Node(parent, at, data, pages, parent.label)
        node.author, node.used = author, parent.used
        key = bytes(data[:self.width])
        assert key not in parent.children
        parent.children[key] = node
        insort(parent.order, key)
        return node

    def _merge(self, node: Node, first: int, pages: list[list[int]], i: int, count: int) -> None:
        """Deduplicates pages: `count` blocks of `node` from `first` on have the same tokens as the given blocks from i on."""
        for g, ids in enumerate(pages):
            mine = node.pages[g]
            for j in range(count):
                there, given = mine[first + j], ids[i + j]
                if there >= 0:
                    ids[i + j] = there
                elif given >= 0:
                    mine[first + j] = given
                    self._keep(node, g, first + j, [given])

    def _keep(self, node: Node, group: int, first: int, ids: list[int]) -> None:
        """Marks the pages that were put into blocks from `first` on as kept, and reports them to `stored`."""
        pages = [page for page in ids if page >= 0] if -1 in ids else ids
        if pages:
            self.pools.keep(group, pages)
            self.kept += len(pages)
            node.label.account.nbytes += len(pages) * self.weights[group]
            if self.stored is not None:
                self.stored(node, group, [first + i for i, page in enumerate(ids) if page >= 0])

    def drop(self, node: Node, group: int, block: int) -> None:
        page = node.pages[group][block]
        if self.removed is not None and len(node.tokens) >= self.width:
            self.removed(node, group, block)
        node.pages[group][block] = -1
        node.label.account.nbytes -= self.weights[group]
        self.pools.drop(group, page)

    def _prefixes(self, node: Node, key: bytes) -> list[Node]:
        """The child, if any, whose partial page is a prefix of `key`. In sorted order it is right before `key`."""
        at = bisect_left(node.order, key)
        return [node.children[node.order[at - 1]]] if at and key.startswith(node.order[at - 1]) else []

    def rest(self, node: Node, at: int, data: bytearray, pages: list[list[int]]) -> tuple[Node | None, list[Node]]:
        """Adds a leaf with a partial page after position `at` of `node`, a block boundary, unless the tree has these tokens
        already. Returns the new leaf or None, and the leaves whose shorter partial page is now redundant."""
        node = self.locate(node, at)
        if at < node.end:
            first = (at - node.start) // self.page
            if node.tokens.startswith(data, first * self.width):
                return None, []
            node = self.split(node, first)
        key = bytes(data)
        place = bisect_left(node.order, key)
        if place < len(node.order) and node.order[place].startswith(key):
            return None, []
        spent = self._prefixes(node, key)
        leaf = self._add(node, at, data, pages, None)
        self.blocks[0] += leaf.blocks
        for g, ids in enumerate(pages):
            self._keep(leaf, g, 0, ids)
        return leaf, spent

    def split(self, node: Node, blocks: int) -> Node:
        """Splits a node and returns the upper part, with `blocks` blocks. The lower part stays the same object."""
        parent, width = node.parent, self.width
        assert parent is not None and 0 < blocks < node.blocks
        upper = Node(parent, node.start, node.tokens[:blocks * width], [ids[:blocks] for ids in node.pages], node.label)
        upper.used, upper.uses, upper.longest = node.used, node.uses, node.longest
        upper.priority, upper.until, upper.seconds = node.priority, node.until, node.seconds
        upper.keys = node.keys[:blocks]
        parent.children[bytes(upper.tokens[:width])] = upper
        node.parent, node.start = upper, node.start + blocks * self.page
        node.keys = node.keys[blocks:]
        del node.tokens[:blocks * width]
        for ids in node.pages:
            del ids[:blocks]
        key = bytes(node.tokens[:width])
        upper.children[key] = node
        upper.order.append(key)
        return upper

    def cut(self, node: Node) -> None:
        """Removes the last block of a leaf, whose pages must be gone already. An empty leaf is removed from the tree."""
        for ids in node.pages:
            ids.pop()
        self.blocks[node.uses > 0] -= 1
        if node.blocks:
            del node.tokens[node.blocks * self.width:]
            del node.keys[node.blocks:]
            return
        parent = node.parent
        assert parent is not None and not node.children
        key = bytes(node.tokens[:self.width])
        del parent.children[key]
        del parent.order[bisect_left(parent.order, key)]
        node.gone = True
        if parent.parent is None and not parent.children:
            parent.gone = True
            del self.roots[parent.label[:2]]

    def clear(self) -> None:
        for node in list(self.nodes()):
            node.gone = True
            for g, ids in enumerate(node.pages):
                for page in ids:
                    if page >= 0:
                        self.pools.drop(g, page)
        for root in self.roots.values():
            root.gone = True
            root.label.account.nbytes = 0
        self.roots.clear()
        self.blocks[:] = 0, 0

    def touch(self, node: Node, now: float) -> None:
        """Marks a node and its ancestors as used at `now`, in seconds of `time.time()`."""
        self.clock += 1
        at: Node | None = node
        while at is not None:
            at.used = self.clock
            if at.until > now:
                at.until = now + at.seconds
            at = at.parent

    def key(self, node: Node, block: int) -> keys.Key:
        """The content key of the context up to the end of a block; for block -1, up to the start of the node."""
        if block < 0:
            return self.key(node.parent, node.parent.blocks - 1) if node.parent is not None else self.root_key(node)
        if len(node.keys) <= block:
            parent = node.keys[-1] if node.keys else self.key(node, -1)
            node.keys += keys.links(parent, node.tokens[len(node.keys) * self.width:(block + 1) * self.width], self.page)
        return node.keys[block]

    def root_key(self, root: Node) -> keys.Key:
        """The parent key of the first page in a namespace."""
        assert self.model is not None, "the weights have no name yet"
        return keys.root(self.model, root.label.adapter, root.label.salt)

    def nodes(self) -> Iterator[Node]:
        """Every node below the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def check(self) -> list[set[int]]:
        """Asserts the tree's invariants; returns the set of its pages for each group."""
        kept: list[set[int]] = [set() for _ in range(self.groups)]
        blocks = [0, 0]
        for node in self.nodes():
            blocks[node.uses > 0] += node.blocks
            parent = node.parent
            assert parent is not None and parent.children[bytes(node.tokens[:self.width])] is node
            assert node.start == parent.end and node.start % self.page == 0 and node.tokens
            assert not node.children or len(node.tokens) % self.width == 0, "a page goes on after a stretch that ends inside it"
            assert len(node.tokens) % self.width == 0 or node.blocks == 1, "a rest of a page is a node of its own"
            assert node.order == sorted(node.children) and parent.used >= node.used
            for g, ids in enumerate(node.pages):
                assert len(ids) == node.blocks == -(-len(node.tokens) // self.width)
                mine = [page for page in ids if page >= 0]
                assert len(set(mine)) == len(mine) and kept[g].isdisjoint(mine), "a page is in the index twice"
                kept[g].update(mine)
        assert blocks == self.blocks, (blocks, self.blocks)
        return kept


def common(data: bytes | bytearray, at: int, other: bytes | bytearray) -> int:
    """The length in bytes, in whole tokens, of the common prefix of `data[at:]` and `other`."""
    size = min(len(data) - at, len(other)) // TOKEN
    differs = np.frombuffer(data, np.int32, size, at) != np.frombuffer(other, np.int32, size)
    first = int(differs.argmax()) if size else 0
    return (first if size and differs[first] else size) * TOKEN


Places = npt.NDArray[np.int32]
"""Shape [pages], for one group: the page id of each page-sized range of positions, -1 where there is no page."""


class CacheMatch(NamedTuple):
    reach: int
    """The length of the longest prefix from which every cache group can continue."""
    places: list[list[int]]
    """For each group the page ids along the path, by page index; -1 where there is no page."""
    trail: Trail


class Lookup:
    """Read-only queries of the prefix index."""

    def __init__(self, index: Prefix, layout: CacheLayout) -> None:
        self.index = index
        self.page = layout.page
        self.keeps = [group.keep for group in layout.groups]
        self.simple = all(keep == Everything() for keep in self.keeps)
        self.shift = [-(-keep.ahead // layout.page) for keep in self.keeps]
        """For each group: its page i depends on tokens up to block i + shift of the tree, so it is stored in that block."""

    def find(self, root: Node | None, packed: bytearray, limit: int) -> CacheMatch:
        """Looks a context up. Its prefix may be at most `limit` positions long."""
        trail = self.index.walk(root, packed) if root is not None else Trail([], [], 0)
        places: list[list[int]] = []
        for g, shift in enumerate(self.shift):
            ids: list[int] = []
            for node, blocks in zip(trail.nodes, trail.blocks, strict=True):
                ids += node.pages[g][:blocks]
            places.append(ids[shift:])
        return CacheMatch(self.continues(places, trail, limit), places, trail)

    def continues(self, places: list[list[int]], trail: Trail, limit: int) -> int:
        """The length of the longest prefix, at most `limit`, from which every group can continue with these pages."""
        if self.simple:
            return min(trail.matched, limit)
        sealed = trail.matched if trail.nodes and trail.nodes[-1].end == trail.matched else -1
        return reach(self.keeps, [np.array(ids, np.int32) for ids in places], self.page, trail.matched, limit, sealed)


def reach(keeps: Sequence[Retention], places: Sequence[Places], page: int, matched: int, limit: int, sealed: int) -> int:
    """The largest n <= limit such that every group has, in `places`, all pages that contain positions it needs at n. If n is
    inside a page, the group must have that page too: it is copied and continued, and a later match may need its beginning.

    The first `matched` positions have equal tokens; the last page may extend beyond them. Snapshots (`Retention.exact`) are
    valid only at page boundaries and at `sealed`, the end of a partial last page (-1 if there is none)."""
    n = min(matched, limit)
    holes = [np.flatnonzero(ids < 0) for ids in places]
    while n > 0:
        best = min(_fits(keep, ids, gaps, page, min(n, matched - keep.ahead), sealed)
                   for keep, ids, gaps in zip(keeps, places, holes, strict=True))
        if best == n:
            return n
        n = max(0, best)
    return 0


def _fits(keep: Retention, ids: Places, holes: npt.NDArray[np.int64], page: int, n: int, sealed: int) -> int:
    """The largest m <= n at which one group can continue."""
    while n > 0:
        low = min(keep.needed(n)[0], n - n % page)
        if low >= n:
            return n
        last = (n - 1) // page
        if last >= len(ids):
            # A range that begins at a page boundary behind the last page, such as a new attention chunk, needs no page.
            n = low if low % page == 0 and low > len(ids) * page and keep.needed(low)[0] >= low else len(ids) * page
            continue
        if keep.exact and n % page and n != sealed:
            n = last * page
            continue
        # The nearest missing page at or below the last needed page.
        at = bisect_left(holes, last + 1) - 1
        hole = int(holes[at]) if at >= 0 else -1
        if hole < low // page:
            return n
        n = hole * page
    return 0
