"""The tiers and the worker's movers together, under a fake index that evicts, loads and forgets at random: bytes come back as
they were, or the result says that they do not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.cache.tiers import Content
from penstock.cache.tiers.hierarchy import Hierarchy, TierPolicy
from penstock.core.plan import Load, Move, PageName, Piece, Save, StepPlan
from penstock.core.steptime import Load as StepLoad, StepTime
from penstock.stores import Store
from penstock.stores.disk import DiskStore
from penstock.stores.folder import claim
from penstock.stores.opening import Behind
from penstock.worker.arena import Arena
from penstock.worker.jobs import Copy, Fence
from penstock.worker.movers import Movers
from tests.unit.stores.pages import layout, path_of, version

DEVICE = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
SLABS = 6
PLACES = (range(4), range(12, 18))
"""Pages of the two groups that do not overlap on the device: of the first four slabs, and of the last two."""


def content(number: int, page: int, group: int = 0) -> Content:
    return Content(group, page, number.to_bytes(32, "big"))


class Rig:
    """A device's arena, and a hierarchy and movers behind it."""

    def __init__(self, root: Path | None, slabs: int = 4, wrap: Callable[[Store], Store] = lambda store: store,
                 **policy: bool) -> None:
        shape = layout(slabs=SLABS)
        self.arena = Arena(shape, DEVICE)
        stores = [[wrap(DiskStore(claim(str(root)), version())) for _ in range(2)]] if root is not None else []
        self.tiers = Hierarchy(shape, slabs, [(pair[0], None) for pair in stores], TierPolicy(**policy), StepTime(),
                               refresh_seconds=0.02)
        self.movers = Movers(self.arena, Behind(slabs, [pair[1] for pair in stores], version().id), DEVICE)
        self.landed: dict[int, bool] = {}
        self.plans = 0

    def fill(self, number: int, page: int, group: int = 0) -> Content:
        """A page of the device holds what context `number` computes."""
        data = random.Random(f"{number}-{group}").randbytes(self.arena.layout.groups[group].page_bytes)
        self.arena.stretch(group, page, 1).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return content(number, page, group)

    def holds(self, number: int, page: int, group: int = 0) -> bool:
        data = random.Random(f"{number}-{group}").randbytes(self.arena.layout.groups[group].page_bytes)
        return bytes(self.arena.stretch(group, page, 1).cpu().numpy()) == data

    def step(self, writes: Sequence[tuple[int, int, int]] = ()) -> None:
        """A plan with the transfers that have gathered, whose step computes contexts into pages: (number, page, group)."""
        self.plans += 1
        edits = [np.array([[i, 0, page] for i, (_, page, of) in enumerate(writes) if of == group], np.int32).reshape(-1, 3)
                 for group in range(2)]
        rows = np.arange(len(writes), dtype=np.int32)
        plan = StepPlan(self.plans, edits=edits, rows=rows, starts=rows * 0, counts=rows * 0 + 16,
                        transfers=self.tiers.drain())
        self.movers.start(plan)
        self.movers.load(plan)
        for write in writes:
            self.fill(*write)
        load_results, write_results = self.movers.arrived(wait=True)
        self.landed |= {result.ticket: result.ok and not result.lost for result in load_results}
        self.tiers.report(load_results, write_results)

    def settle(self, ticket: int) -> bool:
        until = time.monotonic() + 10
        while ticket not in self.landed:
            assert time.monotonic() < until
            self.step()
        return self.landed[ticket]

    def stored(self) -> None:
        """Until nothing is being written."""
        until = time.monotonic() + 10
        while self.tiers._writing or self.tiers._wanted:
            assert time.monotonic() < until
            self.step()
            time.sleep(0.001)

    def close(self) -> None:
        self.movers.close()
        self.tiers.close()


def load(rig: Rig, pages: Sequence[Content], positions: int = 100) -> bool | None:
    ticket = rig.tiers.load(pages, positions)
    return None if ticket is None else rig.settle(ticket)


def test_leaving_pages_are_saved_before_they_are_overwritten() -> None:
    rig = Rig(None)
    rig.tiers.offer([rig.fill(i, i) for i in range(3)], leaving=True)
    rig.step([(90 + i, i, 0) for i in range(3)])
    assert rig.tiers.find(0, [content(i, 0).key for i in range(4)]) == [True, True, True, False]
    assert load(rig, [content(2, 0), content(0, 1), content(1, 2)])
    assert rig.holds(2, 0) and rig.holds(0, 1) and rig.holds(1, 2)
    assert load(rig, [content(7, 0)]) is None
    stats = {tier.name: tier for tier in rig.tiers.stats()}["host"]
    assert (stats.stored_pages, stats.cached_pages, stats.failures) == (3, 3, 0)
    assert stats.bytes_in == stats.bytes_out == 3 * rig.arena.layout.groups[0].page_bytes and stats.hit_tokens == 48
    rig.close()


def test_written_through_and_then_leaving_within_one_plan() -> None:
    """A page that was to stay and leaves after all is not overwritten before it is saved; on eviction nothing is saved."""
    rig = Rig(None)
    page = rig.fill(1, 0)
    rig.tiers.offer([page], leaving=False)
    rig.tiers.offer([page], leaving=True)
    rig.step([(9, 0, 0)])
    assert load(rig, [content(1, 3)]) and rig.holds(1, 3)
    rig.close()
    rig = Rig(None, through=False)
    rig.tiers.offer([rig.fill(1, 0)], leaving=False)
    assert not rig.tiers.drain()
    rig.close()


def test_a_slot_given_up_within_one_plan_holds_what_came_last() -> None:
    """The host has one slab: what comes to it later in a plan takes the place of what came before, whatever their numbers."""
    for first, second in ((3, 1), (1, 3)):
        rig = Rig(None, slabs=1)
        rig.tiers.offer([rig.fill(1, first)], leaving=False)
        rig.tiers.offer([rig.fill(2, second)], leaving=False)
        rig.step()
        assert load(rig, [content(1, 4)]) is None
        assert load(rig, [content(2, 4)]) and rig.holds(2, 4)
        rig.close()


@pytest.mark.parametrize("last", [0, 1])
def test_a_slab_given_to_another_group_within_one_plan_holds_what_came_last(last: int) -> None:
    rig = Rig(None, slabs=1)
    pages = {0: [rig.fill(1, 2)], 1: [rig.fill(i, 12 + i, 1) for i in range(3)]}
    rig.tiers.offer(pages[1 - last], leaving=False)
    rig.tiers.offer(pages[last], leaving=False)
    rig.step()
    wanted = [content(1, 4)] if last == 0 else [content(i, 15 + i, 1) for i in range(3)]
    assert load(rig, wanted)
    assert all(rig.holds(int.from_bytes(one.key, "big"), one.page, one.group) for one in wanted)
    rig.close()


def test_what_was_written_through_leaves_without_a_copy(tmp_path: Path) -> None:
    """The step that needs its room would have to wait for the copy, though the page can be had from the store."""
    rig = Rig(tmp_path, slabs=1)
    for number in (1, 2):
        rig.tiers.offer([rig.fill(number, number)], leaving=False)
        rig.step()
        rig.stored()
    assert rig.tiers.host.slot(PageName(0, content(1, 0).key)) is None
    rig.tiers.offer([content(1, 1), rig.fill(3, 3)], leaving=True)
    assert rig.tiers.drain()[0] == Save(0, 3, 0), "what was never written is saved now or never"
    assert not rig.tiers.drain()
    assert load(rig, [content(1, 4)]) and rig.holds(1, 4)
    rig.close()


def test_pages_survive_on_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slabs=5)
    rig.tiers.offer([rig.fill(i, i) for i in range(4)] + [rig.fill(i, i + 12, 1) for i in range(3)], leaving=False)
    rig.step()
    rig.stored()
    rig.close()
    again = Rig(tmp_path)
    assert again.tiers.find(0, [content(i, 0).key for i in range(5)]) == [True] * 4 + [False]
    ticket = again.tiers.load([content(i, 3 - i) for i in range(4)] + [content(0, 12, 1)], 100)
    assert ticket is not None and again.tiers.source(ticket) == {"disk": 5}
    assert again.settle(ticket)
    assert all(again.holds(i, 3 - i) for i in range(4)) and again.holds(0, 12, 1)
    again.tiers.clear()
    assert load(again, [content(0, 0)]) is None
    again.close()
    last = Rig(tmp_path)
    assert not last.tiers.find(0, [content(0, 0).key])[0], "clearing deletes"
    last.close()


def test_what_leaves_the_host_is_written_in_time(tmp_path: Path) -> None:
    """On eviction, with a host much smaller than what passes through it."""
    rig = Rig(tmp_path, slabs=4, through=False)
    for i in range(40):
        rig.tiers.offer([rig.fill(i, i % SLABS)], leaving=True)
        rig.step()
        rig.stored()
    found = rig.tiers.find(0, [content(i, 0).key for i in range(40)])
    assert sum(found) > 35
    rig.close()


def test_a_step_waits_for_saves_of_what_its_pages_were_in_another_group() -> None:
    """A plan may save a page whose slab it then lends to another group, where the same bytes are pages of other numbers."""
    rig = Rig(None)
    lane = rig.movers._saves = Reluctant()  # type: ignore[assignment]
    rig.tiers.offer([rig.fill(1, 2), rig.fill(5, 3, 1)], leaving=True)
    rig.step([(50, 7, 1), (51, 1, 0)])
    assert lane.held > 0 and not lane.waiting
    assert load(rig, [content(1, 4), content(5, 15, 1)]) and rig.holds(1, 4) and rig.holds(5, 15, 1)
    rig.close()


def test_broken_pages_are_told_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.tiers.offer([rig.fill(i, i) for i in range(4)], leaving=False)
    rig.step()
    rig.stored()
    rig.close()
    disk = DiskStore(claim(str(tmp_path)), version())
    flipped = path_of(disk, PageName(0, content(1, 0).key))
    data = bytearray(flipped.read_bytes())
    data[500] ^= 4
    flipped.write_bytes(data)
    path_of(disk, PageName(0, content(2, 0).key)).write_bytes(data[:700])
    again = Rig(tmp_path)
    # The tier would not try a page that it knows to be gone.
    monkeypatch.setattr("penstock.cache.tiers.catalog.Catalog.refresh", lambda _: None)
    path_of(disk, PageName(0, content(3, 0).key)).unlink()
    for number in (1, 2, 3):
        assert load(again, [content(0, 0), content(number, 1)]) is False
        assert again.tiers.find(0, [content(number, 0).key]) == [False]
    assert load(again, [content(0, 4)]) and again.holds(0, 4)
    assert {tier.name: tier.failures for tier in again.tiers.stats()} == {"host": 0, "disk": 3}
    again.close()
    assert [path_of(disk, PageName(0, content(i, 0).key)).exists() for i in range(4)] == [True, False, False, False]


class Deaf:
    """A store that fails to read."""

    error: OSError | None = None

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        if Deaf.error is not None:
            raise Deaf.error
        return self._store.read(name, parts)


@pytest.mark.parametrize(("error", "kept"), [(OSError(5, "Input/output error"), False), (ConnectionResetError(), True),
                                             (TimeoutError(), True)])
def test_unreadable_pages_make_way_and_silent_stores_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                    error: OSError, kept: bool) -> None:
    rig = Rig(tmp_path)
    rig.tiers.offer([rig.fill(0, 0)], leaving=False)
    rig.step()
    rig.stored()
    rig.close()
    again = Rig(tmp_path, wrap=Deaf)  # type: ignore[arg-type]
    monkeypatch.setattr(Deaf, "error", error)
    assert load(again, [content(0, 1)]) is False
    assert again.tiers.find(0, [content(0, 0).key]) == [kept]
    monkeypatch.setattr(Deaf, "error", None)
    if not kept:
        until = time.monotonic() + 5
        while again.tiers.catalogs[0]._doomed and time.monotonic() < until:
            time.sleep(0.01)
        again.tiers.offer([again.fill(0, 0)], leaving=False)
        again.step()
        again.stored()
    assert load(again, [content(0, 2)]) and again.holds(0, 2)
    again.close()


class Slow:
    """A store that takes its time over pages that it is told, and fails to write others."""

    def __init__(self, store: Store, seconds: float = 0.0, full: bool = False) -> None:
        self._store, self.seconds, self.full = store, seconds, full

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, name: PageName, parts: Sequence[memoryview]) -> int:
        time.sleep(self.seconds)
        return self._store.read(name, parts)

    def write(self, name: PageName, parts: Sequence[memoryview]) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        time.sleep(self.seconds)
        self._store.write(name, parts)


@pytest.mark.serial
def test_a_slow_disk_delays_nobody_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.tiers.offer([rig.fill(i, i) for i in range(2)], leaving=False)
    rig.step()
    rig.stored()
    rig.close()
    slow = Rig(tmp_path, wrap=lambda store: Slow(store, 0.6))  # type: ignore[arg-type, return-value]
    slow.tiers.costs.times.learn(StepLoad(1, 100), 0.01)
    slow.tiers.costs.sources["disk"].learn(1 << 20, 0.001, now=time.monotonic())
    slow.tiers.offer([slow.fill(5, 5)], leaving=True)
    slow.step()
    from_disk = slow.tiers.load([content(0, 0), content(1, 1)], 100)
    from_host = slow.tiers.load([content(5, 2)], 100)
    assert from_disk is not None and from_host is not None
    began = time.monotonic()
    assert slow.settle(from_host) and slow.holds(5, 2)
    assert time.monotonic() - began < 0.3, "the host does not wait for the disk"
    assert slow.settle(from_disk) is False
    assert time.monotonic() - began < 0.59, "it is given up long before the disk answers"
    slow.fill(70, 0)
    time.sleep(0.3)
    slow.step()
    assert slow.holds(70, 0), "a load that was given up writes nothing any more"
    assert slow.tiers.find(0, [content(0, 0).key]) == [False], "it is left alone for a while"
    assert {tier.name: (tier.available, tier.late_loads) for tier in slow.tiers.stats()} == {"host": (1, 0), "disk": (0, 1)}
    slow.tiers.catalogs[0]._away_until = 0.0
    assert slow.tiers.find(0, [content(0, 0).key]) == [True]
    assert slow.tiers.load([content(0, 0)], 100) is None, "computing is faster than that"
    slow.close()


@pytest.mark.serial
def test_who_ends_does_not_wait_for_all_that_is_to_be_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path, slabs=240, wrap=lambda store: Slow(store, 0.05))  # type: ignore[arg-type, return-value]
    for number in range(60):
        rig.tiers.offer([rig.fill(number, number % 4)], leaving=False)
        rig.step()
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < 1.0
    again = Rig(tmp_path)
    assert 0 < sum(again.tiers.find(0, [content(number, 0).key for number in range(60)])) < 60
    again.close()


def test_a_full_disk_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, wrap=lambda store: Slow(store, full=True))  # type: ignore[arg-type, return-value]
    rig.tiers.offer([rig.fill(0, 0)], leaving=False)
    rig.step()
    rig.stored()
    rig.tiers.offer([rig.fill(1, 1)], leaving=False)
    assert len(rig.tiers.drain()) == 1, "saved on the host, and not tried on the disk"
    assert load(rig, [content(0, 3)]) and rig.holds(0, 3)
    rig.close()


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("disk", [True, False])
def test_at_random(tmp_path: Path, through: bool, disk: bool) -> None:
    """Every page that a good result filled holds what its name says, whatever else is saved, evicted and overwritten."""
    rng = random.Random(7)
    rig = Rig(tmp_path if disk else None, slabs=5, through=through)
    on_device: dict[tuple[int, int], int] = {}
    loading: dict[int, list[Content]] = {}
    good = 0
    for _ in range(600):
        for _ in range(rng.randrange(3)):
            group = rng.randrange(2)
            free = [p for p in PLACES[group] if (group, p) not in on_device]
            busy = {(c.group, c.page) for pages in loading.values() for c in pages}
            if not free:
                victims = [at for at in on_device if at[0] == group and at not in busy]
                if victims:
                    at = rng.choice(victims)
                    rig.tiers.offer([content(on_device.pop(at), at[1], group)], leaving=True)
                continue
            number, page = rng.randrange(12), free[0]
            # As in a plan: what is taken now was given up before, so its bytes are overwritten only by the step.
            if rng.random() < 0.5 and rig.tiers.find(group, [content(number, 0).key])[0]:
                wanted = content(number, page, group)
                ticket = rig.tiers.load([wanted], 100)
                if ticket is not None:
                    loading[ticket] = [wanted]
                    on_device[group, page] = number
            else:
                rig.step([(number, page, group)])
                rig.tiers.offer([content(number, page, group)], leaving=False)
                on_device[group, page] = number
        rig.step()
        for ticket in [ticket for ticket in loading if ticket in rig.landed]:
            for one in loading.pop(ticket):
                if rig.landed[ticket]:
                    good += 1
                    assert rig.holds(int.from_bytes(one.key, "big"), one.page, one.group)
                else:
                    del on_device[one.group, one.page]
    assert good > 30
    for ticket in loading:
        rig.settle(ticket)
    rig.close()


class Reluctant:
    """A lane that copies only when somebody waits for it: as late as is allowed."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.held = 0

    def run(self, copies: Iterable[Copy], after: Sequence[Fence]) -> Reluctant:
        def copy() -> None:
            for to, source in copies:
                to.copy_(source)

        self.waiting.append(copy)
        return self

    def hold(self) -> None:
        self.held += 1
        self.wait()

    def wait(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def passed(self) -> bool:
        return not self.waiting

    def close(self) -> None:
        self.wait()


def test_steps_wait_for_saves_only_where_they_would_spoil_them() -> None:
    rig = Rig(None)
    lane = rig.movers._saves = Reluctant()  # type: ignore[assignment]
    rig.tiers.offer([rig.fill(1, 0), rig.fill(2, 1)], leaving=False)
    rig.step([(50, 2, 0)])
    rig.step([(51, 3, 0)])
    assert lane.held == 0 and lane.waiting, "steps that write elsewhere go on"
    # A row that continues from those pages holds them, and writes behind them.
    plan = StepPlan(9, edits=[np.array([[0, 0, 0], [0, 1, 1], [0, 2, 2]], np.int32), np.zeros((0, 3), np.int32)],
                    rows=np.array([0], np.int32), starts=np.array([32], np.int32), counts=np.array([1], np.int32))
    rig.movers.start(plan)
    assert lane.held == 0
    rig.step([(52, 1, 0)])
    assert lane.held > 0 and not lane.waiting
    for number, page in ((1, 4), (2, 5)):
        assert load(rig, [content(number, page)]) and rig.holds(number, page)
    for plan in (StepPlan(10, moves=[Move(0, 5, 4)]),
                 StepPlan(11, transfers=[Load(99, [Piece(PageName(0, b""), 4, 0, -1)], 1.0)])):
        rig.tiers.offer([rig.fill(60 + plan.id, 4)], leaving=False)
        rig.movers.start(StepPlan(0, transfers=rig.tiers.drain()))
        assert lane.waiting
        rig.movers.start(plan)
        assert not lane.waiting, "copies and loads overwrite pages, too"
    rig.close()


@pytest.mark.parametrize("slabs", [SLABS, SLABS + 2, 2 * SLABS - 1, 2 * SLABS])
def test_a_host_as_large_as_the_device_saves_every_page_once(slabs: int) -> None:
    """Contexts pass that nobody asks for again: what leaves the device has long been saved, and no step waits for it."""
    rig = Rig(None, slabs=slabs)
    for number in range(10 * SLABS):
        if number >= SLABS:
            rig.tiers.offer([content(number - SLABS, number % SLABS)], leaving=True)
        rig.step([(number, number % SLABS, 0)])
        rig.tiers.offer([content(number, number % SLABS)], leaving=False)
    rig.step()
    stats = {tier.name: tier for tier in rig.tiers.stats()}["host"]
    assert stats.stored_pages == 10 * SLABS
    rig.close()
