"""Slots of the host: recency, busy slots, groups of different page sizes; and what is faster, to load or to compute."""

from __future__ import annotations

import random

import pytest

from penstock.cache.tiers.hierarchy import Costs, Source
from penstock.cache.tiers.host import HostSlots
from penstock.core.steptime import Load, StepTime
from tests.unit.stores.pages import layout, name


def test_least_recent_goes_first_and_ends_before_beginnings() -> None:
    slots = HostSlots(layout(), 4)
    a, b = [name(i) for i in (1, 2)], [name(i) for i in (3, 4)]
    assert len(slots.add(a)) == len(slots.add(b)) == 2
    slots.touch(a)
    assert list(slots.oldest()) == [b[1], b[0], a[1], a[0]]
    slots.add([name(5)])
    assert b[1] not in slots and b[0] in slots and slots.evicted == 1


def test_busy_slots_are_not_given_away() -> None:
    slots = HostSlots(layout(), 3)
    names = [name(i) for i in range(3)]
    given = list(slots.add(names).values())
    for one in names[:2]:
        assert slots.hold(one) == slots.slot(one)
    slots.hold(names[0])
    assert slots.add([name(8), name(9)]) == {name(8): given[2]}
    slots.let_go(names[0])
    assert names[0] in slots and names[0] in slots._busy
    # Forgotten while busy: the slot is free once the transfer has ended, not before.
    slots.forget(list(slots.oldest()))
    assert len(slots) == 0 and slots.used_bytes == 2 * slots.layout.slab_bytes
    slots.let_go(names[0])
    slots.let_go(names[1])
    assert slots.used_bytes == 0 and len(slots.add([name(i) for i in range(20, 30)])) == 3


def test_groups_trade_slabs() -> None:
    shape = layout()
    assert [group.per_slab for group in shape.groups] == [1, 3]
    slots = HostSlots(shape, 2)
    assert len(slots.add([name(i, 1) for i in range(6)])) == 6
    assert len(slots.add([name(50)])) == 1, "three small pages made room for a large one"
    assert sum(name(i, 1) in slots for i in range(6)) == 3
    rng, model = random.Random(3), set()
    for step in range(3000):
        names = [name(rng.randrange(12), rng.randrange(2)) for _ in range(2)]
        fresh = [one for one in dict.fromkeys(names) if one not in slots]
        added = slots.add(fresh)
        model.update(added)
        places = {(one.group, slots.slot(one)) for one in model if one in slots}
        model = {one for one in model if one in slots}
        assert len(places) == len(model) == len(slots), step
        assert slots.used_bytes <= slots.layout.nbytes


def test_loading_pays_or_not() -> None:
    costs = Costs({"host": Source(), "disk": Source()}, StepTime())
    assert costs.worth_loading({"disk": 1 << 30}, 8192, 0.0), "nobody knows: trying tells"
    costs.times.learn(Load(1, 2048), 0.0625)
    assert costs.worth_loading({"disk": 1 << 30}, 8192, 0.0)
    for _ in range(2):
        assert costs.worth_loading({"disk": 1 << 30}, 8192, 0.5), "one measurement may be an accident"
        costs.sources["disk"].learn(1 << 30, 0.5, now=1.0)
        costs.sources["host"].learn(1 << 30, 0.02, now=1.0)
    assert not costs.worth_loading({"disk": 1 << 30}, 8192, 2.0)
    assert costs.worth_loading({"host": 1 << 30}, 8192, 2.0)
    assert not costs.worth_loading({"host": 1 << 29, "disk": 1 << 30}, 8192, 2.0), "as slow as its slowest part"
    assert costs.worth_loading({"disk": 1 << 30}, 32768, 2.0)
    costs.sources["host"].owed = 20 << 30
    assert not costs.worth_loading({"host": 1 << 30}, 8192, 2.0), "behind what is owed already"
    assert costs.worth_loading({"disk": 1 << 30}, 8192, 100.0), "what was slow a while ago is tried again"
    assert costs.worth_saving("host", 1 << 21, 16) and not costs.worth_saving("host", 1 << 29, 16)


def test_a_source_follows_the_truth() -> None:
    source = Source()
    for i in range(60):
        source.learn(1000, 0.1 if i < 30 else 1.0, now=float(i))
    assert source.rate == pytest.approx(1000, rel=0.01)


def test_a_load_that_fails_at_once_is_no_sign_of_speed() -> None:
    source = Source()
    for _ in range(3):
        source.learn(1000, 0.1, now=0.0)
    source.learn(1000, 1e-6, now=0.0, whole=False)
    assert source.rate == pytest.approx(10_000)
    source.learn(1000, 10.0, now=0.0, whole=False)
    assert source.rate < 500
