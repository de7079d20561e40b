"""Pages with reference counts, carved from slabs that groups borrow from one arena and give back when empty."""

from __future__ import annotations

from penstock.core.layout import CacheLayout


class Pools:
    """Free and held pages of every group. A page id addresses the same bytes for the pool's life: slab x per_slab + place."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._slabs = list(range(layout.slabs - 1, -1, -1))
        self._partial: list[dict[int, list[int]]] = [{} for _ in layout.groups]
        """For each group: slab -> its free pages, for slabs with some free."""
        self._references: list[list[int]] = [[0] * (layout.slabs * group.per_slab) for group in layout.groups]

    @property
    def slabs_used(self) -> int:
        return self.layout.slabs - len(self._slabs)

    def take(self, group: int, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None and nothing changed."""
        per_slab = self.layout.groups[group].per_slab
        partial, references = self._partial[group], self._references[group]
        taken: list[int] = []
        while len(taken) < count:
            if partial:
                slab = next(iter(partial))
                free = partial[slab]
            elif self._slabs:
                slab = self._slabs.pop()
                free = list(range((slab + 1) * per_slab - 1, slab * per_slab - 1, -1))
                partial[slab] = free
            else:
                for page in taken:
                    self.give(group, page)
                return None
            page = free.pop()
            if not free:
                del partial[slab]
            references[page] = 1
            taken.append(page)
        return taken

    def share(self, group: int, page: int) -> None:
        """One more holder of a held page."""
        assert self._references[group][page] > 0
        self._references[group][page] += 1

    def shared(self, group: int, page: int) -> bool:
        """Whether a page has other holders, so that it must not be written."""
        return self._references[group][page] > 1

    def give(self, group: int, page: int) -> None:
        """One holder less; the last one's page is free at once. Plans run in order, so plans in flight are not disturbed."""
        references = self._references[group]
        assert references[page] > 0, (group, page)
        references[page] -= 1
        if references[page]:
            return
        per_slab = self.layout.groups[group].per_slab
        slab, partial = page // per_slab, self._partial[group]
        free = partial.setdefault(slab, [])
        free.append(page)
        if len(free) == per_slab:
            del partial[slab]
            self._slabs.append(slab)

    def check(self, held: list[dict[int, int]]) -> None:
        """Asserts that exactly the pages in `held` (a map page -> holders for each group) are held, and no slab is lost."""
        lent: set[int] = set()
        for group, layout in enumerate(self.layout.groups):
            counted = {page: n for page, n in enumerate(self._references[group]) if n}
            assert counted == held[group], f"group {group}: references {counted} but holders {held[group]}"
            mine = {page // layout.per_slab for page in counted}
            assert not mine & lent, "a slab is lent to two groups"
            lent |= mine
            for slab, free in self._partial[group].items():
                assert slab in mine and len(free) + sum(p // layout.per_slab == slab for p in counted) == layout.per_slab
        assert lent.isdisjoint(self._slabs) and len(lent) + len(self._slabs) == self.layout.slabs, "a slab is lost"
        assert len(set(self._slabs)) == len(self._slabs)
