"""The hierarchy of tiers behind the device: decides which tiers keep a page, when it is saved, and whether loading it pays.

Host memory is the first tier, and pages are written to stores from there. This file decides; the worker moves the bytes
(`worker/movers.py`) in plan order, so a page counts as being on the host from the plan that saves it."""

import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

from penstock.cache.keys import Key
from penstock.cache.tiers import Content, Listener
from penstock.cache.tiers.catalog import Catalog, Keeper
from penstock.cache.tiers.host import HostSlots
from penstock.core.plan import Load, LoadResult, PageName, Piece, Save, Transfer, Write, WriteResult
from penstock.core.request import TierStats
from penstock.core.state import CacheLayout
from penstock.core.steptime import StepTime
from penstock.stores import Store

_WEIGHT = 0.2
"""The weight of a new measurement in an exponential moving average."""

_WARM_UP = 2
"""The number of warm-up loads that are made without a prediction."""

_STALE_SECONDS = 60.0
"""A rate older than this may be outdated: one load is made to measure it again."""


class Source:
    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes per second; 0 until measured."""
        self._samples = 0
        self._measured = 0.0
        self.owed = 0
        """Bytes of in-flight loads."""

    def learn(self, nbytes: int, seconds: float, now: float, whole: bool = True) -> None:
        """Records a load of `nbytes` in `seconds`; one that was not `whole` bounds the rate above, and can only lower it."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        if not whole and rate > self.rate > 0:
            return
        # Warm-up loads are not typical (buffer allocation, opening files, clock ramp-up): replace instead of averaging.
        stale = self._samples < _WARM_UP or now - self._measured > _STALE_SECONDS
        self._samples += 1
        # Average seconds per byte, because the prediction is a time.
        self.rate = rate if stale else 1 / (1 / self.rate + _WEIGHT * (1 / rate - 1 / self.rate))
        self._measured = now

    def seconds(self, nbytes: int, now: float) -> float:
        """Predicted seconds until `nbytes` arrive after the bytes in flight; 0 if the rate should be measured again."""
        if self._samples < _WARM_UP or (now - self._measured > _STALE_SECONDS and not self.owed):
            return 0.0
        return (self.owed + nbytes) / self.rate


class Costs:
    """The cost of computing and of loading from each tier, from measurements of this engine on this machine.

    Computing is predicted by `core/steptime.py`, loading by the bytes requested plus the bytes in flight, divided by the
    tier's recent throughput. Anything not measured yet is assumed to favour loading, because that yields a measurement."""

    def __init__(self, tiers: Mapping[str, Source], times: StepTime) -> None:
        self.times = times
        self.sources = dict(tiers)

    def worth_loading(self, nbytes: Mapping[str, int], positions: int, now: float, patience: float = math.inf) -> bool:
        """Whether loading `nbytes` from each tier should beat computing `positions`, and end within `patience` seconds."""
        slowest = max(self.sources[tier].seconds(n, now) for tier, n in nbytes.items())
        return not self.times.known or slowest < min(self.times.prompt(positions), patience)

    def worth_saving(self, tier: str, nbytes: int, positions: int) -> bool:
        """True if loading `nbytes` from a tier is faster than computing `positions` positions, so that saving them pays."""
        source, times = self.sources[tier], self.times
        return not times.known or not source.rate or nbytes / source.rate < times.prompt(times.chunk) * positions / times.chunk


HOST = "host"

_PATIENCE, _LEAST_PATIENCE = 0.5, 0.1
"""A load may take at most _PATIENCE times the computing time plus _LEAST_PATIENCE seconds, so that computing after a failed
load takes at most 1.5 times computing alone plus 0.2 s: half is for predictions that are too long and for late threads."""
_MOST_PATIENCE = 30.0
"""The timeout of a load in seconds under --cache-load always."""
_STALLED_SECONDS = 10.0
"""A store with a write older than this gets no further writes."""
_WANTED_PAGES = 1 << 16
"""The capacity of the queue of pages to be written to stores; beyond it the oldest entries are dropped."""
_WRITING_SHARE = 0.25
"""The share of host slots that writes to stores may keep busy (backpressure)."""
_SPILL_SHARE = 0.75
"""Above this occupancy of the host, its least recently used pages are written to stores before they are evicted."""


@dataclass(frozen=True)
class TierPolicy:
    through: bool = True
    """Write-through: save pages when they are committed, instead of when the device evicts them."""
    always: bool = False
    """Load every page that is found, instead of only where loading is predicted to be faster than computing."""


@dataclass(slots=True)
class _Loading:
    pieces: list[Piece]
    nbytes: dict[str, int]
    """Bytes by source tier."""
    pages: dict[str, int] = field(default_factory=dict)


class Hierarchy:
    """A host arena of `slabs` slabs, and stores, nearest first. Called while the engine plans: no method blocks on a device."""

    def __init__(self, layout: CacheLayout, slabs: int, stores: Sequence[tuple[Store, int | None]], policy: TierPolicy,
                 times: StepTime, refresh_seconds: float = 1.0) -> None:
        """`stores` are (store, maximal bytes or None) pairs; `times` says what computing takes."""
        self.layout = layout
        self.policy = policy
        self.host = HostSlots(layout, slabs)
        self._roomy = slabs >= 2 * layout.slabs
        """True if pages evicted from the device are marked as just used on the host. A smaller host would otherwise evict pages
        that the device still has, and save them again when the device evicts them, which delays a step that needs room."""
        self._sizes = [group.page_bytes for group in layout.groups]
        self.catalogs = [Catalog(store, self._sizes, bound) for store, bound in stores]
        self.costs = Costs({tier: Source() for tier in (HOST, *(catalog.tier for catalog in self.catalogs))}, times)
        self._keepers = [Keeper(catalog, refresh_seconds) for catalog in self.catalogs]
        self._stats = {tier: TierStats(tier) for tier in self.costs.sources}
        self._saves: dict[tuple[int, int], tuple[PageName, Save]] = {}
        """Saves for the next plan, by (group, slot)."""
        self._transfers: list[Transfer] = []
        """Loads and writes for the next plan."""
        self._wanted: deque[PageName] = deque(maxlen=_WANTED_PAGES)
        """Pages queued to be written to stores."""
        self._writing: dict[int, tuple[int, PageName, int, float]] = {}
        """In-flight writes by id: (index of the store, page, bytes, start time)."""
        self._most_writing = max(1, int(_WRITING_SHARE * slabs * min(group.per_slab for group in layout.groups)))
        self._loading: dict[int, _Loading] = {}
        self._ids = count(1)

    # -- the interface of the prefix index

    def offer(self, pages: Sequence[Content], leaving: bool) -> None:
        """Offers pages for saving: just committed, and staying on the device (write-through), or `leaving`: evicted, and the
        plan being made is the last that may read them. Not all of these were offered before; loaded ones may be again."""
        names = [PageName(content.group, content.key) for content in pages]
        if leaving:
            if self._roomy:
                # While a page was on the device, its uses were recorded only there.
                self.host.touch(names)
        elif not self.policy.through:
            return
        worth = [self.policy.always or self.costs.worth_saving(HOST, size, self.layout.page) for size in self._sizes]
        # A page that is in a store is not saved again when the device evicts it: the step that needs the room would wait.
        stores = self.catalogs if leaving and self.policy.through else []
        fresh = {name: content.page for name, content in zip(names, pages, strict=True)
                 if worth[name.group] and name not in self.host and not any(name in catalog for catalog in stores)}
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
        """Removes pages with invalid contents from every tier."""
        names = [PageName(content.group, content.key) for content in pages]
        self.host.forget(names)
        for catalog in self.catalogs:
            catalog.doom(names)
        self._tidy()

    def find(self, group: int, keys: Sequence[Key]) -> list[bool]:
        """For each of these pages: True if it can be loaded now."""
        names, catalogs = [PageName(group, key) for key in keys], self._present()
        return [name in self.host or any(name in catalog for catalog in catalogs) for name in names]

    def load(self, pages: Sequence[Content], positions: int) -> int | None:
        """Starts a load into these pages, which nothing else uses; its ticket, or None if computing `positions` positions
        should be faster, or a page is in no tier. The load owns the pages until its LoadResult, also if the request ends."""
        pieces = self._locate(pages)
        if not pieces:
            return None
        nbytes, places = Counter[str](), list(map(self._tier, pieces))
        for tier, piece in zip(places, pieces, strict=True):
            nbytes[tier] += self._sizes[piece.name.group]
        patience = self.patience(positions)
        if not self.policy.always and not self.costs.worth_loading(nbytes, positions, time.monotonic(), patience):
            return None
        for piece in pieces:
            if piece.slot >= 0:
                self.host.hold(piece.name)
        for tier, size in nbytes.items():
            self.costs.sources[tier].owed += size
        ticket = next(self._ids)
        self._loading[ticket] = _Loading(pieces, dict(nbytes), dict(Counter(places)))
        self._transfers.append(Load(ticket, pieces, patience))
        return ticket

    def patience(self, positions: int) -> float:
        """The number of seconds that a request may wait for pages that spare it computing `positions` positions."""
        return _MOST_PATIENCE if self.policy.always else _LEAST_PATIENCE + _PATIENCE * self.costs.times.prompt(positions)

    def source(self, ticket: int) -> dict[str, int]:
        """The number of pages of a load by source tier ("host", "disk", "remote")."""
        return self._loading[ticket].pages

    def drain(self) -> list[Transfer]:
        """The transfers since the last call, for the plan being made (its `transfers`)."""
        saves, self._saves = self._saves, {}
        transfers, self._transfers = self._transfers, []
        # If many pages were offered at once, the host may have evicted some since and reused their slots: drop those saves.
        left = [save for name, save in saves.values() if self.host.uses(name, save.slot)]
        for save in left:
            self._moved(HOST, self._sizes[save.group])
        return [*left, *transfers]

    def listen(self, listener: Listener) -> None:
        """Calls `listener` at once for every page in a tier, and from now on for every page that enters or leaves one."""
        self.host.told = partial(listener, HOST)
        for name in self.host.oldest():
            listener(HOST, name, True)
        for catalog in self.catalogs:
            catalog.listen(partial(listener, catalog.tier))

    def clear(self) -> None:
        self.host.forget(list(self.host.oldest()))
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

    @property
    def pending(self) -> bool:
        """True if there are transfers for the next plan."""
        return bool(self._saves or self._transfers)

    @property
    def writing(self) -> bool:
        """True if pages are being written to stores or are queued for it."""
        return bool(self._writing or self._wanted)

    def stats(self) -> list[TierStats]:
        """Statistics, nearest tier first."""
        host = self._stats[HOST]
        host.capacity_bytes, host.used_bytes = self.host.layout.nbytes, self.host.used_bytes
        host.cached_pages, host.evicted_pages = len(self.host), self.host.evicted
        for catalog in self.catalogs:
            stats = self._stats[catalog.tier]
            stats.capacity_bytes, stats.used_bytes = catalog.bound or 0, catalog.used_bytes
            stats.cached_pages, stats.evicted_pages = catalog.pages, catalog.evicted
            stats.available = int(not catalog.failing and not catalog.away(time.monotonic()))
        return list(self._stats.values())

    # -- shutdown

    def close(self) -> None:
        """Stops the background threads and closes the stores. No other method may be called afterwards."""
        for keeper in self._keepers:
            keeper.close()
        for catalog in self.catalogs:
            catalog.store.close()

    # -- internals

    def _tidy(self) -> None:
        """Wakes the keeper threads, which delete doomed pages and shrink full stores."""
        for keeper in self._keepers:
            keeper.wake()

    def _present(self) -> list[Catalog]:
        """The catalogs of stores that are not paused after a timeout (`Catalog.away`)."""
        return [catalog for catalog in self.catalogs if not catalog.away(time.monotonic())]

    def _write(self) -> None:
        """Starts writes of queued pages, up to the limit of in-flight writes. Pages no longer on the host are skipped."""
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
        """The source of each page, nearest tier first; an empty list if a page is in no tier."""
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
        # The duration of a load is attributed to the furthest tier that it reads from.
        furthest = max(load.nbytes, key=list(self._stats).index)
        for tier, size in load.nbytes.items():
            self.costs.sources[tier].owed -= size
            if result.ok:
                self._stats[tier].bytes_out += size
                self._stats[tier].hit_tokens += self._positions(load, tier, result.lost)
        self.costs.sources[furthest].learn(load.nbytes[furthest], result.seconds, now, result.ok)
        for which in result.missed:
            self._stats[self.catalogs[which].tier].late_loads += 1
            # Before the first measured step there is no computing time to derive a deadline from, so do not blame the store.
            if self.costs.times.known:
                self.catalogs[which].missed(now)
        for which in {piece.store for piece in load.pieces if result.ok and piece.store >= 0}:
            self.catalogs[which].answered()
        for piece in load.pieces:
            if piece.name in result.lost:
                self._stats[self._tier(piece)].failures += 1
                self.catalogs[piece.store].doom([piece.name])
                self._tidy()

    def _positions(self, load: _Loading, tier: str, lost: Sequence[PageName]) -> int:
        """The number of context positions that a load got from a tier: the maximum over cache groups. Of a group that lost
        pages, only pages before the first lost one count, and only such groups are considered."""
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
