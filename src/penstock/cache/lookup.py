"""Prefix lookup: finds the cached pages of a context, and the longest prefix from which the context can continue."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.cache.prefix import Node, Prefix, Trail
from penstock.cache.reach import Places, reach
from penstock.core.layout import CacheLayout
from penstock.core.state import Everything


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
