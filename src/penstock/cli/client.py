"""The HTTP client of the command line: requests to an OpenAI-compatible API, over a socket or straight into an ASGI app.

Both ways give the same `Reply`, so a command does not know whether its model runs in a server or beside it. The socket way
is a protocol over httptools with one request per connection at a time: a benchmark's client shares cores with what it
measures, and each chunk must be stamped when it arrives, not when somebody comes to read it."""

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from penstock import __version__
from penstock.core.errors import PenstockError
from penstock.server.inside import inside

App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class ConnectionFailedError(PenstockError):
    """The server cannot be reached, or went away in the middle of an answer."""


class Event(NamedTuple):
    """One server-sent event: its data, and when its last byte arrived (time.perf_counter() seconds)."""

    at: float
    data: bytes


class Reply:
    """One answer. `status` and `headers` (lower-case names) are set when `Transport.send` returns; the body streams in."""

    def __init__(self, abandon: Callable[[], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._chunks: deque[tuple[float, bytes]] = deque()
        self.over = False
        """The whole body has arrived, or nothing more of it will."""
        self._error: PenstockError | None = None
        self._news = asyncio.Event()
        self._abandon = abandon

    # Called by transports.

    def start(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self._news.set()

    def feed(self, data: bytes) -> None:
        self._chunks.append((time.perf_counter(), data))
        self._news.set()

    def finish(self, error: PenstockError | None = None) -> None:
        if not self.over:
            self.over, self._error = True, error
            self._news.set()

    # Called by commands.

    async def started(self) -> None:
        """Waits for the status; raises ConnectionFailedError if none came. A reader that leaves has given the answer up."""
        try:
            while not self.status:
                if self._error:
                    raise self._error
                await self._wait()
        except asyncio.CancelledError:
            self.close()
            raise

    async def chunks(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body's pieces as they arrive, each with its time. Raises ConnectionFailedError if the answer breaks off."""
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._error:
                raise self._error
            if self.over:
                return
            await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def read(self) -> bytes:
        return b"".join([data async for _, data in self.chunks()])

    async def events(self) -> AsyncIterator[Event]:
        """The data of a text/event-stream body, comments and other fields left out."""
        rest = b""
        async for at, data in self.chunks():
            if b"\r" in data:
                data = data.replace(b"\r", b"")
            *whole, rest = (rest + data).split(b"\n\n")
            for block in whole:
                if lines := [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]:
                    yield Event(at, lines[0] if len(lines) == 1 else b"\n".join(lines))

    def close(self) -> None:
        """Gives up on what has not arrived, which makes the server abort the request."""
        if not self.over:
            self.finish(ConnectionFailedError("the answer was given up"))
            self._abandon()


class Transport(Protocol):
    """A way to send requests to an API."""

    async def send(self, method: str, path: str, body: bytes = b"") -> Reply:
        """Sends one request and returns when the answer's status is known. Raises ConnectionFailedError."""

    async def aclose(self) -> None: ...


class _Connection(asyncio.Protocol):
    """One socket, one request at a time."""

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.silent = True
        """No byte of the current answer has arrived."""
        self._headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)

    @property
    def free(self) -> bool:
        return not self.closed and self.reply is None

    def request(self, head: bytes, body: bytes, reply: Reply) -> None:
        assert self.transport is not None
        self.reply, self.silent, self._headers = reply, True, {}
        self._parser = httptools.HttpResponseParser(self)
        self.transport.write(head + body)

    def abandon(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    # asyncio's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has its methods but not its class

    def data_received(self, data: bytes) -> None:
        self.silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")
            self.abandon()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.reply is None:
            return
        sized = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self.reply.status and not sized and exc is None:
            self.on_message_complete()  # a body without a length ends with the connection
        else:
            self._fail("the server closed the connection before its answer was complete")

    def _fail(self, message: str) -> None:
        if self.reply is not None:
            self.reply.finish(ConnectionFailedError(message))

    # httptools' callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self.reply is not None and self._parser.get_status_code() >= 200:
            self.reply.start(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self.reply is not None:
            self.reply.feed(data)

    def on_message_complete(self) -> None:
        if self.reply is None or not self.reply.status:
            return  # an interim 1xx answer; the real one follows
        reply, self.reply = self.reply, None
        if not self._parser.should_keep_alive():
            self.closed = True
            if self.transport is not None:
                self.transport.close()
        reply.finish()


class Wire:
    """Requests over HTTP/1.1. `url` is the server's address, with or without a trailing /v1. If it `waits`, the server does
    not refuse a request because its class's promise cannot be kept."""

    def __init__(self, url: str, api_key: str | None = None, *, waits: bool = False) -> None:
        parts = urlsplit(url if "://" in url else "http://" + url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectionFailedError(f"{url!r} is not the address of an HTTP server; one looks like http://127.0.0.1:8000")
        self.url = url
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        own = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        own += "x-penstock-wait: true\r\n" if waits else ""
        self._common = f"host: {parts.netloc.rpartition('@')[2]}\r\nuser-agent: penstock/{__version__}\r\n{own}".encode()
        self._all: set[_Connection] = set()

    async def send(self, method: str, path: str, body: bytes = b"") -> Reply:
        content = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body or method == "POST" else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{content}".encode() + self._common + b"\r\n"
        while True:
            connection, used = await self._connect()
            reply = Reply(connection.abandon)
            connection.request(head, body, reply)
            try:
                await reply.started()
            except ConnectionFailedError:
                if used and connection.silent:
                    continue  # an idle connection that the server closed just now; it never saw the request
                raise
            return reply

    async def _connect(self) -> tuple[_Connection, bool]:
        """A connection for one request, and whether it was used before."""
        self._all = {c for c in self._all if not c.closed}
        if idle := [c for c in self._all if c.free]:
            return idle[-1], True
        try:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            why = error.strerror or error
            raise ConnectionFailedError(f"cannot reach {self.url}: {why}; is the server running there?") from None
        self._all.add(connection)
        return connection, False

    async def aclose(self) -> None:
        for connection in self._all:
            connection.abandon()
        self._all.clear()


class Local:
    """Requests straight into an ASGI application of this process, which wait. `api_key` is sent like over the wire."""

    def __init__(self, app: App, api_key: str | None = None) -> None:
        self._app = app
        self._headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-penstock-wait", b"true")]
        if api_key:
            self._headers.append((b"authorization", f"Bearer {api_key}".encode()))
        self._running: set[asyncio.Task[None]] = set()

    async def send(self, method: str, path: str, body: bytes = b"") -> Reply:
        gone = asyncio.Event()
        reply = Reply(gone.set)
        task = asyncio.create_task(self._call(method, path, body, reply, gone))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await reply.started()
        return reply

    async def _call(self, method: str, path: str, body: bytes, reply: Reply, gone: asyncio.Event) -> None:
        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in message.get("headers", ())}
                reply.start(message["status"], headers)
            elif message["type"] == "http.response.body" and not gone.is_set():
                # To a caller that has gone nothing is sent, which ASGI before 2.4 wants to be no error.
                if message.get("body"):
                    reply.feed(bytes(message["body"]))
                if not message.get("more_body"):
                    reply.finish()

        scope, receive = inside(method, path, body, self._headers, gone)
        try:
            with contextlib.suppress(OSError):
                await self._app(scope, receive, send)
        finally:
            reply.finish(ConnectionFailedError("the application ended without completing its answer"))
            gone.set()

    async def aclose(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
