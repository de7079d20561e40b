"""Host slots: maps pages to slots of the host memory arena. Slots have the size of device pages; eviction is LRU.

A slot is free, busy (read or written by an in-flight transfer), or idle. This is bookkeeping; the worker owns the bytes."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.cache.pool import Pools
from penstock.core.plan import PageName
from penstock.core.state import CacheLayout


class HostSlots:
    def __init__(self, layout: CacheLayout, slabs: int) -> None:
        self.layout = replace(layout, slabs=slabs)
        self.evicted = 0
        self.told: Callable[[PageName, bool], None] = lambda _name, _there: None
        """Callback (page, present) for every page added or removed."""
        self._pools = Pools(self.layout)
        self._slots: OrderedDict[PageName, int] = OrderedDict()
        """Least recently used first."""
        self._busy: dict[PageName, int] = {}
        """Page -> the number of in-flight transfers that use its slot."""
        self._doomed: dict[PageName, list[int]] = {}
        """Busy slots whose page was forgotten; they are freed when their transfers end."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: PageName) -> bool:
        return name in self._slots

    @property
    def used_bytes(self) -> int:
        return self._pools.slabs_used * self.layout.slab_bytes

    def slot(self, name: PageName) -> int | None:
        """The slot of a page; None if it is not on the host."""
        return self._slots.get(name)

    def uses(self, name: PageName, slot: int) -> bool:
        """True if a page is still in this slot. A forgotten page stays in its slot until its transfers have ended."""
        return self._slots.get(name) == slot or slot in self._doomed.get(name, ())

    def touch(self, names: Sequence[PageName]) -> None:
        """Marks these pages, in context order, as used, the last least recently: an end is useless without its beginning."""
        for name in reversed(names):
            if name in self._slots:
                self._slots.move_to_end(name)

    def add(self, names: Sequence[PageName]) -> dict[PageName, int]:
        """Assigns slots to as many of these new pages as fit, evicting idle pages but no busy ones."""
        wanted: dict[int, list[PageName]] = {}
        for name in names:
            wanted.setdefault(name.group, []).append(name)
        slots: dict[PageName, int] = {}
        for group, mine in wanted.items():
            self._make_room(group, len(mine))
            slots.update(zip(mine, self._pools.take(group, min(len(mine), self._pools.available(group))), strict=False))
        # The end of the context becomes the least recent page: the rest is usable without it.
        for name in reversed(names):
            if name in slots:
                self._slots[name] = slots[name]
                self.told(name, True)
        return slots

    def hold(self, name: PageName) -> int:
        """Marks a page's slot as used by one more transfer, and returns the slot."""
        self._busy[name] = self._busy.get(name, 0) + 1
        return self._slots[name]

    def let_go(self, name: PageName) -> None:
        """Called when a transfer that used the page's slot has ended."""
        self._busy[name] -= 1
        if not self._busy[name]:
            del self._busy[name]
            for slot in self._doomed.pop(name, ()):
                self._pools.give(name.group, [slot])

    def forget(self, names: Iterable[PageName]) -> None:
        """Forgets pages. Busy slots are freed when their transfers have ended."""
        for name in names:
            slot = self._slots.pop(name, None)
            if slot is None:
                continue
            self.told(name, False)
            if name in self._busy:
                self._doomed.setdefault(name, []).append(slot)
            else:
                self._pools.give(name.group, [slot])

    def oldest(self) -> Iterator[PageName]:
        """Pages in eviction order."""
        return iter(self._slots)

    def _make_room(self, group: int, count: int) -> None:
        """Evicts idle pages, least recently used first, until `count` slots of a group are free or none is left to evict."""
        passed: list[PageName] = []
        # A slab can move to another group only when all of its pages are free, so more pages may be evicted than added.
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
