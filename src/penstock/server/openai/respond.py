"""How a stream of deltas becomes an HTTP answer, whole or as server-sent events, and what happens when the client goes away.

What the answer says is an `Answer`'s business; this file owns its life: nobody waits for a client that is gone, and nothing
runs on in the engine for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.core.errors import EngineDeadError, RequestError
from penstock.core.request import TokenLogprobs
from penstock.engine.async_llm import Stream
from penstock.engine.outputs import Delta
from penstock.server.errors import CLIENT_GONE, as_request_error

encode = msgspec.json.Encoder().encode

KEEP_ALIVE_SECONDS = 5.0
"""After so long without an event a comment is sent, so that nobody on the way takes the connection for dead."""

KEEP_ALIVE = b": keep-alive\n\n"

ENTRY_SIZE = 8
"""Writing one log probability takes as long as tokenizing so many characters."""

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(value)


DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """What one request's answer says, in either form."""

    def events(self, deltas: list[Delta]) -> bytes:
        """Server-sent events for these deltas; empty if there is nothing to say yet."""
        ...

    def last_events(self) -> bytes:
        """What comes after the last delta, without the end mark."""
        ...

    def add(self, deltas: list[Delta]) -> None:
        """Takes deltas in for the whole answer."""
        ...

    def whole(self) -> Any:
        """The whole answer, as an object to encode."""
        ...


async def respond(request: Request, stream: Stream, answer: Answer, streaming: bool) -> Response:
    """The answer to `request`, once its status is certain: for events, when the engine has admitted the request."""
    watch = asyncio.create_task(_close_when_gone(request.receive, stream))
    request.scope["stream"] = stream  # the access log tells its tokens
    try:
        if streaming:
            await stream.admitted()
            return EventStream(stream, answer, watch)
        size = 0
        async for deltas in stream:
            answer.add(deltas)
            size += _size(deltas)
        watch.cancel()
        return Response(await stream.work.run(size, lambda: encode(answer.whole())), media_type="application/json")
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except BaseException:
        watch.cancel()
        stream.close()
        raise


def _size(deltas: list[Delta]) -> int:
    """Cost of writing deltas as JSON, in characters to tokenize."""
    return sum(len(delta.text) // 8 + ENTRY_SIZE * (_entries(delta.logprobs) + _entries(delta.prompt_logprobs))
               for delta in deltas)


def _entries(lines: list[TokenLogprobs] | None) -> int:
    return sum(len(line.ids) for line in lines) if lines else 0


async def _close_when_gone(receive: Receive, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close(ClientDisconnect())


class EventStream(Response):
    """Server-sent events. Everything that is ready goes out in one write; a slow reader gets fewer, larger events."""

    media_type = "text/event-stream"

    def __init__(self, stream: Stream, answer: Answer, watch: asyncio.Task[None]) -> None:
        super().__init__(headers=SSE_HEADERS)
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_all(send)
            except ClientDisconnect:
                return
            except (RequestError, EngineDeadError) as error:
                body = event(scope["error_shape"](as_request_error(error)))
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            self._watch.cancel()
            self._stream.close()

    async def _send_all(self, send: Send) -> None:
        answer = self._answer
        while True:
            try:
                deltas = await self._stream.next(KEEP_ALIVE_SECONDS)
            except StopAsyncIteration:
                break
            body = await self._events(deltas) if deltas else KEEP_ALIVE
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        body = answer.last_events()
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _events(self, deltas: list[Delta]) -> bytes:
        return await self._stream.work.run(_size(deltas), lambda: self._answer.events(deltas))
