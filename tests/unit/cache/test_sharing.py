"""Sequences find each other's pages: by token, within a namespace, while they are computed, in order of priority."""

from __future__ import annotations

import math

from penstock.cache.manager import Cache
from penstock.core.plan import Move, StepPlan
from penstock.core.request import PINNED, WHOLE, Request, Sequence, Span
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, Retention, Snapshot, StateSpec, Window, lay_out
from penstock.scheduler.admission import PASSES, Limits
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeWorker, expected

PAGE = 4


def _cache(slabs: int, *keeps: Retention, **more: object) -> Cache:
    states = [StateSpec((Field("k", (1, 16), "float32", per="page" if keep.exact else "position"),), keep)
              for keep in keeps or (Everything(),)]
    return Cache(lay_out(states, PAGE, lay_out(states, PAGE, 0).slab_bytes * slabs), **more)


def _sequence(tokens: list[int], **more: object) -> Sequence:
    sequence = Sequence(Request("r", tokens, SamplingParams(), **more), 0, 0, 1000)
    sequence.row = 0
    return sequence


def _compute(cache: Cache, tokens: list[int], **more: object) -> tuple[int, list[Move]]:
    """Runs a context to its end in one segment; returns what it found, and the copies that it took."""
    sequence = _sequence(tokens, **more)
    found = sequence.planned = sequence.computed = cache.match(sequence)
    assert cache.grow(sequence, len(tokens))
    cache.count_hit(sequence)
    cache.enter(sequence)
    plan = StepPlan(0)
    cache.drain(plan)
    sequence.planned = sequence.computed = len(tokens)
    cache.commit(sequence)
    cache.check([sequence])
    cache.release(sequence)
    cache.check([])
    return found, plan.moves


def _find(cache: Cache, tokens: list[int], **more: object) -> int:
    sequence = _sequence(tokens, **more)
    found = cache.match(sequence)
    sequence.planned = sequence.computed = found
    cache.release(sequence)
    return found


def test_found_by_token_though_stored_by_page() -> None:
    cache = _cache(40)
    context = list(range(100, 122))
    assert _compute(cache, context) == (0, [])
    assert _find(cache, [*context, 7, 7]) == 22, "the rest of the last page too"
    assert _find(cache, context) == 21, "never the last token: its logits are needed"
    assert _find(cache, [*context[:10], 7, 7, 7]) == 10, "parted in the middle of a page"
    assert _find(cache, [*context[:3], 7]) == 3
    assert _find(cache, [7, *context]) == 0
    found, moves = _compute(cache, [*context[:10], 7, 8, 9])
    assert found == 10 and len(moves) == 1, "the page that is cut is copied"
    assert _find(cache, [*context, 7]) == 22 and _find(cache, [*context[:10], 7, 8, 9, 1]) == 13, "both are there now"


def test_a_conversation_grows_in_place() -> None:
    cache, context = _cache(60), [1, 2, 3]
    for turn in range(12):
        context += [turn, turn + 1, 5, turn]
        found, _ = _compute(cache, list(context))
        assert found == (len(context) - 4 if turn else 0)
    assert cache.pools.slabs_used == -(-len(context) // PAGE), "what a page's rest became is not kept twice"


def test_equal_pages_are_kept_once() -> None:
    cache = _cache(40)
    first, second = _sequence(list(range(9))), _sequence(list(range(9)))
    second.row = 1
    for sequence in (first, second):
        assert cache.grow(sequence, 9)
        cache.enter(sequence)
    for sequence in (first, second):
        sequence.planned = sequence.computed = 9
        cache.commit(sequence)
    assert first.pages[0].ids[:2] == second.pages[0].ids[:2] and first.pages[0].ids[2] != second.pages[0].ids[2]
    plan = StepPlan(0)
    cache.drain(plan)
    assert plan.edits[0].tolist()[-2:] == [[1, i, first.pages[0].ids[i]] for i in range(2)], "the worker is told"
    cache.check([first, second])


def test_namespaces_do_not_see_each_other() -> None:
    cache = _cache(40)
    context = list(range(16))
    _compute(cache, context, salt="a", adapter="x")
    assert _find(cache, context, salt="a", adapter="x") == 15
    others = (("b", "x"), ("a", ""), ("", ""))
    assert [_find(cache, context, salt=salt, adapter=adapter) for salt, adapter in others] == [0, 0, 0]


def test_a_window_needs_only_itself() -> None:
    cache = _cache(40, Window(6))
    context = list(range(40))
    _compute(cache, context)
    # The pages of [35, 40) suffice; those before were given back and go first.
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 2)
    assert _find(cache, [*context, 1]) == 40 and _find(cache, [*context[:20], 1]) == 0


def test_a_snapshot_serves_where_it_was_sealed() -> None:
    cache = _cache(40, Everything(), Snapshot())
    context = list(range(18))
    sequence = _sequence(context)
    assert cache.chunk(sequence, 18) == 16
    for upto in (8, 16, 18):
        assert cache.grow(sequence, upto)
        sequence.planned = sequence.computed = upto
        cache.commit(sequence)
        assert upto > 8 or cache.chunk(sequence, 10) == 8
        assert upto != 16 or cache.chunk(sequence, 2) == 2
    cache.release(sequence)
    assert _find(cache, [*context, 1]) == 18, "where it ended"
    assert _find(cache, [*context[:17], 1]) == 16 and _find(cache, [*context[:13], 1]) == 8, "at the borders it stopped at"
    assert _find(cache, [*context[:7], 1]) == 0


def test_leaves_go_first_and_nothing_in_use() -> None:
    cache = _cache(40, policy="lru")
    _compute(cache, list(range(16)))
    _compute(cache, [*range(8), *range(50, 58)])
    holder = _sequence([*range(12), 99])
    assert cache.match(holder) == 12
    assert not cache.evictor.evict(lambda: False), "what is held stays"
    cache.check([holder])
    assert cache.pools.slabs_used == 3 and _find(cache, [*range(12), 99]) == 12


def test_least_recently_used_goes_first() -> None:
    cache = _cache(40, policy="lru")
    for start in (0, 100, 200):
        _compute(cache, list(range(start, start + 8)))
    _find(cache, [*range(8), 9])
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 2)
    assert [_find(cache, [*range(start, start + 8), 9]) for start in (0, 100, 200)] == [8, 0, 0]


def test_what_is_marked_stays_until_its_time_is_over() -> None:
    cache = _cache(40)
    cache.evictor.now = 1000.0
    _compute(cache, list(range(16)), retain=[Span(8, 70, 60.0)])
    _compute(cache, list(range(100, 108)), retain=[Span(WHOLE, PINNED, math.inf)])
    _compute(cache, list(range(200, 208)))
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 4)
    assert _find(cache, [*range(16), 1]) == 8 and _find(cache, [*range(100, 108), 1]) == 8
    assert _find(cache, list(range(200, 208))) == 0
    _compute(cache, list(range(300, 308)))
    cache.evictor.now = 1061.0
    assert cache.evictor.evict(lambda: cache.pools.slabs_used <= 4)
    assert _find(cache, [*range(16), 1]) == 0, "its time is over, and it was used before the last"
    assert _find(cache, [*range(100, 108), 1]) == 8
    assert cache.evictor.evict(lambda: cache.pools.slabs_used == 0) and _find(cache, [*range(100, 108), 1]) == 0


def test_a_tenant_keeps_no_more_than_its_share() -> None:
    cache = _cache(20, quota=0.25)
    _compute(cache, list(range(16)), tenant="a", salt="a")
    for start in range(100, 1000, 100):
        _compute(cache, list(range(start, start + 16)), tenant="b", salt="b")
        assert cache.pools.slabs_used <= 4 + 5
    assert _find(cache, [*range(16), 1], tenant="a", salt="a") == 16, "the others' are not touched"


def test_a_reset_forgets_all_but_disturbs_nobody() -> None:
    cache = _cache(40)
    _compute(cache, list(range(16)))
    running = _sequence(list(range(100, 120)))
    assert cache.grow(running, 20)
    running.planned = running.computed = 8
    cache.commit(running)
    cache.reset()
    cache.check([running])
    running.planned = running.computed = 20
    cache.commit(running)
    assert _find(cache, [*range(16), 1]) == 0 and _find(cache, [*range(100, 120), 1]) == 0
    cache.release(running)
    cache.check([])
    assert cache.pools.slabs_used == 0


def test_what_is_broken_is_not_found() -> None:
    cache = _cache(40)
    _compute(cache, list(range(8)))
    broken = _sequence([*range(8), *range(50, 60)])
    broken.planned = broken.computed = cache.match(broken)
    assert cache.grow(broken, 18)
    broken.planned = broken.computed = 17
    cache.commit(broken)
    cache.release(broken, keep=False)
    cache.check([])
    assert _find(cache, [*range(8), *range(50, 60)]) <= 8


def _scheduler(slabs: int, rows: int = 8, budget: int = 8) -> tuple[Scheduler, FakeWorker]:
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    layout = lay_out(states, PAGE, lay_out(states, PAGE, 0).slab_bytes * slabs)
    return Scheduler(Cache(layout), Limits(200, rows, budget, 1000, VOCABULARY)), FakeWorker(layout, rows, 200)


def _request(name: str, prompt: list[int], output: int = 4, **more: object) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=output, seed=0), **more)


def test_two_that_arrive_together_share_the_work_of_the_first() -> None:
    scheduler, worker = _scheduler(60)
    shared = [i % VOCABULARY for i in range(40)]
    scheduler.add(_request("first", [*shared, 1], arrival=1.0), 0.0)
    scheduler.add(_request("second", [*shared, 2], arrival=2.0), 0.0)
    scheduler.add(_request("other", [9, 9, 9], arrival=3.0), 0.0)
    computed, got = 0, dict[str, list[int]]()
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        assert plan is not None
        computed += int(plan.counts.sum())
        if computed < 30:
            assert len(scheduler.running) <= 2 and "second" not in {s.request.id for s in scheduler.running}
            assert "second" in {s.request.id for s in scheduler.waiting}
        scheduler.apply(worker.run(plan), 0.0)
        scheduler.check()
        for update in scheduler.take_updates():
            got.setdefault(update.request_id, []).extend(update.token_ids)
    assert computed <= 41 + 1 + 3 + 3 * 3 + 1, "the shared beginning was computed once"
    assert got["second"] == expected([*shared, 2], [Everything()], 0, 4) and scheduler.stats.cached_tokens == 40


def test_who_waits_for_one_that_is_aborted_computes_for_itself() -> None:
    scheduler, worker = _scheduler(60)
    shared = [i % VOCABULARY for i in range(40)]
    scheduler.add(_request("first", [*shared, 1], arrival=1.0), 0.0)
    scheduler.add(_request("second", [*shared, 2], arrival=2.0), 0.0)
    scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
    scheduler.abort(["first"], 0.0)
    got: list[int] = []
    while scheduler.busy:
        scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
        got += [token for update in scheduler.take_updates() if update.request_id == "second" for token in update.token_ids]
    assert got == expected([*shared, 2], [Everything()], 0, 4) and scheduler.stats.cached_tokens == 8, "what the first had done"


def test_what_fits_passes_what_does_not_but_not_for_ever() -> None:
    scheduler, worker = _scheduler(20, rows=4, budget=64)
    scheduler.add(_request("runs", [5] * 36, 34, arrival=0.0), 0.0)
    scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
    scheduler.add(_request("large", [6] * 60, 2, arrival=1.0), 0.0)
    for i in range(PASSES + 20):
        scheduler.add(_request(f"small{i}", [7, i % VOCABULARY, i // VOCABULARY], 1, arrival=2.0 + i), 0.0)
    ended: list[str] = []
    while scheduler.busy:
        scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
        scheduler.check()
        ended += [update.request_id for update in scheduler.take_updates() if update.finish_reason]
    before = [name for name in ended[:ended.index("large")] if name.startswith("small")]
    assert 0 < len(before) <= PASSES + 4 and len(ended) == PASSES + 22


def test_pages_that_are_kept_count_as_free() -> None:
    scheduler, worker = _scheduler(12, budget=64)
    for number in range(6):
        scheduler.add(_request(f"r{number}", [number] * 36, 2), 0.0)
        while scheduler.busy:
            scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
            scheduler.take_updates()
    assert scheduler.stats.preemptions == 0
    stats = scheduler.snapshot(0.0)
    assert stats.pages_used == 0 and stats.kv_usage == 0.0 and stats.tiers[0].cached_pages > 8
    assert stats.tiers[0].evicted_pages > 30 and stats.tiers[0].used_bytes > 0
