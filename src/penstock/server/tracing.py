"""OpenTelemetry: a span for each request, with the W3C context of its caller and the attributes of the GenAI conventions.

An extra (pip install penstock[otel]). Prompts and answers never enter a span."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import ConfigError
from penstock.engine.stream import Stream
from penstock.server.gate import PROBES
from penstock.server.page import is_page

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
    return {"gen_ai.usage.input_tokens": stream.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": stream.cached_tokens,
            "gen_ai.usage.output_tokens": stream.output_tokens, "gen_ai.response.finish_reasons": list(stream.ends)}
