"""Requests to the application from within its process: the scope and the body, as an ASGI server would give them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any


def inside(method: str, path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]], gone: asyncio.Event,
           **more: Any) -> tuple[dict[str, Any], Callable[[], Awaitable[dict[str, Any]]]]:
    """(scope, receive) of a request with a whole body, disconnected once `gone` is set. `more` is added to the scope."""
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
             "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
             "headers": [*headers, (b"content-length", str(len(body)).encode())], "client": ("127.0.0.1", 0),
             "server": ("localhost", 80), "state": {}, "began": time.time(), **more}
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    return scope, receive
