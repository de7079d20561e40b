"""What is behind a device, as a rank is told it: how much host memory, and which stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.stores import Store


class Behind(NamedTuple):
    """The worker's half of the tiers. Whoever is given it closes the stores."""

    host_slabs: int
    stores: Sequence[Store]
    version: bytes
    """Of the pages in the stores (`stores/version.py`)."""
