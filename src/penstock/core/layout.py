"""Layout of the cache's arena: groups of layers, pages, slabs. Pure arithmetic, shared by engine and worker.

A group is the states of equal retention, most often one of each layer. A page holds all states of its group for a stretch of
positions, or one snapshot of each, so that any tier can move it in one copy. The arena is cut into equal slabs; a slab is lent
to a group and carved into its pages, so groups of different page sizes trade memory with no fixed ratio."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.state import Retention, Snapshot, StateSpec

ALIGN = 64
"""Alignment in bytes: a cache line, and a multiple of every vector load."""


@dataclass(frozen=True)
class Group:
    """States that share pages. Sizes in bytes; `stride` is the distance between pages, constant across slabs."""

    layers: tuple[int, ...]
    """Indices of the states in the model's list."""
    keep: Retention
    offsets: tuple[int, ...]
    """Byte offset of each state within a page."""
    page_bytes: int
    per_slab: int
    stride: int


@dataclass(frozen=True)
class CacheLayout:
    """`page` positions to a page in every group; `slabs` slabs of `slab_bytes`."""

    page: int
    groups: tuple[Group, ...]
    slab_bytes: int
    slabs: int

    @property
    def nbytes(self) -> int:
        return self.slab_bytes * self.slabs

    def pages_for(self, group: Group, length: int, chunk: int) -> int:
        """The most pages of `group` that a sequence of `length` positions holds at once, computed `chunk` at a time."""
        if group.keep.exact:
            # The state where a segment starts, and where it ends; a segment behind drafts may start in the page before.
            return min(-(-length // self.page), 3 if isinstance(group.keep, Snapshot) and group.keep.back else 2)
        most = min(length, group.keep.widest(length) + chunk)
        # A stretch that starts inside a page touches one page more.
        spill = 0 if most == length else 1
        return min(-(-length // self.page), -(-most // self.page) + spill)

    def slabs_for(self, length: int, chunk: int) -> int:
        """Slabs that a sequence of `length` positions needs if it is alone."""
        return sum(-(-self.pages_for(group, length, chunk) // group.per_slab) for group in self.groups)

    def longest(self, chunk: int) -> int:
        """The largest length for which one sequence alone fits."""
        low, high = 0, 1
        while self.slabs_for(high, chunk) <= self.slabs and high < 1 << 40:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.slabs_for(middle, chunk) <= self.slabs:
                low = middle
            else:
                high = middle
        return low


def lay_out(states: Sequence[StateSpec], page: int, arena_bytes: int) -> CacheLayout:
    """Groups the states by retention and cuts `arena_bytes` into slabs; the result may have 0 slabs if it is too small."""
    by_keep: dict[Retention, list[int]] = {}
    for layer, state in enumerate(states):
        by_keep.setdefault(state.keep, []).append(layer)
    sizes: list[tuple[Retention, list[int], list[int], int]] = []
    for keep, layers in by_keep.items():
        offsets, at = [], 0
        for layer in layers:
            offsets.append(at)
            at += _up(states[layer].page_bytes(page), ALIGN)
        sizes.append((keep, layers, offsets, at))
    largest = max(size for *_, size in sizes)
    counts = [largest // size for *_, size in sizes]
    # Every slab divides evenly by each group's count, so page addresses have one stride through the whole arena.
    slab = _up(largest, ALIGN * math.lcm(*counts))
    groups = tuple(Group(tuple(layers), keep, tuple(offsets), size, count, slab // count)
                   for (keep, layers, offsets, size), count in zip(sizes, counts, strict=True))
    return CacheLayout(page, groups, slab, arena_bytes // slab)


def behind(layout: CacheLayout, states: Sequence[StateSpec]) -> CacheLayout:
    """The layout of the tiers behind the device: the same groups, and as many slabs, whose pages may be smaller."""
    return replace(lay_out([state.behind for state in states], layout.page, 0), slabs=layout.slabs)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
