"""Hostile bodies made from the served OpenAPI schema: every list, object and string at its limit, one above, and 1,000 times.

A new field of the protocol is covered the day it appears. Fields without a limit of their own get a nominal one.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NOMINAL = {"string": 10_000, "array": 1_000, "object": 1_000}
"""Sizes that stand for the limit where a schema names none."""

LONG_FIELDS = {"prompt": 64, "content": 64, "messages": 4}
"""Fields that may be as long as the context: what is at the limit for others is far above it for them."""

BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once"}], "max_completion_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Once"}]], "max_completion_tokens": 1},
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [3]},
    "/v1/messages": {"model": "stories", "max_tokens": 1, "messages": [{"role": "user", "content": "Once"}]},
    "/v1/messages/count_tokens": {"model": "stories", "messages": [{"role": "user", "content": "Once"}]},
    "/v1/responses": {"input": "Once", "max_output_tokens": 1, "store": False},
    "/v1/embeddings": {"input": "Once"}, "/pooling": {"input": "Once"}, "/classify": {"input": "Once"},
    "/score": {"text_1": "Once", "text_2": "Twice"}, "/rerank": {"query": "Once", "documents": ["Twice"]},
    "/api/chat": {"model": "stories", "messages": [{"role": "user", "content": "Once"}], "options": {"num_predict": 1}},
    "/api/generate": {"model": "stories", "prompt": "Once", "options": {"num_predict": 1}},
}
"""A good body of each route, in which one field is grown."""

ALSO = {"/v1/chat/completions": ("/invocations",), "/v1/completions": ("/invocations",)}
"""Routes that take another's bodies, of which the document does not tell."""

DEPTH = 3
"""How deep nested fields are grown."""


class Case(NamedTuple):
    """One hostile body."""

    path: str
    name: str
    """The field that is grown, and to what size."""
    body: bytes
    kind: str = "application/json"
    """Its content type."""


def cases(document: dict[str, Any], factor: int = 1000, most_bytes: int = 40 << 20) -> Iterator[Case]:
    """The bodies for every route of an OpenAPI document, of at most about `most_bytes` each."""
    schemas, seen = document["components"]["schemas"], set()
    for path, methods in document["paths"].items():
        post = methods.get("post", {})
        content, handler = post.get("requestBody", {}).get("content", {}), post.get("summary")
        if "application/json" not in content or (handler, str(content)) in seen:
            # No body, a form (`forms.py`), or a second path of the same route.
            continue
        seen.add((handler, str(content)))
        schema = _resolve(content["application/json"]["schema"], schemas)
        base = BASE.get(path) or _example(schema, schemas)
        for name, grow in _fields(schema, schemas, (), DEPTH):
            limit = grow.limit
            for size in dict.fromkeys((limit, limit + 1, limit * factor)):
                size = max(1, min(size, most_bytes // grow.bytes_each))
                body = json.dumps(_placed(base, name, grow.make(size))).encode()
                for place in (path, *ALSO.get(path, ())):
                    yield Case(place, f"{'.'.join(map(str, name))} x {size}", body)


class _Growth(NamedTuple):
    limit: int
    bytes_each: int
    make: Callable[[int], Any]


def _fields(schema: dict[str, Any], schemas: dict[str, Any], where: tuple[str | int, ...],
            depth: int) -> Iterator[tuple[tuple[str | int, ...], _Growth]]:
    """(path, growth) of everything in an object that can be made longer."""
    for name, declared in schema.get("properties", {}).items():
        place = (*where, name)
        for kind in _kinds(declared, schemas):
            yield from _growths(kind, schemas, place, str(name), depth)


def _growths(kind: dict[str, Any], schemas: dict[str, Any], place: tuple[str | int, ...], name: str,
             depth: int) -> Iterator[tuple[tuple[str | int, ...], _Growth]]:
    what = kind.get("type")
    if what == "string" and "enum" not in kind and "const" not in kind and "pattern" not in kind:
        limit = kind.get("maxLength", NOMINAL["string"] * LONG_FIELDS.get(name, 1))
        yield place, _Growth(limit, 1, lambda size: "a " * (size // 2) + "b" * (size % 2))
    elif what == "array":
        item = _example(kind.get("items", {}), schemas)
        limit = kind.get("maxItems", NOMINAL["array"] * LONG_FIELDS.get(name, 1))
        yield place, _Growth(limit, len(json.dumps(item)) + 2, lambda size: [item] * size)
        if depth > 1:
            for inner in _kinds(kind.get("items", {}), schemas):
                if inner.get("type") == "object":
                    yield from _fields(inner, schemas, (*place, 0), depth - 1)
                else:
                    yield from _growths(inner, schemas, (*place, 0), name, depth - 1)
    elif what == "object":
        if kind.get("properties") and depth > 1:
            yield from _fields(kind, schemas, place, depth - 1)
        elif not kind.get("properties"):
            limit = kind.get("maxProperties", NOMINAL["object"])
            value = _example(kind.get("additionalProperties") or {}, schemas)
            yield place, _Growth(limit, 16 + len(json.dumps(value)), lambda size: {str(i): value for i in range(size)})
            # As deep as it is wide.
            yield place, _Growth(64, 8, _nested)


def _nested(size: int) -> Any:
    """An object nested `size` deep, or as deep as json.dumps can write."""
    found: Any = 1
    for _ in range(min(size, 900)):
        found = {"a": found}
    return found


def _kinds(schema: dict[str, Any], schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema, resolved."""
    schema = _resolve(schema, schemas)
    if "anyOf" in schema:
        return [kind for one in schema["anyOf"] for kind in _kinds(one, schemas)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    return [schema]


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """A small value that the schema allows."""
    kind = _kinds(schema, schemas)[0]
    for name in ("const", "default"):
        if name in kind:
            return kind[name]
    if kind.get("enum"):
        return kind["enum"][0]
    what = kind.get("type")
    if what == "object":
        return {name: _example(kind["properties"][name], schemas) for name in kind.get("required", ())}
    if what == "array":
        return [_example(kind.get("items", {}), schemas)] * kind.get("minItems", 0)
    if what in ("integer", "number"):
        return max(kind.get("minimum", 1), kind.get("exclusiveMinimum", 0) + 1) if kind.get("minimum", 1) > 0 else 1
    return {"string": "ab", "boolean": True, "null": None}.get(str(what), 1)


def _placed(base: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of `base` with `value` at a place, and the containers on the way to it."""
    found = copy.deepcopy(base)
    at: Any = found
    for key, following in itertools.pairwise(place):
        empty: Any = [{}] if isinstance(following, int) else {}
        if isinstance(key, int):
            if not isinstance(at[key], list if isinstance(following, int) else dict):
                at[key] = empty
        elif not isinstance(at.get(key), list if isinstance(following, int) else dict) or not at[key]:
            at[key] = empty
        at = at[key]
    at[place[-1]] = value
    return found
