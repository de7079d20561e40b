"""Decides whether a schema has a finite value. llguidance detects most schemas without values, but not endless recursion."""

from collections.abc import Callable
from typing import Any


def can_end(root: Any, resolve: Callable[[str], Any]) -> bool:
    """Returns False if `root` certainly has no finite value, because its references recurse without end.

    Computes a least fixed point: no subschema has a finite value at first, and each round adds those whose parts have one."""
    ends: dict[int, bool] = {}
    nodes: dict[int, Any] = {}

    def register(schema: Any) -> None:
        stack = [schema]
        while stack:
            part = stack.pop()
            if isinstance(part, dict) and id(part) not in nodes:
                nodes[id(part)] = part
                stack += [child for group in _groups(part, resolve) for child in group]

    def known(schema: Any) -> bool:
        return ends.get(id(schema), False) if isinstance(schema, dict) else schema is not False

    register(root)
    changed = True
    while changed:
        changed = False
        for key, schema in nodes.items():
            if not ends.get(key) and all(any(known(child) for child in group) for group in _groups(schema, resolve)):
                ends[key] = changed = True
    return known(root)


def _groups(schema: dict[str, Any], resolve: Callable[[str], Any]) -> list[list[Any]]:
    """Returns groups of subschemas. The schema has a finite value only if each group has a member with one."""
    groups = [[part] for part in schema.get("allOf", ())]
    if "anyOf" in schema:
        groups.append(list(schema["anyOf"]))
    if "$ref" in schema:
        groups.append([resolve(schema["$ref"])])
    kinds = schema.get("type")
    if kinds == "object":
        properties = schema.get("properties", {})
        groups += [[properties[name]] for name in schema.get("required", ()) if name in properties]
    if kinds == "array":
        count = schema.get("minItems", 0)
        items = schema.get("items")
        first: list[Any] = schema.get("prefixItems") or (items if isinstance(items, list) else [])
        groups += [[part] for part in first[:count]]
        rest = schema.get("additionalItems") if isinstance(items, list) else items
        if count > len(first) and rest is not None:
            groups.append([rest])
    return groups
