"""Turns a stream of deltas into an HTTP response, whole or as server-sent events, and handles disconnects.

The content is built by an `Answer`. This file owns the life cycle: when the client disconnects, its requests are aborted."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.core.errors import EngineDeadError, RequestError
from penstock.engine.outputs import Delta
from penstock.engine.stream import Stream
from penstock.engine.work import INLINE
from penstock.server.connections import DIRECT, DirectWrites
from penstock.server.dialect import as_request_error

encode = msgspec.json.Encoder().encode

KEEP_ALIVE_SECONDS = 5.0
"""Interval of comment lines on an idle stream, which keep proxies from closing the connection."""

KEEP_ALIVE = b": keep-alive\n\n"

ENTRY_SIZE = 8
"""Writing one log probability takes as long as tokenizing so many characters."""

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode(value)


class Frame:
    """An event of which only one text changes: the rest is encoded once."""

    __slots__ = ("_begin", "_end")

    def __init__(self, value: Any, field: str) -> None:
        """`value` is the event's data with the text "\0" in its first field of this name."""
        self._begin, mark, self._end = event(value).partition(b'"%b":"\\u0000"' % field.encode())
        assert mark, f"no {field}"
        self._begin += b'"%b":' % field.encode()

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._begin, encode(text), self._end)


DONE = b"data: [DONE]\n\n"


class Wire(NamedTuple):
    """The framing of a dialect's stream around its events."""

    media_type: str = "text/event-stream"
    opening: Callable[[], bytes] = bytes
    """Sent once the engine has taken the request in."""
    keep_alive: bytes = KEEP_ALIVE
    """Sent while no event is due."""
    done: bytes = DONE
    """Ends the stream."""
    failed: Callable[[Any], bytes] = event
    """The event of an error's body."""


SSE = Wire()


class Answer(Protocol):
    """Builds the content of one response, streamed or not."""

    def events(self, deltas: list[Delta]) -> bytes:
        """Server-sent events for these deltas; may be empty."""

    def last_events(self) -> bytes:
        """Events after the last delta, without the stream's end."""

    def add(self, deltas: list[Delta]) -> None:
        """Accumulates deltas for a non-streamed response."""

    def whole(self) -> Any:
        """The whole response, as an object to encode."""


async def gather(request: Request, stream: Stream, add: Callable[[list[Delta]], None]) -> None:
    """Reads a stream to its end. When the client goes away its requests are aborted, and ClientDisconnect is raised."""
    watch = _watched(request, stream)
    try:
        async for deltas in stream:
            add(deltas)
    finally:
        watch.cancel()
        stream.close()


def _watched(request: Request, stream: Stream) -> asyncio.Task[None]:
    """Names the stream by its request, and closes it when the client goes away."""
    scope = request.scope
    # The access log tells its tokens; /abort_requests finds it by its name.
    scope["stream"] = stream
    stream.name, stream.owner = scope.get("request_id", ""), scope.get("api_key", b"")
    return asyncio.create_task(_close_when_gone(request.receive, stream))


async def respond(request: Request, stream: Stream, answer: Answer, streaming: bool, wire: Wire = SSE) -> Response:
    """The response to `request`. A streamed one starts at the request's admission; errors before have their own status.
    ClientDisconnect if the client goes away before."""
    if streaming:
        watch = _watched(request, stream)
        try:
            await stream.admitted()
            return EventStream(stream, answer, watch, wire)
        except BaseException:
            watch.cancel()
            stream.close()
            raise
    size = 0

    def add(deltas: list[Delta]) -> None:
        nonlocal size
        answer.add(deltas)
        size += _size(deltas)

    await gather(request, stream, add)
    return Response(await stream.work.run(size, lambda: encode(answer.whole())), media_type="application/json")


def _size(deltas: list[Delta]) -> int:
    """Cost of writing deltas as JSON, in characters to tokenize."""
    size = 0
    for delta in deltas:
        size += len(delta.text) // 8
        for lines in (delta.logprobs, delta.prompt_logprobs):
            if lines:
                size += ENTRY_SIZE * sum(len(line.ids) for line in lines)
    return size


async def _close_when_gone(receive: Receive, stream: Stream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close(ClientDisconnect())


class EventStream(Response):
    """Server-sent events. Everything that is ready goes out in one write; a slow reader gets fewer, larger events. While it
    keeps up, the events of a step are written as they arrive, without waking this answer's task."""

    def __init__(self, stream: Stream, answer: Answer, watch: asyncio.Task[None], wire: Wire = SSE) -> None:
        super().__init__(headers=SSE_HEADERS, media_type=wire.media_type)
        del self.headers["content-length"]
        self._stream = stream
        self._answer = answer
        self._watch = watch
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await self._send_all(send, scope.get("extensions", {}).get(DIRECT))
            except ClientDisconnect:
                return
            except (RequestError, EngineDeadError) as error:
                await _piece(send, self._wire.failed(scope["error_shape"](as_request_error(error))))
            await send({"type": "http.response.body", "body": self._wire.done, "more_body": False})
        finally:
            self._watch.cancel()
            self._stream.close()

    async def _send_all(self, send: Send, direct: DirectWrites | None) -> None:
        stream, taker = self._stream, None
        await _piece(send, self._wire.opening())
        while True:
            # Once something was sent, deltas that come while this task waits are written where they arrive.
            stream.taker = taker
            try:
                deltas = await stream.next(KEEP_ALIVE_SECONDS)
            except StopAsyncIteration:
                break
            finally:
                stream.taker = None
                if direct is not None:
                    direct.group.flush()
            await _piece(send, await self._events(deltas) if deltas else self._wire.keep_alive)
            if direct is not None and deltas:
                taker = functools.partial(self._take, direct)
        await _piece(send, self._answer.last_events())

    async def _events(self, deltas: list[Delta]) -> bytes:
        return await self._stream.work.run(_size(deltas), lambda: self._answer.events(deltas))

    def _take(self, direct: DirectWrites, deltas: list[Delta]) -> bool:
        if not direct.possible or _size(deltas) > INLINE:
            return False
        try:
            events = self._answer.events(deltas)
        except Exception as error:  # noqa: BLE001 (it is raised where the stream is read, and fails this answer alone)
            self._stream.close(error)
        else:
            if events:
                direct.write(events)
        return True


async def _piece(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
