"""Refusals at the door, order of service, and what a plan costs to make."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
import pytest

from penstock.cache.manager import Cache
from penstock.core.errors import RequestError
from penstock.core.plan import StepPlan, StepResult, Want
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.scheduler.admission import Limits
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeWorker


def _scheduler(rows: int = 4, budget: int = 16, length: int = 64, slabs: int = 40, queued: int = 8, **more: int) -> Scheduler:
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    layout = lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs)
    return Scheduler(Cache(layout), Limits(length, rows, budget, queued, VOCABULARY, **more))


def _request(name: str, prompt: int, output: int | None = 4, **more: object) -> Request:
    return Request(name, [i % VOCABULARY for i in range(prompt)], SamplingParams(max_tokens=output, seed=0), **more)


@pytest.mark.parametrize(("request_", "code", "words"), [
    (_request("a", 0), "invalid_value", "no tokens"),
    (_request("a", 64), "context_length_exceeded", "the most is 63"),
    (_request("a", 60, 5), "context_length_exceeded", "max_tokens can be 4"),
    (Request("a", [VOCABULARY], SamplingParams()), "invalid_value", "outside the vocabulary"),
])
def test_refused_at_the_door(request_: Request, code: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        _scheduler().add(request_, 0.0)
    assert caught.value.code == code


def test_a_queue_is_full_only_when_others_wait() -> None:
    """2 rows and 2 places in the queue take 4 of 20 that come at once; what is alone is taken whatever its size."""
    scheduler, refused = _scheduler(rows=2, queued=2), 0
    for name in range(20):
        try:
            scheduler.add(_request(str(name), 3), 0.0)
        except RequestError as error:
            assert (error.code, error.status) == ("queue_full", 503) and "at most 2" in error.message
            refused += 1
    assert refused == 16 and len(scheduler.waiting) == 4
    _scheduler(rows=2, queued=2).add(Request("n", [1], SamplingParams(n=9, max_tokens=1, seed=0)), 0.0)
    # Its prompts count as one request, so that it keeps nobody out, up to a number that bounds memory.
    batch = _scheduler(rows=2, queued=2)
    for place in range(33):
        batch.add(_request(str(place), 3, follows="0" if place else ""), 0.0)
    batch.add(_request("late", 3), 0.0)
    with pytest.raises(RequestError, match="2 requests with 34 answers are waiting and at most 2 may, with 32"):
        batch.add(_request("later", 3), 0.0)


def test_rows_that_are_taken_or_of_no_use_are_no_places() -> None:
    scheduler = _scheduler(rows=2, queued=1)
    for name in "ab":
        scheduler.add(_request(name, 3), 0.0)
    assert scheduler.plan(0.0) is not None
    scheduler.add(_request("c", 3), 0.0)
    with pytest.raises(RequestError, match="1 requests with 1 answers"):
        scheduler.add(_request("d", 3), 0.0)


def test_what_the_arena_cannot_hold_is_refused_with_the_largest_that_fits() -> None:
    scheduler = _scheduler(slabs=5)
    with pytest.raises(RequestError, match="the most is 20"):
        scheduler.add(_request("a", 30), 0.0)
    scheduler.add(_request("b", 20, 1), 0.0)


def test_each_stage_of_a_pipeline_has_a_step_to_compute() -> None:
    """Sequences that decode are spread evenly over the steps in flight, and none is in two of them."""
    scheduler = _scheduler(rows=8, budget=8, stages=2)
    for name in "abcdef":
        scheduler.add(_request(name, 1, 30), 0.0)
    scheduler.add(_request("long", 20, 30), 0.0)
    flying: deque[StepPlan] = deque()
    rows: list[set[int]] = []
    for _ in range(20):
        plan = scheduler.plan(0.0)
        if plan is not None:
            flying.append(plan)
            rows.append(set(plan.rows[plan.counts == 1].tolist()))
        while len(flying) > (2 if plan is not None else max(0, len(flying) - 1)):
            done = flying.popleft()
            kept = done.wants & int(Want.SAMPLE)
            scheduler.apply(StepResult(done.id, np.full(int(kept.sum()), 5, np.int32), kept), 0.0)
    steady = rows[-10:]
    assert all(one.isdisjoint(other) for one, other in pairwise(steady))
    assert {len(one) for one in steady} <= {3, 4} and len(set.union(*steady)) == 7


def test_sequences_that_end_in_flight_make_no_room_in_a_step() -> None:
    """Of the sequences that another stage still computes, some have ended; a long prompt takes no positions for that."""
    scheduler = _scheduler(rows=8, budget=8, stages=2)
    for name in "abcdef":
        scheduler.add(_request(name, 1, 30, arrival=5.0), 0.0)
    for late in ([_request("long", 60, 4, arrival=1.0)], []):
        plan = scheduler.plan(0.0)
        assert plan is not None
        kept = plan.wants & int(Want.SAMPLE)
        scheduler.apply(StepResult(plan.id, np.full(int(kept.sum()), 5, np.int32), kept), 0.0)
        for request in late:
            scheduler.add(request, 0.0)
    flying = scheduler.plan(0.0)
    assert flying is not None and sorted(flying.counts.tolist()) == [1, 1, 1, 5]
    rows = set(flying.rows[flying.counts == 1].tolist())
    scheduler.abort([one.request.id for one in scheduler.running if one.row in rows], 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and sorted(plan.counts.tolist()) == [1, 1, 6]


def test_ids_are_unique_while_they_live() -> None:
    scheduler = _scheduler()
    scheduler.add(_request("a", 3), 0.0)
    with pytest.raises(RequestError, match="unique"):
        scheduler.add(_request("a", 3), 0.0)
    scheduler.abort(["a"], 0.0)
    scheduler.add(_request("a", 3), 0.0)


def test_a_long_prompt_does_not_stop_those_who_decode() -> None:
    """Each running sequence is owed one position of every step."""
    scheduler = _scheduler(rows=4, budget=8)
    worker = FakeWorker(scheduler.cache.layout, 4, 64)
    for i in range(3):
        scheduler.add(_request(f"short{i}", 2, 30, arrival=5.0 + i), 0.0)
    scheduler.apply(worker.run(scheduler.plan(0.0)), 0.0)
    scheduler.add(_request("long", 50, 4, arrival=1.0), 0.0)
    for _ in range(6):
        plan = scheduler.plan(0.0)
        assert sorted(plan.counts.tolist()) == [1, 1, 1, 5]
        scheduler.apply(worker.run(plan), 0.0)


def test_abort_frees_rows_and_pages_at_once_even_in_flight() -> None:
    scheduler = _scheduler()
    worker = FakeWorker(scheduler.cache.layout, 4, 64)
    scheduler.add(Request("a", list(range(9)), SamplingParams(n=3, max_tokens=8, seed=0)), 0.0)
    first = worker.run(scheduler.plan(0.0))
    second = worker.run(scheduler.plan(0.0))
    scheduler.abort(["a"], 1.0)
    assert scheduler.cache.pools.slabs_live == 0 and not scheduler.running
    scheduler.apply(first, 1.0)
    scheduler.apply(second, 1.0)
    ends = [u for u in scheduler.take_updates() if u.finish_reason]
    assert sorted(u.index for u in ends) == [0, 1, 2] and {u.finish_reason for u in ends} == {"abort"}
    assert not scheduler.busy
    scheduler.check()


def test_a_row_without_usable_logits_fails_alone() -> None:
    scheduler = _scheduler()
    worker = FakeWorker(scheduler.cache.layout, 4, 64)
    scheduler.add(_request("good", 3, arrival=1.0), 0.0)
    scheduler.add(_request("bad", 3, arrival=2.0), 0.0)
    result = worker.run(scheduler.plan(0.0))
    result.tokens[1] = -2
    scheduler.apply(result, 0.0)
    ends = {u.request_id: u.finish_reason for u in scheduler.take_updates()}
    assert ends == {"good": None, "bad": "error"}
