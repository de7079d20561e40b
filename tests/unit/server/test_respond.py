"""Event streams: comments while nothing comes, and what a stream says of its requests before their first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.engine.async_llm import Stream
from penstock.engine.outputs import Delta
from penstock.engine.work import Workers
from penstock.server import respond


class FakeLLM:
    work = Workers()

    def drop(self, stream: Stream) -> None:
        stream.open.clear()


class FakeAnswer:
    def events(self, deltas: list[Delta]) -> bytes:
        return b"".join(respond.event(delta.text) for delta in deltas)

    def last_events(self) -> bytes:
        return b""


def stream_of(*names: str) -> Stream:
    stream = Stream(FakeLLM())  # type: ignore[arg-type]
    stream.open.update(names)
    stream.unconfirmed.update(names)
    return stream


def test_comments_keep_a_quiet_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "KEEP_ALIVE_SECONDS", 0.03)
    sent: list[bytes] = []

    async def run() -> None:
        stream = stream_of("a")

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        watch = asyncio.create_task(asyncio.sleep(10))
        answering = asyncio.create_task(respond.EventStream(stream, FakeAnswer(), watch)(  # type: ignore[arg-type]
            {"type": "http"}, None, send))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        stream.put(Delta("a", 0, "text", [1]))
        await asyncio.sleep(0.1)
        stream.end("a")
        await answering

    asyncio.run(run())
    kinds = [body for body in sent if body]
    place = kinds.index(b'data: "text"\n\n')
    assert set(kinds) == {respond.KEEP_ALIVE, b'data: "text"\n\n', respond.DONE} and kinds[-1] == respond.DONE
    assert place >= 2 and kinds[place + 1] == respond.KEEP_ALIVE
    assert respond.KEEP_ALIVE.startswith(b":") and respond.KEEP_ALIVE.endswith(b"\n\n")


def test_a_stream_is_admitted_once_all_its_requests_are() -> None:
    async def run() -> None:
        stream = stream_of("a", "b")
        waiting = asyncio.create_task(stream.admitted())
        stream.confirm("a")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        stream.confirm("b")
        await waiting
        refused = stream_of("a")
        waiting = asyncio.create_task(refused.admitted())
        await asyncio.sleep(0)
        refused.close(RequestError("full", status=503))
        with pytest.raises(RequestError, match="full"):
            await waiting
        gone = stream_of("a")
        gone.close()
        await gone.admitted()
        with pytest.raises(StopAsyncIteration):
            await gone.next()

    asyncio.run(run())
