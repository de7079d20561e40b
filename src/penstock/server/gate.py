"""What every request passes first: a name for it, its key, and whether the server takes work at all. Pure ASGI.

Bodies are limited where they are read, in `body`.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core.errors import RequestError
from penstock.server.errors import as_request_error, error_response

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs"})
"""What a probe or a person may ask without a key. Everything else needs one, routes that do not exist among them."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")


class Gate:
    """Gives each request an id, echoed as X-Request-Id; checks the key; turns the last exceptions into answers."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], on_error: Callable[[BaseException], None]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]
        self.on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["request_id"] = request_id.decode()
        started = finished = False

        async def send_named(message: Message) -> None:
            nonlocal started, finished
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            elif not message.get("more_body"):
                finished = True
            await send(message)

        if self.keys and scope["path"] not in OPEN_ROUTES and scope["method"] != "OPTIONS" and not self._knows(headers):
            refusal = RequestError("a valid key is needed: send Authorization: Bearer KEY", code="invalid_api_key", status=401)
            await error_response(refusal, {"WWW-Authenticate": "Bearer"})(scope, receive, send_named)
            return
        try:
            await self.app(scope, receive, send_named)
        except Exception as error:
            self.on_error(error)
            if not started:
                await error_response(as_request_error(error))(scope, receive, send_named)
            elif not finished:
                # The status is gone out already; breaking the connection is the only honest end.
                raise

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All keys are compared, in constant time, so that nothing can be learnt from how long it takes.
        return kind.lower() == b"bearer" and sum(hmac.compare_digest(key.strip(), known) for known in self.keys) > 0
