"""Answers that every room of the server gives: JSON, whole."""

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
