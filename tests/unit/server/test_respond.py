"""Event streams: comments while nothing comes, and what a stream says of its requests before their first token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.engine.outputs import Delta
from penstock.engine.stream import Stream
from penstock.engine.work import INLINE, Workers
from penstock.server import connections, respond


class FakeAnswer:
    def events(self, deltas: list[Delta]) -> bytes:
        if any(delta.text == "wrong" for delta in deltas):
            raise ZeroDivisionError
        return b"".join(respond.event(delta.text) for delta in deltas)

    def last_events(self) -> bytes:
        return b""


def stream_of(*names: str) -> Stream:
    stream = Stream(Workers(), lambda stream: stream.open.clear())
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
        stream.put([Delta("a", 0, [1], text="text")])
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


class FakeDirect:
    """Writes into the same list as `send`."""

    def __init__(self, sent: list[tuple[str, bytes]]) -> None:
        self.sent = sent
        self.possible = True
        self.group = self

    def write(self, piece: bytes) -> None:
        self.sent.append(("direct", piece))

    def flush(self) -> None:
        pass


class Holding(FakeDirect):
    """Holds pieces until they are asked for."""

    def __init__(self, sent: list[tuple[str, bytes]]) -> None:
        super().__init__(sent)
        self.held: list[tuple[str, bytes]] = []

    def write(self, piece: bytes) -> None:
        self.held.append(("held", piece))

    def flush(self) -> None:
        self.sent += self.held
        self.held.clear()


async def read(stream: Stream) -> None:
    """Waits until the reader waits for more."""
    while stream._waiter is None or stream._waiter.done():
        await asyncio.sleep(0.001)


def begun(stream: Stream, direct: FakeDirect) -> asyncio.Task[None]:
    """Begins an answer of the stream's pieces. Those that go the long way are written into the same list as `direct`'s."""

    async def send(message: dict[str, Any]) -> None:
        if message.get("body"):
            direct.sent.append(("send", message["body"]))

    watch = asyncio.create_task(asyncio.sleep(10))
    scope = {"type": "http", "extensions": {connections.DIRECT: direct}}
    return asyncio.create_task(respond.EventStream(stream, FakeAnswer(), watch)(scope, None, send))  # type: ignore[arg-type]


def test_deltas_are_written_as_they_arrive_and_in_order() -> None:
    """The first piece goes the long way, as do large ones and those of a client that does not keep up."""
    sent: list[tuple[str, bytes]] = []
    direct = FakeDirect(sent)

    async def run() -> None:
        stream = stream_of("a")
        answering = begun(stream, direct)
        large = "x" * (8 * INLINE + 8)
        for text, possible, at_once in (("one", True, False), ("two", True, True), ("three", False, False),
                                        ("four", True, True), (large, True, False), ("six", True, True)):
            await read(stream)
            direct.possible, before = possible, len(sent)
            stream.put([Delta("a", 0, [1], text=text)])
            assert (len(sent) > before) == at_once, text[:9]
            if at_once:
                # Others that come before the task has run are not overtaken.
                stream.taker, taker = None, stream.taker
                stream.put([Delta("a", 0, [1], text="waits")])
                stream.taker = taker
                stream.put([Delta("a", 0, [1], text="behind")])
        stream.end("a")
        await answering

    asyncio.run(run())
    texts = [line for _, body in sent for line in body.decode().split("\n\n") if line]
    said = [text.removeprefix('data: "').removesuffix('"') for text in texts]
    pair = ["waits", "behind"]
    assert [text[:6] for text in said] == ["one", "two", *pair, "three", "four", *pair, "xxxxxx", "six", *pair, "data: "]
    assert [how for how, _ in sent] == ["send", "direct", "send", "send", "direct", "send", "send", "direct", "send", "send"]


def test_what_is_held_is_sent_before_the_end() -> None:
    """The end wakes the answer before its last piece is put, as in a step of the engine."""
    sent: list[tuple[str, bytes]] = []

    async def run() -> None:
        stream = stream_of("a")
        answering = begun(stream, Holding(sent))
        for text in ("one", "two"):
            await read(stream)
            if text == "two":
                stream.end("a")
            stream.put([Delta("a", 0, [1], text=text)])
        await answering

    asyncio.run(run())
    assert [(how, body.split(b'"')[1] if b'"' in body else body) for how, body in sent] == [
        ("send", b"one"), ("held", b"two"), ("send", respond.DONE)]


def test_an_answer_that_cannot_be_written_fails_alone() -> None:
    sent: list[tuple[str, bytes]] = []

    async def run() -> None:
        stream = stream_of("a")

        async def send(message: dict[str, Any]) -> None:
            pass

        watch = asyncio.create_task(asyncio.sleep(10))
        scope = {"type": "http", "extensions": {connections.DIRECT: FakeDirect(sent)}}
        answering = asyncio.create_task(respond.EventStream(stream, FakeAnswer(), watch)(scope, None, send))  # type: ignore[arg-type]
        for text in ("one", "wrong"):
            await read(stream)
            stream.put([Delta("a", 0, [1], text=text)])
        with pytest.raises(ZeroDivisionError):
            await answering
        assert not stream.open

    asyncio.run(run())
    assert not sent


def test_a_frame_is_the_event_with_another_text() -> None:
    def value(text: str) -> dict[str, Any]:
        return {"id": 'an id with "text":"\\u0000" and \0', "choices": [{"index": 0, "text": text, "more": [None, "\0"]}]}

    frame = respond.Frame(value("\0"), "text")
    for text in ("", "word", 'a "quote"\n', "\0", "é\U0001f600"):
        assert frame.event(text) == respond.event(value(text))
