"""OpenAI's form of bodies and errors, which several dialects share.

An error is `{"error": {"message", "type", "param", "code"}}`, always JSON. The fields of `IGNORED` are outside OpenAI's schema:
known clients send them, and they cannot change the answer. They are accepted and named in the response header
x-penstock-ignored. A field that would change the answer, or add to it, does not belong there: the server refuses it by name."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.core.errors import RequestError, UnsupportedError
from penstock.server.body import BodyReader
from penstock.server.dialect import ExplainField
from penstock.server.openai.protocol import WHY_REFUSED
from penstock.server.state import State

Body = TypeVar("Body")

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
         429: "rate_limit_error", 503: "service_unavailable_error"}
"""OpenAI's error types by HTTP status; of others below 500 invalid_request_error, from there server_error."""


def error_body(error: RequestError) -> dict[str, Any]:
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
        return UnsupportedError(f"{path} cannot be honoured: {why[field]}", path)

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


IGNORED: dict[str, str] = {
    "session_id": "vLLM, SGLang, Open WebUI: attribution and routing",
    "chat_id": "Open WebUI", "id": "Open WebUI", "message_id": "Open WebUI", "parent_id": "Open WebUI",
    "background_tasks": "Open WebUI: titles and tags, made by itself", "model_item": "Open WebUI: its own model entry",
    "keep_alive": "Ollama: how long a model stays loaded; here it always does",
    "detokenize": "vLLM's engine parameter; answers of the API are text",
    "stream_interval": "vLLM, SGLang: how many tokens an event may gather", "min_characters": "vLLM reads no such field",
    "kv_transfer_params": "vLLM, beside token ids: for its connector, and there is none here; other routes refuse it",
    **dict.fromkeys(("conversation_id", "user_id", "user_email", "end_user", "username", "client_id", "customer_identifier",
                     "organization_id", "thread_id", "run_id"), "attribution"),
    **dict.fromkeys(("trace_id", "span_id", "trace", "tags"), "tracing"),
    **dict.fromkeys(("request_timeout", "timeout", "num_retries", "max_retries"), "the client's own limit"),
    **dict.fromkeys(("routing_key", "data_parallel_rank", "routed_dp_rank"), "SGLang: for its router"),
    "rid": "SGLang: the request's id", "priority_class": "for gateways",
    "no_logs": "SGLang: logging", "custom_labels": "SGLang: labels of metrics", "kv_hints": "vLLM, SGLang: hints of a router",
    "provider": "OpenRouter: which provider serves", "route": "OpenRouter: fallback", "preset": "OpenRouter",
    "caching": "LiteLLM: its own cache", "cache": "LiteLLM: its own cache", "no-log": "LiteLLM: logging",
    "guardrails": "LiteLLM: its own checks", **dict.fromkeys((
        "litellm_metadata", "litellm_call_id", "litellm_session_id", "litellm_trace_id", "litellm_logging_obj",
        "proxy_server_request", "model_info", "mock_timeout"), "LiteLLM")}
"""Field name -> which client sends it, and its purpose."""
