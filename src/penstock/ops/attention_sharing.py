"""Groups segments that share a prefix (cascade attention), so that the prefix's keys are read once for the whole group.

`SharedPrefixes` sorts segments so that neighbours share most: those that share at least k keys are a range, and ranges of
different k nest as in a prefix tree. A segment joins one group at most; those that save most reads are chosen."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.ops.attention import Ints, SharedPrefixes

PART = 64
"""Cost of a split-K part in keys: the number of keys a program reads in the time it takes to write and merge one part. A
grouped segment has one part for its own keys, and each tile has one more for the shared keys."""


class SharedTiles(NamedTuple):
    """Tiles whose queries are the single tokens of several segments with a shared prefix."""

    keys: Ints
    """[tiles] length of the shared prefix in keys, a multiple of the key block."""
    first: Ints
    """[tiles] index in `mates` of a tile's first segment."""
    sizes: Ints
    """[tiles] number of segments of a tile."""
    mates: Ints
    """[N] segment indices, tile after tile."""
    tile: Ints
    """[N] the tile of each entry of `mates`."""


@lru_cache(maxsize=8)
def shared_tiles(shared: SharedPrefixes, queries: int, block: int, most: int) -> SharedTiles | None:
    """Returns the tiles of up to `queries` segments that save more reads than their parts cost, at most `most`, the best ones.
    Prefix lengths are rounded down to multiples of `block` keys. None if no tile pays."""
    common = shared.common // block * block
    # A prefix too short to pay even for a full tile counts as no prefix.
    common[common * (queries - 1) <= PART * (queries + 1)] = 0
    if not common.any():
        return None
    tiles = list[tuple[int, list[int]]]()
    for keys, ranges in _groups(common, queries):
        rows = [row for first, last in ranges for row in range(first, last)]
        cut = [rows[at:at + queries] for at in range(0, len(rows), queries)]
        tiles += [(keys, places) for places in cut if _saved(len(places), keys) > 0]
    if len(tiles) > most:
        tiles = sorted(tiles, key=lambda tile: -_saved(len(tile[1]), tile[0]))[:most]
    if not tiles:
        return None
    sizes = np.array([len(places) for _, places in tiles], np.int32)
    return SharedTiles(np.array([keys for keys, _ in tiles], np.int32), np.cumsum(sizes, dtype=np.int32) - sizes, sizes,
                    shared.segments[[place for _, places in tiles for place in places]],
                    np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))


def _saved(rows: int, keys: int) -> int:
    """Key reads that one tile saves, minus the cost of its parts."""
    return (rows - 1) * keys - PART * (rows + 1)


def _gain(rows: int, keys: int, queries: int) -> int:
    """Key reads that a group of `rows` segments saves when cut into tiles of `queries`; at least 0."""
    full, rest = divmod(rows, queries)
    return full * max(0, _saved(queries, keys)) + max(0, _saved(rest, keys))


Bounds = tuple[int, int]


class _Start(NamedTuple):
    """The state at the beginning of a range of neighbours."""

    begin: int
    groups: int
    free: int
    gain: int
    loose: int


def _groups(common: Ints, queries: int) -> list[tuple[int, list[Bounds]]]:
    """Returns (prefix length in keys, ranges of neighbours) of the groups that save most, in one pass over `common`.

    `stretches` is a stack of open ranges that are nested, the inner ones sharing longer prefixes. When a range ends, either all
    of it becomes one group, or its inner groups stay and its ungrouped rest becomes another group."""
    groups, free = list[tuple[int, list[Bounds]]](), [(0, 1)]
    gain, loose = 0, 1
    stretches, last = list[tuple[int, _Start]](), _Start(0, 0, 0, 0, 0)
    changes = [0, *(np.flatnonzero(np.diff(common)) + 1).tolist(), len(common)]
    lengths = [*common[changes[:-1]].tolist(), -1]
    for at, until, keys in zip(changes, [*changes[1:], 0], lengths, strict=True):
        while stretches and stretches[-1][0] > keys:
            shared, last = stretches.pop()
            whole, rest = _gain(at + 1 - last.begin, shared, queries), _gain(loose - last.loose, shared, queries)
            if whole > gain - last.gain + rest:
                del groups[last.groups:], free[last.free:]
                groups.append((shared, [(last.begin, at + 1)]))
                gain, loose = last.gain + whole, last.loose
            elif rest:
                groups.append((shared, free[last.free:]))
                del free[last.free:]
                gain, loose = gain + rest, last.loose
        if keys < 0:
            break
        if not stretches or stretches[-1][0] < keys:
            stretches.append((keys, last))
        if until - at > 1:
            free.append((at + 1, until))
            loose += until - at - 1
        last = _Start(until, len(groups), len(free), gain, loose)
        free.append((until, until + 1))
        loose += 1
    return groups
