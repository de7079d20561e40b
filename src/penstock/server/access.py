"""Around the gate: paths without a proxy's prefix (--root-path), the access log, and spans of OpenTelemetry.

The log has one line for each request that has ended, at info. A span has the W3C context of its caller and the attributes of
the GenAI conventions; they are an extra (pip install penstock[otel]). Prompts and answers enter neither."""

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import ConfigError
from penstock.engine.ledger import rounded
from penstock.engine.stream import Stream
from penstock.observe.log import LOG
from penstock.server.gate import PROBES
from penstock.server.page import is_page

_LONGEST_PATH = 200


class AccessLog:
    """Pure ASGI around everything else. Probes are logged at debug, or they would drown the rest."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        try:
            await self.app(scope, receive, send)
        finally:
            seconds = time.monotonic() - began
            write = LOG.debug if scope["path"] in PROBES else LOG.info
            # The raw path is still percent-encoded, so that no request can write lines of its own into the log.
            path = (scope.get("raw_path") or scope["path"].encode())[:_LONGEST_PATH].decode("ascii", "backslashreplace")
            write("%s %s %s in %.3f s%s%s [%s]", scope["method"], path, scope["status"] or "no answer", seconds,
                  _tokens(scope.get("stream")), "" if scope["complete"] else ", the client left", scope.get("request_id", "-"),
                  extra={"fields": _fields(scope, path, seconds)})


def _fields(scope: Scope, path: str, seconds: float) -> dict[str, Any]:
    """The same for a log of JSON objects."""
    stream: Stream | None = scope.get("stream")
    counts: dict[str, Any] = {} if stream is None else {
        "prompt_tokens": stream.prompt_tokens, "cached_tokens": stream.cached_tokens, "output_tokens": stream.output_tokens,
        "finish_reasons": list(stream.ends)}
    if stream is not None and stream.ledger:
        # The engine's part, how long its answer took to be sent, and what came before the engine: parsing, template, tokens.
        sent = max(0.0, time.time() - stream.ledger_at)
        parts = {**stream.ledger, "sent": sent, "total": stream.ledger["total"] + sent}
        counts["ledger"] = rounded({**parts, "received": max(0.0, seconds - parts["total"])})
    return {"request_id": scope.get("request_id"), "method": scope["method"], "path": path, "status": scope["status"],
            "seconds": round(seconds, 6), "complete": scope["complete"], **counts}


def _tokens(stream: Stream | None) -> str:
    """The log line's fields on tokens: the request's prompt, cached and generated tokens."""
    if stream is None:
        return ""
    cached = f" ({stream.cached_tokens} cached)" if stream.cached_tokens else ""
    ends = ", ".join(stream.ends)
    return f": {stream.prompt_tokens} tokens in{cached}, {stream.output_tokens} out{ends and ', ' + ends}"


class Paths:
    """Pure ASGI around everything else, so that keys are checked for the path that is served. The scope has the `status` of the
    answer once it has begun (0 before), and whether it is `complete`."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        """`root` is the prefix under which a proxy shows this server. Requests may come with it or without."""
        self.app = app
        self.root = "/" + root.strip("/") if root.strip("/") else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # There are no websockets here, and nothing to do at a server's start and end.
            return
        path: str = scope["path"]
        if self.root and (path == self.root or path.startswith(self.root + "/")):
            path = path[len(self.root):]
        scope["path"] = path.rstrip("/") or "/"
        scope["status"], scope["complete"] = 0, False

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["status"] = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                scope["complete"] = True

        await self.app(scope, receive, watched)


OPERATIONS = {"/v1/chat/completions": "chat", "/v1/messages": "chat", "/api/chat": "chat", "/v1/responses": "chat",
              "/v1/completions": "text_completion", "/api/generate": "text_completion",
              "/inference/v1/generate": "text_completion", "/v1/embeddings": "embeddings", "/api/embed": "embeddings"}
"""gen_ai.operation.name by path."""


def tracer_of(endpoint: str) -> Any:
    """A tracer that sends spans to an OTLP endpoint over HTTP, in batches, on a thread. ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install penstock[otel]") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "penstock"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider.get_tracer("penstock")


class Traces:
    """Pure ASGI around everything else, but for probes and the page's files."""

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        self.app = app
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES or is_page(scope["path"]):
            await self.app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
                   if name in (b"traceparent", b"tracestate")}
        operation = OPERATIONS.get(scope["path"])
        span = self.tracer.start_span(f"{scope['method']} {scope['path'][:200]}", kind=SpanKind.SERVER,
                                      context=TraceContextTextMapPropagator().extract(headers))
        span.set_attributes({"http.request.method": scope["method"], "url.path": scope["path"][:200]})
        first = True

        async def watched(message: Message) -> None:
            nonlocal first
            if first and message.get("body"):
                first = False
                span.add_event("first bytes")
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            span.set_attributes({"http.response.status_code": scope["status"],
                                 "penstock.request_id": scope.get("request_id", "")})
            if operation is not None:
                span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.provider.name": "penstock",
                                     "gen_ai.response.model": scope.get("model", ""), **_usage(scope.get("stream"))})
            span.end()


def _usage(stream: Stream | None) -> dict[str, Any]:
    if stream is None:
        return {}
    return {"gen_ai.usage.input_tokens": stream.prompt_tokens, "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
            "gen_ai.usage.output_tokens": stream.output_tokens, "gen_ai.response.finish_reasons": list(stream.ends)}
