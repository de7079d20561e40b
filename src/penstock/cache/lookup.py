"""Prefix lookup: finds the cached pages of a context, and the longest prefix from which the context can continue.

That is the largest n at which every cache group has the pages it needs (`reach`). It depends only on retention, so full
attention, sliding windows, chunked attention, recurrent snapshots, draft heads and every mixture of them follow the same rule.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cache.prefix import Node, Prefix, Trail
from penstock.core.layout import CacheLayout
from penstock.core.state import Everything, Retention

Places = npt.NDArray[np.int32]
"""Shape [pages], for one group: the page id of each page-sized range of positions, -1 where there is no page."""


class CacheMatch(NamedTuple):
    """The cached part of a context."""

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
        ends = bool(trail.nodes) and trail.nodes[-1].end == trail.matched
        return self.reach([np.array(ids, np.int32) for ids in places], trail.matched, limit, trail.matched if ends else -1)

    def reach(self, places: list[Places], matched: int, limit: int, sealed: int = -1) -> int:
        """`reach.reach` for this cache's groups."""
        return reach(self.keeps, places, self.page, matched, limit, sealed)


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
