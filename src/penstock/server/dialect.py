"""The interface between the server and an API dialect (OpenAI's, Anthropic's, ...): its routes, the shape of its errors,
and parts of answers that all give: JSON, times in it, and the header that names ignored fields. Every failure becomes an HTTP
answer here, and a JSON decoding error is put in terms of the request. The answer is always JSON, from every route and also
where there is no route; its shape is `ErrorShapes`', which the gate has put into the request's scope.

The rest of `server/` knows no dialect. A dialect is a package beside `openai/` with one `Dialect`, listed in `app.py`."""

import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.core.errors import EngineDeadError, RequestError

Handler = Callable[..., Awaitable[Response]]
"""Answers a request. It gets the decoded body, too, where a route says of what type that is."""

ErrorShape = Callable[[RequestError], Any]
"""Builds a dialect's JSON object for a refused request."""


EVENTS, BYTES = "text/event-stream", "application/octet-stream"


class Route(NamedTuple):
    """One route: its method and path, its handler, and its description in /openapi.json."""

    method: str
    path: str
    """Starlette's notation: a parameter is {name} or {name:path}."""
    handler: Handler
    about: str
    body: type[Any] | tuple[type[Any], ...] | None = None
    """The msgspec struct that its body is decoded into; of several the handler reads and chooses one."""
    also: tuple[str, ...] = ()
    """Media types of answers that are not JSON, besides those of `event`."""
    parts: tuple[type[Any], ...] = ()
    """Structs that the body's schema refers to by name alone."""
    answer: Any = dict[str, Any]
    """The type of the whole answer, for the schema; str: it is plain text."""
    event: type[Any] | None = None
    """The type of each server-sent event's data, if it streams."""
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


MAX_NAMED = 32
"""Ignored fields in the header at most; a client may send any number."""

_IGNORED = "penstock_ignored"


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def utc(seconds: float | None = None) -> str:
    """A time, or the present one, as Anthropic and Ollama write it."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).isoformat().replace("+00:00", "Z")


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Has the response to `request` name these fields, which were accepted and changed nothing."""
    request.scope.setdefault(_IGNORED, []).extend(names)


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header x-penstock-ignored for the fields that were noted, or none."""
    names = list(dict.fromkeys(scope.get(_IGNORED, ())))[:MAX_NAMED]
    return [(b"x-penstock-ignored", ", ".join(quote(name[:64], safe="[]") for name in names).encode())] if names else []


RETRY_SECONDS = 1
"""The waiting time that a refused client is told (Retry-After)."""


class UnavailableError(RequestError):
    """The server cannot take a request now: loading, draining or dead. Status 503."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code, status=503)


def error_response(error: RequestError, shape: ErrorShape, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer to a refused request."""
    extra = dict(headers or {})
    if error.status in (429, 503):
        extra.setdefault("Retry-After", str(RETRY_SECONDS if error.retry is None else max(1, math.ceil(error.retry))))
    return Response(msgspec.json.encode(shape(error)), error.status, extra, "application/json")


def as_request_error(error: BaseException) -> RequestError:
    """Any exception as one that can be shown. An unexpected one is status 500, and says its type but not its trace."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return UnavailableError(f"the engine has stopped: {error}", "engine_dead")
    return RequestError(f"internal error ({type(error).__name__}); the server's log has the details", code="internal_error",
                        status=500)


async def on_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for a route's exceptions, and for the router's own refusals (404, 405)."""
    if isinstance(error, ClientDisconnect):
        # Nobody reads the answer; nginx's status for a client that has disconnected.
        return Response(status_code=499)
    if not isinstance(error, HTTPException):
        return error_response(as_request_error(error), request.scope["error_shape"])
    why = {404: "there is no such route; see /openapi.json",
           405: f"this route does not take this method; possible: {(error.headers or {}).get('Allow', '')}"}
    shown = RequestError(f"{request.method} {request.url.path}: {why.get(error.status_code, error.detail)}",
                         code="not_found" if error.status_code == 404 else None, status=error.status_code)
    return error_response(shown, request.scope["error_shape"], error.headers)


# -- what a decoder says

_PATH = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_OF_FIELDS = (
    (re.compile(r"Object contains unknown field `(.*)`"), "Unrecognized request argument supplied: {}", "unknown_parameter"),
    (re.compile(r"Object missing required field `(.*)`"), "Missing required parameter: '{}'", "missing_required_parameter"))
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")

WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
         "object": "an object", "null": "null"}


ExplainField = Callable[[str, str], RequestError | str]
"""Turns (field, decoder's complaint) into a refusal of the dialect's own, or into a better text."""


def explain(error: Exception, explain_field: ExplainField) -> RequestError:
    """A msgspec decoding error in terms of the request: names the field at fault, what was given, what is possible."""
    if isinstance(error, UnicodeDecodeError):
        return RequestError(f"the body is not valid UTF-8: {error.reason} at byte {error.start}", code="invalid_utf8")
    if not isinstance(error, msgspec.ValidationError):
        if isinstance(error, RecursionError):
            return RequestError("the body is nested too deeply", code="invalid_json")
        return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    text = str(error)
    path = _PATH.search(text)
    where = path[1].removeprefix("$").removeprefix(".") if path else ""
    text = _PATH.sub("", text)
    for pattern, said, code in _OF_FIELDS:
        if found := pattern.fullmatch(text):
            name = f"{where}.{found[1]}" if where else found[1]
            return RequestError(said.format(name), param=name, code=code)
    better = explain_field(where, text)
    if isinstance(better, RequestError):
        return better
    return RequestError(f"{where or 'the body'}: {_expectation(better)}", param=where or None, code="invalid_type")


def _expectation(text: str) -> str:
    found = _EXPECTED.match(text)
    if not found:
        return text[:1].lower() + text[1:].replace("`", "")
    possible = [WORDS.get(word, word) for word in found[1].split(" | ") if word != "null"] or ["null"]
    return f"expected {' or '.join(possible)}, got {WORDS.get(found[2], found[2])}"
