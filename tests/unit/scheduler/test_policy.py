"""The order of service: who is planned, admitted and preempted by which policy, and what a change of order costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from penstock.cache.manager import Cache
from penstock.core.request import Request, Sequence
from penstock.core.sampling import SamplingParams
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.scheduler.admission import Limits
from penstock.scheduler.policy import FirstCome, Order, Policy
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeWorker, expected


def serve(policy: Policy, requests: list[Request], *, rows: int, slabs: int, budget: int = 16
          ) -> tuple[Scheduler, list[str], Counter[str], dict[str, list[int]]]:
    """Runs all: in which order they got rows, how often each was preempted, and their outputs."""
    states = [StateSpec((Field("k", (1, 16), "float32"),), Everything())]
    layout = lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * slabs)
    scheduler = Scheduler(Cache(layout, sharing=False), Limits(64, rows, budget, 1000, VOCABULARY), policy)
    worker, preempted, entered = FakeWorker(layout, rows, 64), Counter[str](), list[str]()
    outputs: dict[str, list[int]] = {}
    for request in requests:
        scheduler.add(request, 0.0)
    enter, preempt = scheduler.queues.enter, scheduler.queues.preempt
    scheduler.queues.enter = lambda s, now: (entered.append(s.request.id), enter(s, now))
    scheduler.queues.preempt = lambda s, now: (preempted.update([s.request.id]), preempt(s, now))
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(worker.run(plan), 0.0)
        scheduler.check()
        for update in scheduler.take_updates():
            outputs.setdefault(update.request_id, []).extend(update.token_ids)
    return scheduler, entered, preempted, outputs


def request(name: str, prompt: int = 8, output: int = 20, **more: object) -> Request:
    return Request(name, [i % VOCABULARY for i in range(prompt)], SamplingParams(max_tokens=output, seed=0), **more)


@pytest.mark.parametrize(("policy", "first"), [
    (FirstCome, ["early", "middle", "late"]), (Policy, ["late", "early", "middle"])])
def test_who_goes_first_is_preempted_last(policy: Callable[[], Policy], first: list[str]) -> None:
    """Three that grow where there is room for one and a half: the last in order loses its pages, the first never."""
    asked = [request("early", priority=1, arrival=1.0), request("middle", priority=1, arrival=2.0),
             request("late", priority=0, arrival=3.0)]
    _, entered, preempted, outputs = serve(policy(), asked, rows=3, slabs=12)
    assert list(dict.fromkeys(entered)) == first
    assert preempted[first[0]] == 0 and preempted[first[2]] >= 1 and preempted[first[1]] <= preempted[first[2]]
    assert all(tokens == expected([i % VOCABULARY for i in range(8)], [Everything()], 0, 20) for tokens in outputs.values())


class FairShare(Policy):
    """Tenants in turn: who has had least, by weight, comes first. Decides by state that changes with every step."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.had: Counter[str] = Counter()

    def group(self, sequence: Sequence) -> str:
        return sequence.request.tenant

    def standing(self, group: str) -> float:
        return self.had[group] / self.weights[group]

    def charge(self, sequence: Sequence, positions: int) -> None:
        self.had[sequence.request.tenant] += positions


def test_a_fair_share_policy_needs_nothing_else_to_change() -> None:
    """One tenant asks for much first, another for little later: they are served by their shares, not by arrival."""
    greedy = [request(f"greedy{i}", output=8, tenant="greedy", arrival=float(i)) for i in range(24)]
    modest = [request(f"modest{i}", output=8, tenant="modest", arrival=100.0 + i) for i in range(8)]
    _, entered, _, _ = serve(FirstCome(), [*greedy, *modest], rows=2, slabs=40)
    assert {name[:6] for name in entered[:24]} == {"greedy"}
    for weight, share in ((1.0, 1 / 2), (3.0, 3 / 4)):
        policy = FairShare({"greedy": 1.0, "modest": weight})
        _, entered, _, outputs = serve(policy, [*greedy, *modest], rows=2, slabs=40)
        served = [name[:6] for name in entered[:8]].count("modest")
        assert abs(served / 8 - share) <= 1 / 8, entered
        assert all(len(tokens) == 8 for tokens in outputs.values()) and len(outputs) == 32


def test_a_fair_share_decides_who_is_preempted() -> None:
    """Whose tenant has had most loses its pages, though it came first."""
    policy = FairShare({"a": 1.0, "b": 1.0})
    policy.had["a"] = 1000
    asked = [request("first", tenant="a", arrival=1.0), request("second", tenant="b", arrival=2.0)]
    _, entered, preempted, _ = serve(policy, asked, rows=2, slabs=9)
    assert entered[0] == "second" and preempted["first"] > 0 == preempted["second"]


class Counted(float):
    """A number that counts how often it is compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        return float(self) == other

    __hash__ = float.__hash__


class Predicted(Policy):
    """Shortest first, by a prediction that changes."""

    def __init__(self) -> None:
        self.seconds: dict[Sequence, float] = {}

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (Counted(self.seconds[sequence]),)


def test_a_change_of_order_costs_few_comparisons() -> None:
    policy, draw = Predicted(), random.Random(1)
    order, sequences = Order(policy), [Sequence(request(str(i)), 0, 0, 9) for i in range(4096)]
    for sequence in sequences:
        policy.seconds[sequence] = draw.random()
        order.add(sequence)
    for _ in range(300):
        sequence = draw.choice(sequences)
        policy.seconds[sequence] = draw.random()
        Counted.compared = 0
        order.changed(sequence)
        assert Counted.compared <= 2 * 2 * 13, "twice the logarithm, for taking it out and putting it in"
    assert list(order) == sorted(sequences, key=policy.seconds.__getitem__) and len(order) == 4096
    order.remove(sequences[7])
    assert sequences[7] not in order and len(list(order)) == 4095


def test_equals_keep_the_order_in_which_they_came() -> None:
    order = Order(Policy())
    sequences = [Sequence(request(str(i), arrival=1.0), 0, 0, 9) for i in range(5)]
    for sequence in sequences:
        order.add(sequence)
    assert list(order) == sequences
    order.changed(sequences[1])
    assert list(order) == [sequences[0], *sequences[2:], sequences[1]]
