"""Spans that a collector receives: W3C context, GenAI attributes, and none of the text."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.system.served import served


class Collector(BaseHTTPRequestHandler):
    bodies: list[bytes] = []

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            data = gzip.decompress(data)
        type(self).bodies.append(data)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_a_request_becomes_a_span() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with served("canary", "--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces",
                environment={"OTEL_BSP_SCHEDULE_DELAY": "100"}) as server:
        answer = server.http.post("/v1/chat/completions", headers={"traceparent": f"00-{trace}-{parent}-01"}, json={
            "messages": [{"role": "user", "content": "Repeat: dog cat"}], "temperature": 0})
        server.http.get("/health")
        usage = answer.json()["usage"]
        until = time.monotonic() + 20
        while not Collector.bodies:
            assert time.monotonic() < until, server.log
            time.sleep(0.05)
    collector.shutdown()
    [span] = [span for body in Collector.bodies for resource in ExportTraceServiceRequest.FromString(body).resource_spans
              for scope in resource.scope_spans for span in scope.spans]
    found = {one.key: one.value for one in span.attributes}
    assert span.name == "POST /v1/chat/completions" and span.trace_id.hex() == trace and span.parent_span_id.hex() == parent
    assert found["gen_ai.operation.name"].string_value == "chat" and found["gen_ai.response.model"].string_value == "stories"
    assert found["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert found["http.response.status_code"].int_value == 200 and span.events[0].name == "first bytes"
    assert b"dog" not in b"".join(Collector.bodies)
