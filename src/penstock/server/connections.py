"""Connections: how many there may be, how much each may send before its request is complete, and how long it may take.

uvicorn's HTTP protocol does the parsing and the answers. This file bounds it: header bytes are counted before they are parsed,
every phase of a request has a deadline, and when there are too many connections the oldest one that is not being served makes
room. A few descriptors are kept back, so that probes (`PROBES`) are answered also then."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import httptools
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.config.schema import ServerOptions
from penstock.core.errors import ConfigError, RequestError
from penstock.observe.log import LOG
from penstock.server.dialect import ErrorShape, UnavailableError, error_response

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""Paths that are served also when there are too many connections."""

RESERVE = 32
"""Connections beyond the limit that are accepted, for probes alone."""

OWN_DESCRIPTORS = 128
"""File descriptors that the server needs for other things than connections."""

MOST_CONNECTIONS = 4096
"""The default limit, if the process may have so many descriptors."""

MOST_PIPELINED = 16
"""Requests that a client may send on one connection before the first is answered."""

PROBE_SECONDS = 2.0
"""Header timeout of connections beyond the limit."""

_PIECE = 64 << 10
"""Bytes of a body that are parsed before its framing is checked: tiny chunks take a microsecond each."""

LOG_SECONDS = 10.0
"""The least time between two log lines about refused connections."""


DIRECT = "penstock.direct"
"""The scope's extension that has a request's `DirectWrites`."""


@dataclass
class Counts:
    """Counts of connections since the start; what each counts: `server/metrics.py::CONNECTIONS`."""

    accepted: int = 0
    evicted: int = 0
    refused: int = 0
    timed_out: int = 0


def raise_descriptor_limit() -> int:
    """Raises this process's limit of open files as far as it may; the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Connections:
    """All connections of a server, and the limits that they share."""

    def __init__(self, options: ServerOptions, shape: ErrorShape, descriptors: int) -> None:
        """`descriptors` is how many files the process may have open. ConfigError if the limits leave no connection."""
        possible = descriptors - OWN_DESCRIPTORS - RESERVE
        most = options.max_connections or min(MOST_CONNECTIONS, possible)
        if not 1 <= most <= possible:
            raise ConfigError(f"--max-connections is {most}, but this process may open {descriptors} files (ulimit -n), which "
                              f"leaves {max(0, possible)} for connections; raise the one or lower the other")
        self.options = options
        self.shape = shape
        self.most = most
        self.most_per_address = options.max_connections_per_address or max(1, most * 3 // 4)
        self.all: set[Connection] = set()
        self.counts = Counts()
        self._addresses: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}
        """Connections without a complete request, the one that has waited longest first."""
        self._pieces: list[tuple[asyncio.Transport, bytes]] = []
        """Pieces that wait to be written together."""
        self._logged = 0.0
        self._unlogged = 0

    def write(self, transport: asyncio.Transport, piece: bytes) -> None:
        """Writes `piece` together with those of other answers, before anything runs that the event loop schedules from now on.
        One by one, each call of the kernel would leave the processor's caches cold for the Python between them."""
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pieces.append((transport, piece))

    def flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        for transport, piece in pieces:
            if not transport.is_closing():
                transport.write(piece)

    def add(self, connection: Connection) -> str | None:
        """Takes a new connection in; None, or why nothing but probes is served on it. May close others, or this one."""
        self.counts.accepted += 1
        address = connection.address
        self.all.add(connection)
        self._addresses[address] += 1
        self._waiting[connection] = None
        if self._addresses[address] > self.most_per_address:
            reason = f"there are {self._addresses[address]} connections from {address}; at most {self.most_per_address} are " \
                     "possible from one address (--max-connections-per-address)"
            spare, of = self._addresses[address] <= self.most_per_address + RESERVE // 4, address
        elif len(self.all) > self.most:
            reason = f"there are {len(self.all)} connections; at most {self.most} are possible (--max-connections)"
            spare, of = len(self.all) <= self.most + RESERVE, None
        else:
            return None
        if self._evict(connection, of):
            self.counts.evicted += 1
            self._log(f"{reason}: the oldest idle one was closed")
            return None
        self.counts.refused += 1
        self._log(reason)
        if not spare:
            connection.transport.abort()
        return reason

    def remove(self, connection: Connection) -> None:
        if connection in self.all:
            self.all.discard(connection)
            self._addresses[connection.address] -= 1
            if not self._addresses[connection.address]:
                del self._addresses[connection.address]
        self._waiting.pop(connection, None)

    def serving(self, connection: Connection) -> None:
        """The connection has a complete request: it is not closed for others."""
        self._waiting.pop(connection, None)

    def waiting(self, connection: Connection) -> None:
        if connection in self.all:
            self._waiting[connection] = None

    def _evict(self, new: Connection, address: str | None) -> bool:
        """Closes the connection that has waited longest, of `address` if given; False if there is none but `new`."""
        for connection in self._waiting:
            if connection is not new and address in (None, connection.address):
                connection.transport.abort()
                self.remove(connection)
                return True
        return False

    def _log(self, message: str) -> None:
        now = time.monotonic()
        self._unlogged += 1
        if now - self._logged >= LOG_SECONDS:
            LOG.warning("too many connections: %s (%d times since the last line like this)", message, self._unlogged)
            self._logged, self._unlogged = now, 0


class Connection(HttpToolsProtocol):
    """One connection: uvicorn's HTTP within the limits of its `Connections`. Errors have the dialect's shape."""

    def __init__(self, connections: Connections, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.group = connections
        self.address = ""
        self._in_head = True
        """The bytes that come are of a request's line and headers."""
        self._head_bytes = self._body_bytes = self._overhead = 0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    # -- the connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._deadline("idle", self.group.options.idle_timeout)
        if (reason := self.group.add(self)) is not None:
            self.app = _probes_only(self.app, reason, self.group.shape)
            self._deadline("idle", PROBE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.group.remove(self)
        self._cancel_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        # Cancel the requests in progress: no client reads their answers.
        for task in self._running:
            task.cancel()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        options = self.group.options
        if self._in_head and not self._head_bytes and not self._answering:
            self._deadline("headers", options.header_timeout)
        try:
            while data and not self.transport.is_closing():
                if self._in_head:
                    # In pieces, so that a piece too much is refused before the parser has kept it.
                    piece, data = data[:options.max_header_bytes + 1], data[options.max_header_bytes + 1:]
                    self._head_bytes += len(piece)
                    self.parser.feed_data(piece)
                    if self._in_head and self._head_bytes > options.max_header_bytes:
                        self._refuse(f"the request's headers have more than {options.max_header_bytes:,} bytes "
                                     "(--max-header-bytes)", 431)
                else:
                    piece, data = data[:_PIECE], data[_PIECE:]
                    self._overhead += len(piece)
                    self.parser.feed_data(piece)
                    # Chunk sizes, extensions and trailers, which the parser keeps or skips without end.
                    if self._overhead > options.max_header_bytes + self._body_bytes:
                        self._refuse("the request's chunks have more framing than content", 400)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            if not self.transport.is_closing():
                self.send_400_response(str(error) or "Invalid HTTP request received.")

    @property
    def _answering(self) -> bool:
        """A request whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._body_bytes = self._overhead = 0
        if len(self.pipeline) >= MOST_PIPELINED:
            self._refuse(f"more than {MOST_PIPELINED} requests were sent before the first was answered", 429)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self.group.options.max_header_count:
            self._refuse(f"the request has more than {self.group.options.max_header_count} headers (--max-header-count)", 431)
            raise httptools.HttpParserError("too many headers")  # ends the parsing of what has come

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._in_head, self._head_bytes = False, 0
        self._deadline("body", self.group.options.body_timeout)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._overhead -= len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        if self.transport.is_closing():
            return
        self._cancel_timer()
        self.group.serving(self)
        super().on_message_complete()
        if not self.pipeline:
            # A large body has paused reading; while it is paused, nobody sees that the client disconnects.
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self.group.waiting(self)
            if self._in_head and self._head_bytes:
                self._deadline("headers", self.group.options.header_timeout)

    # -- bounds

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        cycle.scope.setdefault("extensions", {})[DIRECT] = DirectWrites(cycle, self.group)
        task = self.loop.create_task(cycle.run_asgi(app))
        for known in (self.tasks, self._running):
            known.add(task)
            task.add_done_callback(known.discard)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.group.options.write_timeout, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _stalled(self) -> None:
        """The client has not read for too long."""
        self.group.counts.timed_out += 1
        self.transport.abort()

    def _deadline(self, phase: str, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self._expired, phase, seconds)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expired(self, phase: str, seconds: float) -> None:
        self.group.counts.timed_out += 1
        if phase == "idle":
            self.transport.close()
        else:
            flag = "--header-timeout" if phase == "headers" else "--body-timeout"
            self._refuse(f"the request's {phase} did not come within {seconds:g} s ({flag})", 408)

    def _refuse(self, message: str, status: int) -> None:
        """Answers, where an answer has not begun, and closes the connection."""
        if self.transport.is_closing():
            return
        # Before a request, or in the body of one that has no answer yet; anywhere else an answer would be taken for another's.
        if not self._answering if self._in_head else self._answering and not self.cycle.response_started:
            error = RequestError(message, code="request_timeout" if status == 408 else "invalid_http", status=status)
            body = msgspec.json.encode(self.group.shape(error))
            self.transport.write(b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                                 b"connection: close\r\n\r\n%b" % (status, _PHRASES[status], len(body), body))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(f"this is not a valid HTTP/1.1 request: {msg}", 400)


class DirectWrites(NamedTuple):
    """Writes pieces of one answer's body past the layers of the application, which look at its start and end alone."""

    cycle: Any
    group: Connections

    @property
    def possible(self) -> bool:
        """Whether the answer has begun, in chunks, and its client keeps up with reading."""
        cycle = self.cycle
        return bool(cycle.chunked_encoding and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete))

    def write(self, piece: bytes) -> None:
        """Sends a piece that is not empty. Only while it is `possible`. Before other pieces are sent, `group.flush`."""
        self.group.write(self.cycle.transport, b"%x\r\n%b\r\n" % (len(piece), piece))


_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 429: b"Too Many Requests", 431: b"Request Header Fields Too Large"}


def quiet(app: ASGIApp) -> ASGIApp:
    """Wraps `app` so that its cancellation, when a client disconnects, is no error."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return run


def _probes_only(app: Any, reason: str, shape: ErrorShape) -> ASGIApp:
    """`app` for probes; everything else is refused."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = error_response(UnavailableError(reason, "too_many_connections"), shape, {"Connection": "close"})
        await (app if scope["path"] in PROBES else refusal)(scope, receive, send)

    return run
