"""Change detection for stores that can only list everything: the difference to the previous listing."""

from collections.abc import Iterable

from penstock.core.plan import PageName
from penstock.stores import Entry


class Listing:
    """Remembers the previous listing."""

    def __init__(self) -> None:
        self._names: set[PageName | str] = set()

    def compare(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[PageName | str]]:
        """(entries that are new, names that have disappeared) since the previous listing."""
        there = {entry.name: entry for entry in entries}
        came, went = [entry for name, entry in there.items() if name not in self._names], list(self._names - there.keys())
        self._names = set(there)
        return came, went
