"""Groups segments that share a prefix (cascade attention), so that the prefix's keys are read once for the whole group.

`SharedPrefixes` sorts segments so that neighbours share most. Segments that share at least k keys are therefore a range of
neighbours, and ranges of different k nest like the nodes of a prefix tree. A segment joins at most one group, the groups that
save most reads are chosen, and a group is cut into tiles of queries.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.ops.attention import Ints, SharedPrefixes

PART = 64
"""Keys that a program reads in the time in which a part is written and joined. A segment that goes with others has its own
keys in a part of their own, and the shared ones are in one more."""


class SharedTiles(NamedTuple):
    """Tiles of several segments."""

    keys: Ints
    """[tiles] how many first positions of a tile's segments lie in the same pages: whole blocks."""
    first: Ints
    """[tiles] where a tile's segments begin in `mates`."""
    sizes: Ints
    """[tiles] how many there are."""
    mates: Ints
    """[N] the segments, tile after tile,"""
    tile: Ints
    """[N] and which tile each is in."""


@lru_cache(maxsize=8)
def shared_tiles(shared: SharedPrefixes, queries: int, block: int, most: int) -> SharedTiles | None:
    """The tiles of up to `queries` segments for which it pays, keys in whole blocks; of more than `most` those that save most.
    None if there are none."""
    common = shared.common // block * block
    # What would not even pay for a full tile is nothing in common.
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
    """Keys that one tile does not read again, less what its parts cost."""
    return (rows - 1) * keys - PART * (rows + 1)


def _gain(rows: int, keys: int, queries: int) -> int:
    """What a group of so many saves; not less than nothing."""
    full, rest = divmod(rows, queries)
    return full * max(0, _saved(queries, keys)) + max(0, _saved(rest, keys))


Bounds = tuple[int, int]


class _Mark(NamedTuple):
    """Where a stretch of neighbours begins, and what there was before it."""

    begin: int
    groups: int
    free: int
    gain: int
    loose: int


def _groups(common: Ints, queries: int) -> list[tuple[int, list[Bounds]]]:
    """(keys, ranges of neighbours) of the groups that save most, by one pass over stretches of those that share as much.

    Those that are open lie in one another, the inner ones sharing more. When one ends, all of it is a group, or the groups
    inside stay and what is free of it is one more.
    """
    groups, free = list[tuple[int, list[Bounds]]](), [(0, 1)]
    gain, loose = 0, 1
    stretches, last = list[tuple[int, _Mark]](), _Mark(0, 0, 0, 0, 0)
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
        last = _Mark(until, len(groups), len(free), gain, loose)
        free.append((until, until + 1))
        loose += 1
    return groups
