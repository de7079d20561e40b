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
        came, names = [], set()
        for entry in entries:
            names.add(entry.name)
            if entry.name not in self._names:
                came.append(entry)
        went = list(self._names - names)
        self._names = names
        return came, went
