"""/openapi.json, made from the routes and the structs that really decode the bodies, so that it cannot say anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

import penstock
from penstock.server.dialect import Route

_REF = "#/components/schemas/"

_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                   "code": {"type": ["string", "null"]}}}}}

TEXT_ROUTES = frozenset({"/metrics"})
"""Routes whose answer is plain text."""


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [kind for route in routes for kind in (route.body, *route.parts) if kind is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    components["Error"] = _ERROR
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(_path(route), {})[route.method.lower()] = _describe(route)
    return {"openapi": "3.1.0", "info": {"title": "Penstock", "version": penstock.__version__}, "paths": paths,
            "components": {"schemas": components,
                           "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}}


def _path(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _describe(route: Route) -> dict[str, Any]:
    kind = "text/plain" if route.path in TEXT_ROUTES else "application/json"
    content: dict[str, Any] = {kind: {} if kind == "text/plain" else {"schema": {"type": "object"}}}
    if route.streams:
        content["text/event-stream"] = {}
    described: dict[str, Any] = {
        "summary": route.about, "operationId": _name(route),
        "responses": {"200": {"description": "The answer" if route.body else route.about, "content": content}, **_failures()}}
    if route.method == "POST":
        described["security"] = [{"key": []}]
    if route.body is not None:
        described["requestBody"] = {"required": True, "content": {
            "application/json": {"schema": {"$ref": _REF + route.body.__name__}}}}
    if "{" in route.path:
        name = route.path.partition("{")[2].partition("}")[0].partition(":")[0]
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _name(route: Route) -> str:
    """The operation's id: the name of the body's type, or method and path."""
    if route.body is not None:
        return route.body.__name__
    return route.method.lower() + _path(route).replace("/", "_").replace("{", "").replace("}", "")


def _failures() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    return {"4XX": {"description": "The request was refused", "content": error},
            "5XX": {"description": "The request failed, or the server takes none now", "content": error}}
