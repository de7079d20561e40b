"""The page at `/`: files of this folder, served as they are, with a policy that lets a browser load nothing else.

They hold no data, so they need no key; the page asks its user for one and sends it with its requests."""

import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route as PlainRoute

Handler = Callable[[Request], Awaitable[Response]]

PREFIX = "/page/"
"""The paths of the page's files, but for `/` itself."""

KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".svg": "image/svg+xml"}

POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
          "form-action 'none'; frame-ancestors 'none'")
"""No inline script or style, nothing from elsewhere, no frames."""

HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Cache-Control": "no-cache"}


def is_page(path: str) -> bool:
    return path == "/" or path.startswith(PREFIX)


def page_routes() -> Iterator[BaseRoute]:
    """A route for each file, read once."""
    for file in sorted(Path(__file__).parent.iterdir()):
        if file.suffix in KINDS:
            path = "/" if file.name == "index.html" else PREFIX + file.name
            yield PlainRoute(path, _handler(file.read_bytes(), KINDS[file.suffix]), methods=["GET"])


def _handler(data: bytes, kind: str) -> Handler:
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"'}

    async def get(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=kind)

    return get
