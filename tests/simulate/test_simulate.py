"""Thousands of random workloads through scheduler and cache against a fake worker, every invariant checked after every step.

Prompts share beginnings with each other and with what was generated before, in arenas that hold a few of them. So outputs are
right only if hits, joins, pages cut in the middle, copies, evictions, preemptions, forks and loads from other tiers all are.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from penstock.cache.events import Sink
from penstock.cache.eviction import POLICIES
from penstock.cache.manager import Cache
from penstock.cache.tiers.hierarchy import Hierarchy
from penstock.core.errors import RequestError
from penstock.core.request import WHOLE, Request, Sequence, Span, Update
from penstock.core.sampling import SamplingParams
from penstock.core.state import Ahead, Chunk, Everything, Field, Retention, Snapshot, StateSpec, Window, lay_out
from penstock.scheduler.admission import Limits
from penstock.scheduler.drafting import DraftPolicy
from penstock.scheduler.scheduler import Scheduler
from tests.simulate.fake import VOCABULARY, FakeTiers, FakeWorker, expected

WORKLOADS = 1600
SHARDS = 32


def _states(rng: random.Random) -> list[StateSpec]:
    """One to four kinds of layers of different sizes."""
    keeps: list[Retention] = [Everything()] if rng.random() < 0.8 else []
    if rng.random() < 0.5 or not keeps:
        keeps.append(Window(rng.choice([1, 2, 3, 5, 8, 17])))
    if rng.random() < 0.15:
        keeps.append(Window(rng.choice([4, 30])))
    for chance, keep in ((0.15, Chunk(rng.choice([3, 8, 16]))), (0.2, Snapshot()), (0.15, Ahead())):
        if rng.random() < chance:
            keeps.append(keep)
    layers = []
    for keep in keeps:
        size = rng.choice([8, 8, 16, 24])
        fields = tuple(Field(name, (1, size), "float32", per="page" if keep.exact else "position") for name in "kv")
        layers += [StateSpec(fields, keep)] * rng.randint(1, 3)
    return layers


class RandomDrafts(DraftPolicy):
    """Asks for a few drafts, for none, or that the drafter rests."""

    def __init__(self, seed: int) -> None:
        super().__init__(5)
        self.rng = random.Random(seed)

    def begin(self, rows: int) -> int:
        return self.rng.random() < 0.8

    def count(self, sequence: Sequence) -> int:
        return self.rng.randint(0, 5)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted > 0

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: int) -> None:
        assert 0 <= kept <= tokens >= rows


class Run:
    """One workload from its seed."""

    CHOICES = (1, 1, 1, 2, 4)
    """The number of each request's sequences is drawn from these."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        states = _states(rng)
        page = rng.choice([1, 2, 3, 4, 8, 16])
        slab = lay_out(states, page, 0).slab_bytes
        layout = lay_out(states, page, slab * rng.choice([5, 8, 12, 16, 24, 60, 200]))
        self.keeps = [group.keep for group in layout.groups]
        rows = rng.choice([1, 2, 3, 5, 9])
        length = rng.choice([12, 40, 80])
        self.limits = Limits(length, rows, rng.choice([rows, rows + 1, rows + 5, 64]), rng.choice([6, 1000]), VOCABULARY,
                             exact=seed % 12 == 9)
        self.tiers = FakeTiers(random.Random(seed), rng.random() < 0.5) if rng.random() < 0.3 else None
        self.worker = FakeWorker(layout, rows, length, self.tiers)
        self.policy, self.sharing, self.quota = rng.choice(list(POLICIES)), rng.random() < 0.9, rng.choice([1.0, 1.0, 0.3])
        self.depth = rng.choice([1, 2, 2, 3])
        self.drafting = RandomDrafts(seed) if seed % 3 == 0 else None
        self.assemble(self.tiers)
        self.in_flight: deque[object] = deque()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], Update] = {}
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.now = 1.0
        self.documents = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, length))] for _ in range(3)]
        self.rounds = rng.randint(1, 12)
        self.seen: Counter[str] = Counter()

    def assemble(self, tiers: Hierarchy | None, sink: Sink | None = None) -> None:
        """A cache and a scheduler for the worker that there is."""
        self.cache = Cache(self.worker.layout, policy=self.policy, sharing=self.sharing, quota=self.quota, tiers=tiers,
                           sink=sink)
        self.scheduler = Scheduler(self.cache, self.limits, drafting=self.drafting)

    def prompt(self) -> list[int]:
        """Something of its own, behind a document's beginning or an earlier conversation."""
        rng, longest = self.rng, self.limits.max_model_len
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, rng.choice([3, 6, longest])))]
        choice = rng.random()
        if choice < 0.5:
            shared = rng.choice(self.documents)
            own = shared[:rng.randint(1, len(shared))] + own[:rng.randint(0, 4)]
        elif choice < 0.8 and self.requests:
            request = rng.choice(list(self.requests.values()))
            own = request.prompt_ids + self.outputs.get((request.id, 0), []) + own[:rng.randint(0, 4)]
        return own[:longest]

    def submit(self, number: int) -> None:
        rng = self.rng
        params = SamplingParams(n=rng.choice(self.CHOICES), max_tokens=rng.choice([None, 1, 2, 12, 30]),
                                seed=rng.randrange(1000),
                                stop_token_ids=[3] if rng.random() < 0.3 else None,
                                prompt_logprobs=0 if rng.random() < 0.1 else None)
        tenant = rng.choice(["", "", "b"])
        spans = [Span(rng.choice([3, 20, WHOLE]), rng.choice([10, 70, 100]), rng.choice([2.0, 50.0]))] * (rng.random() < 0.2)
        request = self.dress(Request(f"r{number}", self.prompt(), params, priority=rng.choice([0, 0, 1]), salt=tenant,
                                     tenant=tenant, retain=spans))
        try:
            self.scheduler.add(request, self.now)
        except RequestError:
            return
        self.requests[request.id] = request

    def dress(self, request: Request) -> Request:
        """Options that some requests have besides their tokens."""
        return request

    def abort(self) -> None:
        live = self.scheduler.live
        if live:
            victim = self.rng.choice(live)
            whole = self.rng.random() < 0.5
            name = victim.request.id if whole else f"{victim.request.id}/{victim.index}"
            self.aborted.add(name)
            self.scheduler.abort([name, "nobody"], self.now)
            gone = [s for s in self.scheduler.live if s.request.id == name or f"{s.request.id}/{s.index}" == name]
            assert not gone

    def expect(self, rng: random.Random) -> None:
        """Somebody on the host knows what comes next for a sequence, or thinks so."""
        sequence = rng.choice(self.scheduler.live or [None])
        if sequence is not None and len(sequence.tokens) >= sequence.prompt_len:
            tokens = expected(sequence.tokens, self.keeps, sequence.seed, rng.randint(1, 5))
            if rng.random() < 0.5:
                tokens[rng.randrange(len(tokens))] = 5
            self.scheduler.drafts.expect(sequence, len(sequence.tokens), tokens)

    def turn(self) -> None:
        self.now += 1
        if self.drafting is not None and not self.cache.exact:
            self.expect(self.drafting.rng)
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            assert int(plan.counts.sum()) <= self.limits.max_num_batched_tokens
            assert len(set(plan.rows.tolist())) == len(plan.rows), "a row has two segments"
            assert plan.slack is None or not self.limits.exact
            self.seen["copies"] += len(plan.moves)
            self.seen["waits"] += any(self.cache.joining.leads(s.cache_state.leader) for s in self.scheduler.waiting
                                      if s.cache_state is not None and s.cache_state.leader is not None)
            self.in_flight.append(self.worker.run(plan))
        else:
            assert self.in_flight or not self.scheduler.live, "nothing runs though there is work: a livelock"
        self.scheduler.check()
        room = self.depth - 1 if plan is not None else max(0, len(self.in_flight) - 1)
        while len(self.in_flight) > room:
            self.scheduler.apply(self.in_flight.popleft(), self.now)
            self.scheduler.check()
        for update in self.scheduler.take_updates():
            key = (update.request_id, update.index)
            assert key not in self.ends, "news after the end"
            self.outputs.setdefault(key, []).extend(update.token_ids)
            assert sum((update.cached_by_tier or {}).values()) == update.cached_tokens < self.limits.max_model_len
            self.seen["cached"] += update.cached_tokens * (update.index == 0)
            if update.prompt_logprobs is not None:
                prompt = self.requests[update.request_id].prompt_ids
                assert [line.ids[0] for line in update.prompt_logprobs][:len(prompt) - 1] == list(range(1, len(prompt)))
            if update.finish_reason:
                self.ends[key] = update

    def go(self) -> None:
        rng, number = self.rng, 0
        for _ in range(self.rounds):
            for _ in range(rng.choice([0, 1, 3, 8])):
                self.submit(number)
                number += 1
            for _ in range(rng.randint(1, 6)):
                if self.scheduler.busy:
                    self.turn()
            if rng.random() < 0.2:
                self.abort()
            if rng.random() < 0.05:
                self.cache.reset()
                self.scheduler.check()
        turns = 0
        while self.scheduler.busy:
            self.turn()
            turns += 1
            assert turns < 20_000, "does not end"
        self.judge()

    def judge(self) -> None:
        assert self.cache.pools.slabs_live == 0
        for request in self.requests.values():
            for index in range(request.params.n):
                got, end = self.outputs.get((request.id, index), []), self.ends[(request.id, index)]
                want = expected(request.prompt_ids, self.keeps, (request.params.seed or 0) + index, len(got))
                assert got == want, (request.id, index, got, want)
                assert end.finish_reason in ("stop", "length", "abort") or (end.finish_reason == "error" and request.deadline)
                self.seen["expired"] += end.finish_reason == "error"
                if end.finish_reason == "error":
                    assert end.status == 504
                elif end.finish_reason == "abort":
                    assert {request.id, f"{request.id}/{index}"} & self.aborted
                elif end.finish_reason == "stop":
                    assert got[-1] == 3 and request.params.stop_token_ids
                else:
                    assert len(got) == (request.params.max_tokens or self.scheduler.admission.longest - len(request.prompt_ids))
        self.seen["preemptions"] = self.scheduler.stats.preemptions
        self.seen["drafted"], self.seen["accepted"] = (
            self.scheduler.stats.drafted_tokens, self.scheduler.stats.accepted_tokens)
        self.seen["evictions"] = sum(self.cache.evictor.evicted)
        if self.tiers is not None:
            self.seen["landed"], self.seen["failed"] = self.tiers.landed, self.tiers.failed
        if not self.cache.sharing:
            assert not self.seen["cached"] + self.seen["waits"]
        # All that is left can go, down to the last page.
        assert not self.cache.evictor.evict(lambda: False)
        assert self.cache.pools.slabs_used == 0


def seen_in(kind: Callable[[int], Run], seeds: range) -> Counter[str]:
    """Counts over all of these workloads, each run to its end; an error names its seed."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        run = kind(seed)
        try:
            run.go()
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
        seen += run.seen
    return seen


@pytest.mark.parametrize("shard", [pytest.param(i, marks=[pytest.mark.exhaustive] if i else []) for i in range(SHARDS)])
def test_random_workloads(shard: int) -> None:
    seen = seen_in(Run, range(shard * WORKLOADS // SHARDS, (shard + 1) * WORKLOADS // SHARDS))
    for what in ("cached", "copies", "waits", "evictions", "preemptions", "landed", "failed", "drafted", "accepted"):
        assert seen[what] > (0 if what in ("landed", "failed") else 50), f"the workloads do not strain the cache: {seen}"


def test_no_row_is_lost_when_a_fork_waits_for_rows() -> None:
    """n larger than the rows: the forks take turns."""
    states = [StateSpec((Field("k", (1, 8), "float32"),), Everything())]
    layout = lay_out(states, 4, lay_out(states, 4, 0).slab_bytes * 20)
    scheduler = Scheduler(Cache(layout), Limits(40, 2, 8, 100, VOCABULARY))
    worker = FakeWorker(layout, 2, 40)
    scheduler.add(Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(n=7, max_tokens=5, seed=5)), 0.0)
    got: dict[int, list[int]] = {}
    while scheduler.busy:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(worker.run(plan), 0.0)
        scheduler.check()
        for update in scheduler.take_updates():
            got.setdefault(update.index, []).extend(update.token_ids)
    assert got == {i: expected([1, 2, 3, 4, 5, 6], [Everything()], 5 + i, 5) for i in range(7)}
