"""Permissions: browsers' pages, priorities, and where events are told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.config.schema import EngineOptions, ServerOptions
from penstock.core.errors import RequestError
from penstock.engine import events
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.events import EventsConfig, Publisher
from penstock.server.app import Application

JSON = (b"content-type", b"application/json")


def ask(options: ServerOptions, path: str, *headers: tuple[bytes, bytes], method: str = "POST") -> tuple[int, bytes]:
    """(status, body) of a request to an application whose model is still loading: what passes the gate gets 404 or 503."""
    app = Application(AsyncLLM(EngineOptions()), options)
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [(b"host", b"127.0.0.1:8000"), *headers], "http_version": "1.1", "scheme": "http",
                 "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1), "root_path": "", "asgi": {"version": "3.0"}}
        await app.asgi(scope, receive, send)

    asyncio.run(run())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/reset_prefix_cache", "/v1/not/there"]


@pytest.mark.parametrize("path", POSTS)
def test_every_post_needs_a_json_content_type(path: str) -> None:
    """Forms, plain text and nothing at all, which a browser sends across origins without asking, are refused everywhere."""
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b""):
        assert ask(ServerOptions(), path, (b"content-type", kind))[0] == 415
    status, body = ask(ServerOptions(), path)
    assert status == 415 and b"Content-Type: application/json" in body
    assert ask(ServerOptions(), path, JSON)[0] in (400, 404, 503)


def test_a_post_without_a_body_needs_no_type() -> None:
    """As curl -X POST and vLLM's own tests send it. A browser that does so for another site's page says so."""
    for path, *headers in (("/v1/batches/batch_a/cancel",), ("/v1/messages/batches/b/cancel",), ("/v1/responses/r/cancel",),
                           ("/stop_profile",), ("/reset_prefix_cache", (b"content-length", b"0"))):
        assert ask(ServerOptions(), path, *headers)[0] != 415, path
        assert ask(ServerOptions(), path, *headers, (b"sec-fetch-site", b"cross-site"))[0] == 415, path
        assert ask(ServerOptions(), path, *headers, (b"origin", b"https://evil.example"))[0] == 403, path
    assert ask(ServerOptions(), "/reset_prefix_cache", (b"content-length", b"2"))[0] == 415


def test_origins_are_checked_where_there_are_no_keys() -> None:
    open_to_one = ServerOptions(allowed_origins=["https://app.example"])
    for options, origin, passes in ((ServerOptions(), b"https://evil.example", False), (ServerOptions(), b"null", False),
                                    (ServerOptions(), b"http://127.0.0.1:9000", False),
                                    (ServerOptions(), b"http://127.0.0.1:8000", True),
                                    (open_to_one, b"https://app.example", True),
                                    (open_to_one, b"https://app.example.evil", False),
                                    (ServerOptions(allowed_origins=["*"]), b"https://evil.example", True)):
        for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/reset_prefix_cache", "POST")):
            status, body = ask(options, path, JSON, (b"origin", origin), method=method)
            assert (status != 403) == passes, (origin, path, body)
            assert passes or b"--allowed-origins" in body
    # A key keeps pages out as it is: they do not have it.
    key = ServerOptions(api_key=["k"])
    assert ask(key, "/v1/models", (b"origin", b"https://evil.example"), (b"authorization", b"Bearer k"), method="GET")[0] == 200
    # A name that was made to lead here is of the same origin, and still a stranger's.
    rebound = ((b"origin", b"http://evil.example:8000"), (b"host", b"evil.example:8000"))
    assert ask(ServerOptions(), "/v1/models", *rebound, method="GET")[0] == 403
    assert ask(ServerOptions(), "/health", (b"origin", b"https://evil.example"), method="GET")[0] == 503


def test_a_priority_before_others_needs_leave() -> None:
    def priority(wanted: int | None, admin: bool, **options: Any) -> int:
        return Application(AsyncLLM(EngineOptions()), ServerOptions(**options)).state.priority(wanted, admin)

    assert priority(None, False) == 0 and priority(7, False) == 7
    assert priority(-5, True) == -5 and priority(-5, False, allow_priority="all") == -5
    for key in ([], ["a"]):
        with pytest.raises(RequestError, match="--allow-priority") as refused:
            priority(-(2**31), False, api_key=key)
        assert refused.value.status == 403


def test_events_are_told_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default endpoint is the loopback's, and bound although it is no wildcard."""
    assert EventsConfig().endpoint == events.ENDPOINT == "tcp://127.0.0.1:5557"
    monkeypatch.setattr(events, "ENDPOINT", "tcp://127.0.0.1:0")
    publisher = Publisher(EventsConfig(endpoint=events.ENDPOINT))
    try:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:") and not publisher.endpoint.endswith(":0")
    finally:
        publisher.close()
