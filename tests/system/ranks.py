"""Ranks in threads of one process: they compute what ranks in processes do, and start at once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from penstock.config.schema import EngineOptions, place
from penstock.core.plan import Ints, Masks, StepPlan, StepResult
from penstock.engine.engine import Engine
from penstock.engine.executor import Begun
from penstock.engine.ranks import RankGroup
from penstock.parallel.axis import Place, places
from penstock.parallel.group import Group
from penstock.parallel.mesh import Mesh
from penstock.parallel.pipe import Pipe
from penstock.worker.rank import Rank


class Threads(Group):
    """Ranks in threads of one process (`parallel/group.py::Group`)."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.size = rank, shared.size
        self._shared = shared
        self._sums, self._peers = False, None

    def _gathered(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        shared = self._shared
        shared.given[self.rank] = x
        shared.barrier.wait()
        found = torch.stack(shared.given)
        # Nobody may go on and overwrite its part before all have read it.
        shared.barrier.wait()
        return lambda: found

    def _exchanged(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        found = self._gathered(x)()[:, self.rank]
        return lambda: found

    def begin_exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Callable[[], torch.Tensor]:
        shared = self._shared
        shared.given[self.rank] = x.split(sent)
        shared.barrier.wait()
        found = torch.cat([parts[self.rank] for parts in shared.given])
        shared.barrier.wait()
        assert len(found) == sum(received)
        return lambda: found


class Shared:
    """State that the `Threads` of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)


class ThreadPipe(Pipe):
    """Stages in threads of one process (`parallel/pipe.py::Pipe`)."""

    def __init__(self, place: Place, queues: dict[tuple[int, int], SimpleQueue[torch.Tensor]]) -> None:
        """`queues`: by receiving stage and the rank within it; those to the first stage carry tokens."""
        self._place, self._queues = place, queues

    def send(self, x: torch.Tensor) -> None:
        self._queues[self._place.stage + 1, self._place.within].put(x.clone())

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self._queues[self._place.stage, self._place.within].get(timeout=120))

    def send_back(self, tokens: torch.Tensor) -> None:
        self._queues[0, self._place.within].put(tokens.clone())

    def receive_back(self, out: torch.Tensor) -> None:
        out.copy_(self._queues[0, self._place.within].get(timeout=120))


class ThreadRank(Rank):
    """A rank whose mesh is in this process."""

    def __init__(self, options: EngineOptions, place: Place, shared: dict[Any, Shared], queues: Any) -> None:
        super().__init__(options, place)
        mine: list[Shared] = []

        def group(axis: str, rank: int, size: int, others: tuple[int, int]) -> Threads | None:
            if size == 1:
                return None
            mine.append(shared.setdefault((axis, *others), Shared(size)))
            return Threads(rank, mine[-1])

        def end() -> None:
            for one in mine:
                one.barrier.abort()

        tensor = group("tensor", place.tensor, place.tensors, (place.stage, place.context))
        context = group("context", place.context, place.contexts, (place.stage, place.tensor))
        self._threads = Mesh(tensor, ThreadPipe(place, queues) if place.stages > 1 else None, context=context, end=end)

    def _join(self) -> Mesh:
        return self._threads


class Several(RankGroup):
    """Ranks of this process, one after another."""

    @property
    def overlaps(self) -> bool:
        return all(rank.overlaps for rank in self.ranks)

    def all(self, calls: list[Callable[[], Any]]) -> list[Any]:
        return [call() for call in calls]

    def _each(self, call: str, *arguments: Any) -> list[Any]:
        pool = ThreadPoolExecutor(len(self.ranks))
        try:
            calls = [pool.submit(getattr(rank, call), *(arguments if call != "load" or not i else ()))
                     for i, rank in enumerate(self.ranks)]
            wait(calls, return_when=ALL_COMPLETED if "adapter" in call else FIRST_EXCEPTION)
            for one in calls:
                if one.done():
                    one.result()
            return [one.result() for one in calls]
        finally:
            pool.shutdown(wait=False)

    def launch(self, plan: StepPlan) -> Begun:
        return _Step(self, self.all([partial(rank.launch, plan) for rank in self.ranks]))

    def look(self) -> None:
        """They are never lost."""

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Threaded(Several):
    """Runs each rank's part of a step in a thread of its own, as they wait for each other."""

    ranks: list[Any]

    def __init__(self, options: EngineOptions) -> None:
        shared: dict[Any, Shared] = {}
        queues: Any = defaultdict(SimpleQueue)
        super().__init__([ThreadRank(options, own, shared, queues)
                          for own in places(place(options))], options.pipeline_parallel_size - 1)
        self._pools = [ThreadPoolExecutor(1) for _ in self.ranks]

    def all(self, calls: list[Callable[[], Any]]) -> list[Any]:
        return [found.result() for found in [pool.submit(call) for pool, call in zip(self._pools, calls, strict=True)]]

    def close(self) -> None:
        super().close()
        for pool in self._pools:
            pool.shutdown()


class _Step:
    def __init__(self, group: Several, begun: list[Any]) -> None:
        self._group = group
        self._begun = begun
        self._result: StepResult | None = None

    def drafts(self) -> Ints:
        first, *others = self._group.all([one.drafts for one in self._begun])
        assert all(np.array_equal(first, other) for other in others)
        return first

    def choose(self, masks: Masks) -> None:
        self._group.all([partial(one.choose, masks) for one in self._begun])

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._group.agree(self._group.all([one.result for one in self._begun]))
        return self._result


def drained(engine: Engine, count: int) -> list[list[int]]:
    """The tokens of requests that are numbered from 0 on, once all have ended by their length."""
    found: list[list[int]] = [[] for _ in range(count)]
    while engine.busy:
        for update in engine.turn():
            assert update.finish_reason in (None, "length"), update
            found[int(update.request_id)] += update.token_ids
    return found
