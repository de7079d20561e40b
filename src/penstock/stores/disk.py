"""Pages as files: one a page, written beside and renamed into place, so that a reader sees all of a page or none of it.

    ROOT/VERSION/version.json       what the version is, for people and `penstock cache`
    ROOT/VERSION/ab/abcd...-GROUP   a page whose key begins with ab; its modification time says when it was last used
    ROOT/incoming/                  being written; what a killed writer left there is removed later

Several engines may share a root: they agree through the file system alone, without locks. No fsync: after a power failure a
page may be cut or empty, which its checksum tells.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.transfer import PageName
from penstock.stores import Entry
from penstock.stores.version import Version

INCOMING = "incoming"
DESCRIPTION = "version.json"

_ABANDONED_SECONDS = 600.0
"""A file that has been incoming for so long has lost its writer."""
_UNSETTLED_SECONDS = 0.1
"""A folder that changed so recently may change again without its time changing."""
_NUMBERS = itertools.count()


def open_root(path: str) -> Path:
    """The folder `path`, made if it is missing. ConfigError if it cannot be written to."""
    root = Path(path).expanduser()
    try:
        (root / INCOMING).mkdir(parents=True, exist_ok=True)
        probe = root / INCOMING / f"probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cache_disk is {path}, which cannot be written to ({error.strerror}); name another folder") from None
    return root


class DiskStore:
    """The pages of one version in a root; sees, and may delete, those of other versions, as they share its bounds."""

    tier = "disk"

    def __init__(self, root: Path, version: Version) -> None:
        self.root = root
        self._version = version.id.hex()
        self._home = root / self._version
        self._incoming = root / INCOMING
        self._folders: dict[Path, _Folder] = {}
        try:
            self._home.mkdir(exist_ok=True)
            self._put(self._home / DESCRIPTION, [memoryview(json.dumps(version.facts, indent=1).encode())])
        except OSError as error:
            raise ConfigError(f"cache_disk {root} cannot be written to ({error.strerror})") from None

    def path(self, name: PageName) -> Path:
        """Where a page is, if it is."""
        return Path(self.place(name))

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        self._put(self.place(name), parts)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        file = os.open(self.place(name), os.O_RDONLY)
        try:
            return _fill(file, parts)
        finally:
            os.close(file)

    def touch(self, name: PageName) -> None:
        try:
            os.utime(self.place(name))
        except FileNotFoundError:
            return

    def delete(self, name: PageName | str) -> None:
        try:
            os.unlink(self.root / name if isinstance(name, str) else self.place(name))
        except FileNotFoundError:
            return

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        came: list[Entry] = []
        went: list[PageName | str] = []
        seen = set()
        for version in _folders(self.root):
            if version.name == INCOMING:
                _sweep(version)
                continue
            for path in _folders(version):
                seen.add(path)
                folder = self._folders.get(path)
                if folder is None:
                    folder = self._folders[path] = _Folder(path, version.name == self._version)
                folder.update(came, went)
        for path in self._folders.keys() - seen:
            went += self._folders.pop(path).names.values()
        return came, went

    def close(self) -> None:
        """Nothing is held open."""

    def place(self, name: PageName) -> str:
        """`path` as text."""
        key = name[1].hex()
        return f"{self._home}/{key[:2]}/{key}-{name[0]}"

    def _put(self, target: str | Path, parts: Sequence[memoryview]) -> None:
        beside = f"{self._incoming}/{os.getpid()}-{time.time_ns()}-{next(_NUMBERS)}"
        try:
            file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _drain(file, parts)
            finally:
                os.close(file)
            try:
                os.rename(beside, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(beside, target)
        except OSError:
            with suppress(OSError):
                os.unlink(beside)
            raise


class _Folder:
    """What one folder of pages held when it was last looked at."""

    def __init__(self, path: Path, own: bool) -> None:
        self.path = path
        self.own = own
        self.names: dict[str, PageName | str] = {}
        self._changed = -1

    def update(self, came: list[Entry], went: list[PageName | str]) -> None:
        """Looks again if the folder has changed; what is known already is not looked at, so a quiet folder costs one stat."""
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == self._changed:
                return
            self._changed = changed if time.time_ns() - changed > _UNSETTLED_SECONDS * 1e9 else -1
            gone = dict(self.names)
            for found in os.scandir(self.path):
                if gone.pop(found.name, None) is None:
                    self._add(found, came)
            for text, name in gone.items():
                del self.names[text]
                went.append(name)
        except FileNotFoundError:
            # The next look at the version's folder tells.
            return

    def _add(self, found: os.DirEntry[str], came: list[Entry]) -> None:
        try:
            facts = found.stat()
        except FileNotFoundError:
            return
        name: PageName | str | None = parse(found.name) if self.own else None
        if name is None:
            name = f"{self.path.parent.name}/{self.path.name}/{found.name}"
        self.names[found.name] = name
        came.append(Entry(name, facts.st_size, facts.st_mtime))


def parse(text: str) -> PageName | None:
    """The page that a file is named after."""
    key, dash, group = text.rpartition("-")
    try:
        return PageName(int(group), bytes.fromhex(key)) if dash and len(key) == 64 else None
    except ValueError:
        return None


def _folders(path: Path) -> Iterator[Path]:
    try:
        with os.scandir(path) as found:
            yield from [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return


def _sweep(incoming: Path) -> None:
    """Removes what writers that were killed have left."""
    long_ago = time.time() - _ABANDONED_SECONDS
    for entry in os.scandir(incoming):
        try:
            if entry.stat().st_mtime < long_ago:
                os.unlink(entry.path)
        except FileNotFoundError:
            continue


def _drain(file: int, parts: Sequence[memoryview]) -> None:
    """Writes all of it; OSError if the disk takes no more."""
    left = [part for part in parts if part.nbytes]
    while left:
        done = os.writev(file, left)
        if done == 0:
            raise OSError(errno.ENOSPC, "the disk takes no more")
        left = _rest(left, done)


def _fill(file: int, parts: Sequence[memoryview]) -> int:
    """Reads as much as there is and fits."""
    left, done = list(parts), 0
    while left:
        got = os.readv(file, left)
        if got == 0:
            break
        done += got
        left = _rest(left, got)
    return done


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """What of the parts lies behind the first `done` bytes."""
    while parts and done >= parts[0].nbytes:
        done -= parts[0].nbytes
        parts = parts[1:]
    return [parts[0][done:], *parts[1:]] if parts else []
