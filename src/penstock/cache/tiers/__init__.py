"""The interface of the tiers behind device memory. The prefix index decides which pages are kept; tiers move the bytes.

Transfers are part of plans. Within a plan the order is: saves, page copies (`core/plan.py::Move`), loads, then the step. So a
saved page may be reused by a copy, a load or a sequence of the same plan, and the source of a copy may be the target of a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.cache.keys import Key
from penstock.core.request import TierStats
from penstock.core.transfer import LoadResult, PageName, Transfer, WriteResult


class Content(NamedTuple):
    """One whole page of a cache group: its contents (by key) and its page on the device."""

    group: int
    page: int
    """The page's id on the device: the source of a save, the target of a load."""
    key: Key
    """The key of the context up to the end of the page (`cache/keys.py`). Together with `group` and the layout it identifies
    the bytes."""


Listener = Callable[[str, PageName, bool], None]
"""Called with (tier, page, present) when a page enters or leaves a tier. Called from any thread; must not call the tiers."""


class Tiers(Protocol):
    """All tiers behind the device. The engine's thread calls them while it plans, so no method may block on a device."""

    def offer(self, pages: Sequence[Content], leaving: bool) -> None:
        """Offers pages for saving. With `leaving` False they were just committed and stay on the device (write-through); with
        True they are being evicted, and the plan being made is the last that may read them. Not every evicted page was offered
        before, and a page may be offered again after it was loaded."""
        ...

    def forget(self, pages: Sequence[Content]) -> None:
        """Removes pages with invalid contents from every tier."""
        ...

    def find(self, group: int, keys: Sequence[Key]) -> list[bool]:
        """For each of these pages: True if it can be loaded now."""
        ...

    def load(self, pages: Sequence[Content], positions: int) -> int | None:
        """Starts a load into these pages, which nothing else uses, and returns its ticket. None if computing `positions`
        positions is predicted to be faster, or if a page is no longer in any tier. A LoadResult with the ticket ends the load;
        until then it owns the pages, even if the request that wanted them has ended."""
        ...

    def patience(self, positions: int) -> float:
        """The number of seconds that a request may wait for pages that spare it computing `positions` positions."""
        ...

    def source(self, ticket: int) -> dict[str, int]:
        """The number of pages of a load by source tier ("host", "disk", "remote")."""
        ...

    def drain(self) -> list[Transfer]:
        """The transfers since the last call, for the plan being made (its `transfers`)."""
        ...

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult]) -> None:
        """Processes the results of transfers."""
        ...

    @property
    def pending(self) -> bool:
        """True if there are transfers for the next plan."""
        ...

    @property
    def writing(self) -> bool:
        """True if pages are being written to stores or are queued for it."""
        ...

    def stats(self) -> list[TierStats]:
        """Statistics, nearest tier first."""
        ...

    def listen(self, listener: Listener) -> None:
        """Calls `listener` at once for every page in a tier, and from now on for every page that enters or leaves one."""
        ...

    def clear(self) -> None:
        """Removes everything from every tier."""
        ...
