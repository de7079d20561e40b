"""Negation and disjointness of schemas, for oneOf, not and if. Both results are exact or not given.

The schemas were rewritten by `schema.py`, or will be; `resolve` follows references."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from penstock.grammar.keywords import ANNOTATIONS, TYPES

Schema = dict[str, Any] | bool
Resolve = Callable[[str], Any]
"""Returns the schema that a reference within the document names. Raises KeyError if there is none."""

_DEEPEST, _WIDEST = 8, 64
"""The most levels, and values of an enum, whose negation is written out."""


def negate(schema: Any, resolve: Resolve, depth: int = 0) -> Schema | None:
    """Returns a schema that is valid exactly where `schema` is not; None if the keywords cannot express it."""
    if isinstance(schema, bool):
        return not schema
    if depth > _DEEPEST or not isinstance(schema, dict):
        return None
    parts: list[Schema] = []
    for key, value in schema.items():
        if key in ANNOTATIONS or (key == "additionalProperties" and value in (True, {})):
            continue
        if key not in _OPPOSITES:
            return None
        opposite = _OPPOSITES[key](value, resolve, depth + 1)
        if opposite is None:
            return None
        parts.append(opposite)
    return any_of(parts)


def any_of(parts: list[Schema]) -> Schema:
    """Returns a schema that is valid where one of `parts` is."""
    parts = [part for part in parts if part is not False]
    if True in parts or {} in parts:
        return True
    return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}


def _not_type(value: Any, _resolve: Resolve, _depth: int) -> Schema | None:
    named = {value} if isinstance(value, str) else set(value)
    if "integer" in named and "number" not in named:
        return None
    others = [kind for kind in TYPES if kind not in named]
    return {"type": others} if others else False


def _not_enum(values: Any, _resolve: Resolve, _depth: int) -> Schema | None:
    """Returns a schema of all values except these scalars, by type."""
    if not isinstance(values, list) or len(values) > _WIDEST or any(isinstance(value, dict | list) for value in values):
        return None
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    parts: list[Schema] = [{"type": ["object", "array"]}]
    if None not in values:
        parts.append({"type": "null"})
    if truths := [truth for truth in (True, False) if not any(value is truth for value in values)]:
        parts.append({"enum": truths})
    parts.append({"type": "string", "pattern": f"^(?:{_other_strings(strings)})$"} if strings else {"type": "string"})
    if numbers:
        parts += [{"type": "number", "exclusiveMaximum": numbers[0]}, {"type": "number", "exclusiveMinimum": numbers[-1]}]
        parts += [{"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)]
    else:
        parts.append({"type": "number"})
    return {"anyOf": parts}


def _other_strings(strings: list[str]) -> str:
    """Returns a regular expression of all strings except these."""
    firsts = sorted({string[0] for string in strings if string})
    parts = [] if "" in strings else [""]
    parts.append("[\\s\\S]+" if not firsts else f"[^{''.join(map(_escape, firsts))}][\\s\\S]*")
    for first in firsts:
        parts.append(f"{_escape(first)}(?:{_other_strings([string[1:] for string in strings if string[:1] == first])})")
    return "|".join(parts)


def _escape(character: str) -> str:
    if character.isalnum() and character.isascii():
        return character
    return f"\\u{{{ord(character):x}}}" if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"


def _bound(kind: str, opposite: str, step: int = 0) -> Callable[[Any, Resolve, int], Schema | None]:
    """Returns what negates a bound of a type as one on the other side. `step`: their distance if both are inclusive counts."""
    def build(value: Any, _resolve: Resolve, _depth: int) -> Schema | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return False if step == -1 and value <= 0 else {"type": kind, opposite: value + step}
    return build


def _not_required(names: Any, _resolve: Resolve, _depth: int) -> Schema | None:
    return any_of([{"type": "object", "properties": {name: False}} for name in names]) if isinstance(names, list) else None


def _not_properties(properties: Any, resolve: Resolve, depth: int) -> Schema | None:
    parts: list[Schema] = []
    for name, schema in properties.items():
        opposite = negate(schema, resolve, depth)
        if opposite is None:
            return None
        if opposite is not False:
            parts.append({"type": "object", "properties": {name: opposite}, "required": [name]})
    return any_of(parts)


def _not_any(schemas: Any, resolve: Resolve, depth: int) -> Schema | None:
    parts = [negate(schema, resolve, depth) for schema in schemas]
    return None if None in parts else {"allOf": parts}


def _not_all(schemas: Any, resolve: Resolve, depth: int) -> Schema | None:
    parts = [negate(schema, resolve, depth) for schema in schemas]
    return None if None in parts else any_of([part for part in parts if part is not None])


def _not_reference(reference: Any, resolve: Resolve, depth: int) -> Schema | None:
    try:
        return negate(resolve(reference), resolve, depth)
    except KeyError:
        return None


_OPPOSITES: dict[str, Callable[[Any, Resolve, int], Schema | None]] = {
    "type": _not_type, "enum": _not_enum, "const": lambda value, resolve, depth: _not_enum([value], resolve, depth),
    "required": _not_required, "properties": _not_properties, "anyOf": _not_any, "allOf": _not_all, "$ref": _not_reference,
    "not": lambda schema, _resolve, _depth: schema,
    "minimum": _bound("number", "exclusiveMaximum"), "maximum": _bound("number", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("number", "maximum"), "exclusiveMaximum": _bound("number", "minimum"),
    "minLength": _bound("string", "maxLength", -1), "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1), "maxItems": _bound("array", "minItems", 1)}


def disjoint(a: Any, b: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Returns whether certainly no value is valid under both schemas."""
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict) or depth > _DEEPEST:
        return False
    a, b = _followed(a, resolve), _followed(b, resolve)
    if not _kinds(a) & _kinds(b):
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not {json.dumps(value, sort_keys=True) for value in values} & {
            json.dumps(value, sort_keys=True) for value in others}
    if _kinds(a) & _kinds(b) == {"object"} and (_apart(a, b, resolve, depth) or _apart(b, a, resolve, depth)):
        return True
    return _split(a, b, resolve, depth) or _split(b, a, resolve, depth)


def _followed(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    for _ in range(_DEEPEST):
        if "$ref" not in schema or schema.keys() - ANNOTATIONS != {"$ref"}:
            break
        try:
            target = resolve(schema["$ref"])
        except KeyError:
            break
        if not isinstance(target, dict):
            break
        schema = target
    return schema


def _kinds(schema: dict[str, Any]) -> set[str]:
    if (values := _values(schema)) is not None:
        return {_kind(value) for value in values}
    named = schema.get("type", TYPES)
    named = [named] if isinstance(named, str) else named
    return {"number" if kind == "integer" else kind for kind in named}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"))
    return next((kind for types, kind in kinds if isinstance(value, types)), "object")


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Returns all valid values if the schema lists them. Numbers become floats, because 1 and 1.0 are equal."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list):
        return None
    return [float(value) if isinstance(value, int) and not isinstance(value, bool) else value for value in listed]


def _apart(a: dict[str, Any], b: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    """Returns whether two object schemas are disjoint: `a` requires a property that `b` forbids or gives a disjoint schema."""
    mine, theirs = a.get("properties", {}), b.get("properties", {})
    for name in a.get("required", ()):
        if name in theirs:
            if disjoint(mine.get(name, {}), theirs[name], resolve, depth + 1):
                return True
        elif b.get("additionalProperties") is False and "patternProperties" not in b:
            return True
    return False


def _split(a: dict[str, Any], b: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    """Returns whether a required part of `a`, or each of its alternatives, is disjoint from `b`."""
    return any(disjoint(part, b, resolve, depth + 1) for part in a.get("allOf", ())) or any(
        a.get(key) and all(disjoint(part, b, resolve, depth + 1) for part in a[key]) for key in ("anyOf", "oneOf"))
