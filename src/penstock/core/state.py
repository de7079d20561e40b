"""What a layer remembers, as data: the fields of one entry, and which positions must live to continue at n.

Prefix hits, freeing, admission, eviction, offload and rollback are derived from `Retention` alone, so a new kind of state is
one small class here and one operation in `ops`.
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

    def widest(self, n: int) -> int:
        """How many positions the interval has at most, for positions up to n."""
        ...

    @property
    def exact(self) -> bool:
        """A page holds the state behind the last position written to it instead of an entry for each, so it serves to
        continue at that one position and cannot be cut. Such a page is sealed where a segment ends on its border."""
        ...

    @property
    def ahead(self) -> int:
        """On how many tokens behind its own position an entry depends."""
        ...


@dataclass(frozen=True)
class _Entries:
    """An entry for each position, made from the tokens up to it and read by all that follow: what most kinds are but for one
    thing."""

    def needed(self, n: int) -> tuple[int, int]:
        return 0, n

    def widest(self, n: int) -> int:
        return n - self.needed(n)[0]

    @property
    def exact(self) -> bool:
        return False

    @property
    def ahead(self) -> int:
        return 0


@dataclass(frozen=True)
class Everything(_Entries):
    """Full attention: position n reads all before it."""


@dataclass(frozen=True)
class Window(_Entries):
    """Sliding-window attention: a query sees `width` positions, itself among them."""

    width: int

    def needed(self, n: int) -> tuple[int, int]:
        return max(0, n - self.width + 1), n


@dataclass(frozen=True)
class Chunk(_Entries):
    """Chunked local attention: a query sees its own chunk of `size` positions, up to itself."""

    size: int

    def needed(self, n: int) -> tuple[int, int]:
        return n - n % self.size, n

    def widest(self, n: int) -> int:
        return min(n, self.size - 1)


@dataclass(frozen=True)
class Snapshot(_Entries):
    """A recurrent state (Mamba, gated delta networks, short convolutions): what all positions before n left behind."""

    def needed(self, n: int) -> tuple[int, int]:
        return max(0, n - 1), n

    @property
    def exact(self) -> bool:
        return True


@dataclass(frozen=True)
class Ahead(_Entries):
    """Full attention of a draft head: its entry at a position is made from the `tokens` that follow, too."""

    tokens: int = 1

    @property
    def ahead(self) -> int:
        return self.tokens


@dataclass(frozen=True)
class StateSpec:
    """What one layer keeps per position, and for how long. Layers of equal `keep` share a cache group."""

    fields: tuple[Field, ...]
    keep: Retention

    @property
    def nbytes(self) -> int:
        """Bytes for one position of one layer; of an exact state, a page's share of it."""
        return sum(field.nbytes for field in self.fields)
