"""/openapi.json, made from the structs that really decode the bodies, so that it cannot say anything else."""

from __future__ import annotations

from typing import Any

import msgspec

import penstock
from penstock.server.openai.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/"

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                   "code": {"type": ["string", "null"]}}}}}

_POSTS: dict[str, tuple[type[Any], str, bool]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue prompts", True),
    "/tokenize": (TokenizeRequest, "Turn a text or a conversation into tokens", False),
    "/detokenize": (DetokenizeRequest, "Turn tokens into text", False),
}

_GETS = {
    "/v1/models": "List the served names",
    "/v1/models/{model}": "Describe one served name",
    "/health": "Whether the engine is alive and makes progress",
    "/ready": "Whether a request would be taken now",
    "/ping": "The same as /health",
    "/version": "The version of Penstock",
    "/load": "How much there is to do",
    "/server_info": "What is served and how",
    "/kv_event_sources": "Where the cache's events are published",
}


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for kind, _, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    components["Error"] = _ERROR
    paths: dict[str, Any] = {path: {"post": _post(*entry)} for path, entry in _POSTS.items()}
    paths |= {path: {"get": _get(path, about)} for path, about in _GETS.items()}
    paths["/reset_prefix_cache"] = {"post": {**_get("/reset_prefix_cache", "Forget everything that is cached"),
                                             "operationId": "resetPrefixCache", "security": [{"key": []}]}}
    paths["/metrics"] = {"get": {"summary": "Figures in Prometheus' format", "operationId": "metrics",
                                 "responses": {"200": {"description": "Figures", "content": {"text/plain": {}}}}}}
    return {"openapi": "3.1.0", "info": {"title": "Penstock", "version": penstock.__version__}, "paths": paths,
            "components": {"schemas": components,
                           "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}


def _post(kind: type[Any], about: str, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {}
    return {"summary": about, "operationId": kind.__name__, "security": [{"key": []}],
            "requestBody": {"required": True,
                            "content": {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}},
            "responses": {"200": {"description": "The answer", "content": content}, **_failures()}}


def _get(path: str, about: str) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": about, "operationId": "get" + path.replace("/", "_").strip("_{}"),
                                 "responses": {"200": {"description": about,
                                                       "content": {"application/json": {"schema": {"type": "object"}}}},
                                               **_failures()}}
    if "{model}" in path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _failures() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {"4XX": {"description": "The request was refused", "content": error},
            "5XX": {"description": "The request failed, or the server takes none now", "content": error}}
