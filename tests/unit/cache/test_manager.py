"""Pages: all or nothing, copied before a shared one is written, given back behind windows."""

from __future__ import annotations

import time

from penstock.cache.manager import Cache
from penstock.cache.pool import Pools
from penstock.core.plan import Ints, Move, StepPlan
from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.state import CacheLayout, Everything, Field, StateSpec, Window, lay_out


def _layout(slabs: int, *windows: int) -> CacheLayout:
    states = [StateSpec((Field("k", (1, 16), "float32"),), Window(w) if w else Everything()) for w in windows]
    return lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs)


def _sequence(tokens: int, row: int = 0) -> Sequence:
    sequence = Sequence(Request("r", list(range(tokens)), SamplingParams()), 0, 0, 100)
    sequence.row = row
    return sequence


def _drain(cache: Cache) -> tuple[list[Ints], list[Move]]:
    plan = StepPlan(0)
    cache.drain(plan)
    return plan.edits, plan.moves


def test_grow_is_all_or_nothing() -> None:
    cache = Cache(_layout(5, 0, 6))
    sequence = _sequence(20)
    assert not cache.grow(sequence, 20), "two groups of five pages do not fit in five slabs"
    assert cache.pools.slabs_live == 0
    assert cache.grow(sequence, 8)
    edits, moves = _drain(cache)
    assert [len(e) for e in edits] == [2, 2] and moves == []
    assert [e[:, 1].tolist() for e in edits] == [[0, 1], [0, 1]]
    cache.check([sequence])
    cache.release(sequence)
    cache.check([])


def test_pages_behind_the_window_are_given_back() -> None:
    cache = Cache(_layout(4, 6))
    sequence = _sequence(60)
    held = []
    for upto in range(1, 61):
        assert cache.grow(sequence, upto), upto
        sequence.planned = sequence.computed = upto
        held.append(cache.pools.slabs_live)
    assert max(held) == 3 and sequence.pages[0].first == (60 - 1 - 5) // 4
    cache.check([sequence])


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = Cache(_layout(10, 0))
    parent, child = _sequence(7, 0), _sequence(7, 1)
    assert cache.grow(parent, 7)
    parent.planned = 7
    _drain(cache)
    cache.fork(parent, child, 6)
    child.planned = 6
    cache.check([parent, child])
    before = list(parent.pages[0].ids)
    assert cache.grow(parent, 8)
    (edits,), (move,) = _drain(cache)
    assert (move.source, move.target) == (before[1], parent.pages[0].ids[1]) and edits.tolist() == [[0, 1, move.target]]
    assert cache.grow(child, 7)
    assert _drain(cache)[1] == [], "the last holder writes in place"
    assert child.pages[0].ids == before
    cache.check([parent, child])


def test_slabs_move_between_groups() -> None:
    cache = Cache(_layout(4, 0, 4))
    first = _sequence(8)
    assert cache.grow(first, 8)
    assert cache.pools.slabs_live == 4
    cache.release(first)
    second = _sequence(4)
    assert cache.grow(second, 4)
    assert cache.pools.slabs_live == 2


def _seconds_a_page(slabs: int) -> float:
    """Of taking all free pages one by one, where every slab has one page that is held."""
    states = [StateSpec((Field("k", (1, 16), "float32"),), keep) for keep in [*[Everything()] * 4, Window(64)]]
    pools = Pools(lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs))
    per_slab = pools.layout.groups[1].per_slab
    pools.give(1, [page for page in pools.take(1, slabs * per_slab) if page % per_slab])
    count = pools.available(1)
    assert count == slabs * (per_slab - 1) > 0
    began = time.process_time()
    for _ in range(count):
        pools.take(1, 1)
    return (time.process_time() - began) / count


def test_taking_a_page_costs_the_same_however_many_slabs_are_partly_free() -> None:
    few, many = (min(_seconds_a_page(slabs) for _ in range(3)) for slabs in (2_000, 32_000))
    assert many < 3 * few, f"{many * 1e6:.2f} us a page with 32,000 slabs, {few * 1e6:.2f} with 2,000"
