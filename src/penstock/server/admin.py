"""The operator's routes: health, readiness, load, metrics, version."""

from collections.abc import Sequence
from typing import Any, TypedDict

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

import penstock
from penstock.core.errors import RequestError
from penstock.core.request import EngineInfo
from penstock.core.steptime import TERMS
from penstock.server.dialect import Route, UnavailableError, json_response
from penstock.server.metrics import CONTENT_TYPE, metrics_page
from penstock.server.state import State

Done = dict[str, bool]
Traces = dict[str, list[str]]
"""One file of each engine, on the server's machine."""


class ServerLoad(TypedDict):
    server_load: int
    """Requests that are open."""
    running: int
    waiting: int
    kv_cache_usage: float


class Admin:
    """The operator's routes, which read state or send a call to the engine."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.page = metrics_page(state.fleet, lambda: state.connections)

    def routes(self) -> Sequence[Route]:
        return (
            Route("GET", "/health", self.health, "Whether the engine is alive and makes progress", answer=dict[str, str]),
            Route("GET", "/ready", self.ready, "Whether a request would be taken now", answer=dict[str, str]),
            Route("GET", "/ping", self.health, "The same as /health", answer=dict[str, str]),
            Route("POST", "/ping", self.health, "The same as /health", answer=dict[str, str]),
            Route("GET", "/version", self.version, "The version of Penstock", answer=dict[str, str]),
            Route("GET", "/load", self.load, "How much there is to do", answer=ServerLoad),
            Route("GET", "/server_info", self.server_info, "What is served and how"),
            Route("GET", "/step_time", self.step_time, "The model of step time, for penstock simulate --model-cost"),
            Route("GET", "/kv_event_sources", self.kv_event_sources, "Where the cache's events are published, by engine",
                  answer=list[dict[str, Any]]),
            Route("GET", "/metrics", self.metrics, "Figures in Prometheus' format", answer=str),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache, "Forget everything that is cached", answer=Done),
            Route("POST", "/start_profile", self.start_profile, "Record the ranks' steps (--torch-profiler-dir)", answer=Done),
            Route("POST", "/stop_profile", self.stop_profile, "End that, and write one trace of all ranks", answer=Traces))

    async def health(self, request: Request) -> Response:
        """200 while the engine answers; 503 with the reason while it loads, when it is stuck, and when it is dead."""
        if reason := self.state.fleet.unhealthy():
            raise UnavailableError(reason, "unhealthy")
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 if a request sent now would be accepted; with ?model=NAME, if that model is loaded."""
        if reason := self.state.not_ready() or (self.state.llm.unhealthy() if "model" in request.query_params else None):
            raise UnavailableError(reason, "not_ready")
        return json_response({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self.page(), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return json_response({"version": penstock.__version__})

    async def load(self, request: Request) -> Response:
        llm = self.state.llm
        return json_response({"server_load": llm.live, "running": llm.stats.running, "waiting": llm.stats.waiting,
                              "kv_cache_usage": llm.stats.kv_usage})

    async def server_info(self, request: Request) -> Response:
        """Facts about the served model; 503 while it loads. SGLang's keys where the meaning is the same."""
        info = self._info()
        tenants = self.state.tenants
        return json_response({
            "version": penstock.__version__, "model_path": info.model, "served_model_name": self.state.fleet.names,
            "architecture": info.architecture, "dtype": info.dtype, "device": info.device,
            "max_model_len": info.max_model_len, "max_num_seqs": info.max_num_seqs, "page_size": info.page_size,
            "kv_events": info.kv_events,
            "cache": {"prefix_caching": info.prefix_caching, "identity": info.cache_identity, "isolated": tenants.isolated,
                      "tenant_share": info.tenant_share, "tiers": [asdict(tier) for tier in self.state.llm.stats.tiers]}})

    async def step_time(self, request: Request) -> Response:
        """The engine as `cli/simulation/fleet.py::Cost`. 503 until it has run a step."""
        info, stats = self._info(), self.state.llm.stats
        if not any(stats.step_time):
            raise UnavailableError("no step has run yet, so nothing is known of their times; send a request first", "not_ready")
        return json_response({
            "name": f"{info.model} on {info.device}", "weights": dict(zip(TERMS, stats.step_time, strict=True)),
            "buckets": info.buckets, "kv_tokens": info.kv_tokens, "page_size": info.page_size,
            "max_num_seqs": info.max_num_seqs, "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_model_len": info.max_model_len, "step_target": info.step_target,
            "overhead": max(0.0, stats.busy_seconds - stats.worker_seconds) / max(1, stats.steps)})

    async def kv_event_sources(self, request: Request) -> Response:
        """Endpoints of the KV cache events, one for each engine with the fields of --kv-events-config."""
        info = self._info()
        return json_response([] if info.kv_events is None else [
            {"dp_rank": 0, "block_size": info.page_size, "model": info.cache_identity, **info.kv_events}])

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empties the prefix cache, in every tier, for all tenants."""
        self._info()
        return json_response({"success": await self.state.llm.reset_prefix_cache()})

    async def start_profile(self, request: Request) -> Response:
        self._traces()
        await self.state.llm.start_profile()
        return json_response({"success": True})

    async def stop_profile(self, request: Request) -> Response:
        return json_response({"traces": await self.state.llm.stop_profile(self._traces())})

    def _traces(self) -> str:
        """The folder for traces. RequestError if there is none."""
        self._info()
        if (folder := self.state.options.torch_profiler_dir) is None:
            raise RequestError("there is no folder for traces; start the server with --torch-profiler-dir FOLDER",
                               code="profiling_is_off")
        return folder

    def _info(self) -> EngineInfo:
        self.state.admit(None)
        info = self.state.llm.info
        assert info is not None
        return info
