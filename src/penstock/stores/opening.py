"""Opens stores by the user's options: their kinds and URL schemes. Engine and ranks open their own, and share only the data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.core.errors import ConfigError
from penstock.stores import Store
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from penstock.stores.guarded import GuardedStore
from penstock.stores.objects import ObjectStore
from penstock.stores.redis import RedisStore
from penstock.stores.version import Version

_START_SECONDS = 2.0
"""The longest that start-up waits for a store."""


def open_stores(disk: str | None, remote: str | None, version: Version, adopt: bool = False, wait: bool = True) -> list[Store]:
    """The stores behind host memory, nearest first. ConfigError if one can never be used. A store that is unavailable now, or
    does not answer soon, is opened later; without `wait` every store is opened later, by the threads that use it."""
    stores: list[GuardedStore] = []
    if disk is not None:
        stores.append(GuardedStore("disk", disk, lambda: DiskStore(claim(disk, adopt), version)))
    if remote is not None:
        scheme, colon, _ = remote.partition("://")
        if not colon:
            raise ConfigError(f"cache_remote is {remote!r}; possible are redis://HOST:PORT and the URLs of fsspec, such as "
                              "s3://BUCKET/FOLDER or file:///FOLDER")
        kind = RedisStore if scheme in ("redis", "valkey") else ObjectStore
        # Remove the password that a URL may contain.
        name = f"{scheme}://{remote.rpartition('@')[2].rpartition('://')[2]}"
        stores.append(GuardedStore("remote", name, lambda: kind(remote, version)))
    for store in stores if wait else []:
        store.open(_START_SECONDS)
    return list(stores)


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
