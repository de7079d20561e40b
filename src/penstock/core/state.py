"""Cache states of mixers, as data: the fields of a state, and which positions must be kept to continue at n.

Prefix hits, freeing, admission, eviction, offload and rollback follow from `Retention`: a new state is a class and an op.

The arena's layout is shared by engine and worker. A group is the states of equal retention, most often one of each layer. A
page holds all states of its group for a stretch of positions, or one snapshot of each, so any tier can move it in one copy. The
arena is cut into equal slabs, lent to groups and carved into their pages, so groups of different page sizes trade memory."""

import math
from bisect import bisect_right
from collections.abc import Sequence
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
    """One tensor of a state: `shape` of a position, or a page; `dtype` a torch name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
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


ALIGN = 64
"""Alignment in bytes: a cache line, and a multiple of every vector load."""


@dataclass(frozen=True)
class Group:
    """States that share pages. Sizes in bytes; `stride` is the distance between pages, constant across slabs."""

    layers: tuple[int, ...]
    """Indices of the states in the model's list."""
    keep: Retention
    offsets: tuple[int, ...]
    """Byte offset of each state within a page."""
    page_bytes: int
    per_slab: int
    stride: int


@dataclass(frozen=True)
class CacheLayout:
    """`page` positions to a page in every group; `slabs` slabs of `slab_bytes`."""

    page: int
    groups: tuple[Group, ...]
    slab_bytes: int
    slabs: int

    @property
    def nbytes(self) -> int:
        return self.slab_bytes * self.slabs

    def pages_for(self, group: Group, length: int, chunk: int) -> int:
        """The most pages of `group` that a sequence of `length` positions holds at once, computed `chunk` at a time."""
        if group.keep.exact:
            # The state where a segment starts, and where it ends; a segment behind drafts may start in the page before.
            return min(-(-length // self.page), 3 if isinstance(group.keep, Snapshot) and group.keep.back else 2)
        most = min(length, group.keep.widest(length) + chunk)
        # A stretch that starts inside a page touches one page more.
        return min(-(-length // self.page), -(-most // self.page) + (0 if most == length else 1))

    def slabs_for(self, length: int, chunk: int) -> int:
        """Slabs that a sequence of `length` positions needs if it is alone."""
        return sum(-(-self.pages_for(group, length, chunk) // group.per_slab) for group in self.groups)

    def longest(self, chunk: int) -> int:
        """The largest length for which one sequence alone fits."""
        return bisect_right(range(1 << 40), self.slabs, key=lambda length: self.slabs_for(length, chunk)) - 1


def lay_out(states: Sequence[StateSpec], page: int, arena_bytes: int) -> CacheLayout:
    """Groups the states by retention and cuts `arena_bytes` into slabs; the result may have 0 slabs if it is too small."""
    by_keep: dict[Retention, list[int]] = {}
    for layer, state in enumerate(states):
        by_keep.setdefault(state.keep, []).append(layer)
    sizes: list[tuple[Retention, list[int], list[int], int]] = []
    for keep, layers in by_keep.items():
        offsets, at = [], 0
        for layer in layers:
            offsets.append(at)
            at += _up(states[layer].page_bytes(page), ALIGN)
        sizes.append((keep, layers, offsets, at))
    largest = max(size for *_, size in sizes)
    counts = [largest // size for *_, size in sizes]
    # Every slab divides evenly by each group's count, so page addresses have one stride through the whole arena.
    slab = _up(largest, ALIGN * math.lcm(*counts))
    groups = tuple(Group(tuple(layers), keep, tuple(offsets), size, count, slab // count)
                   for (keep, layers, offsets, size), count in zip(sizes, counts, strict=True))
    return CacheLayout(page, groups, slab, arena_bytes // slab)


def layout_behind(layout: CacheLayout, states: Sequence[StateSpec]) -> CacheLayout:
    """The layout of the tiers behind the device: the same groups, and as many slabs, whose pages may be smaller."""
    return replace(lay_out([state.behind for state in states], layout.page, 0), slabs=layout.slabs)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
