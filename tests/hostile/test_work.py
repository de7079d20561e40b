"""Work off the event loop: short jobs overtake long ones, jobs of clients that left are not done, and templates are bounded."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from penstock.core.child import own_folder
from penstock.core.errors import RequestError
from penstock.engine import work
from penstock.engine.rendering import Conversation, Renderers
from penstock.engine.work import SHORT, Workers, abandoned, checkpoint
from penstock.text import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def test_small_work_stays_on_the_loop() -> None:
    async def run() -> None:
        workers = Workers()
        main = threading.get_ident()
        assert await workers.run(10, threading.get_ident) == main
        assert await workers.run(10, threading.get_ident, always=True) != main
        assert await workers.run(10**6, threading.get_ident) != main

    asyncio.run(run())


def test_short_jobs_overtake_long_ones() -> None:
    """Both threads for long jobs are busy and more long jobs wait; short ones do not."""

    async def run() -> None:
        workers, gate, order = Workers(2), threading.Event(), []
        long = [asyncio.create_task(workers.run(10 * SHORT, lambda: (gate.wait(10), order.append("long")))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(workers.run(SHORT, lambda: order.append("short")), 2)
        gate.set()
        await asyncio.gather(*long)
        assert order == ["short", "long", "long", "long"]

    asyncio.run(run())


def test_a_long_job_is_not_put_off_for_ever() -> None:
    """A job's place is its arrival plus its size: shorter ones that come later than that do not pass."""

    async def run() -> None:
        workers, gate, order = Workers(2), threading.Event(), []
        block = asyncio.create_task(workers.run(2 * SHORT, lambda: gate.wait(10)))
        await asyncio.sleep(0.02)
        jobs = [asyncio.create_task(workers.run(work.SIZE_PER_SECOND // 4, lambda: order.append("old and long")))]
        await asyncio.sleep(0.4)
        jobs.append(asyncio.create_task(workers.run(2 * SHORT, lambda: order.append("new and shorter"))))
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(block, *jobs)
        assert order == ["old and long", "new and shorter"]

    asyncio.run(run())


def test_nobody_works_for_clients_that_left() -> None:
    async def run() -> None:
        workers, started, ended, done = Workers(2), threading.Event(), threading.Event(), []

        def long() -> None:
            started.set()
            while not abandoned():
                time.sleep(0.005)
            ended.set()
            checkpoint()
            done.append("the end")

        running = asyncio.create_task(workers.run(10 * SHORT, long))
        waiting = [asyncio.create_task(workers.run(10 * SHORT, lambda: done.append("waited"))) for _ in range(5)]
        await asyncio.to_thread(started.wait, 5)
        for task in (running, *waiting):
            task.cancel()
        await asyncio.gather(running, *waiting, return_exceptions=True)
        assert await asyncio.to_thread(ended.wait, 5)
        await workers.run(10 * SHORT, lambda: None)
        assert done == [] and workers.waiting_size == 0

    asyncio.run(run())


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        workers, gate = Workers(2), threading.Event()
        monkeypatch.setattr(work, "MOST_JOBS", 3)
        tasks = [asyncio.create_task(workers.run(10 * SHORT, lambda: gate.wait(5))) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError) as refused:
            await asyncio.gather(*(workers.run(10 * SHORT, lambda: None) for _ in range(3)))
        assert refused.value.status == 503
        gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_an_error_arrives_where_the_job_is_awaited() -> None:
    def fail() -> None:
        raise RequestError("no", status=418)

    with pytest.raises(RequestError, match="no"):
        asyncio.run(Workers().run(10**6, fail))


# -- templates


@pytest.fixture
def renderers(request: pytest.FixtureRequest):
    made = Renderers(ChatTemplate({"default": request.param}, {}), 0.7, 1)
    yield made
    made.close()


BAD = """{% set text = messages[0]['content'] %}
{%- if text == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif text == 'allocate' %}{{ 'a' * 9999999999 }}
{%- elif text == 'grow' %}{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}
{%- elif text == 'format' %}{{ '%999999999999d' | format(1) }}
{%- else %}{{ text }}{% endif %}"""


@pytest.mark.parametrize("renderers", [BAD], indirect=True)
def test_a_template_that_loops_or_allocates_fails_its_request(renderers: Renderers) -> None:
    assert renderers.render(Conversation(HELLO)).text.strip() == "hello"
    for what in ("loop", "allocate", "grow", "format"):
        began = time.monotonic()
        with pytest.raises(RequestError) as refused:
            renderers.render(Conversation([{"role": "user", "content": what}]))
        assert refused.value.code == "template_error" and refused.value.status == 400, what
        assert time.monotonic() - began < 4, what
        if what == "loop":
            assert "--template-timeout" in refused.value.message
        assert renderers.render(Conversation(HELLO)).text.strip() == "hello"


@pytest.mark.parametrize("renderers", ["{{ messages[0].content }}"], indirect=True)
def test_refusals_and_numbers_cross_the_pipe(renderers: Renderers) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]") as refused:
        renderers.render(Conversation([{"role": "user", "content": 3}]))
    assert refused.value.param == "messages"
    with pytest.raises(RequestError, match="64 bits"):
        renderers.render(Conversation(HELLO, how={"depth": 2**70}))
    long = "x" * 3_000_000
    assert renderers.render(Conversation([{"role": "user", "content": long}])).text == long


def test_folders_of_dead_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed server's folder is removed by the next one that starts; others' are not touched."""
    # A short folder: sockets' paths are short.
    tmp_path = Path(tempfile.mkdtemp(prefix="p", dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, living = tmp_path / "penstock-4194305-abc", tmp_path / f"penstock-{os.getpid()}-abc"
    other, link = tmp_path / "penstock-notes", tmp_path / "penstock-4194306-link"
    for folder in (dead, living, other):
        folder.mkdir()
        (folder / "file").write_text("a")
    link.symlink_to(other)
    own = own_folder()
    assert Path(own).name.startswith(f"penstock-{os.getpid()}-")
    assert not dead.exists() and (living / "file").exists() and (other / "file").exists() and link.is_symlink()
