"""Limits on a connection's bytes: parsing ends where one is passed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from penstock.config.schema import ServerOptions
from penstock.server.connections import Connection, Connections


class Transport:
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("1.2.3.4", 5) if name in ("peername", "sockname") else default


def test_headers_beyond_the_limit_are_not_parsed() -> None:
    """Thousands of headers that come at once cost as much as the first hundred: they are one callback of the event loop."""
    async def run() -> None:
        options = ServerOptions()
        group = Connections(options, str, 10_000)
        connection = Connection(group, Config(None), ServerState(), {}, asyncio.get_running_loop())  # type: ignore[arg-type]
        transport = Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000)
        assert len(connection.headers) == options.max_header_count + 1
        assert transport.closing and b"--max-header-count" in transport.written
        assert transport.written.startswith(b"HTTP/1.1 431")
        assert transport.written.count(b"HTTP/1.1") == 1
        connection.connection_lost(None)

    asyncio.run(run())


def test_pieces_of_many_answers_are_written_together() -> None:
    """Before what is scheduled later, in order, and not to a connection that is closing."""
    async def run() -> None:
        group, gone = Connections(ServerOptions(), str, 10_000), Transport()
        transports = [Transport(), Transport()]
        gone.closing = True
        for transport in (*transports, gone, transports[0]):
            group.write(transport, b"a" if transport is not transports[0] else b"%d" % len(group._pieces))  # type: ignore[arg-type]
        assert not transports[0].written
        seen: list[bytes] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(transports[0].written + transports[1].written + gone.written))
        await asyncio.sleep(0)
        assert seen == [b"03a"]

    asyncio.run(run())
