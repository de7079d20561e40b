"""The limit that binds the engine: what a step says of it, how the seconds add up, and the line of the log that names it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.core.request import EngineStats
from penstock.engine import async_llm
from penstock.engine.ledger import bound
from penstock.scheduler.step import LIMITS, binding
from tests.unit.engine.test_accounts import frontend
from tests.unit.scheduler.test_wiring import made, request


def seconds(**given: float) -> list[float]:
    return [given.get(name, 0.0) for name in LIMITS]


@pytest.mark.parametrize(("state", "name"), [
    ({"waiting": True, "rows": False}, "rows"), ({"waiting": True, "room": False}, "kv_space"),
    ({"waiting": True, "rows": False, "room": False}, "rows"), ({"refused": True}, "queue"),
    ({"waiting": True, "refused": True}, ""), ({"rows": False, "room": False}, ""), ({}, "")], ids=str)
def test_a_step_names_what_binds_beside_the_device(state: dict[str, bool], name: str) -> None:
    assert binding(**{"waiting": False, "rows": True, "room": True, "refused": False, **state}) == name


def test_steps_add_their_seconds_to_their_limit() -> None:
    """With one row and two requests it is the row, until the second one has it; then the device itself."""
    scheduler, worker = made(rows=1)
    for name in "ab":
        scheduler.add(request(name, 3, 2), 0.0)
    named = []
    while scheduler.live:
        before, plan = list(scheduler.stats.limits), scheduler.plan(0.0)
        assert plan is not None
        result = worker.run(plan)
        result.seconds = 0.5
        scheduler.apply(result, 0.0)
        (changed,) = [name for name, old, new in zip(LIMITS, before, scheduler.stats.limits, strict=True) if new != old]
        named.append(changed)
    assert named[:2] == ["rows", "rows"] and set(named[2:]) <= {"compute", "memory"} and len(named) == 4


@pytest.mark.parametrize(("before", "after", "line"), [
    ([], seconds(memory=6.0, rows=3.0), "the limit is memory: memory 60%, rows 30%, client 10%"),
    (seconds(memory=6.0), seconds(memory=7.0, compute=1.0), "the limit is client: client 80%, memory 10%, compute 10%"),
    (seconds(queue=1.0), seconds(queue=11.0), "the limit is queue: queue 100%")], ids=str)
def test_the_line_names_the_largest_share_first(before: list[float], after: list[float], line: str) -> None:
    assert bound(before, after, 10.0) == line


def test_the_log_says_it_again_and_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every ten seconds (here 20 ms) in which steps ran; an engine at rest says nothing."""
    monkeypatch.setattr(async_llm, "_TELL_SECONDS", 0.02)
    # Collecting all objects of the test's process takes longer than the 20 ms; a server's are excluded at its start.
    monkeypatch.setattr(async_llm, "give_back_memory", lambda at_rest: None)
    llm = frontend()
    llm.stall_timeout = 0.02

    async def watched() -> None:
        watching = asyncio.ensure_future(llm._watch_progress())
        for rounds in (1, 2, 2):
            llm.stats = EngineStats(running=3, waiting=2, limits=seconds(kv_space=float(rounds)))
            await asyncio.sleep(0.1)
        watching.cancel()

    with caplog.at_level(logging.INFO, "penstock"):
        asyncio.run(watched())
    lines = [record.getMessage() for record in caplog.records if "the limit is" in record.getMessage()]
    assert len(lines) == 2 and all(line.startswith("the limit is kv_space: ") and "(3 run, 2 wait)" in line for line in lines)
