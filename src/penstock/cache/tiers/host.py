"""Host slots: which page is in which slot of the host's arena. Slots have the size of device pages; eviction is LRU.

A slot is free, being read or written by a transfer (busy), or idle. Bookkeeping alone; the bytes are the worker's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.cache.pool import Pools
from penstock.core.layout import CacheLayout
from penstock.core.transfer import PageName


class HostSlots:
    """Slots of the host's arena by what is in them."""

    def __init__(self, layout: CacheLayout, slabs: int) -> None:
        self.layout = replace(layout, slabs=slabs)
        self.evicted = 0
        self.told: Callable[[PageName, bool], None] = lambda _name, _there: None
        """Told of every page that comes or goes."""
        self._pools = Pools(self.layout)
        self._slots: OrderedDict[PageName, int] = OrderedDict()
        """Least recently used first."""
        self._busy: dict[PageName, int] = {}
        """How many transfers use a page's slot."""
        self._doomed: dict[PageName, list[int]] = {}
        """Slots whose page was forgotten while a transfer used them."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: PageName) -> bool:
        return name in self._slots

    @property
    def used_bytes(self) -> int:
        return self._pools.slabs_used * self.layout.slab_bytes

    def slot(self, name: PageName) -> int | None:
        """Where a page is, if it is here."""
        return self._slots.get(name)

    def uses(self, name: PageName, slot: int) -> bool:
        """Whether a page still is in this slot; forgotten, it is until the transfers that use it have ended."""
        return self._slots.get(name) == slot or slot in self._doomed.get(name, ())

    def touch(self, names: Sequence[PageName]) -> None:
        """These pages, in the order of their context, have been used. Its end is forgotten first: it is of no use alone."""
        for name in reversed(names):
            if name in self._slots:
                self._slots.move_to_end(name)

    def add(self, names: Sequence[PageName]) -> dict[PageName, int]:
        """Slots for as many of these pages, which are not here, as there is room for without touching busy ones."""
        wanted: dict[int, list[PageName]] = {}
        for name in names:
            wanted.setdefault(name.group, []).append(name)
        slots: dict[PageName, int] = {}
        for group, mine in wanted.items():
            self._make_room(group, len(mine))
            count = min(len(mine), self._pools.available(group))
            slots.update(zip(mine, self._pools.take(group, count), strict=False))
        # Least recent of them is the end of the context: without it the rest is still of use.
        for name in reversed(names):
            if name in slots:
                self._slots[name] = slots[name]
                self.told(name, True)
        return slots

    def hold(self, name: PageName) -> int:
        """A transfer uses a page's slot from now on."""
        self._busy[name] = self._busy.get(name, 0) + 1
        return self._slots[name]

    def let_go(self, name: PageName) -> None:
        """A transfer has ended."""
        self._busy[name] -= 1
        if not self._busy[name]:
            del self._busy[name]
            for slot in self._doomed.pop(name, ()):
                self._pools.give(name.group, [slot])

    def forget(self, names: Iterable[PageName]) -> None:
        """Forgets pages; busy slots are free when their transfers have ended."""
        for name in names:
            slot = self._slots.pop(name, None)
            if slot is None:
                continue
            self.told(name, False)
            if name in self._busy:
                self._doomed.setdefault(name, []).append(slot)
            else:
                self._pools.give(name.group, [slot])

    def clear(self) -> None:
        """Forgets every page."""
        self.forget(list(self._slots))

    def oldest(self) -> Iterator[PageName]:
        """Pages in the order in which they will go."""
        return iter(self._slots)

    def busy(self, name: PageName) -> bool:
        """Whether a transfer uses a page's slot."""
        return name in self._busy

    def _make_room(self, group: int, count: int) -> None:
        """Gives up idle pages, least recent first, until `count` slots of a group are free or no more can be."""
        passed: list[PageName] = []
        # A slab is free for another group when all of its pages are, so more may have to go than come.
        while (missing := count - self._pools.available(group)) > 0 and len(self._slots) > len(passed):
            gone: dict[int, list[int]] = {}
            for _ in range(min(missing, len(self._slots) - len(passed))):
                name, slot = self._slots.popitem(last=False)
                if name in self._busy:
                    passed.append(name)
                    self._slots[name] = slot
                    continue
                gone.setdefault(name.group, []).append(slot)
                self.evicted += 1
                self.told(name, False)
            for other, slots in gone.items():
                self._pools.give(other, slots)
        for name in reversed(passed):
            self._slots.move_to_end(name, last=False)
