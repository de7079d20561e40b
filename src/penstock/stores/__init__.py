"""Stores keep pages beyond the process: one small interface, implemented on disk, in object stores and in Redis.

A store keeps byte strings under names. That they are whole, the right ones and of the right version is checked by whoever
reads (`stores/record.py`), so a store may lose, cut or mix up what it likes: it costs time, never a wrong token. Knows neither
tensors nor the prefix index. Operations raise OSError (or a subclass) and nothing else, and may be called from many threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.core.transfer import PageName


class Entry(NamedTuple):
    """Something that a store holds."""

    name: PageName | str
    """A page of this store's own version; or, as text that only the store understands, something else that takes its room."""
    nbytes: int
    used: float
    """When it was last written or read, in seconds since the epoch; 0 if the store does not know."""


class Store(Protocol):
    """One place for the pages of one version (`stores/version.py::Version`)."""

    tier: str
    """disk | remote, as in `core/request.py::TierStats`."""

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        """Keeps the parts, one behind the other. Readers see all or nothing of it."""
        ...

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        """Fills the parts, one after the other, as far as there are bytes; how many there were. FileNotFoundError if none."""
        ...

    def touch(self, name: PageName) -> None:
        """Notes that a page was used now, if the store keeps to an order of use."""
        ...

    def delete(self, name: PageName | str) -> None:
        """Nothing is there afterwards, nor need anything have been before."""
        ...

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        """Entries added and names removed since the last call, by any engine; at first all that is there. May take long."""
        ...

    def close(self) -> None:
        """Frees connections. The pages stay."""
        ...


def fill(parts: Sequence[memoryview], data: bytes | bytearray) -> int:
    """Copies bytes into the parts, one after the other, as far as there are any and they fit; how many went in."""
    done = 0
    for part in parts:
        piece = data[done:done + part.nbytes]
        part[:len(piece)] = piece
        done += len(piece)
    return done
