"""OpenAI's error object, and why this server refuses some of the fields that its API has.

`{"error": {"message", "type", "param", "code"}}`, always JSON.
"""

from __future__ import annotations

import re
from typing import Any

from penstock.core.errors import RequestError
from penstock.server.openai.protocol import WHY_REFUSED

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
         429: "rate_limit_error", 503: "service_unavailable_error"}
"""OpenAI's error types by HTTP status."""


def error_body(error: RequestError) -> dict[str, Any]:
    """The error object of a refused request."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def unsupported(field: str) -> RequestError:
    """The refusal of a recognised field, or of its value, by name."""
    return RequestError(f"{field} cannot be honoured: {WHY_REFUSED[field]}", param=field, code="unsupported_parameter")


def explain_field(where: str, text: str) -> RequestError | str:
    """A decoder's complaint `text` about the field at `where`: a refusal of its own, or the text with what helps added."""
    field = re.split(r"[.\[]", where)[0]
    if field in WHY_REFUSED:
        return unsupported(field)
    if where.endswith(".type") and "content" in where:
        return (f"{text[:1].lower()}{text[1:]}; this server takes text only, in parts of type text, input_text, output_text, "
                "refusal or thinking")
    return text
