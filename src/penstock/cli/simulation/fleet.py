"""Simulated replicas: `core/steptime.py` instead of a device, a heap of events instead of a clock; all else is the engine's.

As in `engine/engine.py::Engine.turn`, `depth` plans are in flight: a step is planned when the one before the last has ended."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from penstock.cache.manager import Cache
from penstock.core.errors import ConfigError, RequestError
from penstock.core.plan import StepPlan, StepResult, Want
from penstock.core.request import Request
from penstock.core.service import Service
from penstock.core.state import Everything, Field, StateSpec, lay_out
from penstock.core.steptime import TERMS, StepTime
from penstock.engine.replicas import Balancer
from penstock.scheduler.admission import Limits
from penstock.scheduler.policy import Policy
from penstock.scheduler.promises import policy_of
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.step import LIMITS


class Cost(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A device and its engine's limits; `GET /step_time` of a server answers so."""

    name: str = ""
    weights: dict[str, float]
    """Seconds by `core/steptime.py::TERMS`."""
    buckets: list[int] = []
    kv_tokens: int
    page_size: int = 16
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    step_target: float | None = 0.05
    overhead: float = 0.0
    """Seconds between two steps: what the engine does that no step in flight hides."""

    def times(self) -> StepTime:
        return StepTime([self.weights.get(term, 0.0) for term in TERMS], self.buckets, self.max_num_batched_tokens)


def read_cost(path: Path) -> Cost:
    """ConfigError for a file that is no cost model."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Cost)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no cost model: {error}; curl SERVER/step_time > FILE writes one") from None
    unknown = set(found.weights) - set(TERMS)
    if unknown or not any(found.weights.values()):
        raise ConfigError(f"{path}: weights must be of {', '.join(TERMS)}{f', not {sorted(unknown)}' if unknown else ''}")
    return found


@dataclass(slots=True)
class Record:
    """One request as it went. Times in seconds of the virtual clock."""

    arrival: float
    tier: str
    tenant: str
    prompt: int
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    cached: int = 0
    refused: bool = False

    @property
    def ttft(self) -> float:
        return self.first - self.arrival if self.first else float("inf")

    @property
    def tpot(self) -> float:
        """0 for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def kept(self, service: Service) -> bool:
        """Whether both promises were kept."""
        return bool(self.tokens) and self.ttft <= service.ttft and self.tpot <= (service.tpot or float("inf"))


@dataclass
class Outcome:
    records: list[Record]
    seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    """Seconds of steps, by replica."""
    limits: dict[str, float] = field(default_factory=dict)
    """Seconds by what bound the steps."""
    preemptions: int = 0


SchedulerKind = Callable[[Cache, Limits, Policy], Scheduler]


class Replica:
    """One engine. `wake` is when something happens next; infinity while it is idle."""

    def __init__(self, cost: Cost, policy: str, classes: dict[str, Service], kind: SchedulerKind | None = None,
                 depth: int = 2, times: StepTime | None = None) -> None:
        """`kind` makes another scheduler than the engine's, for comparisons. `times`: known step times, by default none."""
        state = StateSpec((Field("k", (1, 1), "float32"),), Everything())
        slab = lay_out([state], cost.page_size, 0).slab_bytes
        layout = lay_out([state], cost.page_size, slab * max(2, cost.kv_tokens // cost.page_size))
        limits = Limits(cost.max_model_len, cost.max_num_seqs, cost.max_num_batched_tokens, 1 << 30, 1 << 31,
                        step_target=cost.step_target)
        times = StepTime(buckets=cost.buckets, chunk=cost.max_num_batched_tokens) if times is None else times
        order = policy_of(policy, classes, times, limits.max_num_batched_tokens)
        self.scheduler = kind(Cache(layout), limits, order) if kind else Scheduler(Cache(layout), limits, order, times=times)
        self._device, self._overhead, self._depth = cost.times(), cost.overhead, depth
        self._flying: deque[tuple[StepPlan, float, float]] = deque()
        self._free = self.busy = 0.0
        self.wake = float("inf")
        self.work: dict[str, Record] = {}

    def add(self, request: Request, record: Record, now: float) -> None:
        """Takes a request in; the record says if it was refused."""
        try:
            self.scheduler.add(request, now)
        except RequestError:
            record.refused = True
            return
        self.work[request.id] = record
        if self.wake == float("inf"):
            self.turn(now)

    def turn(self, now: float) -> list[str]:
        """Applies what has ended, and plans until as many steps are in flight as may be. The requests that have ended."""
        while self._flying and self._flying[0][1] <= now:
            plan, end, seconds = self._flying.popleft()
            kept = plan.wants & int(Want.SAMPLE)
            self.scheduler.apply(StepResult(plan.id, np.ones(int(kept.sum()), np.int32), kept, seconds=seconds), end)
        ended = self._updates(now)
        while len(self._flying) < self._depth and self.scheduler.busy:
            made = self.scheduler.plan(now)
            if made is None:
                break
            seconds = self._device.seconds(self.scheduler.in_flight[-1].load) + self._overhead
            self._free = end = max(now, self._free) + seconds
            self.busy += seconds
            self._flying.append((made, end, seconds))
        self.wake = self._flying[0][1] if self._flying else float("inf")
        return ended

    def _updates(self, now: float) -> list[str]:
        ended = []
        for update in self.scheduler.take_updates():
            record = self.work[update.request_id]
            if update.token_ids:
                if not record.tokens:
                    record.first, record.cached = now, update.cached_tokens
                record.last, record.tokens = now, record.tokens + len(update.token_ids)
            if update.finish_reason is not None:
                del self.work[update.request_id]
                ended.append(update.request_id)
        return ended


ROUTERS = ("prefix", "least-load", "round-robin")


class Fleet:
    """Replicas behind a router. `prefix` is the server's own balancer, `least-load` the same without what may be cached."""

    def __init__(self, cost: Cost, replicas: int, router: str = "prefix", policy: str = "promises",
                 classes: dict[str, Service] | None = None, kind: SchedulerKind | None = None) -> None:
        self._replicas = [Replica(cost, policy, classes or {}, kind) for _ in range(replicas)]
        self._router, self._turn = router, 0
        self._balancer = Balancer(replicas)

    def run(self, requests: Iterator[Request]) -> Outcome:
        """Serves requests, in the order of their arrival, to the end of the last."""
        outcome, events = Outcome([]), list[tuple[float, int]]()
        upcoming = next(requests, None)
        now = 0.0
        while upcoming is not None or events:
            if upcoming is not None and (not events or upcoming.arrival <= events[0][0]):
                now, i = upcoming.arrival, self._choose(upcoming)
                record = Record(now, upcoming.tier, upcoming.tenant, len(upcoming.prompt_ids))
                outcome.records.append(record)
                replica, idle = self._replicas[i], self._replicas[i].wake == float("inf")
                replica.add(upcoming, record, now)
                if record.refused:
                    self._balancer.forget(upcoming.id)
                elif idle:
                    heapq.heappush(events, (replica.wake, i))
                upcoming = next(requests, None)
                continue
            now, i = heapq.heappop(events)
            replica = self._replicas[i]
            for name in replica.turn(now):
                self._balancer.forget(name)
            if replica.wake < float("inf"):
                heapq.heappush(events, (replica.wake, i))
        outcome.seconds = now
        outcome.busy = [replica.busy for replica in self._replicas]
        found = [replica.scheduler.stats for replica in self._replicas]
        outcome.preemptions = sum(stats.preemptions for stats in found)
        spent = zip(*(stats.limits for stats in found), strict=True)
        outcome.limits = {name: sum(seconds) for name, seconds in zip(LIMITS, spent, strict=True) if any(seconds)}
        outcome.limits["client"] = max(0.0, (now - outcome.records[0].arrival) * len(outcome.busy) - sum(outcome.busy)
                                       ) if outcome.records else 0.0
        return outcome

    def _choose(self, request: Request) -> int:
        self._turn += 1
        if self._router == "round-robin":
            return self._turn % len(self._replicas)
        if self._router == "least-load":
            self._balancer.reset()
        return self._balancer.choose(request, range(len(self._replicas)))
