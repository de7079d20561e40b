"""For stores that can only say all that they hold: what has come and gone since the last listing."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.transfer import PageName
from penstock.stores import Entry


class Listing:
    """Remembers one listing."""

    def __init__(self) -> None:
        self._names: set[PageName | str] = set()

    def compare(self, entries: Iterable[Entry]) -> tuple[list[Entry], list[PageName | str]]:
        """Entries that the last listing had not, and names that only it had."""
        came, names = [], set()
        for entry in entries:
            names.add(entry.name)
            if entry.name not in self._names:
                came.append(entry)
        went = list(self._names - names)
        self._names = names
        return came, went
