"""Random workloads through scheduler, cache, the tiers and the real movers: what the fake worker's pages say goes through the
bytes of an arena, a small host and a faulty store, while a seed decides when each thread does what.
"""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from penstock.cache.keys import Key
from penstock.cache.tiers import hierarchy
from penstock.cache.tiers.hierarchy import Hierarchy, TierPolicy
from penstock.core.plan import LoadResult, PageName, StepPlan, WriteResult
from penstock.core.steptime import StepTime
from penstock.stores import Entry, Listing
from penstock.stores.opening import Behind
from penstock.worker import jobs, movers
from penstock.worker.arena import Arena
from penstock.worker.movers import Movers
from tests.simulate.fake import Pages
from tests.simulate.test_simulate import Run
from tests.simulate.threads import World

WORKLOADS = 72
SHARDS = 12


class Shelf:
    """A store in memory, in which things go wrong: one half's view of what both halves, and other engines, share."""

    def __init__(self, rng: random.Random, tier: str, pages: dict[PageName, bytes], faults: float) -> None:
        self.tier = tier
        self._rng, self._pages, self._faults = rng, pages, faults
        self._listing = Listing()

    def _happens(self) -> bool:
        return self._rng.random() < self._faults

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        if self._happens():
            raise OSError(28, "No space left on device")
        data = b"".join(parts)
        self._pages[name] = data[:self._rng.randrange(len(data))] if self._happens() else data

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        if self._happens():
            raise ConnectionResetError("connection reset")
        if name not in self._pages:
            raise FileNotFoundError(name)
        data = bytearray(self._pages[name])
        if self._happens() and data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return sum(map(io.BytesIO(data).readinto, parts))

    def touch(self, name: PageName) -> None:
        if self._happens():
            raise OSError(5, "Input/output error")

    def delete(self, name: PageName | str) -> None:
        if self._happens():
            raise OSError(5, "Input/output error")
        assert isinstance(name, PageName)
        self._pages.pop(name, None)

    def changes(self) -> tuple[list[Entry], list[PageName | str]]:
        if self._happens():
            raise OSError(5, "Input/output error")
        # Another engine makes room.
        for name in list(self._pages):
            if self._rng.random() < self._faults / 4:
                del self._pages[name]
        return self._listing.compare(Entry(name, len(data), 0) for name, data in self._pages.items())

    def close(self) -> None:
        """Nothing is held."""


class Places:
    """A sink that keeps where every page is, and asserts that nothing is told twice, or of pages whose parent is unknown."""

    def __init__(self) -> None:
        self.there: set[tuple[str, PageName]] = set()

    def stored(self, group: int, tier: str, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str,
               adapter: str) -> None:
        assert keys and len(tokens) % len(keys) == 0
        for key in keys:
            assert (tier, PageName(group, key)) not in self.there, "a page is stored twice"
            self.there.add((tier, PageName(group, key)))

    def removed(self, group: int, tier: str, keys: Sequence[Key]) -> None:
        for key in keys:
            self.there.remove((tier, PageName(group, key)))

    def cleared(self) -> None:
        self.there.clear()


class TieredRun(Run):
    """One workload from its seed."""

    def __init__(self, seed: int, world: World) -> None:
        super().__init__(seed)
        rng, self.world = world.rng, world
        layout, self.tiers = self.worker.layout, None
        self.sharing = True
        self.rounds = rng.choice([5, 20, 60])
        self.arena = Arena(layout, torch.device("cpu"))
        for g, group in enumerate(layout.groups):
            cut = self.arena.whole.numpy().reshape(layout.slabs, layout.slab_bytes)[:, :group.per_slab * group.stride]
            pages = cut.reshape(-1, group.stride)[:, :8 * layout.page].view("int64")
            self.worker.pages[g] = pages
            pages[:] = -99
        faults, slabs = rng.choice([0.0, 0.02, 0.1]), rng.choice([1, 2, 3, 6, 20])
        kinds = rng.choice([[], ["disk"], ["disk"], ["remote"], ["disk", "remote"]])
        shelves = {tier: dict[PageName, bytes]() for tier in kinds}
        bound = layout.slab_bytes * rng.choice([3, 10, 100])
        self.halves = [[Shelf(rng, tier, shelves[tier], faults) for tier in kinds] for _ in range(2)]
        policy = TierPolicy(through=rng.random() < 0.5, always=rng.random() < 0.9)
        stores = [(shelf, bound if shelf.tier == "disk" else None) for shelf in self.halves[0]]
        self.hierarchy = Hierarchy(layout, slabs, stores, policy, StepTime())
        self.movers = Movers(self.arena, Behind(slabs, self.halves[1], b"a version of it."), torch.device("cpu"))
        self.worker.behind = self
        self.sink = Places() if rng.random() < 0.5 else None
        self.assemble(self.hierarchy, self.sink)

    def prompt(self) -> list[int]:
        """Mostly beginnings of a few documents, so that what has left the device is wanted again."""
        if self.rng.random() < 0.3:
            return super().prompt()
        document = self.rng.choice(self.documents[:2]) * 7
        return document[:self.rng.randint(1, self.limits.max_model_len)]

    # -- the worker's half

    def save(self, plan: StepPlan, pages: list[Pages]) -> None:
        self.world.passes()
        self.movers.start(plan)

    def fetch(self, plan: StepPlan) -> None:
        self.movers.load(plan)
        self.world.passes()

    def arrived(self, pages: list[Pages], wait: bool) -> tuple[list[LoadResult], list[WriteResult]]:
        self.world.passes()
        for job in list(self.movers._open.values()):
            if self.world.rng.random() < 0.03:
                job.give_up()
        if wait and self.movers._open:
            self.world.settles()
        found = self.movers.arrived()
        self.seen["landed"] += sum(result.ok for result in found[0])
        self.seen["failed"] += sum(not result.ok for result in found[0])
        self.seen["written"] += sum(result.ok for result in found[1])
        return found

    # -- what is checked

    def judge(self) -> None:
        self.world.settles()
        for _ in range(1000):
            if not self.cache.writing:
                break
            self.turn()
        self.world.settles()
        assert not self.cache.writing and not self.hierarchy._loading and not self.hierarchy._writing
        assert not self.hierarchy.host._busy and not self.hierarchy.host._doomed
        for catalog in self.hierarchy.catalogs:
            assert catalog._pending_bytes == 0 and not catalog._pending
            assert catalog.used_bytes == sum(catalog._entries.values()) and catalog.pages == len(catalog._entries)
        assert all(source.owed == 0 for source in self.hierarchy.costs.sources.values())
        if self.sink is not None:
            self.told(self.sink)
        super().judge()
        self.movers.close()
        self.hierarchy.close()

    def told(self, sink: Places) -> None:
        """A consumer knows of all that is on the device and on the host, and of nothing that is not there."""
        self.turn()
        self.cache._news.flush()
        device = {("device", PageName(g, self.cache.index.key(node, slot))) for node in self.cache.index.nodes()
                  if len(node.tokens) >= self.cache.index.width
                  for g, ids in enumerate(node.pages) for slot, page in enumerate(ids) if page >= 0}
        assert {place for place in sink.there if place[0] == "device"} == device


@pytest.mark.parametrize("shard", [pytest.param(i, marks=[pytest.mark.exhaustive] if i else []) for i in range(SHARDS)])
def test_random_workloads_over_tiers(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    for seed in range(shard * WORKLOADS // SHARDS, (shard + 1) * WORKLOADS // SHARDS):
        try:
            seen += workload(seed, monkeypatch).seen
        except Exception as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    for what, least in (("cached", 150), ("evictions", 500), ("written", 50), ("landed", 4)):
        assert seen[what] > least, f"the workloads do not strain the tiers: {seen}"


def workload(seed: int, monkeypatch: pytest.MonkeyPatch) -> TieredRun:
    world = World(random.Random(f"world {seed}"))
    for module in (movers, jobs):
        monkeypatch.setattr(module, "ThreadPoolExecutor", world.pool)
    monkeypatch.setattr(movers, "Threads", world.pool)
    monkeypatch.setattr(hierarchy, "Keeper", world.keeper)
    run = TieredRun(seed, world)
    run.go()
    return run
