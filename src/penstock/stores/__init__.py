"""Persistent stores for pages: one small interface, implemented on disk, in object stores and in Redis.

A store maps names to byte strings. The reader verifies integrity, identity and version (`stores/record.py`), so lost, truncated
or mixed-up data costs time, never a wrong token. Stores raise only OSError, and serve many threads."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.core.plan import PageName


class Entry(NamedTuple):
    name: PageName | str
    """A page of this store's version, or an opaque name for anything else that occupies its room."""
    nbytes: int
    used: float
    """The time of the last write or read, in seconds since the epoch; 0 if the store does not know it."""


class Store(Protocol):
    """A store for the pages of one version (`stores/version.py::Version`). By default uses and the end change nothing."""

    tier: str
    """disk | remote, as in `core/request.py::TierStats`."""

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        """Writes the concatenated parts atomically: readers see all of them or nothing."""

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        """Reads into the parts in order and returns the number of bytes read. FileNotFoundError if there is no such page."""

    def touch(self, name: PageName) -> None:  # noqa: ARG002
        """Records that a page was used now, if the store tracks the order of use."""
        return

    def delete(self, name: PageName | str) -> None:
        """Deletes an entry. It is no error if there is none."""

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        """Entries added and names removed by any engine since the last call; the first call lists everything. May take long."""

    def close(self) -> None:
        """Closes connections. The pages stay."""
        return


class Listing:
    """Finds what has changed in a store that can only list everything."""

    def __init__(self) -> None:
        self._names: set[PageName | str] = set()

    def compare(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[PageName | str]]:
        """(entries that are new, names that have disappeared) since the previous listing."""
        there = {entry.name: entry for entry in entries}
        came, went = [entry for name, entry in there.items() if name not in self._names], list(self._names - there.keys())
        self._names = set(there)
        return came, went
