"""What a layer remembers, as data: the fields of one entry, and which positions must live to continue at n.

Prefix hits, freeing, admission, eviction, offload and rollback are derived from `Retention.needed` alone, so a new kind of
state is one small class here and one operation in `ops`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Field:
    """One tensor of an entry: `shape` per position, `dtype` a torch name, `split` how tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: str = "heads"

    @property
    def nbytes(self) -> int:
        """Bytes for one position."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Retention(Protocol):
    """Which cached positions must be alive so that position n can be computed."""

    def needed(self, n: int) -> tuple[int, int]:
        """The half-open interval of positions that position n reads. Its lower end never falls as n grows."""
        ...


@dataclass(frozen=True)
class Everything:
    """Full attention: position n reads all before it."""

    def needed(self, n: int) -> tuple[int, int]:
        return 0, n


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: a query sees `width` positions, itself among them."""

    width: int

    def needed(self, n: int) -> tuple[int, int]:
        return max(0, n - self.width + 1), n


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps per position, and for how long. Layers of equal `keep` share a cache group."""

    fields: tuple[Field, ...]
    keep: Retention

    @property
    def nbytes(self) -> int:
        """Bytes for one position of one layer."""
        return sum(field.nbytes for field in self.fields)
