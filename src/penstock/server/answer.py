"""Parts of answers that every room of the server gives: JSON, times in it, and the header that names ignored fields."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

MAX_NAMED = 32
"""Ignored fields in the header at most; a client may send any number."""

_IGNORED = "penstock_ignored"


def json_response(value: Any) -> Response:
    """`value` as JSON."""
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
