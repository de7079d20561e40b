"""From what the user said to stores: which kinds there are, and how a URL names one."""

from __future__ import annotations

from penstock.core.errors import ConfigError
from penstock.stores import Store
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from penstock.stores.objects import ObjectStore
from penstock.stores.redis import RedisStore
from penstock.stores.version import Version


def open_stores(disk: str | None, remote: str | None, version: Version, adopt: bool = False) -> list[Store]:
    """The stores behind the host, nearest first. ConfigError if one cannot be used.

    Both halves of an engine open their own; they share nothing but what is stored.
    """
    stores: list[Store] = []
    if disk is not None:
        stores.append(DiskStore(claim(disk, adopt), version))
    if remote is not None:
        scheme, colon, _ = remote.partition("://")
        if not colon:
            raise ConfigError(f"cache_remote is {remote!r}; possible are redis://HOST:PORT and the URLs of fsspec, such as "
                              "s3://BUCKET/FOLDER or file:///FOLDER")
        stores.append(RedisStore(remote, version) if scheme in ("redis", "valkey") else ObjectStore(remote, version))
    return stores
