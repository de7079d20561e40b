"""The tiers behind device memory (`hierarchy.py`). The prefix index decides which pages are kept; tiers move the bytes.

Transfers are part of plans. Within a plan the order is: saves, page copies (`core/plan.py::Move`), loads, then the step. So a
saved page may be reused by a copy, a load or a sequence of the same plan, and a copy's source may be the target of a load."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.cache.keys import Key
from penstock.core.plan import PageName


class Content(NamedTuple):
    """One whole page of a cache group: its contents (by key) and its page on the device."""

    group: int
    page: int
    """The page's id on the device: the source of a save, the target of a load."""
    key: Key
    """The key of the context up to the end of the page (`cache/keys.py`). With `group` and the layout it names the bytes."""


Listener = Callable[[str, PageName, bool], None]
"""Called with (tier, page, present) when a page enters or leaves a tier. Called from any thread; must not call the tiers."""
