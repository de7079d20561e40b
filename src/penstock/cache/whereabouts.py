"""Adds events of the tiers behind the device: pages stored in or removed from host memory, disk and remote stores.

Tiers know pages by name alone. The other facts of an event (the page's tokens and its parent) are recorded when the page is on
the device; pages that a store has from an earlier run are not reported until then."""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from penstock.cache.events import Sink
from penstock.cache.keys import Key
from penstock.cache.tiers.hierarchy import Hierarchy
from penstock.core.plan import PageName

_PATIENCE = 4
"""The number of flushes for which a page in no tier is remembered: the next plan may save one evicted from the device."""


class _Page(NamedTuple):
    parent: Key | None
    tokens: list[int]
    salt: str
    adapter: str
    depth: int
    """The number of known pages before it, for reporting parents before children."""


class Whereabouts:
    """A `cache/events.py::Sink` between the index and another sink. The engine's thread calls it, including `flush`."""

    def __init__(self, sink: Sink, tiers: Hierarchy) -> None:
        self._sink = sink
        self._pages: dict[PageName, _Page] = {}
        """Facts of pages that were on the device and are still there or in a tier."""
        self._there: dict[PageName, int] = {}
        """The tiers of each page, as a bit mask."""
        self._bits: dict[str, int] = {}
        self._numbers = count()
        self._nowhere: deque[tuple[int, PageName]] = deque()
        """(flush number, page) for pages removed from their last tier."""
        self._flushes = 0
        self._news: deque[tuple[str, PageName, bool]] = deque()
        """(tier, page, present) reports of the tiers; appended from any thread."""
        tiers.listen(lambda tier, name, there: self._news.append((tier, name, there)))

    def stored(self, group: int, tier: str, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str,
               adapter: str) -> None:
        self._sink.stored(group, tier, parent, keys, tokens, salt, adapter)
        size, names = len(tokens) // len(keys), [PageName(group, key) for key in keys]
        before = self._pages.get(PageName(group, parent)) if parent is not None else None
        depth = before.depth + 1 if before is not None else 0
        for i, name in enumerate(names):
            self._pages[name] = _Page(parent, list(tokens[i * size:(i + 1) * size]), salt, adapter, depth + i)
            parent = name.key
            self._mark(name, tier, True)
        for other in self._bits:
            if other != tier:
                self._tell(other, [name for name in names if self._there[name] & self._bits[other]])

    def removed(self, group: int, tier: str, keys: Sequence[Key]) -> None:
        self._sink.removed(group, tier, keys)
        for key in keys:
            self._mark(PageName(group, key), tier, False)

    def cleared(self) -> None:
        self._sink.cleared()
        self._news.clear()
        self._pages.clear()
        self._there.clear()
        self._nowhere.clear()

    def flush(self) -> None:
        """Passes on the tiers' reports since the last call."""
        came: dict[str, list[PageName]] = {}
        for _ in range(len(self._news)):
            tier, name, there = self._news.popleft()
            if bool(self._there.get(name, 0) & self._bits.get(tier, 0)) == there:
                continue
            if there:
                self._mark(name, tier, True)
                if name in self._pages:
                    came.setdefault(tier, []).append(name)
                continue
            if came:
                self._tell_all(came)
                came = {}
            if name in self._pages:
                self._sink.removed(name.group, tier, [name.key])
            self._mark(name, tier, False)
        self._tell_all(came)
        self._flushes += 1
        while self._nowhere and self._nowhere[0][0] <= self._flushes - _PATIENCE:
            name = self._nowhere.popleft()[1]
            if name not in self._there:
                self._pages.pop(name, None)

    def _mark(self, name: PageName, tier: str, there: bool) -> None:
        bit = self._bits.get(tier) or self._bits.setdefault(tier, 1 << next(self._numbers))
        known = self._there.get(name, 0) | bit if there else self._there.get(name, 0) & ~bit
        if known:
            self._there[name] = known
        elif self._there.pop(name, None):
            self._nowhere.append((self._flushes, name))

    def _tell_all(self, came: dict[str, list[PageName]]) -> None:
        for tier, names in came.items():
            self._tell(tier, sorted(names, key=lambda name: self._pages[name].depth))

    def _tell(self, tier: str, names: list[PageName]) -> None:
        """Reports pages that are now in a tier, given parents first; consecutive pages become one event."""
        run: list[PageName] = []
        for name in names:
            if run and (self._pages[name].parent, name.group) != (run[-1].key, run[-1].group):
                self._tell_run(tier, run)
                run = []
            run.append(name)
        if run:
            self._tell_run(tier, run)

    def _tell_run(self, tier: str, run: list[PageName]) -> None:
        first, tokens = self._pages[run[0]], [token for name in run for token in self._pages[name].tokens]
        self._sink.stored(run[0].group, tier, first.parent, [name.key for name in run], tokens, first.salt, first.adapter)
