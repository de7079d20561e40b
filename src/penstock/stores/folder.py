"""The folder layout of the disk tier, and which files belong to the cache. All code that touches files uses it.

The user names FOLDER; the cache owns a subfolder that it created and marked, and in there only files with these names:

    FOLDER/penstock-cache/marker                            says that the subfolder is the cache's
    FOLDER/penstock-cache/pages/VERSION/ab/abcd...-GROUP    a page; VERSION is 32 hex digits, the key 64, ab the first two of it
    FOLDER/penstock-cache/incoming/PID-NANOSECONDS-NUMBER   a file being written

Any other file, wherever it lies, is never opened, counted or deleted. Symbolic links are never followed below FOLDER."""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.plan import PageName

LOG = logging.getLogger("penstock")

SUBFOLDER, MARKER, PAGES, INCOMING = "penstock-cache", "marker", "pages", "incoming"
DESCRIPTION = "version.json"
"""The file in a version's folder that describes the version, for people and `penstock cache`."""

_MARK = b"This folder belongs to the page cache of Penstock, which creates and deletes files in it.\n"
_VERSION = re.compile(r"[0-9a-f]{32}")
_BUCKET = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"([0-9a-f]{64})-([0-9]{1,4})")
_WRITING = re.compile(r"[0-9]+-[0-9]+-[0-9]+")
_NEUTRAL = {"lost+found", "tenants.secret"}
"""Entries of FOLDER that do not count as other people's files: a new file system's own, and the secret of a server."""
_ABANDONED_SECONDS = 600.0
"""A file in incoming/ older than this was abandoned by its writer."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class CacheFolder:
    """A claimed subfolder. `path` is FOLDER/penstock-cache with the links of FOLDER resolved."""

    path: Path

    def versions(self) -> Iterator[Path]:
        yield from _folders(self.path / PAGES, _VERSION)

    @staticmethod
    def buckets(version: Path) -> Iterator[Path]:
        yield from _folders(version, _BUCKET)

    def incoming(self) -> Iterator[os.DirEntry[str]]:
        """Files that are being written, or were when their writer was killed."""
        with suppress(FileNotFoundError), os.scandir(self.path / INCOMING) as found:
            yield from (entry for entry in found if _WRITING.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))

    @contextmanager
    def directory(self, *parts: str, make: bool = False) -> Iterator[int]:
        """A descriptor of a folder below, for calls with `dir_fd`; no component may be a link. With `make`, missing folders are
        created. OSError if that is not possible."""
        at = os.open(self.path, _DIRECTORY)
        try:
            for part in parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=at)
                below = os.open(part, _DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
            yield at
        finally:
            os.close(at)

    def remove(self, version: str, page: str) -> None:
        """Deletes a page's file; it may be gone already. ValueError for names that no page has."""
        if not _VERSION.fullmatch(version) or not _PAGE.fullmatch(page):
            raise ValueError(f"{version}/{page} is not a page")
        with suppress(FileNotFoundError), self.directory(PAGES, version, page[:2]) as folder:
            os.unlink(page, dir_fd=folder)

    def sweep(self) -> None:
        """Removes files that killed writers left in incoming/."""
        for entry in self.incoming():
            with suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < time.time() - _ABANDONED_SECONDS:
                    with self.directory(INCOMING) as folder:
                        os.unlink(entry.name, dir_fd=folder)


def claim(path: str, adopt: bool = False) -> CacheFolder:
    """The cache's subfolder of the folder `path`; both are created if missing.

    ConfigError if the folder holds other people's files and `adopt` does not permit that, or if the subfolder is not one that
    this user's Penstock created. OSError if the file system does not let us write now (full, read-only, no permission)."""
    outer = Path(path).expanduser()
    if outer.exists() and not outer.is_dir():
        raise ConfigError(f"cache_disk is {path}, which is not a folder; name a new or an empty one")
    outer.mkdir(parents=True, exist_ok=True)
    outer = outer.resolve()
    own = outer / SUBFOLDER
    if not os.path.lexists(own / MARKER):
        _check_free(outer, own, path, adopt)
        with suppress(FileExistsError):
            own.mkdir(mode=0o700)
        _check_own(own)
        _mark(own)
    folder = _opened(own)
    with folder.directory(PAGES, make=True), folder.directory(INCOMING, make=True):
        return folder


def find(path: Path) -> CacheFolder:
    """The cache's subfolder of a folder, for maintenance (`penstock cache`). ConfigError if there is none."""
    own = path.expanduser().resolve() / SUBFOLDER
    if not os.path.lexists(own / MARKER):
        raise ConfigError(f"{path} has no cache of Penstock's (no {SUBFOLDER}/{MARKER}); name what --cache-disk names")
    return _opened(own)


def parse(text: str) -> PageName | None:
    """The page that a file name stands for; None if it is not a page's name."""
    found = _PAGE.fullmatch(text)
    return PageName(int(found[2]), bytes.fromhex(found[1])) if found else None


def page_of(entry: os.DirEntry[str], bucket: str) -> PageName | None:
    """The page of a directory entry in a bucket; None unless it is a regular file named like a page of this bucket."""
    name = parse(entry.name)
    return name if name is not None and entry.name.startswith(bucket) and entry.is_file(follow_symlinks=False) else None


def _check_free(outer: Path, own: Path, path: str, adopt: bool) -> None:
    """ConfigError unless the subfolder may be created."""
    # The marker is looked for after the listing: another engine that starts now writes it before anything else.
    if os.path.lexists(own) and (own.is_symlink() or not own.is_dir() or not (
            all(name.startswith(MARKER) for name in os.listdir(own)) or os.path.lexists(own / MARKER))):
        raise ConfigError(f"cache_disk is {path}, but {own} is there already and was not created by Penstock (it has no "
                          f"{MARKER}); name another folder")
    foreign = sorted(name for name in os.listdir(outer) if name != SUBFOLDER and name not in _NEUTRAL)
    if foreign and not adopt:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ConfigError(f"cache_disk is {path}, a folder with other files in it ({', '.join(foreign[:3])}{more}). Name a new "
                          f"or an empty folder, or set cache_disk_adopt to let the cache create {SUBFOLDER}/ in this one; it "
                          "never touches files outside of that")


def _check_own(own: Path) -> None:
    """Removes other users' permissions from the subfolder. ConfigError unless it is a real folder owned by this user."""
    facts = own.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError(f"{own} is not a folder but {'a symbolic link' if stat.S_ISLNK(facts.st_mode) else 'a file'}; the "
                          "cache does not follow it. Name the folder itself as cache_disk")
    if facts.st_uid != os.geteuid():
        raise ConfigError(f"{own} belongs to user {facts.st_uid}, this is user {os.geteuid()}; whoever can write pages decides "
                          "what is answered, so only its owner uses a folder. Name another one")
    if facts.st_mode & 0o077:
        os.chmod(own, 0o700)
        if own.lstat().st_mode & 0o077:
            LOG.warning("other users may read or write %s, and this file system does not let that be changed", own)


def _mark(own: Path) -> None:
    """Writes the marker atomically, because another engine may do the same at the same time."""
    beside = own / f"{MARKER}.{os.getpid()}-{time.time_ns()}"
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(_MARK)
        os.rename(beside, own / MARKER)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _opened(own: Path) -> CacheFolder:
    """ConfigError for a folder or a marker that is not ours."""
    _check_own(own)
    marker = own / MARKER
    facts = marker.lstat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size != len(_MARK) \
            or marker.read_bytes() != _MARK:
        raise ConfigError(f"{marker} is not the marker that Penstock writes; name another folder as cache_disk")
    return CacheFolder(own)


def _folders(path: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    """Subfolders, not symbolic links, whose names match the pattern."""
    with suppress(FileNotFoundError), os.scandir(path) as found:
        yield from [Path(entry.path) for entry in found
                    if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
