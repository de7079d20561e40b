"""The engine room: the engine's work at this moment, as one JSON object and as server-sent events for the page at `/`.

It tells counts, times and ids of all tenants' requests, never their text, so among several keys it needs an admin's."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.observe.figures import Histogram
from penstock.server.dialect import Route, json_response
from penstock.server.respond import SSE_HEADERS, event
from penstock.server.state import State

SHOWN = 60.0
"""Seconds for which sequences that ended are shown."""

INTERVAL = 0.5
"""Seconds between two events."""


class Room:
    """GET /engine, GET /engine/events."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._found: dict[str, Any] = {}
        self._at = 0.0
        self._looking = asyncio.Lock()

    def routes(self) -> Sequence[Route]:
        return (Route("GET", "/engine", self.engine, "The engine's steps, requests, pages and prefix tree at this moment"),
                Route("GET", "/engine/events", self.events, "The same as events, twice a second", event=dict[str, Any]))

    async def engine(self, request: Request) -> Response:
        """One look, with the engine's facts. 503 while there is no engine."""
        return json_response({**self._facts(), **await self._look()})

    async def events(self, request: Request) -> Response:
        """The engine's facts, then a look at a time, until the client goes away or the engine ends."""
        self.state.admit(None)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=SSE_HEADERS)

    async def _events(self) -> AsyncIterator[bytes]:
        yield event(self._facts())
        while not self.state.not_ready():
            yield event(await self._look())
            await asyncio.sleep(INTERVAL)

    def _facts(self) -> dict[str, Any]:
        self.state.admit(None)
        return {"info": msgspec.to_builtins(self.state.llm.info), "names": self.state.fleet.names}

    async def _look(self) -> dict[str, Any]:
        """One look serves all who watch at the same time."""
        async with self._looking:
            if time.monotonic() - self._at > INTERVAL / 2:
                llm = self.state.llm
                found = await llm.look()
                stats, figures = llm.stats, llm.traffic.figures
                ended = [one for one in llm.traffic.ended if one["finished"] > time.time() - SHOWN]
                self._found = {**found, "stats": {**asdict(stats), "tiers": [asdict(tier) for tier in stats.tiers]},
                               "ended": ended, "finished": figures.finished, "refused": figures.refused,
                               "first_token": _counts(figures.first_token), "between_tokens": _counts(figures.between_tokens)}
                self._at = time.monotonic()
            return self._found


def _counts(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "total": histogram.total}
