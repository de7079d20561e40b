"""The tiers behind the device as the prefix index sees them: where a page is kept, when it is saved, whether loading it pays.

The host's arena is the first of them, and the place from which pages are written to stores. What moves is decided here and done
by the worker (`worker/movers.py`), in the order of plans, so a page counts as being on the host from the plan that saves it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

from penstock.cache.keys import Key
from penstock.cache.tiers import Content, Listener
from penstock.cache.tiers.catalog import Catalog, Keeper
from penstock.cache.tiers.cost import Costs, Source
from penstock.cache.tiers.host import HostSlots
from penstock.core.layout import CacheLayout
from penstock.core.request import TierStats
from penstock.core.transfer import Load, LoadResult, PageName, Piece, Save, Transfer, Write, WriteResult
from penstock.stores import Store

HOST = "host"

_PATIENCE, _LEAST_PATIENCE = 0.5, 0.15
"""A load may take so much of the time that computing takes, and so many seconds: with the computing after a load that was in
vain, no request takes longer than 1.5 times computing alone and 0.2 s."""
_MOST_PATIENCE = 30.0
"""Seconds where the user wants all loaded that is found."""
_STALLED_SECONDS = 10.0
"""A store that has not finished writing some pages for so long is given no more."""
_WANTED_PAGES = 1 << 16
"""Pages that may wait to be written to stores; of more the oldest are not written."""
_WRITING_SHARE = 0.25
"""Of the host's slots, those that writing to stores may keep busy."""
_SPILL_SHARE = 0.75
"""With so much of the host full, pages on their way out are written to stores in good time."""


@dataclass(frozen=True)
class Policy:
    """The user's choices."""

    through: bool = True
    """Save pages as soon as they are certain, instead of when the device gives them up."""
    always: bool = False
    """Load whatever is found, instead of where loading is predicted to be faster than computing."""


@dataclass(slots=True)
class _Loading:
    """A load under way."""

    pieces: list[Piece]
    nbytes: dict[str, int]
    """By tier."""
    pages: dict[str, int] = field(default_factory=dict)


class Hierarchy:
    """Implements `cache/tiers/__init__.py::Tiers` over a host arena of `slabs` slabs and stores, nearest first."""

    def __init__(self, layout: CacheLayout, slabs: int, stores: Sequence[tuple[Store, int | None]], policy: Policy,
                 refresh_seconds: float = 1.0) -> None:
        """`stores` with the bytes that each may hold."""
        self.layout = layout
        self.policy = policy
        self.host = HostSlots(layout, slabs)
        self._roomy = slabs >= 2 * layout.slabs
        """Whether pages that leave the device may count as just used: while it is filled anew once, as many leave it as are
        saved. A host without room for both would give up what the device still has, and save it again when that leaves, which
        the step that needs its room has to wait for."""
        self._sizes = [group.page_bytes for group in layout.groups]
        self.catalogs = [Catalog(store, self._sizes, bound) for store, bound in stores]
        self.costs = Costs({tier: Source() for tier in (HOST, *(catalog.tier for catalog in self.catalogs))})
        # One for each, so that a store that hangs keeps no other's from its work.
        self._keepers = [Keeper([catalog], refresh_seconds) for catalog in self.catalogs]
        self._stats = {tier: TierStats(tier) for tier in self.costs.sources}
        self._saves: dict[tuple[int, int], tuple[PageName, Save]] = {}
        """By group and slot."""
        self._transfers: list[Transfer] = []
        """Loads and writes."""
        self._wanted: deque[PageName] = deque(maxlen=_WANTED_PAGES)
        """Pages to be written to stores as soon as there is room for them in the queue."""
        self._writing: dict[int, tuple[int, PageName, int, float]] = {}
        """Writes under way: which store, which page, its size, since when."""
        self._most_writing = max(1, int(_WRITING_SHARE * slabs * min(group.per_slab for group in layout.groups)))
        self._loading: dict[int, _Loading] = {}
        self._ids = count(1)

    # -- what the prefix index asks (`cache/tiers/__init__.py::Tiers`)

    def offer(self, pages: Sequence[Content], leaving: bool) -> None:
        names = [PageName(content.group, content.key) for content in pages]
        if leaving:
            if self._roomy:
                # Until now it was the device's affair how recently they were used.
                self.host.touch(names)
        elif not self.policy.through:
            return
        worth = [self._worth_saving(size) for size in self._sizes]
        fresh = {name: content.page for name, content in zip(names, pages, strict=True)
                 if worth[name.group] and name not in self.host and not (leaving and self._written(name))}
        slots = self.host.add(list(fresh))
        for name, slot in slots.items():
            self._saves[name.group, slot] = name, Save(name.group, fresh[name], slot)
        if self.catalogs:
            if self.policy.through:
                self._wanted.extend(slots)
            elif self.host.used_bytes > _SPILL_SHARE * self.host.layout.nbytes:
                self._wanted.extend(islice(self.host.oldest(), 2 * len(slots) + 1))
            self._write()

    def forget(self, pages: Sequence[Content]) -> None:
        names = [PageName(content.group, content.key) for content in pages]
        self.host.forget(names)
        for catalog in self.catalogs:
            catalog.doom(names)
        self._tidy()

    def find(self, group: int, keys: Sequence[Key]) -> list[bool]:
        names, catalogs = [PageName(group, key) for key in keys], self._present()
        return [name in self.host or any(name in catalog for catalog in catalogs) for name in names]

    def load(self, pages: Sequence[Content], positions: int) -> int | None:
        pieces = self._locate(pages)
        if not pieces:
            return None
        nbytes, tiers = Counter[str](), Counter[str]()
        for piece in pieces:
            tier = self._tier(piece)
            nbytes[tier] += self._sizes[piece.name.group]
            tiers[tier] += 1
        patience = self.patience(positions)
        if not self.policy.always and not self.costs.worth_loading(nbytes, positions, time.monotonic(), patience):
            return None
        for piece in pieces:
            if piece.slot >= 0:
                self.host.hold(piece.name)
        for tier, size in nbytes.items():
            self.costs.sources[tier].owed += size
        ticket = next(self._ids)
        self._loading[ticket] = _Loading(pieces, dict(nbytes), dict(tiers))
        self._transfers.append(Load(ticket, pieces, patience))
        return ticket

    def patience(self, positions: int) -> float:
        if self.policy.always:
            return _MOST_PATIENCE
        return _LEAST_PATIENCE + _PATIENCE * (self.costs.steps.seconds(positions) or 0.0)

    def source(self, ticket: int) -> dict[str, int]:
        return self._loading[ticket].pages

    def drain(self) -> list[Transfer]:
        saves, self._saves = self._saves, {}
        transfers, self._transfers = self._transfers, []
        # Where much comes at once, the host has given up some of it since, and the slot, or the whole slab, to another page.
        left = [save for name, save in saves.values() if self.host.uses(name, save.slot)]
        for save in left:
            self._moved(HOST, self._sizes[save.group])
        return [*left, *transfers]

    def listen(self, listener: Listener) -> None:
        self.host.told = partial(listener, HOST)
        for name in self.host.oldest():
            listener(HOST, name, True)
        for catalog in self.catalogs:
            catalog.listen(partial(listener, catalog.tier))

    def clear(self) -> None:
        self.host.clear()
        self._wanted.clear()
        for catalog in self.catalogs:
            catalog.doom_all()
        self._tidy()

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult]) -> None:
        now = time.monotonic()
        for loaded in load_results:
            self._take_result(loaded, now)
        for result in write_results:
            which, name, size, _ = self._writing.pop(result.id)
            catalog = self.catalogs[which]
            self.host.let_go(name)
            if not catalog.finish_write(name, result.ok, now):
                self._tidy()
            if result.ok:
                self._moved(catalog.tier, size)
                self._stats[HOST].bytes_out += size
        if self._wanted:
            self._write()
        if any(catalog.crowded for catalog in self.catalogs):
            self._tidy()

    def computed(self, positions: int, seconds: float) -> None:
        self.costs.steps.learn(positions, seconds)

    @property
    def pending(self) -> bool:
        return bool(self._saves or self._transfers)

    @property
    def writing(self) -> bool:
        return bool(self._writing or self._wanted)

    def stats(self) -> list[TierStats]:
        host = self._stats[HOST]
        host.capacity_bytes, host.used_bytes = self.host.layout.nbytes, self.host.used_bytes
        host.cached_pages, host.evicted_pages = len(self.host), self.host.evicted
        for catalog in self.catalogs:
            stats = self._stats[catalog.tier]
            stats.capacity_bytes, stats.used_bytes = catalog.bound or 0, catalog.used_bytes
            stats.cached_pages, stats.evicted_pages = catalog.pages, catalog.evicted
            stats.available = int(not catalog.failing and not catalog.away(time.monotonic()))
        return list(self._stats.values())

    # -- what the engine asks

    def close(self) -> None:
        """Ends what runs in the background; nothing may be asked any more."""
        for keeper in self._keepers:
            keeper.close()
        for catalog in self.catalogs:
            catalog.store.close()

    # -- within

    def _tidy(self) -> None:
        """Has doomed pages deleted and full stores shrunk."""
        for keeper in self._keepers:
            keeper.wake()

    def _present(self) -> list[Catalog]:
        """Those of stores that are not left alone."""
        now = time.monotonic()
        return [catalog for catalog in self.catalogs if not catalog.away(now)]

    def _worth_saving(self, nbytes: int) -> bool:
        return self.policy.always or self.costs.worth_saving(HOST, nbytes, self.layout.page)

    def _written(self, name: PageName) -> bool:
        """Whether a page was written through to a store. When it leaves the device it is not saved once more, which the step
        that needs its room would have to wait for."""
        return self.policy.through and any(name in catalog for catalog in self.catalogs)

    def _write(self) -> None:
        """Starts writing wanted pages, as many as the queue takes. A page that has left the host meanwhile is not written."""
        now = time.monotonic()
        stalled = {which for which, _, _, since in self._writing.values() if now - since > _STALLED_SECONDS}
        busy = sum(which not in stalled for which, *_ in self._writing.values())
        while self._wanted and busy < self._most_writing:
            name = self._wanted.popleft()
            for which, catalog in enumerate(self.catalogs):
                if which not in stalled and name in self.host and catalog.reserve(name, now):
                    number = next(self._ids)
                    busy += 1
                    self._writing[number] = which, name, self._sizes[name.group], now
                    self._transfers.append(Write(number, which, name, self.host.hold(name)))

    def _locate(self, pages: Sequence[Content]) -> list[Piece]:
        """Where each page is to come from; nothing if one of them is nowhere."""
        pieces, names, present = [], [], self._present()
        for content in pages:
            name = PageName(content.group, content.key)
            slot, store = self.host.slot(name), -1
            if slot is None:
                slot = -1
                store = next((i for i, catalog in enumerate(self.catalogs) if catalog in present and name in catalog), -1)
                if store < 0:
                    return []
            names.append(name)
            pieces.append(Piece(name, content.page, slot, store))
        self.host.touch(names)
        for catalog in self.catalogs:
            catalog.touch(names)
        return pieces

    def _take_result(self, result: LoadResult, now: float) -> None:
        load = self._loading.pop(result.ticket)
        for piece in load.pieces:
            if piece.slot >= 0:
                self.host.let_go(piece.name)
        # A load is as slow as the furthest tier that it needs.
        furthest = max(load.nbytes, key=list(self._stats).index)
        for tier, size in load.nbytes.items():
            self.costs.sources[tier].owed -= size
            if result.ok:
                self._stats[tier].bytes_out += size
                self._stats[tier].hit_tokens += self._positions(load, tier, result.lost)
        self.costs.sources[furthest].learn(load.nbytes[furthest], result.seconds, now, result.ok)
        for which in result.missed:
            self._stats[self.catalogs[which].tier].late_loads += 1
            # Where nothing has been computed yet nobody knows what was to be expected.
            if self.costs.steps.known:
                self.catalogs[which].missed(now)
        for which in {piece.store for piece in load.pieces if result.ok and piece.store >= 0}:
            self.catalogs[which].answered()
        for piece in load.pieces:
            if piece.name in result.lost:
                self._stats[self._tier(piece)].failures += 1
                self.catalogs[piece.store].doom([piece.name])
                self._tidy()

    def _positions(self, load: _Loading, tier: str, lost: Sequence[PageName]) -> int:
        """Positions of context that a load got from a tier: of the cache group that got most, or of one that has lost pages,
        those before the first of these."""
        pages, broken = Counter[int](), set[int]()
        for piece in load.pieces:
            group = piece.name.group
            if piece.name in lost:
                broken.add(group)
            elif self._tier(piece) == tier and group not in broken:
                pages[group] += 1
        return max((pages[group] for group in broken or pages), default=0) * self.layout.page

    def _moved(self, tier: str, nbytes: int) -> None:
        self._stats[tier].stored_pages += 1
        self._stats[tier].bytes_in += nbytes

    def _tier(self, piece: Piece) -> str:
        return HOST if piece.store < 0 else self.catalogs[piece.store].tier
