"""The interface between the server and an API dialect (OpenAI's, Anthropic's, ...): its routes and the shape of its errors.

The rest of `server/` knows no dialect. A dialect is a package beside `openai/` with one `Dialect`, listed in `app.py`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response

from penstock.core.errors import RequestError

Handler = Callable[..., Awaitable[Response]]
"""Answers a request. It gets the decoded body, too, where a route says of what type that is."""

ErrorShape = Callable[[RequestError], Any]
"""Builds a dialect's JSON object for a refused request."""


class Route(NamedTuple):
    """One route: its method and path, its handler, and its description in /openapi.json."""

    method: str
    path: str
    """Starlette's notation: a parameter is {name} or {name:path}."""
    handler: Handler
    about: str
    body: type[Any] | tuple[type[Any], ...] | None = None
    """The msgspec struct that its body is decoded into; of several the handler reads and chooses one."""
    streams: bool = False
    """True if it can answer with server-sent events."""
    parts: tuple[type[Any], ...] = ()
    """Structs that the body's schema refers to by name alone."""
    answer: Any = dict[str, Any]
    """The type of the whole answer, for the schema."""
    event: type[Any] | None = None
    """The type of each event's data, if it streams."""
    form: bool = False
    """The body is a multipart form, which the handler reads."""


class Dialect(Protocol):
    """One API. `bodies` is its `body.BodyReader`."""

    bodies: Any

    def routes(self) -> Sequence[Route]: ...
    def error_body(self, error: RequestError) -> Any: ...


class ErrorShapes:
    """Selects the dialect that shapes the errors of a path: the one with a route there, else the first."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.default: ErrorShape = dialects[0].error_body
        self._exact: dict[str, ErrorShape] = {}
        self._beginnings: list[tuple[str, ErrorShape]] = []
        for dialect in dialects:
            for route in dialect.routes():
                fixed, parameter, _ = route.path.partition("{")
                if parameter:
                    self._beginnings.append((fixed, dialect.error_body))
                else:
                    self._exact[fixed] = dialect.error_body

    def of(self, path: str) -> ErrorShape:
        """The shape for a request's path, which need not exist."""
        return self._exact.get(path) or next(
            (shape for beginning, shape in self._beginnings if path.startswith(beginning)), self.default)
