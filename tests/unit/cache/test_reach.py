"""The rule of prefix hits against its definition, on random mixtures of every kind of state with random holes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.cache.prefix import reach
from penstock.core.state import Ahead, Chunk, Everything, Retention, Snapshot, Window


def _mixture(rng: random.Random) -> list[Retention]:
    kinds: list[Retention] = [Everything(), Window(rng.choice([1, 3, 5, 9, 17])), Snapshot(), Chunk(rng.choice([3, 8, 12])),
                              Ahead(rng.choice([1, 2]))]
    return rng.sample(kinds, rng.randint(1, len(kinds)))


def _brute(keeps: list[Retention], places: list[list[int]], page: int, matched: int, limit: int, sealed: int) -> int:
    """Tries every n, position by position."""
    best = 0
    for n in range(1, min(matched, limit) + 1):
        good = True
        for keep, ids in zip(keeps, places, strict=True):
            low, high = keep.needed(n)
            # A page is cut where the context goes on inside it, so it must be there whether or not this is needed at n.
            there = all(p // page < len(ids) and ids[p // page] >= 0 for p in range(min(low, n - n % page), high))
            # An exact state is that behind the last position written to its page: a border, or where the last page ends.
            right = not keep.exact or n % page == 0 or n == sealed
            good = good and there and right and n <= matched - keep.ahead
        best = n if good else best
    return best


@pytest.mark.parametrize("seed", range(20))
def test_a_hit_is_the_longest_context_that_can_go_on(seed: int) -> None:
    rng, nonzero = random.Random(seed), 0
    for _ in range(200):
        keeps, page = _mixture(rng), rng.choice([1, 2, 4, 8])
        matched = rng.randint(0, 60)
        pages, presence = -(-matched // page), rng.choice([0.5, 0.9, 1.0])
        places = [[i if rng.random() < presence else -1 for i in range(max(0, pages - keep.ahead))] for keep in keeps]
        limit = rng.choice([matched, max(0, matched - 1), rng.randint(0, 60)])
        sealed = rng.choice([-1, matched])
        got = reach(keeps, [np.array(ids, np.int32) for ids in places], page, matched, limit, sealed)
        assert got == _brute(keeps, places, page, matched, limit, sealed), (keeps, places, page, matched, limit, sealed)
        nonzero += got > 0
    assert nonzero > 30


def test_nobody_goes_on_inside_a_page_that_is_not_there() -> None:
    """A chunk that begins inside a page needs nothing before it; but the page is found later as if all of it were written."""
    for there, n in (([0, 1], 9), ([-1, 1], 9), ([0, -1], 8), ([-1, -1], 0)):
        places = [np.array(ids, np.int32) for ids in ([0, 1], there)]
        assert reach([Everything(), Chunk(3)], places, 8, 10, 9, -1) == n, there


def test_the_lower_end_of_what_is_needed_never_falls() -> None:
    """So what lies below it can be given back for good."""
    for keep in (Everything(), Window(1), Window(5), Chunk(8), Snapshot(), Ahead(2)):
        lows = [keep.needed(n)[0] for n in range(1, 64)]
        assert lows == sorted(lows)
        assert all(n - keep.needed(n)[0] <= keep.widest(m) for m in range(1, 64) for n in range(1, m + 1))
