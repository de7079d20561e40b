"""The routes of those who run the server: is it alive, is it ready, how loaded, which version."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import penstock
from penstock.server.errors import UnavailableError, error_response
from penstock.server.metrics import CONTENT_TYPE, MetricsPage
from penstock.server.state import State


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Admin:
    """GET /health, /ready, /ping, /metrics, /version, /load. None of them asks the engine anything."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.page = MetricsPage(state.llm, state.name)

    async def health(self, request: Request) -> Response:
        """200 while the engine answers; 503 with the reason while it loads, when it is stuck, and when it is dead."""
        reason = self.state.llm.unhealthy()
        if reason:
            return error_response(UnavailableError(reason, "unhealthy"))
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request sent now would be taken."""
        reason = self.state.not_ready()
        if reason:
            return error_response(UnavailableError(reason, "not_ready"))
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        return Response(self.page.render(), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def load(self, request: Request) -> Response:
        """How much there is to do, for a balancer."""
        llm = self.state.llm
        return json_response({"server_load": llm.live, "running": llm.stats.running, "waiting": llm.stats.waiting,
                              "kv_cache_usage": llm.stats.kv_usage})
