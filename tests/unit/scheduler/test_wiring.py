"""The scheduler's messages to others, and their times: each of these once could be wrong without any other test noticing."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from penstock.cache.manager import Cache, Reuse
from penstock.core.plan import NOT_FINITE
from penstock.core.request import Request, Sequence, Update
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.ops.noise import seed_key
from penstock.scheduler.admission import PASSES, TRIES, Limits
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeWorker


def made(rows: int = 4, budget: int = 16, slabs: int = 40, **limits: Any) -> tuple[Scheduler, FakeWorker]:
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    layout = lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs)
    return Scheduler(Cache(layout), Limits(64, rows, budget, 1000, VOCABULARY, **limits)), FakeWorker(layout, rows, 64)


def request(name: str, prompt: int, output: int = 4, *, first: int = 0, more: dict[str, Any] | None = None,
            **params: Any) -> Request:
    return Request(name, [(first + i) % VOCABULARY for i in range(prompt)],
                   SamplingParams(**{"max_tokens": output, "seed": 0, **params}), **(more or {}))


def run(scheduler: Scheduler, worker: FakeWorker, now: float = 0.0) -> list[Update]:
    """One step."""
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.apply(worker.run(plan), now)
    scheduler.check()
    return scheduler.take_updates()


@pytest.mark.parametrize(("params", "banned"), [
    ({"min_tokens": 3}, [5, 9]), ({"min_tokens": 3, "stop_token_ids": [2]}, [2, 5, 9]), ({}, []),
    ({"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [7]}, [7]), ({"stop_token_ids": [2]}, [])], ids=str)
def test_what_ends_a_sequence_is_banned_before_min_tokens(params: dict[str, Any], banned: list[int]) -> None:
    scheduler, _ = made()
    scheduler.add(request("a", 3, 8, more={"eos_ids": [9, 5]}, **params), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.enter[0].banned_until == banned


@pytest.mark.parametrize("budget", [16, 4])
def test_what_gave_no_usable_logits_is_not_found_again(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what the broken step computed, which is never told to the cache, nor what came before it."""
    scheduler, worker = made(budget=budget)
    committed: list[int] = []
    commit = scheduler.cache.commit
    monkeypatch.setattr(scheduler.cache, "commit", lambda s: (committed.append(s.computed), commit(s)))
    scheduler.add(request("broken", 12), 0.0)
    for _ in range(12 // budget + (12 % budget > 0)):
        plan = scheduler.plan(0.0)
        assert plan is not None
        result = worker.run(plan)
        if len(result.tokens):
            result.tokens[:] = NOT_FINITE
        scheduler.apply(result, 0.0)
        scheduler.check()
    assert [update.finish_reason for update in scheduler.take_updates()] == ["error"]
    assert 12 not in committed and (committed == [4, 8] or budget == 16)
    scheduler.add(request("next", 12), 0.0)
    found = run(scheduler, worker)
    while not found:
        found = run(scheduler, worker)
    assert found[0].cached_tokens == 0 and not scheduler.stats.cached_tokens


def test_a_blocked_sequence_is_passed_only_so_often() -> None:
    """A large one has no room while small ones keep coming. After PASSES of them all wait until it has entered."""
    scheduler, worker = made(rows=4, slabs=14)
    scheduler.add(request("small", 5, 4, more={"arrival": 0.5}), 0.0)
    run(scheduler, worker)
    scheduler.add(request("large", 48, 2, first=3, more={"arrival": 1.0}), 0.0)
    entered: list[str] = []
    enter = scheduler.queues.enter
    scheduler.queues.enter = lambda s, now: (entered.append(s.request.id), enter(s, now))
    numbers = count()
    for _ in range(400):
        # Their ends lie apart, so that there never is room by chance.
        while sum(1 for sequence in scheduler.live if sequence.request.id != "large") < 3:
            number = next(numbers)
            scheduler.add(request(f"small{number}", 5, (3, 5, 8)[number % 3], first=number,
                                  more={"arrival": 2.0 + number}), 0.0)
        run(scheduler, worker)
        if "large" in entered:
            break
    assert "large" in entered and 8 < entered.index("large") <= PASSES + TRIES


def test_a_cornered_sequence_shares_nothing() -> None:
    scheduler, worker = made()
    scheduler.add(request("before", 12), 0.0)
    while scheduler.busy:
        run(scheduler, worker)
    scheduler.add(request("again", 12), 0.0)
    [sequence] = scheduler.waiting
    asked: list[Reuse] = []
    match = scheduler.cache.match
    scheduler.cache.match = lambda s, reuse=Reuse.TOKENS: (asked.append(reuse), match(s, reuse))[1]
    scheduler.queues.cornered = sequence
    plan = scheduler.plan(0.0)
    assert plan is not None and asked == [Reuse.NOTHING] and plan.starts.tolist() == [0]
    assert scheduler.queues.cornered is None


def test_what_is_counted_at_first_is_not_counted_again_after_preemption() -> None:
    """When it was first scheduled, what the cache had of it then, and the totals of prompts."""
    scheduler, worker = made(rows=2, slabs=11)
    scheduler.add(request("before", 9, 1), 0.0)
    while scheduler.busy:
        run(scheduler, worker)
    assert (scheduler.stats.prompt_tokens, scheduler.stats.cached_tokens) == (9, 0)
    scheduler.add(request("first", 12, 20, first=9, more={"arrival": 1.0}), 0.0)
    scheduler.add(request("second", 12, 20, more={"arrival": 2.0}), 0.0)
    sequences: dict[str, Sequence] = {sequence.request.id: sequence for sequence in scheduler.live}
    now, seen = 10.0, list[tuple[float, int]]()
    updates: list[Update] = []
    while scheduler.busy:
        now += 1
        updates += run(scheduler, worker, now)
        seen.append((sequences["second"].timings.first_scheduled, sequences["second"].cached))
    second = [update for update in updates if update.request_id == "second"]
    assert sequences["second"].timings.preemptions > 0 and scheduler.stats.preemptions > 0
    assert {pair for pair in seen if pair[0]} == {(11.0, 9)}, "set once, when it had its first row"
    assert second[0].cached_tokens == 9 and second[-1].timings.first_scheduled == 11.0
    assert (scheduler.stats.prompt_tokens, scheduler.stats.cached_tokens) == (9 + 24, 9)


def test_all_64_bits_of_a_seed_count() -> None:
    """From the request to the key that the draw is made by; the sequences of one request have seeds of their own."""
    seeds = [5, 5 + 2**32, 5 + 2**63 - 2**40, -5, 5 - 2**63]
    scheduler, _ = made(rows=8)
    for number, seed in enumerate(seeds):
        scheduler.add(request(str(number), 2, seed=seed), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [enter.seed for enter in plan.enter] == [seed % 2**64 for seed in seeds]
    assert len({seed_key(enter.seed) for enter in plan.enter}) == len(seeds)
    high = {seed_key(number << 32) for number in range(1000)}
    assert len(high) == 1000, "keys of seeds that differ in their high half differ"


@pytest.mark.parametrize("held", [True, False])
def test_behind_a_step_that_is_held_back_none_is_planned(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short prompt that comes while it runs is in the next one."""
    scheduler, worker = made(step_target=0.05)
    monkeypatch.setattr(scheduler.pace, "budget", lambda *_: (4, 0, lambda _: False))
    monkeypatch.setattr(scheduler.pace, "held", held)
    scheduler.add(request("long", 12), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and (scheduler.plan(0.0) is None) == held
    if held:
        scheduler.apply(worker.run(plan), 0.0)
        assert scheduler.plan(0.0) is not None
