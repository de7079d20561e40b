"""The command line's HTTP client, over a socket and into an application, against the same fake API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from penstock.cli.client import ConnectionFailedError, Local, Transport, Wire
from tests.unit.cli.fake import FakeApi, served

CHAT = "/v1/chat/completions"


def body(text: str, **more: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


@contextlib.asynccontextmanager
async def both(app: FakeApi, way: str) -> AsyncIterator[Transport]:
    if way == "local":
        transport: Transport = Local(app, "secret")
        yield transport
        await transport.aclose()
    else:
        with served(app) as url:
            transport = Wire(url + "/v1/", "secret", waits=True)
            yield transport
            await transport.aclose()


@pytest.mark.parametrize("way", ["local", "wire"])
def test_answers_whole_and_streamed(way: str) -> None:
    app = FakeApi()

    async def go() -> None:
        async with both(app, way) as api:
            for _ in range(3):
                reply = await api.send("POST", CHAT, body("one two three"))
                assert reply.status == 200
                assert reply.headers["content-type"] == "application/json"
                assert json.loads(await reply.read())["choices"][0]["message"]["content"] == "one two three"
            before = time.perf_counter()
            reply = await api.send("POST", CHAT, body("one two slow", stream=True))
            events = [event async for event in reply.events()]
            assert [json.loads(e.data)["choices"][0]["delta"]["content"] for e in events[:3]] == ["one", " two", " slow"]
            assert events[-1].data == b"[DONE]"
            # Stamped on arrival: the chunks were sent 50 ms apart.
            assert before < events[0].at < events[1].at - 0.03 < events[2].at - 0.06
            assert (await api.send("GET", "/nothing")).status == 404

    asyncio.run(go())
    assert set(app.keys) == {"Bearer secret"} and set(app.waits) == {"true"}


@pytest.mark.parametrize("way", ["local", "wire"])
def test_closing_a_reply_aborts_the_request(way: str) -> None:
    app = FakeApi()

    async def go() -> None:
        async with both(app, way) as api:
            reply = await api.send("POST", CHAT, body("slow " * 50, stream=True))
            async for _ in reply.events():
                break
            reply.close()
            for _ in range(100):
                if app.aborted:
                    break
                await asyncio.sleep(0.01)

    asyncio.run(go())
    assert app.aborted == 1


@pytest.mark.parametrize("way", ["local", "wire"])
def test_an_answer_that_breaks_off_is_an_error(way: str) -> None:
    async def go() -> None:
        async with both(FakeApi(), way) as api:
            reply = await api.send("POST", CHAT, body("one crash two", stream=True))
            with pytest.raises(ConnectionFailedError):
                _ = [event async for event in reply.events()]
            assert (await api.send("GET", "/health")).status == 200

    asyncio.run(go())


def test_many_at_once_reuse_connections() -> None:
    app = FakeApi()

    async def go() -> None:
        with served(app) as url:
            wire = Wire(url)
            for _ in range(3):
                replies = await asyncio.gather(*[wire.send("POST", CHAT, body(f"hello {i}")) for i in range(20)])
                texts = [json.loads(await r.read())["choices"][0]["message"]["content"] for r in replies]
                assert texts == [f"hello {i}" for i in range(20)]
            assert len(wire._all) <= 20
            await wire.aclose()

    asyncio.run(go())


def test_odd_but_legal_answers() -> None:
    """Bodies cut at any byte, CRLF events, comments, an interim 100, a body that ends with its connection, a stale one."""
    payload = b': hi\r\n\r\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata: one\r\ndata: two\r\n\r\ndata: [DONE]\r\n\r\n'
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while (await reader.readline()).strip():
            pass
        asked += 1
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if asked == 1:  # promises to stay, but leaves
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for i in range(len(payload)):
                writer.write(payload[i : i + 1])
                await writer.drain()
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        wire = Wire(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert await (await wire.send("GET", "/")).read() == b"ok"
        reply = await wire.send("GET", "/")
        assert [event.data async for event in reply.events()] == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]
        server.close()
        await wire.aclose()

    asyncio.run(go())


def test_no_server() -> None:
    with pytest.raises(ConnectionFailedError, match="is the server running"):
        asyncio.run(Wire("http://127.0.0.1:9").send("GET", "/"))
    with pytest.raises(ConnectionFailedError, match="not the address"):
        Wire("ftp://x")
