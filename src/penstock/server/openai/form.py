"""OpenAI's form of bodies and errors, which several dialects share.

An error is `{"error": {"message", "type", "param", "code"}}`, always JSON."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.core.errors import RequestError
from penstock.server.body import BodyReader
from penstock.server.errors import ExplainField
from penstock.server.openai.harmless import IGNORED
from penstock.server.openai.protocol import WHY_REFUSED
from penstock.server.state import State

Body = TypeVar("Body")

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
         429: "rate_limit_error", 503: "service_unavailable_error"}
"""OpenAI's error types by HTTP status; of others below 500 invalid_request_error, from there server_error."""


def error_body(error: RequestError) -> dict[str, Any]:
    """The error object of a refused request."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


class OpenAIForm:
    """The part of a dialect whose bodies and errors have OpenAI's form."""

    def __init__(self, state: State, explain_field: ExplainField | None = None) -> None:
        self.state = state
        self.bodies = BodyReader(state, explain_field or explain, IGNORED)

    error_body = staticmethod(error_body)


def refusing(why: Mapping[str, str], otherwise: ExplainField = lambda _where, text: text) -> ExplainField:
    """Refuses recognised fields by name; `why` has the second half of each one's sentence. Others are left to `otherwise`."""
    def explain(where: str, text: str) -> RequestError | str:
        field = next((name for name in re.findall(r"\w+", where) if name in why), None)
        if field is None:
            return otherwise(where, text)
        path = where[:where.index(field) + len(field)]
        return RequestError(f"{path} cannot be honoured: {why[field]}", param=path, code="unsupported_parameter")

    return explain


def in_terms(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """An error in terms of a route whose fields have other names, which are changed in its text where they stand alone."""
    name = names.get(error.param or "")
    if name is None:
        return error
    # "prompt" is a word that fits conversations, too.
    message = error.message if error.param == "prompt" else re.sub(rf"(?<![-\w]){error.param}\b", name, error.message)
    return RequestError(message, param=name, code=error.code, status=error.status)


def _parts(where: str, text: str) -> str:
    """A decoder's complaint, with what helps where it is about a part of a message."""
    if where.endswith(".type") and "content" in where:
        return (f"{text[:1].lower()}{text[1:]}; this server takes text only, in parts of type text, input_text, output_text, "
                "refusal or thinking")
    return text


explain = refusing(WHY_REFUSED, _parts)
"""A decoder's complaint about a field of OpenAI's API."""


def converted(fields: Mapping[str, Any], kind: type[Body], param: str | None = None) -> Body:
    """A body in another dialect's terms, without fields that are None. RequestError, naming `param`, for other values."""
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the request has no meaning here: {error}", param=param) from None
