"""From what the user said to stores: which kinds there are, and how a URL names one."""

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
"""How long a start waits for a store."""


def open_stores(disk: str | None, remote: str | None, version: Version, adopt: bool = False, wait: bool = True) -> list[Store]:
    """The stores behind the host, nearest first. ConfigError if one can never be used. One that cannot be used now, or does not
    answer soon, is opened later; without `wait` all are, by the threads that use them.

    Both halves of an engine open their own; they share nothing but what is stored.
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
        # Without the password that a URL may carry.
        name = f"{scheme}://{remote.rpartition('@')[2].rpartition('://')[2]}"
        stores.append(GuardedStore("remote", name, lambda: kind(remote, version)))
    for store in stores if wait else []:
        store.open(_START_SECONDS)
    return list(stores)
