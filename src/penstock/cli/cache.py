"""Look after a folder of cached pages (option --cache-disk): what is in it, how large it is, whether it is whole.
Engines may go on using the folder meanwhile: nothing here locks, and whatever is removed is computed again."""

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.flags import integer
from penstock.core.errors import ConfigError
from penstock.stores import record
from penstock.stores.folder import DESCRIPTION, CacheFolder, find, page_of, parse

_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, about in (("ls", "list the versions, or the pages of some"), ("stat", "sum up the folder"),
                        ("rm", "remove pages"), ("verify", "read every page and check it")):
        action = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        action.add_argument("folder", metavar="FOLDER", type=Path, help="what --cache-disk names")
        action.add_argument("--version", metavar="ID", help="only this version; the beginning of its id will do")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "ls":
            action.add_argument("--pages", action="store_true", help="list pages instead of versions")
        if name == "rm":
            action.add_argument("--unused", metavar="AGE", type=age, help="only pages not used for so long: 90s, 30m, 12h, 7d")
            action.add_argument("--keep-bytes", metavar="N", type=integer,
                                help="only the least recently used pages, until so many bytes are left")
            action.add_argument("--all", action="store_true", help="every page of the folder")
        if name == "verify":
            action.add_argument("--remove", action="store_true", help="remove what is broken")


def age(text: str) -> float:
    """Seconds, from a number with a unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age; possible are 90s, 30m, 12h and 7d")
    return float(match[1]) * _AGES[match[2]]


def run(args: argparse.Namespace) -> int:
    """0; for verify 1 if a page is broken. Raises ConfigError for a folder without a cache that this user owns."""
    folder = find(args.folder)
    versions = survey(folder, args.version)
    return {"ls": _list, "stat": _sum_up, "rm": _remove, "verify": _verify}[args.action](args, folder, versions)


@dataclass
class Page:
    path: Path
    nbytes: int
    used: float
    """When it was last written or read, in seconds since the epoch."""


@dataclass
class Kept:
    id: str
    facts: dict[str, Any]
    pages: list[Page] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages)

    @property
    def summary(self) -> dict[str, Any]:
        return {"version": self.id, "model": self.facts.get("model", "?"), "dtype": self.facts.get("dtype", "?"),
                "codec": self.facts.get("codec", "?"), "page_size": self.facts.get("page_size", 0), "pages": len(self.pages),
                "bytes": self.nbytes, "last_used": max((page.used for page in self.pages), default=0.0)}


def survey(folder: CacheFolder, version: str | None = None) -> list[Kept]:
    """The versions in a folder whose id begins with `version`, the most recently used first."""
    found = []
    for path in sorted(folder.versions()):
        if not path.name.startswith(version or ""):
            continue
        try:
            facts = json.loads((path / DESCRIPTION).read_text())
        except (OSError, ValueError):
            facts = {}
        found.append(Kept(path.name, facts if isinstance(facts, dict) else {}, list(_pages(folder, path))))
    if version is not None and not found:
        raise ConfigError(f"{folder.path} has no version {version!r}; `penstock cache ls` lists them")
    return sorted(found, key=lambda kept: -kept.summary["last_used"])


def _pages(folder: CacheFolder, version: Path) -> Iterator[Page]:
    for bucket in folder.buckets(version):
        with suppress(FileNotFoundError), os.scandir(bucket) as found:
            for entry in found:
                if page_of(entry, bucket.name) is None:
                    continue
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    yield Page(Path(entry.path), facts.st_size, facts.st_mtime)


def _list(args: argparse.Namespace, _folder: CacheFolder, versions: list[Kept]) -> int:
    if args.pages:
        pages: list[dict[str, Any]] = [
            {"version": kept.id, "page": page.path.name, "bytes": page.nbytes, "last_used": page.used}
            for kept in versions for page in sorted(kept.pages, key=lambda page: -page.used)]
        _print(args, pages, [f"{page['page']}  {page['bytes']:>12,}  {_ago(page['last_used'])}" for page in pages])
        return 0
    found = [kept.summary for kept in versions]
    lines = [f"{one['version']}  {one['pages']:>9,} pages  {one['bytes']:>16,} bytes  {_ago(one['last_used']):>9}  "
             f"{one['dtype']}  {one['model']}" for one in found]
    _print(args, found, lines or ["no pages"])
    return 0


def _sum_up(args: argparse.Namespace, folder: CacheFolder, versions: list[Kept]) -> int:
    pages = [page for kept in versions for page in kept.pages]
    incoming = [entry.stat(follow_symlinks=False).st_size for entry in folder.incoming()]
    now = time.time()
    figures = {"versions": len(versions), "pages": len(pages), "bytes": sum(page.nbytes for page in pages),
               "tokens": sum(_tokens(kept) for kept in versions),
               "used_within": {name: sum(now - page.used <= seconds for page in pages)
                               for name, seconds in (("hour", 3600), ("day", 86400), ("week", 604800))},
               "incoming_files": len(incoming), "incoming_bytes": sum(incoming)}
    _print(args, figures, [f"{name.replace('_', ' ')}: {_plain(value)}" for name, value in figures.items()])
    return 0


def _tokens(kept: Kept) -> int:
    """Positions of context that a version's pages cover: those of the cache group that has most."""
    groups = Counter(name.group for page in kept.pages if (name := parse(page.path.name)) is not None)
    return max(groups.values(), default=0) * int(kept.facts.get("page_size", 0))


def _remove(args: argparse.Namespace, folder: CacheFolder, versions: list[Kept]) -> int:
    if not (args.all or args.version or args.unused is not None or args.keep_bytes is not None):
        raise ConfigError("say what to remove: --version ID, --unused AGE, --keep-bytes N, or --all")
    pages = sorted((page for kept in versions for page in kept.pages), key=lambda page: page.used)
    if args.unused is not None:
        pages = [page for page in pages if time.time() - page.used > args.unused]
    left, doomed = sum(kept.nbytes for kept in versions), []
    for page in pages:
        if args.keep_bytes is not None and left <= args.keep_bytes:
            break
        left -= page.nbytes
        doomed.append(page)
    for page in doomed:
        folder.remove(page.path.parent.parent.name, page.path.name)
    nbytes = sum(page.nbytes for page in doomed)
    _print(args, {"removed_pages": len(doomed), "removed_bytes": nbytes, "bytes": left},
           [f"removed {len(doomed):,} pages, {nbytes:,} bytes; {left:,} bytes are left"])
    return 0


def _verify(args: argparse.Namespace, folder: CacheFolder, versions: list[Kept]) -> int:
    checked, broken = 0, []
    for kept in versions:
        for page in kept.pages:
            try:
                why = fault_of(page.path, kept.id)
            except FileNotFoundError:
                continue
            except OSError as error:
                why = str(error)
            checked += 1
            if why is not None:
                broken.append({"page": str(page.path.relative_to(folder.path)), "fault": why})
                if args.remove:
                    folder.remove(kept.id, page.path.name)
    verb = "removed" if args.remove else "broken"
    _print(args, {"checked": checked, "broken": broken},
           [*(f"{one['page']}: {one['fault']}" for one in broken), f"{checked:,} pages checked, {len(broken):,} {verb}"])
    return 1 if broken else 0


def fault_of(path: Path, version: str) -> str | None:
    """The fault of a page's file in the folder of `version`; None if it is good."""
    data, name = memoryview(path.read_bytes()), parse(path.name)
    assert name is not None, "it was found by its name"
    if len(data) < record.HEADER_BYTES:
        return f"it ends after {len(data)} bytes, within the header"
    return record.fault(bytes.fromhex(version), name, data[:record.HEADER_BYTES], data[record.HEADER_BYTES:])


def _print(args: argparse.Namespace, data: Any, lines: list[str]) -> None:
    print(json.dumps(data, indent=2) if args.json else "\n".join(lines))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{inner:,} in the last {name}" for name, inner in value.items())
    return f"{value:,}"


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    unit, size = next(((unit, size) for unit, size in reversed(_AGES.items()) if seconds >= size), ("s", 1))
    return f"{seconds / size:.0f}{unit} ago" if then else "never"
