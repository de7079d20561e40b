"""The folder for files that are built for this machine and kept between runs."""

import os
import tempfile
from functools import cache
from pathlib import Path


def cache_folder() -> Path:
    """Below XDG_CACHE_HOME or ~/.cache, or a folder for this process alone if that is not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _fallback()


@cache
def _fallback() -> Path:
    return Path(tempfile.mkdtemp(prefix="penstock-"))
