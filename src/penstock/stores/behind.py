"""The tiers behind a device as a rank needs them: the amount of host memory, and the stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.stores import Store
from penstock.stores.opening import open_stores
from penstock.stores.version import Version


class Behind(NamedTuple):
    """The worker's half of the tiers. The receiver owns the stores and closes them."""

    host_slabs: int
    stores: Sequence[Store]
    version: bytes
    """The version of the pages in the stores (`stores/version.py`)."""


@dataclass(frozen=True)
class Opening:
    """The same as data: what to open. It reaches ranks in other processes."""

    host_slabs: int
    disk: str | None
    remote: str | None
    adopt: bool
    version: Version
    """Rank 0's."""

    def open(self, rank: int = 0, ranks: int = 1) -> Behind:
        """For one of so many ranks, whose pages hold its share of every entry. The threads that use stores open them."""
        version = replace(self.version, rank=rank, ranks=ranks)
        return Behind(self.host_slabs, open_stores(self.disk, self.remote, version, self.adopt, wait=False), version.id)
