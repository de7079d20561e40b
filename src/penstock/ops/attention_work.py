"""How the attention of a step is divided over the programs of a GPU: items, made on the host with numpy.

A tile is a few consecutive queries of one segment; an item is a tile and a range of its keys, one program for each KV head.
There are two kinds of tiles. Narrow ones, for segments of few queries, are bound by memory: their keys are split over as many
programs as keep the memory busy. Broad ones, for prompts, are bound by arithmetic, and split only if there are few of them for
many keys. What the items of a kind look like is its `Shape`, a function of the geometry alone; how many there may be, and where
they stand in the step's array, is its `Launch`.

A narrow tile may also be the single queries of several segments whose contexts begin in the same pages
(`attention_sharing.py`): some items then have all of its queries for those keys, others one of them each for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from penstock.ops.attention import Geometry, Ints, SharedPrefixes
from penstock.ops.attention_sharing import SharedTiles, shared_tiles
from penstock.ops.gpu import MULTIPROCESSORS, covering

Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

_LARGER = np.array([[16], [18], [20], [24], [28], [32]])
"""Sizes of items to try, in sixteenths of the least one."""


class Item:
    """The int32 of an item, in the order in which the kernel takes them."""

    TOKEN = 0
    """The first token of its tile, unless the tile's queries are listed."""
    QUERIES = 1
    """0: the item is inert."""
    POSITION = 2
    """Of its first query."""
    SEGMENT = 3
    """By whose table it reads."""
    BEGIN = 4
    END = 5
    """Its keys."""
    UNIT = 6
    """Of keys, at which sums are closed where bits must not depend on the batch."""
    COMPLETE = 7
    """Parts after which its tile is complete; 1: there is nothing to join."""
    FIRST = 8
    """Which query of its tile is its first; others than 0 only where they are listed."""
    SLOT = 9
    """Of its first part."""
    LISTED = 10
    """1 + where the tile's queries are listed; 0: they follow one another."""
    COUNTER = 11
    """The tile's."""
    TILE_SLOT = 12
    """Of the tile's first part."""
    TILE_QUERIES = 13
    PARTS = 14
    """Parts that have all of the tile's queries."""
    MOST = 15
    """Most parts that one of them has to itself."""


FIELDS = 16

LISTED = 3
"""int32 of a query in the list: token, slot of the first part that it has to itself, how many of those there are."""

JOINING = 32
"""Keys that a program reads in the time in which it joins a part. K keys in p parts take K / p + p * JOINING, which is least
for items of sqrt(K * JOINING) keys; smaller ones are not made."""

WORTH = 256
"""Keys of an item that is made only so that no multiprocessor stands still at the end."""

UNITS = 32
"""Most parts a query's keys are cut into where bits must not depend on the batch."""

FIRST_UNIT = 512
"""Keys of such a part for queries at positions below FIRST_UNIT * UNITS; it doubles where the position does."""


@dataclass(frozen=True)
class Shape:
    """A tile and how a program goes over its keys."""

    block_m: int
    """Rows of the matrix unit's tile: queries x heads of a group, and padding."""
    block_n: int
    """Keys in a block."""
    queries: int
    """Most queries of a tile."""
    warps: int
    stages: int
    resident: int
    """Programs that a multiprocessor holds at a time; work that is split makes so many."""


@dataclass(frozen=True)
class Launch:
    """The items of one kind, as far as they depend on what a step is padded to."""

    shape: Shape
    items: int
    split: int
    """Most items beyond one a tile, or beyond one for each range of keys of a tile of several segments."""
    slots: int
    """Room for parts; a part has a slot for each query."""
    shared: bool
    """Whether there may be tiles of several segments,"""
    several: int
    """and how many."""
    offset: int
    """Where the items begin in the step's array,"""
    mates: int
    """the list of the queries of tiles of several segments,"""
    counters: int
    """and the counters, one for each tile in parts and KV head: zero, and zero again when a launch has ended."""
    end: int


@dataclass(frozen=True)
class Layout:
    """Both kinds, and the array's length. `broad` is None in steps which are all narrow."""

    narrow: Launch
    broad: Launch | None
    size: int


def shares(geometry: Geometry, invariant: bool) -> bool:
    """Whether tiles of several segments are made. Not where bits must not depend on the batch, nor behind a window, which
    leaves little of what contexts begin with; and a tile must have room for two."""
    return not (invariant or geometry.window) and shapes(geometry, 1, invariant)[0].queries > 1


def shapes(geometry: Geometry, segments: int, invariant: bool) -> tuple[Shape, Shape]:
    """The narrow and the broad shape for steps of up to so many segments: what `bench/gpu_attention.py --sweep` found best."""
    group = geometry.heads // geometry.kv_heads
    rows = max(16, covering(group))
    assert rows <= 128, f"{group} query heads share a KV head; these kernels serve up to 128"
    wide = geometry.head_size > 128
    if geometry.itemsize == 4:
        # Products of float32 are not for the matrix unit: small tiles, so that they fit.
        tall = max(32, rows)
        narrow, broad = Shape(rows, 32, rows // group, 4, 2, 2), Shape(tall, 32, tall // group, 8, 2, 1)
        return (broad, broad) if invariant else (narrow, broad)
    if invariant:
        # One shape of matrix instruction and one block of keys for all: the bits of a row are then those of any other.
        tall = max(64, rows)
        if wide:
            return Shape(tall, 32, max(1, 16 // group), 8, 3, 1), Shape(tall, 32, tall // group, 8, 3, 1)
        return Shape(tall, 64, max(1, 16 // group), 4, 3, 2), Shape(128, 64, 128 // group, 8, 3, 1)
    broad = Shape(128, 32 if wide else 64, 128 // group, 8, 3, 1)
    if segments * geometry.kv_heads <= MULTIPROCESSORS:
        # Too little to keep the memory busy: what counts is how soon a program is through with its keys.
        return Shape(rows, 64 if wide else 128, rows // group, 8, 3, 1), broad
    if segments * geometry.kv_heads <= 2 * MULTIPROCESSORS:
        return Shape(rows, 32 if wide else 64, rows // group, 4, 4, 2), broad
    return Shape(rows, 32 if wide else 64, rows // group, 4, 3, 3), broad


@lru_cache(maxsize=4096)
def layout(geometry: Geometry, segments: int, tokens: int, invariant: bool) -> Layout:
    """The array's layout. Equal arguments, equal layout: the host's array and the launches of a captured graph agree by it."""
    narrow, broad = shapes(geometry, segments, invariant)
    # A step of one query a segment, or of a few drafted ones, needs no broad tiles; a larger one may have long segments.
    mixed = tokens > max(segments, 2 * narrow.queries)
    pieces = segments
    if invariant:
        pieces += segments + tokens // (FIRST_UNIT * UNITS // 2)
    tiles = min(tokens, pieces if mixed else _tiles_at_most(tokens, pieces, narrow.queries))
    first = _launch(narrow, tiles, 0, geometry.kv_heads, invariant, segments if shares(geometry, invariant) else None)
    if not mixed:
        return Layout(first, None, first.end)
    second = _launch(broad, _tiles_at_most(tokens, pieces, broad.queries), first.end, geometry.kv_heads, invariant)
    return Layout(first, second, second.end)


def _tiles_at_most(tokens: int, pieces: int, queries: int) -> int:
    """The most tiles of `queries` that `tokens` in so many pieces can need."""
    return min(tokens, (tokens + pieces * (queries - 1)) // queries)


def _launch(shape: Shape, tiles: int, offset: int, kv_heads: int, invariant: bool, sharing: int | None = None) -> Launch:
    """`sharing`: so many segments may be in tiles of several."""
    split, mates = max(1, MULTIPROCESSORS * shape.resident // kv_heads), sharing or 0
    # Room for full ones, or for as many of any size as run at once.
    several = min(mates // 2, max(mates // shape.queries, split))
    # `_fill` adds at most `split` items to the tiles: a tile in parts has at most twice as many as were added for it. Tiles of
    # several, and those of their segments, always are in parts.
    slots = (min(tiles, split) * UNITS if invariant else 2 * split) * shape.queries + 2 * mates
    # What a step does not need is inert, and not free: where there are tiles of several, less may be split.
    items = tiles + max(split, several + split * 2 // 3)
    listed = offset + _round(items, 8) * FIELDS
    counters = listed + _round(mates * LISTED, 16)
    end = _round(counters + (min(tiles, split) + several) * kv_heads, 16)
    return Launch(shape, items, split, slots, sharing is not None, several, offset, listed, counters, end)


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def correct(work: torch.Tensor, plan: Layout, lag: torch.Tensor) -> None:
    """Moves the queries of a step's array to where they stand: AttentionOps.correct.

    An item's keys stay as they are: programs read none beyond their queries, so an item that lies wholly beyond contributes
    nothing. Items of keys that several segments share stay, too: those keys lie before all of their queries in any case.
    """
    for launch in (plan.narrow, plan.broad):
        if launch is not None:
            items = work[launch.offset:launch.offset + launch.items * FIELDS].view(-1, FIELDS)
            own = (items[:, Item.LISTED] == 0) | (items[:, Item.QUERIES] == 1)
            items[:, Item.POSITION] -= lag[items[:, Item.SEGMENT].long()] * own


def prepare(geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int, invariant: bool,
            without: Sequence[int] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints:
    """The step's array: AttentionOps.prepare (ops/attention.py), `without` some of the segments."""
    plan = layout(geometry, segments, tokens, invariant)
    work = np.zeros(plan.size, np.int32)
    wanted = counts > 0
    if without:
        wanted[list(without)] = False
    if plan.broad is None:
        _fill(work, plan.narrow, geometry, counts, context, wanted, invariant, shared, slack)
        return work
    few = counts <= plan.narrow.shape.queries
    _fill(work, plan.narrow, geometry, counts, context, wanted & few, invariant, shared, slack)
    _fill(work, plan.broad, geometry, counts, context, wanted & ~few, invariant, None, slack)
    return work


def _fill(work: Ints, launch: Launch, geometry: Geometry, counts: Ints, context: Ints, chosen: Flags, invariant: bool,
          shared: SharedPrefixes | None = None, slack: Ints | None = None) -> None:
    """Writes the items of the chosen segments."""
    segment = chosen.nonzero()[0].astype(np.int32)
    if not len(segment):
        return
    shape = launch.shape
    token, queries, position = counts.cumsum(dtype=np.int32) - counts, counts, context - counts
    if len(segment) < len(counts):
        token, queries, position = token[segment], queries[segment], position[segment]
    if int(queries.max()) > 1:
        if invariant:
            segment, token, queries, position = _cut_at_units(segment, token, queries, position)
        segment, token, queries, position = _cut(segment, token, queries, position, shape.queries)
    end = position + queries
    unit = np.maximum(FIRST_UNIT, _power_of_two(-(-end // UNITS))) if invariant else np.int32(shape.block_n)
    begin = np.zeros_like(end)
    if geometry.window:
        # The keys of any position where the first query may stand.
        least = position if slack is None else position - slack[segment]
        begin = np.maximum(least + (1 - geometry.window), 0) // unit * unit
    found = _found(launch, shared, end)
    if found is not None:
        own, more = _several(found, segment, token, begin)
        token, queries, position, segment, begin, end = map(
            np.concatenate, zip((token, queries, position, segment, begin, end), more, strict=True))
    blocks = -((begin - end) // unit)
    keys = blocks * unit
    items = _items(keys, unit, launch.split, launch.items)
    each = -(-blocks // items) * unit
    items = -(-keys // each)
    rows = np.zeros((len(segment), FIELDS), np.int32)
    for column, values in enumerate((token, queries, position, segment, begin, end, unit, 1)):
        rows[:, column] = values
    total = int(items.sum())
    if total > len(rows) or found is not None:
        split = counted = items > 1
        if found is not None:
            # Segments that go with others are counted where their tile is.
            split[own] = split[-len(found.keys):] = True
            counted = split.copy()
            counted[own] = False
        parts = np.where(split, blocks, 1) if invariant else items
        slots = parts * queries * split
        rows[:, Item.SLOT] = rows[:, Item.TILE_SLOT] = slots.cumsum() - slots
        rows[:, Item.COMPLETE] = rows[:, Item.PARTS] = parts
        rows[:, Item.COUNTER] = counted.cumsum() - 1
        rows[:, Item.TILE_QUERIES] = queries
        if found is not None:
            _list(work[launch.mates:launch.counters], rows, found, own, items)
        rows = _repeat(rows, items, each, each // unit if invariant else None)
    if total > launch.split:
        # More than are run at once: the longest first, so that none is left over at the end.
        rows = rows[np.argsort(rows[:, Item.BEGIN] - rows[:, Item.END], kind="stable")]
    work[launch.offset:launch.offset + rows.size] = rows.ravel()


def _repeat(rows: Ints, items: Ints, each: Ints, parts: Ints | None) -> Ints:
    """Each row cut into so many items of `each` keys, the last perhaps fewer, and `parts` parts, or one."""
    index = np.arange(items.sum(), dtype=np.int32) - (items.cumsum(dtype=np.int32) - items).repeat(items)
    each, rows = each.repeat(items), rows.repeat(items, 0)
    rows[:, Item.BEGIN] += index * each
    np.minimum(rows[:, Item.END], rows[:, Item.BEGIN] + each, out=rows[:, Item.END])
    rows[:, Item.SLOT] += index * rows[:, Item.QUERIES] * (1 if parts is None else parts.repeat(items))
    return rows


def _found(launch: Launch, shared: SharedPrefixes | None, keys: Ints) -> SharedTiles | None:
    """Tiles of several segments, unless so few keys are read that all items run at once without them."""
    if shared is None or not launch.shared or int(keys.sum()) <= launch.split * math.isqrt(JOINING * int(keys.max())):
        return None
    return shared_tiles(shared, launch.shape.queries, launch.shape.block_n, launch.several)


def _several(found: SharedTiles, segment: Ints, token: Ints, begin: Ints) -> tuple[Places, tuple[Ints, ...]]:
    """Has the segments that go with others begin where their own keys do. Returns which tiles these are, and further tiles for
    the keys that they share: token, queries, position, segment, begin and end."""
    own = np.searchsorted(segment, found.mates)
    begin[own] = found.keys[found.tile]
    lead = found.mates[found.first]
    # All queries stand behind all shared keys, which is what their position says.
    return own, (token[own[found.first]], found.sizes, found.keys, lead, np.zeros_like(lead), found.keys)


def _list(mates: Ints, rows: Ints, found: SharedTiles, own: Places, items: Ints) -> None:
    """Lists the queries of tiles of several segments, and has all items of a tile, those of its queries too, know the tile."""
    listed = mates[:len(own) * LISTED].reshape(-1, LISTED)
    listed[:, 0], listed[:, 1], listed[:, 2] = rows[own, Item.TOKEN], rows[own, Item.SLOT], items[own]
    tiles = rows[-len(found.keys):]
    tiles[:, Item.COMPLETE] += np.add.reduceat(listed[:, 2], found.first)
    tiles[:, Item.LISTED] = found.first + 1
    tiles[:, Item.MOST] = np.maximum.reduceat(listed[:, 2], found.first)
    rows[own, Item.COMPLETE] = tiles[found.tile, Item.COMPLETE]
    rows[own, Item.LISTED:] = tiles[found.tile, Item.LISTED:]
    rows[own, Item.FIRST] = np.arange(len(own), dtype=np.int32) - found.first[found.tile]


def _items(keys: Ints, unit: Ints | np.int32, split: int, room: int) -> Ints:
    """Items for each tile, at most `split` more than there are tiles and `room` in all: as many of equal size as run at once,
    or a few more. The largest of the sizes makes at most half of `split` more items than there are tiles."""
    total = int(keys.sum())
    least = max(math.isqrt(JOINING * int(keys.max())), -(-total // split))
    sizes = _LARGER if len(keys) < split else _LARGER[[0, -1]]
    items = -(-keys // (-(-least * sizes // 16 // unit) * unit))
    count = items.sum(1)
    # Where no size has all run at once, the finest for which there is room leaves least for the end.
    found = items[int((count <= (split if count.min() <= split else room)).argmax())]
    return _last_round(found, keys, split, room) if len(keys) > split and int(found.max()) == 1 else found


def _last_round(items: Ints, keys: Ints, split: int, room: int) -> Ints:
    """The same for whole tiles of which `split` are run at a time: those left over for the last round, the shortest, are cut so
    that all take part in it."""
    rest = len(keys) % split
    parts = min(split // rest, 1 + (room - len(keys)) // rest) if rest else 1
    if parts > 1:
        short = np.argpartition(keys, rest)[:rest]
        items[short] = np.clip(keys[short] // WORTH, 1, parts)
    return items


def _power_of_two(number: Ints) -> Ints:
    """The least power of two that is not below."""
    return (2 ** np.ceil(np.log2(number))).astype(np.int32)


def _cut(segment: Ints, token: Ints, queries: Ints, position: Ints, most: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Pieces into tiles of `most` queries, the last of a piece perhaps fewer."""
    tiles = -(-queries // most)
    index = np.arange(tiles.sum(), dtype=np.int32) - np.repeat(np.cumsum(tiles, dtype=np.int32) - tiles, tiles)
    at = index * most
    return (np.repeat(segment, tiles), np.repeat(token, tiles) + at, np.minimum(np.repeat(queries, tiles) - at, most),
            np.repeat(position, tiles) + at)


def _cut_at_units(segment: Ints, token: Ints, queries: Ints, position: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts pieces where the unit of a query's keys doubles, so that all queries of a piece have the same."""
    edge = FIRST_UNIT * UNITS
    while edge < int((position + queries).max()):
        across = np.flatnonzero((position < edge) & (position + queries > edge))
        if len(across):
            front = edge - position[across]
            more = (segment[across], token[across] + front, queries[across] - front, position[across] + front)
            queries = queries.copy()
            queries[across] = front
            segment, token, queries, position = (np.concatenate(pair) for pair in
                                                 zip((segment, token, queries, position), more, strict=True))
        edge *= 2
    return segment, token, queries, position
