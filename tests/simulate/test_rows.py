"""Rows are shared between requests: one with many choices or prompts gives rows to others, and all outputs stay the same."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from penstock.cache.manager import Cache
from penstock.core.plan import StepPlan
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.core.service import BUILT_IN
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.core.steptime import TERMS, StepTime
from penstock.scheduler.admission import Limits
from penstock.scheduler.policy import FirstCome, Policy
from penstock.scheduler.promises import Promises
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeWorker, expected

ROWS, PROMPT = 16, [3, 1, 4, 1, 5, 9]
POLICIES = {"promises": lambda: Promises(BUILT_IN, StepTime(), 100.0), "priority": Policy, "fcfs": FirstCome}


def request(name: str, output: int, n: int = 1, **more: object) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=output, n=n, seed=7), **more)


class Served:
    """A scheduler and a fake worker, with `count` requests of 4 tokens that come `every` six steps. One step takes a second."""

    def __init__(self, policy: str, big: list[Request], depth: int = 1, slabs: int = 600, times: StepTime | None = None,
                 every: int = 6, count: int = 5, **small: object) -> None:
        states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
        layout = lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs)
        scheduler = Scheduler(Cache(layout), Limits(64, ROWS, 64, 1000, VOCABULARY, step_target=times and 9.0),
                              POLICIES[policy](), times=times)
        worker, flying = FakeWorker(layout, ROWS, 64), deque[StepPlan]()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.decoding: list[list[int]] = [[], []]
        """Segments of the steps, all of one token, without small requests and with them."""
        self.stats = scheduler.stats
        self.preempted: Counter[str] = Counter()
        preempt = scheduler.queues.preempt
        scheduler.queues.preempt = lambda s, now: (self.preempted.update([s.request.owner]), preempt(s, now))
        for one in big:
            one.arrival = 1.0
            scheduler.add(one, 1.0)
        now, asked = 1.0, 0
        while scheduler.busy:
            if now >= 10 and now % every == 0 and asked < count:
                scheduler.add(request(f"s{asked}", 4, arrival=now, waits=True, **small), now)
                asked += 1
            plan = scheduler.plan(now)
            if plan is not None:
                flying.append(plan)
                if plan.counts.max(initial=0) == 1:
                    names = {sequence.request.id[0] for sequence in scheduler.in_flight[-1].sequences}
                    self.decoding["s" in names].append(len(plan.counts))
            while len(flying) > (depth - 1 if plan is not None else 0):
                scheduler.apply(worker.run(flying.popleft()), now)
                scheduler.check()
            for update in scheduler.take_updates():
                self.outputs.setdefault((update.request_id, update.index), []).extend(update.token_ids)
                if update.token_ids:
                    self.first.setdefault(update.request_id, now)
                    self.last[update.request_id] = now
            now += 1.0
            assert now < 1000

    @property
    def waited(self) -> float:
        """The longest that one of the small requests waited for its first token."""
        return max(first - 12 - 6 * int(name[1:]) for name, first in self.first.items() if name.startswith("s"))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_with_many_choices_gives_rows_to_others(policy: str, depth: int) -> None:
    served = Served(policy, [request("big", 40, n=48)], depth)
    assert served.waited <= 2 * depth, served.first
    assert 1 <= served.preempted["big"] == served.stats.preemptions <= 5, "a row for each, and no more"
    for index in range(48):
        assert served.outputs["big", index] == expected(PROMPT, [Everything()], 7 + index, 40)
    assert all(served.outputs[f"s{i}", 0] == expected(PROMPT, [Everything()], 7, 4) for i in range(5))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_with_many_prompts_gives_rows_to_others(policy: str) -> None:
    served = Served(policy, [request(f"b{i}", 40, follows="b0" if i else "") for i in range(48)])
    assert served.waited <= 2 and served.preempted["b0"] <= 5


def test_requests_of_one_choice_take_nothing_from_each_other() -> None:
    served = Served("promises", [request(f"b{i}", 40) for i in range(ROWS)])
    assert not served.stats.preemptions and served.waited > 20


def test_requests_with_few_choices_are_left_alone() -> None:
    """A sixteenth of the rows, at least one, is everybody's, however many wait."""
    served = Served("promises", [request(f"b{i}", 30, n=1 + i % 2) for i in range(11)])
    assert served.preempted["b0"] == 0 and all(len(tokens) in (4, 30) for tokens in served.outputs.values())


def test_a_more_important_request_keeps_its_rows() -> None:
    served = Served("priority", [request("big", 40, n=48, priority=-1)])
    assert not served.stats.preemptions and served.waited > 20
    served = Served("promises", [request("big", 40, n=48, tier="interactive")], tier="batch")
    assert not served.preempted["big"]


def test_choices_of_an_important_request_do_not_wait_for_lower_classes() -> None:
    many = [request(f"b{i}", 50, tier="batch") for i in range(60)]
    served = Served("promises", [*many, request("i", 4, n=4, tier="interactive")])
    assert len(served.last) == 66 and served.last["i"] < 30


def slow_rows(row: float) -> StepTime:
    """A step takes a second, and so much for each row besides."""
    return StepTime([1.0, 0.0, row, *[0.0] * (len(TERMS) - 3)])


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_of_many_choices_take_turns_beside_others(depth: int) -> None:
    """Where rows cost time. All of them end with their own outputs, and nobody loses a row for it."""
    served = Served("promises", [request("big", 40, n=48)], depth, times=slow_rows(0.1), every=4, count=60)
    alone, beside = served.decoding
    assert max(alone) == ROWS and set(beside[:5]) == {1}, "they had every step before"
    # With two steps in flight a small request comes while the one before it still decodes: twice the rows.
    assert max(beside[5:]) == 2 + depth, "a fifth of 1.1 s, its own row, is two rows"
    assert served.preempted["big"] <= 60 and min(len(tokens) for tokens in served.outputs.values()) == 4
    for index in range(48):
        assert served.outputs["big", index] == expected(PROMPT, [Everything()], 7 + index, 40)
    free = Served("promises", [request("big", 40, n=48)], depth, times=slow_rows(0.01))
    assert max(free.decoding[True]) == ROWS, "15 rows more than one take 0.15 s of 1.01"


def test_rows_take_no_turns_where_nobody_watches() -> None:
    served = Served("promises", [request("big", 40, n=48, tier="batch")], times=slow_rows(0.1), tier="batch")
    assert max(served.decoding[True]) == ROWS


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_ends_with_the_same_outputs(seed: int) -> None:
    draw = random.Random(seed)
    big = [request(f"b{i}", draw.randint(5, 40), n=draw.choice([1, 1, 2, 8, 40])) for i in range(draw.randint(1, 6))]
    lengths = {one.id: (one.params.n, one.params.max_tokens) for one in big}
    for depth in (1, 2):
        asked = [request(name, length, n=n) for name, (n, length) in lengths.items()]
        served = Served(draw.choice(list(POLICIES)), asked, depth, slabs=draw.choice([60, 150, 600]),
                        times=draw.choice([None, slow_rows(0.2)]))
        for name, (n, length) in lengths.items():
            for index in range(n):
                assert served.outputs[name, index] == expected(PROMPT, [Everything()], 7 + index, length)
