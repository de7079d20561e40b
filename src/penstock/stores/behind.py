"""The tiers behind a device as a rank needs them: the amount of host memory, and the stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.stores import Store


class Behind(NamedTuple):
    """The worker's half of the tiers. The receiver owns the stores and closes them."""

    host_slabs: int
    stores: Sequence[Store]
    version: bytes
    """The version of the pages in the stores (`stores/version.py`)."""
