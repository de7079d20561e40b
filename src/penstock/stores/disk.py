"""The disk store: one file per page, written under a temporary name and renamed, so that readers see whole pages only.

`stores/folder.py` defines the files and which of them may be touched. A file's modification time is the page's last use.
Several engines may share a folder; they coordinate through the file system alone, without locks. There is no fsync: after a
power failure a page may be truncated or empty, which its checksum detects."""

import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.plan import PageName
from penstock.stores import Entry, Store
from penstock.stores.folder import DESCRIPTION, INCOMING, PAGES, CacheFolder, page_of
from penstock.stores.version import Version

_UNSETTLED_SECONDS = 0.1
"""A folder modified more recently than this may change again without a change of its modification time."""
_NUMBERS = itertools.count()


class DiskStore(Store):
    """The pages of one version in a folder. Pages of other versions are listed and may be deleted, as they share its bound.

    No file is held open."""

    tier = "disk"

    def __init__(self, folder: CacheFolder, version: Version) -> None:
        """OSError if the folder cannot be written to now."""
        self.folder = folder
        self._version = version.id.hex()
        self._home = folder.path / PAGES / self._version
        self._buckets: dict[Path, _Bucket] = {}
        self._put((PAGES, self._version), DESCRIPTION, [memoryview(json.dumps(version.facts, indent=1).encode())])

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        self._put(self._bucket(name), _file(name), parts)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with self.folder.directory(*self._bucket(name)) as bucket, open(
                _file(name), "rb", opener=lambda path, _: os.open(path, flags, dir_fd=bucket)) as file:
            return sum(map(file.readinto, parts))

    def files(self, names: Sequence[PageName]) -> list[str]:
        """The paths of these pages, which need not exist, as text."""
        return [f"{self._home}/{key[:2]}/{key}-{group}" for group, key in ((name[0], name[1].hex()) for name in names)]

    def touch(self, name: PageName) -> None:
        with suppress(FileNotFoundError), self.folder.directory(*self._bucket(name)) as bucket:
            os.utime(_file(name), dir_fd=bucket, follow_symlinks=False)

    def delete(self, name: PageName | str) -> None:
        version, file = name.split("/") if isinstance(name, str) else (self._version, _file(name))
        self.folder.remove(version, file)

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        came: list[Entry] = []
        went: list[PageName | str] = []
        seen = set()
        for version in self.folder.versions():
            for path in self.folder.buckets(version):
                seen.add(path)
                bucket = self._buckets.get(path)
                if bucket is None:
                    bucket = self._buckets[path] = _Bucket(path, version.name == self._version)
                bucket.update(came, went)
        for path in self._buckets.keys() - seen:
            went += self._buckets.pop(path).names.values()
        self.folder.sweep()
        return came, went

    def _bucket(self, name: PageName) -> tuple[str, str, str]:
        return PAGES, self._version, name[1][:1].hex()

    def _put(self, where: tuple[str, ...], target: str, parts: Sequence[memoryview]) -> None:
        beside = f"{os.getpid()}-{time.time_ns()}-{next(_NUMBERS)}"
        with self.folder.directory(INCOMING, make=True) as incoming:
            try:
                with open(beside, "xb", opener=lambda path, flags: os.open(path, flags, 0o600, dir_fd=incoming)) as file:
                    file.writelines(parts)
                with self.folder.directory(*where, make=True) as folder:
                    os.rename(beside, target, src_dir_fd=incoming, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(beside, dir_fd=incoming)
                raise


class _Bucket:
    """The listing of one folder of pages, as of the last scan."""

    def __init__(self, path: Path, own: bool) -> None:
        self.path = path
        self.own = own
        self.names: dict[str, PageName | str] = {}
        self._changed = -1

    def update(self, came: list[Entry], went: list[PageName | str]) -> None:
        """Rescans the folder if it has changed. Known files are not examined again; an unchanged folder costs one stat."""
        try:
            changed = self.path.stat(follow_symlinks=False).st_mtime_ns
            if changed == self._changed:
                return
            self._changed = changed if time.time_ns() - changed > _UNSETTLED_SECONDS * 1e9 else -1
            gone = dict(self.names)
            with os.scandir(self.path) as found:
                for entry in found:
                    if gone.pop(entry.name, None) is None:
                        self._add(entry, came)
            for text, name in gone.items():
                del self.names[text]
                went.append(name)
        except FileNotFoundError:
            # The next look at the version's folder tells.
            return

    def _add(self, entry: os.DirEntry[str], came: list[Entry]) -> None:
        try:
            page = page_of(entry, self.path.name)
            if page is None:
                return
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        name = page if self.own else f"{self.path.parent.name}/{entry.name}"
        self.names[entry.name] = name
        came.append(Entry(name, facts.st_size, facts.st_mtime))


def _file(name: PageName) -> str:
    return f"{name[1].hex()}-{name[0]}"
