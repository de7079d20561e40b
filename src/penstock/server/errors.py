"""How a refusal looks on the wire: OpenAI's error object for everything, and what a JSON decoding error says to a user.

`{"error": {"message", "type", "param", "code"}}`, always JSON, from every route and also where there is no route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import EngineDeadError, RequestError
from penstock.server.openai.protocol import WHY_REFUSED

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
         429: "rate_limit_error", 503: "service_unavailable_error"}
"""OpenAI's error types by HTTP status."""

CLIENT_GONE = 499
"""The status of an answer that nobody will read, as nginx has it."""

RETRY_SECONDS = 1
"""What a refused client is told to wait for."""


class UnavailableError(RequestError):
    """The server cannot take a request now: loading, draining or dead. Status 503."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code=code, status=503)


def error_body(error: RequestError) -> dict[str, Any]:
    """The error object of a refused request."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The whole answer to a refused request."""
    extra = dict(headers or {})
    if error.status in (429, 503):
        extra.setdefault("Retry-After", str(RETRY_SECONDS))
    return Response(msgspec.json.encode(error_body(error)), error.status, extra, "application/json")


def as_request_error(error: BaseException) -> RequestError:
    """Any exception as one that can be shown. What nobody foresaw is status 500, and says its type but not its trace."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return UnavailableError(f"the engine has stopped: {error}", "engine_dead")
    if isinstance(error, HTTPException):
        code = "not_found" if error.status_code == 404 else None
        return RequestError(_http_message(error), code=code, status=error.status_code)
    return RequestError(f"internal error ({type(error).__name__}); the server's log has the details", code="internal_error",
                        status=500)


def _http_message(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is no such route; see /openapi.json"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"this route does not take this method; possible: {allowed}"
    return str(error.detail)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's handler for what its router refuses."""
    assert isinstance(error, HTTPException)
    shown = as_request_error(error)
    if error.status_code in (404, 405):
        shown = RequestError(f"{request.method} {request.url.path}: {shown.message}", code=shown.code, status=shown.status)
    return error_response(shown, error.headers)


async def on_request_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for what a route raises: refusals, the engine's death, and what nobody foresaw."""
    return error_response(as_request_error(error))


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Starlette's handler for a client that left before its request was complete. Nobody reads the answer."""
    return Response(status_code=CLIENT_GONE)


# -- what a decoder says

_PATH = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")

WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
         "object": "an object", "null": "null"}


def explain(error: Exception) -> RequestError:
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
    if found := _UNKNOWN.fullmatch(text):
        name = f"{where}.{found[1]}" if where else found[1]
        return RequestError(f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    if found := _MISSING.fullmatch(text):
        name = f"{where}.{found[1]}" if where else found[1]
        return RequestError(f"Missing required parameter: '{name}'", param=name, code="missing_required_parameter")
    field = re.split(r"[.\[]", where)[0]
    if field in WHY_REFUSED:
        return unsupported(field)
    if where.endswith(".type") and "content" in where:
        text = f"{text[:1].lower()}{text[1:]}; this server takes text only, in parts of type text or refusal"
    return RequestError(f"{where or 'the body'}: {_expectation(text)}", param=where or None, code="invalid_type")


def unsupported(field: str) -> RequestError:
    """The refusal of a recognised field, or of its value, by name."""
    return RequestError(f"{field} cannot be honoured: {WHY_REFUSED[field]}", param=field, code="unsupported_parameter")


def _expectation(text: str) -> str:
    found = _EXPECTED.match(text)
    if not found:
        return text[:1].lower() + text[1:].replace("`", "")
    possible = [WORDS.get(word, word) for word in found[1].split(" | ") if word != "null"] or ["null"]
    return f"expected {' or '.join(possible)}, got {WORDS.get(found[2], found[2])}"
