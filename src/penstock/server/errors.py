"""Every failure as an HTTP answer, and a JSON decoding error in terms of the request.

The answer is always JSON, from every route and also where there is no route; its shape is the dialect's
(`dialect.ErrorShapes`), which the gate has put into the request's scope."""

import math
import re
from collections.abc import Callable, Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.core.errors import EngineDeadError, RequestError
from penstock.server.dialect import ErrorShape

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
