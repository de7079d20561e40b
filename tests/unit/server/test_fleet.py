"""When the models of one server are loaded and unloaded, on engines that do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.server.fleet import Fleet, Selection, Slot


class Fake:
    """An engine's frontend, whose start waits for `gate`."""

    alive = 0

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.gate = gate
        self.info: Any = None
        self.dead: str | None = None
        self.live = 0
        self.model = "fake"

    def again(self) -> Fake:
        return Fake(self.gate)

    async def start(self) -> None:
        Fake.alive += 1
        if self.gate is not None:
            await self.gate.wait()
        self.info = object()

    async def shutdown(self, _timeout: float) -> None:
        Fake.alive -= 1
        self.info = None

    def unhealthy(self) -> str | None:
        return None

    def fail_open(self, _error: Exception) -> None:
        pass


def run(test: Callable[[Fleet, asyncio.Event], Awaitable[None]], keep_alive: float = 0.0) -> None:
    """Runs `test` over a model that starts at once and one whose start waits."""
    async def whole() -> None:
        Fake.alive, gate = 0, asyncio.Event()
        fakes: list[Any] = [Fake(), Fake(gate)]
        slots = [Slot([name], fake) for name, fake in zip(("quick", "slow"), fakes, strict=True)]
        fleet = Fleet(slots, keep_alive=keep_alive)
        await fleet.start()
        try:
            await asyncio.wait_for(test(fleet, gate), 10)
        finally:
            await fleet.close(1.0)

    asyncio.run(whole())


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_client_that_leaves_does_not_break_the_load_that_it_began() -> None:
    async def test(fleet: Fleet, gate: asyncio.Event) -> None:
        slow = fleet.slots[1]
        first = asyncio.create_task(fleet.load(slow))
        await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(fleet.load(slow))
        await asyncio.sleep(0.01)
        assert slow.state == "loading" and Fake.alive == 1
        gate.set()
        await second
        assert slow.state == "ready" and Fake.alive == 1

    run(test)


def test_a_client_that_leaves_does_not_break_an_end() -> None:
    async def test(fleet: Fleet, gate: asyncio.Event) -> None:
        quick = fleet.slots[0]
        await fleet.load(quick)
        old: Any = quick.llm
        old.live = 1
        asked = asyncio.create_task(fleet.unload(quick, patience=5.0))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.sleep(0.05)
        assert Fake.alive == 1, "its request is still running"
        old.live = 0
        await until(lambda: Fake.alive == 0)

    run(test)


def test_a_response_in_the_background_keeps_its_model() -> None:
    """Its request is over, and another model is asked for that has no place beside it."""
    async def test(fleet: Fleet, gate: asyncio.Event) -> None:
        quick, slow = fleet.slots
        fleet.most = 1
        await fleet.load(quick)
        llm: Any = quick.llm
        llm.live = 1
        gate.set()
        loading = asyncio.create_task(fleet.load(slow))
        await asyncio.sleep(0.6)
        assert (quick.state, slow.state) == ("ready", "unloaded")
        llm.live = 0
        await loading
        assert (quick.state, slow.state) == ("unloaded", "ready")

    run(test, keep_alive=0.1)


def test_a_model_that_is_used_meanwhile_is_not_unloaded() -> None:
    """The watch finds it unused, but has to wait until another model is loaded."""
    async def test(fleet: Fleet, gate: asyncio.Event) -> None:
        quick, slow = fleet.slots
        await fleet.load(quick)
        loading = asyncio.create_task(fleet.load(slow))
        await asyncio.sleep(0.7)
        selection = Selection()
        selection.choose(quick)
        gate.set()
        await loading
        await asyncio.sleep(0.4)
        assert quick.state == "ready"
        selection.choose(None)
        await until(lambda: quick.state == "unloaded")

    run(test, keep_alive=0.3)
