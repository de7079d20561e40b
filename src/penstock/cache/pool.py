"""The page pool: reference counts and free lists of KV cache pages, carved from slabs that cache groups borrow from one arena.

A page is free when no sequence holds it and the prefix index does not keep it. Slabs of free pages return to the arena."""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.state import CacheLayout

_MANY = 24
"""Above this number of pages, numpy updates the counts faster than a Python loop."""


class Pools:
    """Pages of every group. A page id addresses the same bytes for the pool's life: slab x per_slab + place."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._slabs = list(range(layout.slabs - 1, -1, -1))
        # OrderedDict, because finding the first key of a plain dict scans over all deleted entries before it.
        self._partial: list[OrderedDict[int, list[int]]] = [OrderedDict() for _ in layout.groups]
        """For each group: slab -> its free pages, for slabs with some free."""
        self._spare = [0] * len(layout.groups)
        """For each group: the number of free pages in its partly used slabs."""
        sizes = [layout.slabs * group.per_slab for group in layout.groups]
        self._holders = [array("i", bytes(4 * size)) for size in sizes]
        self._held_view: list[npt.NDArray[np.int32]] = [np.frombuffer(holders, np.int32) for holders in self._holders]
        """A numpy view of `_holders`, for updating many pages at once."""
        self._kept = [bytearray(size) for size in sizes]
        self._kept_view: list[npt.NDArray[np.uint8]] = [np.frombuffer(kept, np.uint8) for kept in self._kept]
        """A numpy view of `_kept`: 1 for pages that the index keeps."""
        self.kept_pages = [0] * len(layout.groups)
        """For each group: the number of pages that the index keeps."""
        self._live = array("i", bytes(4 * layout.slabs))
        """For each slab: the number of its pages that have a holder."""
        self._live_view: npt.NDArray[np.int32] = np.frombuffer(self._live, np.int32)
        self.slabs_live = 0
        """The number of slabs with at least one held page."""

    @property
    def slabs_used(self) -> int:
        """The number of slabs with at least one page that is not free."""
        return self.layout.slabs - len(self._slabs)

    def available(self, group: int) -> int:
        """The number of pages that `take` can allocate now without eviction."""
        return self._spare[group] + len(self._slabs) * self.layout.groups[group].per_slab

    def take(self, group: int, count: int) -> list[int]:
        """Allocates `count` pages with one holder each. At least `count` must be `available`."""
        assert count <= self.available(group)
        per_slab = self.layout.groups[group].per_slab
        partial, holders, live = self._partial[group], self._holders[group], self._live
        taken: list[int] = []
        if per_slab == 1:  # pages are slabs, and none is partly used
            taken = self._slabs[:-1 - count:-1]
            del self._slabs[len(self._slabs) - count:]
            self.slabs_live += count
        while len(taken) < count:
            if partial:
                slab = next(iter(partial))
                free = partial[slab]
            else:
                slab = self._slabs.pop()
                free = partial[slab] = list(range((slab + 1) * per_slab - 1, slab * per_slab - 1, -1))
                self._spare[group] += per_slab
            some = free[:-1 - count + len(taken):-1]
            del free[-len(some):]
            self._spare[group] -= len(some)
            if not free:
                del partial[slab]
            self.slabs_live += not live[slab]
            live[slab] += len(some)
            taken += some
        for counts, view in [(holders, self._held_view[group]), *([(live, self._live_view)] if per_slab == 1 else [])]:
            if count > _MANY:
                view[taken] = 1
                continue
            for page in taken:
                counts[page] = 1
        return taken

    def share(self, group: int, pages: Sequence[int]) -> None:
        """Adds one holder to each of these pages. Each must be held or kept already, and no page may be listed twice."""
        if len(pages) > _MANY:
            many, view = np.array(pages, np.int32), self._held_view[group]
            view[many] += 1
            self._count_live(group, many[view[many] == 1], 1)
            return
        holders, per_slab, live = self._holders[group], self.layout.groups[group].per_slab, self._live
        for page in pages:
            holders[page] += 1
            if holders[page] == 1:
                slab = page // per_slab
                self.slabs_live += not live[slab]
                live[slab] += 1

    def _count_live(self, group: int, pages: npt.NDArray[np.int32], change: int) -> None:
        """Updates the slab counts after pages got their first holder (`change` 1) or lost their last (`change` -1)."""
        per_slab = self.layout.groups[group].per_slab
        if per_slab == 1:
            self._live_view[pages] += change
            self.slabs_live += change * len(pages)
            return
        slabs = pages // per_slab
        np.add.at(self._live_view, slabs, change)
        touched, counts = np.unique(slabs, return_counts=True)
        # Slabs in which no other page is held: they become live, or stop being live.
        self.slabs_live += change * int(np.count_nonzero(self._live_view[touched] == (counts if change > 0 else 0)))

    def shared(self, group: int, page: int) -> bool:
        """True if a held page must not be written in place, because it has other holders or the index keeps it."""
        return self._holders[group][page] > 1 or self._kept[group][page] == 1

    def holders(self, group: int, page: int) -> int:
        return self._holders[group][page]

    def marks(self, group: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """The number of holders of each page, and 1 where the index keeps it; to look at, not to change."""
        return self._held_view[group], self._kept_view[group]

    def give(self, group: int, pages: Sequence[int]) -> list[int]:
        """Removes one holder from each page. Returns the pages without a holder that the index still keeps; pages that are not
        kept are free at once. That is safe for in-flight plans, because plans execute in order."""
        if len(pages) > _MANY:
            many, view = np.array(pages, np.int32), self._held_view[group]
            view[many] -= 1
            assert int(view[many].min()) >= 0
            gone = many[view[many] == 0]
            self._count_live(group, gone, -1)
            kept_ = self._kept_view[group][gone] == 1
            for page in gone[~kept_].tolist():
                self._free(group, page)
            idle: list[int] = gone[kept_].tolist()
            return idle
        holders, per_slab, live, kept = self._holders[group], self.layout.groups[group].per_slab, self._live, self._kept[group]
        idle = []
        for page in pages:
            holders[page] -= 1
            assert holders[page] >= 0, (group, page)
            if holders[page]:
                continue
            slab = page // per_slab
            live[slab] -= 1
            self.slabs_live -= not live[slab]
            if kept[page]:
                idle.append(page)
            else:
                self._free(group, page)
        return idle

    def keep(self, group: int, pages: Sequence[int]) -> None:
        """Marks pages as kept by the index. They must have a holder and not be kept yet."""
        if len(pages) > _MANY:
            many, view = np.array(pages, np.int32), self._kept_view[group]
            assert (self._held_view[group][many] > 0).all() and not view[many].any()
            view[many] = 1
        else:
            kept, holders = self._kept[group], self._holders[group]
            for page in pages:
                assert holders[page] > 0 and not kept[page], (group, page)
                kept[page] = 1
        self.kept_pages[group] += len(pages)

    def drop(self, group: int, page: int) -> None:
        """Marks a page as no longer kept by the index. It becomes free unless it has a holder."""
        assert self._kept[group][page], (group, page)
        self._kept[group][page] = 0
        self.kept_pages[group] -= 1
        if not self._holders[group][page]:
            self._free(group, page)

    def _free(self, group: int, page: int) -> None:
        per_slab = self.layout.groups[group].per_slab
        slab, partial = page // per_slab, self._partial[group]
        free = partial.setdefault(slab, [])
        free.append(page)
        self._spare[group] += 1
        if len(free) == per_slab:
            del partial[slab]
            self._spare[group] -= per_slab
            self._slabs.append(slab)

    def check(self, held: Sequence[Mapping[int, int]], kept: list[set[int]]) -> None:
        """Asserts that exactly the pages in `held` (for each group, page -> holders) are held and exactly those in `kept` are
        kept, that all others are free exactly once, and that no slab is lost."""
        lent: set[int] = set()
        live = [0] * self.layout.slabs
        for group, layout in enumerate(self.layout.groups):
            counted = {page: n for page, n in enumerate(self._holders[group]) if n}
            assert counted == held[group], f"group {group}: holders counted {counted} but there are {held[group]}"
            marked = {page for page, mark in enumerate(self._kept[group]) if mark}
            assert marked == kept[group], f"group {group}: marked as kept {marked} but the index has {kept[group]}"
            assert len(marked) == self.kept_pages[group]
            owned = marked | counted.keys()
            mine = {page // layout.per_slab for page in owned}
            assert not mine & lent, "a slab is lent to two groups"
            lent |= mine
            for page in counted:
                live[page // layout.per_slab] += 1
            free = [page for pages in self._partial[group].values() for page in pages]
            assert len(set(free)) == len(free) == self._spare[group] and owned.isdisjoint(free), "a page is free and not free"
            assert len(free) + len(owned) == len(mine) * layout.per_slab, "a page is lost"
            assert {page // layout.per_slab for page in free} == set(self._partial[group])
        assert live == self._live.tolist() and sum(map(bool, live)) == self.slabs_live
        assert lent.isdisjoint(self._slabs) and len(lent) + len(self._slabs) == self.layout.slabs, "a slab is lost"
        assert len(set(self._slabs)) == len(self._slabs)
