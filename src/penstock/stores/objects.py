"""Pages as objects of any file system that fsspec knows: s3://bucket/folder, gcs://, file:///shared/folder and others.

fsspec comes with the extra `remote`; a protocol may need a package of its own (s3fs for s3), which fsspec names. Bounding the
size is the bucket's affair (its lifecycle rules); nothing is deleted here but what is broken."""

import importlib
import io
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from penstock.core.errors import ConfigError
from penstock.core.plan import PageName
from penstock.stores import Entry, Listing, Store
from penstock.stores.folder import parse
from penstock.stores.version import Version

_FOLDERS = {"file", "local", "sftp", "ssh", "smb", "hdfs", "nfs"}
"""File systems where a file is visible while it is being written and renaming is cheap. Bucket objects appear atomically."""

class ObjectStore(Store):
    """The pages of one version under a URL, one object a page: URL/VERSION/ab/abcd...-GROUP.

    Buckets do not track the order of use, and fsspec shares and closes its sessions itself."""

    tier = "remote"

    def __init__(self, url: str, version: Version) -> None:
        """ConfigError if there is no such kind of file system. Every file system has errors of its own (`guarded.py`)."""
        try:
            fsspec = importlib.import_module("fsspec")
            # Listings must not be cached, because other engines write here too.
            self._files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            self._home = f"{root.rstrip('/')}/{version.id.hex()}"
            names = self._files.protocol
            self._beside = not _FOLDERS.isdisjoint([names] if isinstance(names, str) else names)
            self._made: set[str] = set()
            self._files.makedirs(self._home, exist_ok=True)
        except ImportError as error:
            raise ConfigError(f"cache_remote is {url}, which needs a package that is not installed ({error}); "
                              "pip install 'penstock[remote]' brings fsspec") from None
        except ValueError as error:
            raise ConfigError(f"cache_remote is {url}, which cannot be used: {error}") from None
        self._listing = Listing()

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        path = self._path(name)
        folder = path.rpartition("/")[0]
        if folder not in self._made:
            self._files.makedirs(folder, exist_ok=True)
            self._made.add(folder)
        if not self._beside:
            self._files.pipe_file(path, b"".join(parts))
            return
        beside = f"{path}.{uuid4().hex}"
        self._files.pipe_file(beside, b"".join(parts))
        self._files.mv(beside, path)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        # Read no more than fits: the object may have any size.
        data = self._files.cat_file(self._path(name), start=0, end=sum(part.nbytes for part in parts))
        return sum(map(io.BytesIO(data).readinto, parts))

    def delete(self, name: PageName | str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(name if isinstance(name, str) else self._path(name))

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        now = time.time()
        found: dict[str, dict[str, Any]] = self._files.find(self._home, detail=True)
        names = ((parse(path.rpartition("/")[2]) or path, facts) for path, facts in found.items())
        return self._listing.compare(Entry(name, int(facts.get("size") or 0), now) for name, facts in names)

    def _path(self, name: PageName) -> str:
        key = name[1].hex()
        return f"{self._home}/{key[:2]}/{key}-{name[0]}"
