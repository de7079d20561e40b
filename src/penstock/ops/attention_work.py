"""Divides the attention of a step into work items for the GPU's programs, on the host with numpy.

A tile is a few consecutive queries of one segment. An item is a tile and a range of its keys (split-K); one program per KV head
runs it. Narrow tiles, for segments of few queries, are memory-bound: their keys are split over as many programs as saturate the
memory. Broad tiles, for prefill, are compute-bound, and are split only if few tiles have many keys. `Shape` is the tile size of
a kind, a function of the geometry alone. `Launch` is the number of its items and their place in the step's array.

A narrow tile may also hold the single queries of several segments with a shared prefix (`attention_sharing.py`): some items
then have all of its queries for the keys of the prefix, and others have one query each for that segment's own keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
"""Item sizes to try, in sixteenths of the smallest one."""


class WorkItem:
    """Indices of an item's int32 fields, in the kernel's order."""

    TOKEN = 0
    """First token of the tile, unless the tile's queries are listed."""
    QUERIES = 1
    """Number of queries; 0: the item is inert."""
    POSITION = 2
    """Position of the first query."""
    SEGMENT = 3
    """Segment whose row of the block table it reads."""
    BEGIN = 4
    END = 5
    """The item reads keys [BEGIN, END)."""
    UNIT = 6
    """Batch-invariant mode: keys per unit; partial sums end at multiples of it."""
    COMPLETE = 7
    """Number of parts that complete the tile; 1: there is nothing to merge."""
    FIRST = 8
    """Index in the tile of the item's first query; nonzero only if the queries are listed."""
    SLOT = 9
    """Scratch slot of the item's first part."""
    LISTED = 10
    """1 + index of the tile's first query in the list; 0: the queries are consecutive tokens."""
    COUNTER = 11
    """Index of the tile's counter."""
    TILE_SLOT = 12
    """Scratch slot of the tile's first part."""
    TILE_QUERIES = 13
    PARTS = 14
    """Number of parts that hold all of the tile's queries."""
    MOST = 15
    """Maximum number of parts that hold one query alone."""


FIELDS = 16

LISTED = 3
"""int32 per listed query: its token, the slot of its first own part, and the number of its own parts."""

JOINING = 32
"""Cost of merging a part, in keys read. K keys in p parts take K / p + p * JOINING, which is smallest for items of
sqrt(K * JOINING) keys; smaller items are not made. Over latents, of which reading one takes longer, it is half as much."""

WORTH = 256
"""Minimum keys of an item that is split off only to keep multiprocessors busy in the last wave."""

UNITS = 32
"""Batch-invariant mode: maximum number of units that a query's keys are split into."""

FIRST_UNIT = 512
"""Batch-invariant mode: keys per unit for positions below FIRST_UNIT * UNITS; the unit doubles each time the position does."""


@dataclass(frozen=True)
class Shape:
    """Tile sizes and launch parameters of one kind of items."""

    block_m: int
    """Rows of the MMA tile: queries x query heads per KV head, padded."""
    block_n: int
    """Keys per block."""
    queries: int
    """Maximum queries per tile."""
    warps: int
    stages: int
    resident: int
    """Programs resident per multiprocessor; split-K creates enough items to fill them."""


@dataclass(frozen=True)
class Launch:
    """The sizes and offsets of one kind of items, fixed by the step's bucket."""

    shape: Shape
    items: int
    split: int
    """Maximum number of items that split-K adds to one per tile, or to one per key range of a shared-prefix tile."""
    slots: int
    """Scratch slots for parts; a part takes one slot per query."""
    shared: bool
    """Whether shared-prefix tiles are possible."""
    several: int
    """Maximum number of shared-prefix tiles."""
    offset: int
    """Offset of the items in the step's array."""
    mates: int
    """Offset of the list of the shared-prefix tiles' queries."""
    counters: int
    """Offset of the counters, one per split tile and KV head: zero before and after each launch."""
    end: int


@dataclass(frozen=True)
class Layout:
    """The launches of both kinds and the array's length. `broad` is None for steps with narrow tiles only."""

    narrow: Launch
    broad: Launch | None
    size: int


LATENT_HEADS = 64
"""Maximum query heads of one program over latents: a row's sums take 512 registers."""


@lru_cache(maxsize=256)
def served(geometry: Geometry) -> Geometry:
    """The geometry as the kernel serves it: of many heads over one latent, several programs take a share each."""
    shares = -(-geometry.heads // LATENT_HEADS) if geometry.tail else 1
    while geometry.heads % shares:
        shares += 1
    return replace(geometry, kv_heads=shares) if shares > 1 else geometry


def shares(geometry: Geometry, invariant: bool) -> bool:
    """Whether shared-prefix tiles are made. They are not in batch-invariant mode, nor with a sliding window, which excludes
    most of a prefix, nor with slopes, which need each query's own position, nor if a tile holds only one query."""
    alone = invariant or geometry.window or geometry.sloped or geometry.stripe.of > 1
    return not alone and shapes(geometry, 1, invariant)[0].queries > 1


def shapes(geometry: Geometry, segments: int, invariant: bool) -> tuple[Shape, Shape]:
    """Returns the narrow and the broad shape for up to `segments` segments, tuned by `bench/gpu_attention.py --sweep`."""
    geometry = served(geometry)
    group = geometry.heads // geometry.kv_heads
    rows = max(16, covering(group))
    assert rows <= 128, f"{group} query heads share a KV head; these kernels serve up to 128"
    wide = geometry.head_size > 128
    if geometry.tail:
        return _latent_shapes(rows, group, geometry.itemsize, invariant)
    if geometry.itemsize == 4:
        # float32 does not use tensor cores: small tiles, so that they fit in registers.
        tall = max(32, rows)
        narrow, broad = Shape(rows, 32, rows // group, 4, 2, 2), Shape(tall, 32, tall // group, 8, 2, 1)
        return (broad, broad) if invariant else (narrow, broad)
    if invariant:
        # All tiles use the same MMA shape and key block, so that a row's result is bitwise the same in any tile.
        tall = max(64, rows)
        if wide:
            return Shape(tall, 32, max(1, 16 // group), 8, 3, 1), Shape(tall, 32, tall // group, 8, 3, 1)
        return Shape(tall, 64, max(1, 16 // group), 4, 3, 2), Shape(128, 64, 128 // group, 8, 3, 1)
    broad = Shape(128, 32 if wide else 64, 128 // group, 8, 3, 1)
    if geometry.codec not in ("", "turbo3") and not wide:
        # Codes are converted between loads and products: small programs take turns (bench/notes.md).
        return Shape(rows, 64, rows // group, 2, 4, 4), broad
    if segments * geometry.kv_heads <= MULTIPROCESSORS:
        # Too few programs to saturate the memory: the latency of one program decides.
        return Shape(rows, 64 if wide else 128, rows // group, 8, 3, 1), broad
    if segments * geometry.kv_heads <= 2 * MULTIPROCESSORS:
        return Shape(rows, 32 if wide else 64, rows // group, 4, 4, 2), broad
    return Shape(rows, 32 if wide else 64, rows // group, 4, 3, 3), broad


def _latent_shapes(rows: int, group: int, itemsize: int, invariant: bool) -> tuple[Shape, Shape]:
    """The same over latents of some 576 elements, which are loaded once as keys and values."""
    tall = max(64, rows)
    if itemsize == 4:
        narrow, broad = Shape(rows, 16, rows // group, 8, 1, 1), Shape(max(32, rows), 16, max(32, rows) // group, 8, 1, 1)
        return (broad, broad) if invariant else (narrow, broad)
    broad = Shape(tall, 32, tall // group, 8, 2, 1)
    return (broad, broad) if invariant else (Shape(rows, 64, rows // group, 8, 3 if rows < 64 else 2, 1), broad)


@lru_cache(maxsize=4096)
def layout(geometry: Geometry, segments: int, tokens: int, invariant: bool) -> Layout:
    """Returns the array's layout, a pure function, so that the host's array matches the launches of a captured CUDA graph."""
    geometry = served(geometry)
    narrow, broad = shapes(geometry, segments, invariant)
    # Decode steps, also with a few drafted tokens, need no broad tiles; larger steps may have long segments.
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
    """Maximum number of tiles of `queries` queries for `tokens` tokens in `pieces` pieces."""
    return min(tokens, (tokens + pieces * (queries - 1)) // queries)


def _launch(shape: Shape, tiles: int, offset: int, kv_heads: int, invariant: bool, sharing: int | None = None) -> Launch:
    """`sharing`: maximum number of segments in shared-prefix tiles; None if there are none."""
    split, mates = max(1, MULTIPROCESSORS * shape.resident // kv_heads), sharing or 0
    # Room for full tiles, or for as many tiles of any size as run at once.
    several = min(mates // 2, max(mates // shape.queries, split))
    # `_fill` adds at most `split` items, so a split tile has at most twice as many parts as items were added for it.
    # Shared-prefix tiles and the tiles of their segments are always split.
    slots = (min(tiles, split) * UNITS if invariant else 2 * split) * shape.queries + 2 * mates
    # Unused items are inert but still cost a program launch: with shared-prefix tiles, fewer items are added for split-K.
    items = tiles + max(split, several + split * 2 // 3)
    listed = offset + _round(items, 8) * FIELDS
    counters = listed + _round(mates * LISTED, 16)
    end = _round(counters + (min(tiles, split) + several) * kv_heads, 16)
    return Launch(shape, items, split, slots, sharing is not None, several, offset, listed, counters, end)


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def move(items: torch.Tensor, by: torch.Tensor) -> None:
    """Moves the query positions of work items [n, FIELDS] on, in place, by as many positions as their segments [S].

    Key ranges stay unchanged: programs read no keys behind their queries, so an item that lies entirely behind them contributes
    nothing. Shared-prefix items stay unchanged too, because their keys precede all of their queries in any case."""
    own = (items[:, WorkItem.LISTED] == 0) | (items[:, WorkItem.QUERIES] == 1)
    items[:, WorkItem.POSITION] += by[items[:, WorkItem.SEGMENT].long()] * own


def prepare(geometry: Geometry, counts: Ints, context: Ints, segments: int, tokens: int, invariant: bool,
            without: Sequence[int] = (), shared: SharedPrefixes | None = None, slack: Ints | None = None) -> Ints:
    """Implements AttentionOps.prepare (ops/attention.py) for all segments except those in `without`."""
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


def singles(geometry: Geometry, counts: Ints, context: Ints, tokens: int, invariant: bool, without: Sequence[int]) -> Ints:
    """The items of a stripe of keys: each query is a tile of its own, as the keys that it sees follow no order of queries."""
    plan = layout(geometry, tokens, tokens, invariant)
    work = np.zeros(plan.size, np.int32)
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    behind = np.repeat(np.cumsum(counts, dtype=np.int32), counts) - np.arange(len(owner), dtype=np.int32)
    seen = geometry.stripe.local((np.repeat(context, counts) + 1 - behind).astype(np.int32), geometry.page).astype(np.int32)
    wanted = (seen > 0) & ~np.isin(owner, without)
    _fill(work, plan.narrow, geometry, np.ones_like(seen), seen, wanted, invariant)
    items = work[plan.narrow.offset:plan.narrow.offset + plan.narrow.items * FIELDS].reshape(-1, FIELDS)
    live = items[:, WorkItem.QUERIES] > 0
    # The row of the block table is that of the query's segment.
    items[live, WorkItem.SEGMENT] = owner[items[live, WorkItem.SEGMENT]]
    return work


def _fill(work: Ints, launch: Launch, geometry: Geometry, counts: Ints, context: Ints, chosen: Flags, invariant: bool,
          shared: SharedPrefixes | None = None, slack: Ints | None = None) -> None:
    """Writes the items of the chosen segments to the array."""
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
    unit = (np.maximum(FIRST_UNIT, 2 ** np.ceil(np.log2(-(-end // UNITS)))).astype(np.int32) if invariant
            else np.int32(shape.block_n))
    begin = np.zeros_like(end)
    if geometry.window:
        # With slack, the first query may be earlier: include the window of the earliest position.
        least = position if slack is None else position - slack[segment]
        begin = np.maximum(least + (1 - geometry.window), 0) // unit * unit
    found = _found(launch, shared, end)
    if found is not None:
        own, more = _several(found, segment, token, begin)
        token, queries, position, segment, begin, end = map(
            np.concatenate, zip((token, queries, position, segment, begin, end), more, strict=True))
    blocks = -((begin - end) // unit)
    keys = blocks * unit
    items = _items(keys, unit, launch.split, launch.items, JOINING // 2 if geometry.tail else JOINING)
    each = -(-blocks // items) * unit
    items = -(-keys // each)
    rows = np.zeros((len(segment), FIELDS), np.int32)
    for column, values in enumerate((token, queries, position, segment, begin, end, unit, 1)):
        rows[:, column] = values
    total = int(items.sum())
    if total > len(rows) or found is not None:
        split = counted = items > 1
        if found is not None:
            # Segments of a shared-prefix tile use the counter of that tile.
            split[own] = split[-len(found.keys):] = True
            counted = split.copy()
            counted[own] = False
        parts = np.where(split, blocks, 1) if invariant else items
        slots = parts * queries * split
        rows[:, WorkItem.SLOT] = rows[:, WorkItem.TILE_SLOT] = slots.cumsum() - slots
        rows[:, WorkItem.COMPLETE] = rows[:, WorkItem.PARTS] = parts
        rows[:, WorkItem.COUNTER] = counted.cumsum() - 1
        rows[:, WorkItem.TILE_QUERIES] = queries
        if found is not None:
            _list(work[launch.mates:launch.counters], rows, found, own, items)
        rows = _repeat(rows, items, each, each // unit if invariant else None)
    if total > launch.split:
        # More items than run at once: longest first, so that the last wave is short.
        rows = rows[np.argsort(rows[:, WorkItem.BEGIN] - rows[:, WorkItem.END], kind="stable")]
    work[launch.offset:launch.offset + rows.size] = rows.ravel()


def _repeat(rows: Ints, items: Ints, each: Ints, parts: Ints | None) -> Ints:
    """Splits row i into items[i] items of each[i] keys (the last may have fewer), of parts[i] parts each (default 1)."""
    index = np.arange(items.sum(), dtype=np.int32) - (items.cumsum(dtype=np.int32) - items).repeat(items)
    each, rows = each.repeat(items), rows.repeat(items, 0)
    rows[:, WorkItem.BEGIN] += index * each
    np.minimum(rows[:, WorkItem.END], rows[:, WorkItem.BEGIN] + each, out=rows[:, WorkItem.END])
    rows[:, WorkItem.SLOT] += index * rows[:, WorkItem.QUERIES] * (1 if parts is None else parts.repeat(items))
    return rows


def _found(launch: Launch, shared: SharedPrefixes | None, keys: Ints) -> SharedTiles | None:
    """Returns the shared-prefix tiles; None if there are none, or if all items run at once without them."""
    if shared is None or not launch.shared or int(keys.sum()) <= launch.split * math.isqrt(JOINING * int(keys.max())):
        return None
    return shared_tiles(shared, launch.shape.queries, launch.shape.block_n, launch.several)


def _several(found: SharedTiles, segment: Ints, token: Ints, begin: Ints) -> tuple[Places, tuple[Ints, ...]]:
    """Moves the key ranges of grouped segments past their shared prefix. Returns the indices of these tiles, and the additional
    tiles for the shared keys: token, queries, position, segment, begin and end."""
    own = np.searchsorted(segment, found.mates)
    begin[own] = found.keys[found.tile]
    lead = found.mates[found.first]
    # Position = prefix length: every query sees every shared key.
    return own, (token[own[found.first]], found.sizes, found.keys, lead, np.zeros_like(lead), found.keys)


def _list(mates: Ints, rows: Ints, found: SharedTiles, own: Places, items: Ints) -> None:
    """Writes the query list of the shared-prefix tiles, and refers every item of a tile and of its queries to the tile."""
    listed = mates[:len(own) * LISTED].reshape(-1, LISTED)
    listed[:, 0], listed[:, 1], listed[:, 2] = rows[own, WorkItem.TOKEN], rows[own, WorkItem.SLOT], items[own]
    tiles = rows[-len(found.keys):]
    tiles[:, WorkItem.COMPLETE] += np.add.reduceat(listed[:, 2], found.first)
    tiles[:, WorkItem.LISTED] = found.first + 1
    tiles[:, WorkItem.MOST] = np.maximum.reduceat(listed[:, 2], found.first)
    rows[own, WorkItem.COMPLETE] = tiles[found.tile, WorkItem.COMPLETE]
    rows[own, WorkItem.LISTED:] = tiles[found.tile, WorkItem.LISTED:]
    rows[own, WorkItem.FIRST] = np.arange(len(own), dtype=np.int32) - found.first[found.tile]


def _items(keys: Ints, unit: Ints | np.int32, split: int, room: int, joining: int) -> Ints:
    """Returns the number of items of each tile: at most `split` more than there are tiles, and at most `room` in total. Items
    have about equal size, and as many are made as run at once, or a few more. The largest size adds at most split / 2 items."""
    total = int(keys.sum())
    least = max(math.isqrt(joining * int(keys.max())), -(-total // split))
    sizes = _LARGER if len(keys) < split else _LARGER[[0, -1]]
    items = -(-keys // (-(-least * sizes // 16 // unit) * unit))
    count = items.sum(1)
    # If all items cannot run at once, the smallest size for which there is room leaves the shortest last wave.
    found = items[int((count <= (split if count.min() <= split else room)).argmax())]
    return _last_round(found, keys, split, room) if len(keys) > split and int(found.max()) == 1 else found


def _last_round(items: Ints, keys: Ints, split: int, room: int) -> Ints:
    """Splits the shortest tiles, which are left for the last wave of `split` programs, so that they fill that wave."""
    rest = len(keys) % split
    parts = min(split // rest, 1 + (room - len(keys)) // rest) if rest else 1
    if parts > 1:
        short = np.argpartition(keys, rest)[:rest]
        items[short] = np.clip(keys[short] // WORTH, 1, parts)
    return items


def _cut(segment: Ints, token: Ints, queries: Ints, position: Ints, most: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts pieces into tiles of `most` queries; the last tile of a piece may have fewer."""
    tiles = -(-queries // most)
    index = np.arange(tiles.sum(), dtype=np.int32) - np.repeat(np.cumsum(tiles, dtype=np.int32) - tiles, tiles)
    at = index * most
    return (np.repeat(segment, tiles), np.repeat(token, tiles) + at, np.minimum(np.repeat(queries, tiles) - at, most),
            np.repeat(position, tiles) + at)


def _cut_at_units(segment: Ints, token: Ints, queries: Ints, position: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Cuts pieces at the positions where the unit doubles, so that all queries of a piece have the same unit."""
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
