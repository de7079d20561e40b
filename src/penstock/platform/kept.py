"""Values that one start finds out and the next start of the same finds again, as JSON on disk.

A value is kept under a digest of all that it depends on, this package's sources and torch's and Triton's versions among it, so
it is never out of date. Where nothing can be written, nothing is kept. The folder is for all files built for this machine."""

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Below XDG_CACHE_HOME or ~/.cache, or a folder for this process alone if that is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return _fallback()


@cache
def _fallback() -> Path:
    return Path(tempfile.mkdtemp(prefix="penstock-"))


class Kept:
    """One value. Processes may read and write it at the same time."""

    def __init__(self, folder: Path, *what: object) -> None:
        """`what`: all that the value depends on besides sources and versions; told apart by their `repr`."""
        self._path = folder / f"{hashlib.sha256(repr(what).encode() + sources()).hexdigest()}.json"

    def read(self) -> Any:
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, value: Any) -> None:
        text = json.dumps(value)
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(f".{os.getpid()}")
            part.write_text(text)
            part.replace(self._path)


@cache
def sources() -> bytes:
    digest = hashlib.sha256()
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            digest.update(f"{name} {version(name)} ".encode())
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
