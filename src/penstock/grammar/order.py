"""Property orders that an object may be written in: that of `properties`, and that of `required` if it differs.

Serializers that sort keys lose the author's order in `properties`, which llguidance writes, but not in the list `required`."""

import re
from collections.abc import Iterator
from typing import Any

from penstock.grammar.keywords import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, SCHEMAS

MAX_PARTS = 500
"""Maximum number of subschemas: the second order of an object copies the object and all its parts."""
_DEFINITIONS = ("$defs", "definitions")
_DOCUMENT = (*_DEFINITIONS, "$schema", "$id")
_MOVABLE = re.compile(r"#(/(\$defs|definitions)/[^/]+)?")


class _TooManyError(Exception):
    """The schema has more than MAX_PARTS subschemas."""


def with_orders(root: dict[str, Any]) -> dict[str, Any]:
    """Returns an enforceable schema in which each object with two orders has both as alternatives. Returns `root` unchanged
    if the result would have too many parts, or if a reference points into an object: its copy would have no pointer."""
    references = (part.get("$ref") for part in _parts(root))
    if not all(_MOVABLE.fullmatch(reference) for reference in references if isinstance(reference, str)):
        return root
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    try:
        walk = _Walk()
        body = walk.ordered({key: value for key, value in root.items() if key not in _DOCUMENT})
        definitions = {key: walk.each(value) for key, value in definitions.items()}
    except _TooManyError:
        return root
    return {**{key: root[key] for key in _DOCUMENT if key in root}, **definitions, **body}


class _Walk:
    def __init__(self) -> None:
        self._left = MAX_PARTS

    def ordered(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._take(1)
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
                found[key] = self.each(value)
            elif key in (*LISTS_OF_SCHEMAS, "items") and isinstance(value, list):
                found[key] = [self.ordered(part) for part in value]
            else:
                found[key] = self.ordered(value) if key in (*SCHEMAS, "items") else value
        properties, required = found.get("properties"), found.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list):
            return found
        order = list(dict.fromkeys(name for name in (*required, *properties) if name in properties))
        if order == list(properties):
            return found
        self._take(sum(1 for _ in _parts(found)))
        return {"anyOf": [found, {**found, "properties": {name: properties[name] for name in order}}]}

    def each(self, schemas: dict[str, Any]) -> dict[str, Any]:
        return {name: self.ordered(schema) for name, schema in schemas.items()}

    def _take(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise _TooManyError


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects in a schema: its subschemas and some others."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
        if isinstance(part, dict | list):
            stack += part.values() if isinstance(part, dict) else part
