"""The interface of the tiers behind device memory. The prefix index decides which pages are kept; tiers move the bytes.

Transfers travel in plans. In one plan the order is: saves, page copies (`core/plan.py::Move`), loads, then the step. So a page
that is saved may be taken by a copy, a load or a sequence of the same plan, and a page that is copied from may be loaded into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.cache.keys import Key
from penstock.core.request import TierStats
from penstock.core.transfer import LoadResult, PageName, Transfer, WriteResult


class Content(NamedTuple):
    """One whole page of a cache group: what is in it, and where in device memory it lies."""

    group: int
    page: int
    """The page's id on the device: the source of a save, the target of a load."""
    key: Key
    """Of the whole context up to the end of the page (`cache/keys.py`): with `group` and the layout, it names the bytes."""


Listener = Callable[[str, PageName, bool], None]
"""Told a tier, a page, and whether the page is there from now on. Called from any thread; must not ask the tiers."""


class Tiers(Protocol):
    """Everything behind the device. Called by the engine's thread while it plans; nothing here may block on a device."""

    def offer(self, pages: Sequence[Content], leaving: bool) -> None:
        """Pages whose bytes may be saved: with `leaving` False they have just become certain and stay (write-through); with
        True they are being evicted, and the plan being made is the last that may read them. Not every page that leaves was
        offered before; a page may be offered again after it was loaded."""
        ...

    def forget(self, pages: Sequence[Content]) -> None:
        """The contents of these pages are broken: no tier may find them any more."""
        ...

    def find(self, group: int, keys: Sequence[Key]) -> list[bool]:
        """Which of these pages can be loaded now."""
        ...

    def load(self, pages: Sequence[Content], positions: int) -> int | None:
        """Promises to fill these pages, which nobody else uses, and returns a ticket; or None where computing `positions`
        positions is predicted to be faster, or the bytes have gone meanwhile. A LoadResult with the ticket ends it; until then
        the pages belong to the load, even if the request that wanted them has gone."""
        ...

    def patience(self, positions: int) -> float:
        """For how many seconds a request may wait for pages that save it the computing of so many positions."""
        ...

    def source(self, ticket: int) -> dict[str, int]:
        """Of the pages of a load, how many come from which tier ("host", "disk", "remote")."""
        ...

    def drain(self) -> list[Transfer]:
        """The transfers since the last call, for the plan being made (its `transfers`)."""
        ...

    def report(self, load_results: Iterable[LoadResult], write_results: Iterable[WriteResult]) -> None:
        """Takes the results of transfers."""
        ...

    def computed(self, positions: int, seconds: float) -> None:
        """A step has computed so many positions in this time: by this, loading is weighed."""
        ...

    @property
    def pending(self) -> bool:
        """Whether there are transfers for the next plan."""
        ...

    @property
    def writing(self) -> bool:
        """Whether pages are still being written to stores, or wait for it."""
        ...

    def stats(self) -> list[TierStats]:
        """Figures, nearest tier first."""
        ...

    def listen(self, listener: Listener) -> None:
        """Tells `listener` of every page that is in a tier, at once, and from now on of every one that comes or goes."""
        ...

    def clear(self) -> None:
        """Forgets everything, in every tier."""
        ...
