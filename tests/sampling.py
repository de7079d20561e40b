"""Cases of which `make test` runs some and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], every: int, first: int = 0, name: Callable[[Any], str] | None = None) -> list[Any]:
    """The values as parameters: one of `every` so many from the `first` on for `make test`, the others exhaustive."""
    return [pytest.param(value, marks=[] if place % every == first else [pytest.mark.exhaustive],
                         id=None if name is None else name(value)) for place, value in enumerate(values)]
