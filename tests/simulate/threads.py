"""Threads that a seed drives: one task at a time, as late and in as unlikely an order as is allowed, the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from penstock.cache.tiers.catalog import Catalog, Keeper


class World:
    """All pools and keepers of a workload."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pools: list[Pool] = []
        self.keepers: list[QuietKeeper] = []

    def pool(self, threads: int, name: str) -> Pool:
        """In place of a ThreadPoolExecutor, and of our own Threads."""
        self.pools.append(Pool(self, threads))
        return self.pools[-1]

    def keeper(self, catalog: Catalog, seconds: float) -> QuietKeeper:
        """In place of a Keeper."""
        self.keepers.append(QuietKeeper(catalog, seconds))
        return self.keepers[-1]

    def passes(self) -> None:
        """Some time: some of the tasks are done."""
        for _ in range(self.rng.choice([0, 0, 1, 3, 10])):
            busy = [pool for pool in self.pools if pool.tasks]
            if busy:
                self.rng.choice(busy).one()
        for keeper in self.keepers:
            if self.rng.random() < 0.2:
                keeper.turn(self.rng.random() < 0.5)

    def settles(self) -> None:
        """Until there is nothing to do."""
        while any(pool.tasks for pool in self.pools):
            for pool in self.pools:
                pool.all()


class Pool:
    """Threads as far as movers use them. Of one thread, it keeps the order."""

    def __init__(self, world: World, threads: int) -> None:
        self.world = world
        self.threads = threads
        self.tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = _Future(self)

        def run() -> None:
            try:
                future.set_result(task(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self.tasks.append(run)
        return future

    def one(self) -> None:
        self.tasks.pop(self.world.rng.randrange(min(self.threads, len(self.tasks))))()

    def all(self) -> None:
        while self.tasks:
            self.one()

    def shutdown(self) -> None:
        self.all()

    def close(self, _seconds: float) -> None:
        self.tasks.clear()


class _Future(Future[Any]):
    """Waiting for it makes its pool work."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._pool.one()
        return super().result()


class QuietKeeper(Keeper):
    """A Keeper without a thread."""

    def __init__(self, catalog: Catalog, seconds: float) -> None:
        self._catalog = catalog
        self._look()

    def wake(self) -> None:
        """Its turn will come."""

    def turn(self, looks: bool) -> None:
        self._catalog.bury()
        self._catalog.tell()
        if looks:
            self._look()
        self._catalog.shrink()

    def close(self) -> None:
        self._catalog.bury(last=True)
        self._catalog.tell()
