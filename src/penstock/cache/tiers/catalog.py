"""Catalogs: an in-memory listing of a store, its size bound, and its health.

The engine's thread must never wait for a store, so it reads the catalog, which a keeper thread refreshes. The catalog may be
stale: a load discovers that a page is gone, and the next refresh discovers pages that another engine added."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from penstock.core.plan import PageName
from penstock.stores import Entry, Store
from penstock.stores.record import HEADER_BYTES

LOG = logging.getLogger("penstock")

_SPARE = 0.05
"""The share of the bound that is kept free for writers. Below it, the keeper thread evicts until twice this share is free."""
_PAUSE_SECONDS, _LONGEST_PAUSE = 5.0, 60.0
"""The pause in writing after a failed write; the first and longest one after missed deadlines, doubled by each miss."""
_FIRST_SECONDS = 1.0
"""The longest that start-up waits for the first listing of a store."""
_CLOSE_SECONDS = 2.0
"""The longest that shutdown waits for a hanging store."""


class Catalog:
    """The pages of one store. Thread-safe between the engine's thread and the keeper's."""

    def __init__(self, store: Store, page_bytes: Sequence[int], bound: int | None) -> None:
        """`page_bytes` has the page size of each cache group; `bound` is the maximal number of bytes, None for no limit."""
        self.store = store
        self.tier = store.tier
        self.bound = bound
        self.used_bytes = self.pages = self.evicted = 0
        self.told: Callable[[PageName, bool], None] = lambda _name, _there: None
        """Callback (page, present) for every page added or removed; called from any thread."""
        self._sizes = [HEADER_BYTES + size for size in page_bytes]
        self._spare = max(2 * max(self._sizes), int(_SPARE * (bound or 0)))
        self._entries: OrderedDict[PageName | str, int] = OrderedDict()
        """Entry -> bytes, least recently used first."""
        self._touched: OrderedDict[PageName, None] = OrderedDict()
        """Uses that have not been passed on to the store yet."""
        self._pending: dict[PageName, int] = {}
        """Pages being written -> bytes."""
        self._pending_bytes = 0
        self._doomed: set[PageName] = set()
        """Pages to be deleted; until then they are not found, even if a listing has them."""
        self._paused_until = 0.0
        """No writes before this time."""
        self._away_until = 0.0
        """No loads or writes before this time."""
        self._misses = 0
        """The number of consecutive loads that missed their deadline."""
        self.failing = False
        """True from a failed operation of the keeper thread until the next successful listing."""
        self._lock = threading.Lock()

    def __contains__(self, name: PageName) -> bool:
        return name in self._entries

    def away(self, now: float) -> bool:
        """True if the store is paused at this time (`time.monotonic()`) after missed deadlines."""
        return now < self._away_until

    def missed(self, now: float) -> None:
        """Called when the store missed a load's deadline: pauses it for a while."""
        if self.away(now):
            return
        pause = min(_LONGEST_PAUSE, _PAUSE_SECONDS * 2**min(self._misses, 8))
        self._misses += 1
        self._away_until = now + pause
        LOG.warning("the %s tier of the cache did not give pages in time; it is left alone for %.0f s, and requests compute "
                    "instead", self.tier, pause)

    def answered(self) -> None:
        """Called when the store met a load's deadline: resets the count of misses."""
        if self._misses:
            LOG.warning("the %s tier of the cache gives pages in time again", self.tier)
        self._misses = 0

    def listen(self, told: Callable[[PageName, bool], None]) -> None:
        """Calls `told` for every page in the catalog, and from now on for every page added or removed."""
        with self._lock:
            self.told = told
            for name in self._entries:
                if not isinstance(name, str):
                    told(name, True)

    def touch(self, names: Sequence[PageName]) -> None:
        """Marks these pages, in context order, as used, the last least recently: an end is useless without its beginning."""
        with self._lock:
            for name in reversed(names):
                if name in self._entries:
                    self._entries.move_to_end(name)
                    self._touched[name] = None

    @property
    def crowded(self) -> bool:
        """True if the store should be shrunk."""
        return self.bound is not None and self.used_bytes + self._pending_bytes > self.bound - self._spare

    def reserve(self, name: PageName, now: float) -> bool:
        """Reserves room for a page to be written. False if it is there or in flight, or if the store is full or paused."""
        if name in self._entries or name in self._pending or name in self._doomed or now < self._paused_until or self.away(now):
            return False
        size = self._sizes[name.group]
        if self.bound is not None and self.used_bytes + self._pending_bytes + size > self.bound:
            return False
        self._pending[name] = size
        self._pending_bytes += size
        return True

    def finish_write(self, name: PageName, ok: bool, now: float) -> bool:
        """Ends the write of a reserved page. False if the page was doomed meanwhile and can be deleted now."""
        size = self._pending.pop(name)
        self._pending_bytes -= size
        if not ok:
            self._paused_until = now + _PAUSE_SECONDS
        elif name not in self._doomed:
            self._add(Entry(name, size, time.time()))
        return name not in self._doomed

    def doom(self, names: Iterable[PageName]) -> None:
        """Removes invalid or unwanted pages from the catalog; `bury` deletes them from the store."""
        with self._lock:
            for name in names:
                self._doomed.add(name)
                self._remove(name)

    def doom_all(self) -> None:
        """Dooms all pages, including those being written."""
        with self._lock:
            names = [name for name in self._entries if not isinstance(name, str)]
        self.doom([*names, *self._pending])

    def bury(self, last: bool = False) -> None:
        """Deletes doomed pages from the store. Pages still being written are deleted later, except in the `last` call, when no
        writes are left. Must not run in the engine's thread."""
        for name in list(self._doomed):
            if last or name not in self._pending:
                if not self.delete(name):
                    return
                self._doomed.discard(name)

    def refresh(self) -> None:
        """Updates the catalog from the store. May take long; must not run in the engine's thread."""
        try:
            came, went = self.store.changes()
        except OSError as error:
            self._complain("cannot be listed", error)
            return
        self.failing = False
        for entry in sorted(came, key=lambda entry: entry.used):
            self._add(entry)
        with self._lock:
            for name in went:
                self._remove(name)

    def tell(self) -> None:
        """Passes uses on to the store, because other engines evict by them too. Must not run in the engine's thread."""
        try:
            while self._touched:
                self.store.touch(self._touched.popitem(last=False)[0])
        except OSError as error:
            self._complain("cannot be told what is used", error)

    def shrink(self) -> None:
        """Evicts the least recently used entries if the store is nearly full. Must not run in the engine's thread."""
        if self.bound is None or not self.crowded:
            return
        while self.used_bytes + self._pending_bytes > self.bound - 2 * self._spare:
            with self._lock:
                oldest = next(iter(self._entries), None)
            if oldest is None or not self.delete(oldest):
                return
            self.evicted += 1

    def delete(self, name: PageName | str) -> bool:
        """Deletes an entry from the store; False if that failed."""
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
        """Logs a failure; repeated failures are logged again only after a listing has succeeded."""
        if not self.failing:
            LOG.warning("the %s tier of the cache %s: %s", self.tier, what, error)
        self.failing = True


class Keeper:
    """A thread that refreshes a catalog and keeps its store within the bound. A store that hangs must not delay the others."""

    def __init__(self, catalog: Catalog, seconds: float) -> None:
        """Refreshes once, waiting up to _FIRST_SECONDS, so that stored pages are known; then every `seconds`, or less often."""
        self._catalog = catalog
        self._seconds = seconds
        self._wake = threading.Event()
        self._looked = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-tiers", daemon=True)
        self._thread.start()
        self._looked.wait(_FIRST_SECONDS)

    def wake(self) -> None:
        """Makes the thread delete doomed pages and shrink the store soon."""
        self._wake.set()

    def close(self) -> None:
        """Stops the thread after its current work; does not wait for a hanging store. No writes may be in flight."""
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
            self._catalog.bury(last)
            self._catalog.tell()
            if last:
                return
            began = time.monotonic()
            if began >= due:
                self._look()
                # Refreshing uses at most 1 % of a core.
                due = time.monotonic() + max(self._seconds, 100 * (time.monotonic() - began))
            self._catalog.shrink()

    def _look(self) -> None:
        self._catalog.refresh()
        self._catalog.shrink()
