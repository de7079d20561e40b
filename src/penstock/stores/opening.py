"""Opens the stores that the user's options name: the kinds of stores, and the URL schemes of each."""

from __future__ import annotations

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
    does not answer soon, is opened later; without `wait` every store is opened later, by the threads that use it.

    The engine's and the worker's half open their own stores; they share only the stored data.
    """
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
