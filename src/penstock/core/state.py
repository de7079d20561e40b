"""Cache states of mixers, as data: the fields of a state, and which positions must be kept to continue at n.

Prefix hits, freeing, admission, eviction, offload and rollback are derived from `Retention` alone, so a new kind of state is
one small class here and one operation in `ops`."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "int8": 1,
               "int32": 4, "int64": 8}
"""Bytes per element by torch dtype name, for stored tensors and cached fields."""
MODEL_DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes in which a model can compute."""


FIELD_ALIGN = 16
"""Alignment of fields in bytes: the widest vector load of a GPU thread."""


@dataclass(frozen=True)
class Field:
    """One tensor of a state: `shape` of a position, or a page; `dtype` a torch name; `split` how tensor parallelism cuts it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: str = "heads"
    per: Literal["position", "page"] = "position"
    """"page": one value per page, such as a recurrent state's snapshot or a quantisation scale."""
    stripes: int = 1
    """Ranks that each hold an equal run of every page's positions."""

    @property
    def nbytes(self) -> int:
        """Bytes per position, or per page if `per` is "page"."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def page_bytes(self, page: int) -> int:
        """Bytes in a page of `page` positions."""
        return self.nbytes * (page // self.stripes if self.per == "position" else 1)


class _Retention(msgspec.Struct, frozen=True, tag=True):
    """The cached positions that must be resident to compute position n. By default one entry per position, which depends on the
    tokens up to it and is read by all later positions."""

    def needed(self, n: int) -> tuple[int, int]:
        """The half-open interval of positions that position n reads. Its lower end never falls as n grows."""
        return 0, n

    def widest(self, n: int) -> int:
        """The maximum length of `needed` for positions up to n."""
        return n - self.needed(n)[0]

    @property
    def exact(self) -> bool:
        """Whether a page holds one snapshot, the state after the last position written to it, instead of an entry per position.
        Such a page can be continued there alone and not be truncated. It is final when a segment ends on its border."""
        return False

    @property
    def ahead(self) -> int:
        """Number of following tokens on which an entry depends."""
        return 0


class Everything(_Retention, frozen=True):
    """Full attention: position n reads all before it."""


class Window(_Retention, frozen=True):
    """Sliding-window attention: a query sees `width` positions, itself among them."""

    width: int

    def needed(self, n: int) -> tuple[int, int]:
        return max(0, n - self.width + 1), n


class Chunk(_Retention, frozen=True):
    """Chunked local attention: a query sees its own chunk of `size` positions, up to itself."""

    size: int

    def needed(self, n: int) -> tuple[int, int]:
        return n - n % self.size, n

    def widest(self, n: int) -> int:
        return min(n, self.size - 1)


class Snapshot(_Retention, frozen=True):
    """A recurrent state (Mamba, gated delta networks, short convolutions): what all positions before n left behind."""

    back: int = 0
    """Positions by which it can go back, so that so many drafts may be rejected."""

    def needed(self, n: int) -> tuple[int, int]:
        return max(0, n - 1), n

    @property
    def exact(self) -> bool:
        return True


class Ahead(_Retention, frozen=True):
    """Full attention of a draft head: its entry at a position is made from the `tokens` that follow, too."""

    tokens: int = 1

    @property
    def ahead(self) -> int:
        return self.tokens


Retention = Everything | Window | Chunk | Snapshot | Ahead
"""Every kind, so that ranks in other processes can read them."""


@dataclass(frozen=True)
class StateSpec:
    """A mixer's cache state and its retention. States of equal `keep` share a cache group."""

    fields: tuple[Field, ...]
    keep: Retention
    aged: tuple[Field, ...] = ()
    """The fields as tiers behind the device keep them (`worker/ageing.py`); none: as the device does."""

    def __post_init__(self) -> None:
        assert not self.keep.exact or all(field.per == "page" for field in self.fields), \
            "every field of a snapshot state must be per page"
        assert len({field.name for field in self.fields}) == len(self.fields), "field names must be unique"

    def offsets(self, page: int) -> tuple[int, ...]:
        """Returns each field's byte offset within the state's part of a page of `page` positions, then the end."""
        found = [0]
        for field in self.fields:
            begin = -(-found[-1] // FIELD_ALIGN) * FIELD_ALIGN
            found[-1:] = [begin, begin + field.page_bytes(page)]
        return tuple(found)

    def page_bytes(self, page: int) -> int:
        """Bytes in a page of `page` positions."""
        return self.offsets(page)[-1]

    @property
    def behind(self) -> "StateSpec":
        """The state as tiers behind the device keep it."""
        return replace(self, fields=self.aged, aged=()) if self.aged else self
