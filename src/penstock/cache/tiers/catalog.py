"""Catalogs: the known contents of a store, its size bound, and whether it is to be left alone.

The engine's thread asks and must never wait for a store; so the answer comes from memory, which a thread of its own brings up
to date. It may be wrong: a page may have gone, which a load finds out, or have come from another engine, which the next look
finds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.core.transfer import PageName
from penstock.stores import Entry, Store
from penstock.stores.record import HEADER_BYTES

LOG = logging.getLogger("penstock")

_SPARE = 0.05
"""Of the bound, what is to be free so that writers find room. If it is not, twice as much is made free, in the background."""
_PAUSE_SECONDS, _LONGEST_PAUSE = 5.0, 60.0
"""A store that has failed to write, or did not answer in time, is left alone for so long; each time in a row twice as long."""
_FIRST_SECONDS = 1.0
"""How long a start waits for the first look at a store."""
_CLOSE_SECONDS = 2.0
"""How long an end waits for a store that hangs."""


class Catalog:
    """The pages of one store. Safe to use from the engine's thread and from the keeper's."""

    def __init__(self, store: Store, page_bytes: Sequence[int], bound: int | None) -> None:
        """`page_bytes` of each cache group; the store may hold `bound` bytes, or None for no bound of ours."""
        self.store = store
        self.tier = store.tier
        self.bound = bound
        self.used_bytes = 0
        self.pages = 0
        self.evicted = 0
        self.told: Callable[[PageName, bool], None] = lambda _name, _there: None
        """Told of every page that comes or goes; from any thread."""
        self._sizes = [HEADER_BYTES + size for size in page_bytes]
        self._spare = max(2 * max(self._sizes), int(_SPARE * (bound or 0)))
        self._entries: OrderedDict[PageName | str, int] = OrderedDict()
        """Bytes of everything there, least recently used first."""
        self._touched: OrderedDict[PageName, None] = OrderedDict()
        """Uses that the store has not been told of yet."""
        self._pending: dict[PageName, int] = {}
        """Bytes of what is being written."""
        self._pending_bytes = 0
        self._doomed: set[PageName] = set()
        """Pages that must not be found, whatever a listing says, until they are deleted."""
        self._paused_until = 0.0
        """Nothing is written before."""
        self._away_until = 0.0
        """Nothing is loaded or written before."""
        self._misses = 0
        """How many loads in a row it did not answer in time."""
        self._failing = False
        self._lock = threading.Lock()

    def __contains__(self, name: PageName) -> bool:
        return name in self._entries

    def away(self, now: float) -> bool:
        """Whether the store is left alone at this time (`time.monotonic()`)."""
        return now < self._away_until

    @property
    def failing(self) -> bool:
        """Whether the last look at the store has failed."""
        return self._failing

    def missed(self, now: float) -> None:
        """The store did not answer a load in time: it is left alone for a while, and then tried again."""
        if self.away(now):
            return
        pause = min(_LONGEST_PAUSE, _PAUSE_SECONDS * 2**min(self._misses, 8))
        self._misses += 1
        self._away_until = now + pause
        LOG.warning("the %s tier of the cache did not give pages in time; it is left alone for %.0f s, and requests compute "
                    "instead", self.tier, pause)

    def answered(self) -> None:
        """The store gave a load in time."""
        if self._misses:
            LOG.warning("the %s tier of the cache gives pages in time again", self.tier)
        self._misses = 0

    def listen(self, told: Callable[[PageName, bool], None]) -> None:
        """Tells of every page that is there, and from now on of every one that comes or goes."""
        with self._lock:
            self.told = told
            for name in self._entries:
                if not isinstance(name, str):
                    told(name, True)

    def touch(self, names: Sequence[PageName]) -> None:
        """These pages, in the order of their context, were wanted. Its end is to go first: it is of no use alone."""
        with self._lock:
            for name in reversed(names):
                if name in self._entries:
                    self._entries.move_to_end(name)
                    self._touched[name] = None

    @property
    def crowded(self) -> bool:
        """Whether it is time to shrink."""
        return self.bound is not None and self.used_bytes + self._pending_bytes > self.bound - self._spare

    def reserve(self, name: PageName, now: float) -> bool:
        """Whether a page should be written now: it is not there nor on its way, there is room, and the store takes pages."""
        if name in self._entries or name in self._pending or name in self._doomed:
            return False
        if now < self._paused_until or self.away(now):
            return False
        size = self._sizes[name.group]
        if self.bound is not None and self.used_bytes + self._pending_bytes + size > self.bound:
            return False
        self._pending[name] = size
        self._pending_bytes += size
        return True

    def finish_write(self, name: PageName, ok: bool, now: float) -> bool:
        """A reserved page has been written, or could not be. False if it was doomed meanwhile: it can be deleted now."""
        size = self._pending.pop(name)
        self._pending_bytes -= size
        if not ok:
            self._paused_until = now + _PAUSE_SECONDS
        elif name not in self._doomed:
            self._add(Entry(name, size, time.time()))
        return name not in self._doomed

    def doom(self, names: Iterable[PageName]) -> None:
        """These pages are broken or not wanted any more: nobody finds them from now on, and `bury` deletes them."""
        with self._lock:
            for name in names:
                self._doomed.add(name)
                self._remove(name)

    def doom_all(self) -> None:
        """Dooms whatever is there or on its way."""
        with self._lock:
            names = [name for name in self._entries if not isinstance(name, str)]
        self.doom([*names, *self._pending])

    def bury(self, last: bool = False) -> None:
        """Deletes what is doomed. What is still being written has to wait, unless this is the `last` call, before which all has
        been written. Not for the engine's thread."""
        for name in list(self._doomed):
            if last or name not in self._pending:
                if not self.delete(name):
                    return
                self._doomed.discard(name)

    def refresh(self) -> None:
        """Looks at the store. May take long; not for the engine's thread."""
        try:
            came, went = self.store.changes()
        except OSError as error:
            self._complain("cannot be listed", error)
            return
        self._failing = False
        for entry in sorted(came, key=lambda entry: entry.used):
            self._add(entry)
        with self._lock:
            for name in went:
                self._remove(name)

    def tell(self) -> None:
        """Tells the store what was used, because others go by that, too. Not for the engine's thread."""
        try:
            while self._touched:
                self.store.touch(self._touched.popitem(last=False)[0])
        except OSError as error:
            self._complain("cannot be told what is used", error)

    def shrink(self) -> None:
        """Deletes what was used longest ago, if the store is nearly full. Not for the engine's thread."""
        if self.bound is None or not self.crowded:
            return
        while self.used_bytes + self._pending_bytes > self.bound - 2 * self._spare:
            with self._lock:
                oldest = next(iter(self._entries), None)
            if oldest is None or not self.delete(oldest):
                return
            self.evicted += 1

    def delete(self, name: PageName | str) -> bool:
        """Takes something out of the store."""
        try:
            self.store.delete(name)
        except OSError as error:
            self._complain("does not let go of pages", error)
            return False
        with self._lock:
            self._remove(name)
        return True

    def _add(self, entry: Entry) -> None:
        name, nbytes, _ = entry
        with self._lock:
            if name in self._entries or name in self._doomed:
                return
            if not nbytes and not isinstance(name, str):
                nbytes = self._sizes[name.group] if name.group < len(self._sizes) else 0
            self._entries[name] = nbytes
            self.used_bytes += nbytes
            if not isinstance(name, str):
                self.pages += 1
                self.told(name, True)

    def _remove(self, name: PageName | str) -> None:
        nbytes = self._entries.pop(name, None)
        if nbytes is not None:
            self.used_bytes -= nbytes
            if not isinstance(name, str):
                self.pages -= 1
                self.told(name, False)

    def _complain(self, what: str, error: OSError) -> None:
        """Once for each time that it begins to fail."""
        if not self._failing:
            LOG.warning("the %s tier of the cache %s: %s", self.tier, what, error)
        self._failing = True


class Keeper:
    """A thread that keeps catalogs true and stores within their bounds."""

    def __init__(self, catalogs: Sequence[Catalog], seconds: float) -> None:
        """Looks once, for which it waits a moment, so that a new engine knows what was kept; then every `seconds`, or more
        rarely where looking takes long."""
        self._catalogs = list(catalogs)
        self._seconds = seconds
        self._wake = threading.Event()
        self._looked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-tiers", daemon=True)
        self._thread.start()
        self._looked.wait(_FIRST_SECONDS)

    def wake(self) -> None:
        """Has doomed pages deleted and stores shrunk soon."""
        self._wake.set()

    def close(self) -> None:
        """Finishes what it is doing, unless a store hangs. Nothing may be being written any more."""
        self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        self._look()
        self._looked.set()
        due = time.monotonic() + self._seconds
        while True:
            self._wake.wait(max(0.0, due - time.monotonic()))
            self._wake.clear()
            last = self._closed
            for catalog in self._catalogs:
                catalog.bury(last)
                catalog.tell()
            if last:
                return
            began = time.monotonic()
            if began >= due:
                self._look()
                # At most a hundredth of a core goes into looking.
                due = time.monotonic() + max(self._seconds, 100 * (time.monotonic() - began))
            for catalog in self._catalogs:
                catalog.shrink()

    def _look(self) -> None:
        for catalog in self._catalogs:
            catalog.refresh()
            catalog.shrink()
