"""From tokens to pages: what the index has of a context, and from how much of that the context can go on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.cache.prefix import Node, Prefix, Trail
from penstock.cache.reach import Places, reach
from penstock.core.layout import CacheLayout
from penstock.core.state import Everything


class Found(NamedTuple):
    """The part of a context that the index has."""

    reach: int
    """Positions from which every group of layers can go on."""
    places: list[list[int]]
    """For each group the pages on the way, by page index; -1 where there is none."""
    trail: Trail


class Lookup:
    """Reads the index; changes nothing."""

    def __init__(self, index: Prefix, layout: CacheLayout) -> None:
        self.index = index
        self.page = layout.page
        self.keeps = [group.keep for group in layout.groups]
        self.simple = all(keep == Everything() for keep in self.keeps)
        self.shift = [-(-keep.ahead // layout.page) for keep in self.keeps]
        """For each group: its page i depends on tokens up to block i + shift of the tree, and is found there."""

    def find(self, root: Node | None, packed: bytearray, limit: int) -> Found:
        """Looks a context up that may go on at `limit` at most."""
        trail = self.index.walk(root, packed) if root is not None else Trail([], [], 0)
        places: list[list[int]] = []
        for g, shift in enumerate(self.shift):
            ids: list[int] = []
            for node, blocks in zip(trail.nodes, trail.blocks, strict=True):
                ids += node.pages[g][:blocks]
            places.append(ids[shift:])
        return Found(self.continues(places, trail, limit), places, trail)

    def continues(self, places: list[list[int]], trail: Trail, limit: int) -> int:
        """The longest context that can go on from these pages, at `limit` at most."""
        if self.simple:
            return min(trail.matched, limit)
        ends = bool(trail.nodes) and trail.nodes[-1].end == trail.matched
        return self.reach([np.array(ids, np.int32) for ids in places], trail.matched, limit, trail.matched if ends else -1)

    def reach(self, places: list[Places], matched: int, limit: int, sealed: int = -1) -> int:
        """`reach.reach` for these groups."""
        return reach(self.keeps, places, self.page, matched, limit, sealed)
