"""Where the benchmarks find real traces, schemas and models."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """PENSTOCK_TEST_DATA, as for the tests; by default the folder shared/data beside the repository."""
    return Path(os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
