"""/openapi.json, generated from the routes and the structs that decode the bodies, so that it always matches the code."""

import json
import re
from collections.abc import Container, Sequence
from typing import Any

import msgspec

import penstock
from penstock.core.errors import RequestError
from penstock.server.dialect import EVENTS, ErrorShape, ErrorShapes, Route

_REF = "#/components/schemas/"


def openapi(routes: Sequence[Route], open_routes: Container[str], shapes: ErrorShapes, root_path: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document. `open_routes` need no key, `shapes` are errors' by path, `root_path` is a proxy's prefix."""
    kinds = [kind for route in routes for kind in (*_bodies(route), *route.parts, route.answer, route.event)
             if kind is not None]
    schemas, components = _short_names(*msgspec.json.schema_components(kinds, ref_template=_REF + "{name}"))
    schema_of = {str(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    components["Error"] = _error(shapes.default)
    paths: dict[str, Any] = {}
    secured = False
    for route in routes:
        error = _error(shapes.of(route.path))
        error = {"$ref": _REF + "Error"} if error == components["Error"] else error
        described = paths.setdefault(_path(route), {})[route.method.lower()] = _describe(route, schema_of, error)
        shown = {"application/json": {"schema": error}}
        described["responses"] |= {"4XX": {"description": "The request was refused", "content": shown},
                                   "5XX": {"description": "The request failed, or the server takes none now", "content": shown}}
        if route.path not in open_routes:
            described["security"], secured = [{"key": []}], True
    schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if secured else {}
    servers = {"servers": [{"url": "/" + root_path.strip("/")}]} if root_path.strip("/") else {}
    return {"openapi": "3.1.0", "info": {"title": "Penstock", "version": penstock.__version__}, **servers, "paths": paths,
            "components": {"schemas": components, **schemes}}


def _short_names(schemas: Sequence[dict[str, Any]], components: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The same with short names in place of msgspec's: of equal ones all but the first get a package's."""
    taken = {name for name in components if "." not in name}
    renamed: dict[str, str] = {}
    for name in components:
        if "." in name:
            *_, package, _, short = name.split(".")
            renamed[name] = short if short not in taken else package.capitalize() + short
            taken.add(renamed[name])
    text = json.dumps([list(schemas), {renamed.get(name, name): schema for name, schema in components.items()}])
    for name, short in renamed.items():
        text = text.replace(f'"{_REF}{name}"', f'"{_REF}{short}"')
    found_schemas, found_components = json.loads(text, object_hook=_with_items)
    for name, schema in found_components.items():
        schema["title"] = name
    return found_schemas, found_components


def _with_items(schema: dict[str, Any]) -> dict[str, Any]:
    """A list says of what it is, even if that is anything: generators of clients want to know."""
    return {**schema, "items": {}} if schema.get("type") == "array" and "items" not in schema else schema


def _path(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _bodies(route: Route) -> tuple[type[Any], ...]:
    return route.body if isinstance(route.body, tuple) else () if route.body is None else (route.body,)


def _describe(route: Route, schema_of: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    whole = "text/plain" if route.answer is str else "application/json"
    content = {whole: {"schema": schema_of[str(route.answer)]},
               **{kind: {"schema": {"description": "Not one JSON value"}} for kind in route.also}}
    if route.event is not None:
        content[EVENTS] = {"schema": {"anyOf": [schema_of[str(route.event)], error]}}
    described: dict[str, Any] = {
        "summary": route.about,
        "operationId": route.method.lower() + _path(route).replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {"200": {"description": "The answer" if route.body else route.about, "content": content}}}
    if bodies := [schema_of[str(kind)] for kind in _bodies(route)]:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        kind = "multipart/form-data" if route.form else "application/json"
        described["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    if "{" in route.path:
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                                   for name in re.findall(r"{(\w+)", route.path)]
    return described


def _error(shape: ErrorShape) -> dict[str, Any]:
    """The schema of a dialect's errors, as one of them looks."""
    def schema(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {"type": ["string", "null"]}
        return {"type": "object", "required": list(value), "properties": {name: schema(one) for name, one in value.items()}}

    return schema(shape(RequestError("an example")))

