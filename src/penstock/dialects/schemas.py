"""The types of parameters that a dialect writes as plain text, from the tools' JSON schemas."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.dialects.reader import MalformedError, Reader

KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
_ALIASES = {"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean",
            "list": "array", "dict": "object"}


class Tools:
    """The tools of a request by name. If there are none, every name is accepted and no parameter has a type."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            # A tool is OpenAI's object or a bare function; a custom tool takes one text.
            inner = tool.get("function") or tool.get("custom") or tool
            self._schemas[str(inner.get("name"))] = inner.get("parameters") or {}

    def knows(self, name: str) -> bool:
        """Whether there is a tool of that name, or no tool is known."""
        return not self._schemas or name in self._schemas

    def types(self, tool: str, key: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have; empty if the schema does not restrict them."""
        known, schema = self.properties(tool)
        return types_of(known.get(key), schema)

    def properties(self, tool: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Returns (a tool's parameters by name, the whole schema)."""
        schema = self._schemas.get(tool, {})
        found = schema.get("properties")
        return found if isinstance(found, Mapping) else {}, schema

    def shaped(self, tool: str, key: str, tree: "Tree") -> Any:
        """A parameter's value, given its elements."""
        root = self._schemas.get(tool, {})
        return _shaped(tree, _inside(root, key, root), root)

    def wraps(self, tool: str, key: str) -> bool:
        """Whether a parameter that the tool does not have may hold all arguments, as models write by mistake."""
        known, _ = self.properties(tool)
        return key in ("arguments", "input") and bool(known) and key not in known

    def unwrapped(self, tool: str, said: str) -> str:
        """The JSON text of an object of the tool's parameters, which may be written as a string; "" if it is none."""
        value = json.loads(said)
        value = json.loads(read_value(value) or "null") if isinstance(value, str) else value
        fits = isinstance(value, dict) and value and value.keys() <= self.properties(tool)[0].keys()
        return json.dumps(value, ensure_ascii=False) if fits else ""

    def taking(self, arguments: Mapping[str, Any]) -> str:
        """The only tool that there is, or the only one that can take these arguments; "" if none or several can."""
        fitting = [name for name, schema in self._schemas.items() if len(self._schemas) == 1 or
                   set(schema.get("required") or ()) <= arguments.keys() <= self.properties(name)[0].keys()]
        return fitting[0] if len(fitting) == 1 else ""

    @property
    def names(self) -> list[str]:
        return list(self._schemas)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a schema in `root` allows; empty if it does not restrict them."""
    return frozenset(_types(schema, root, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 20:
        return set()
    if (kind := schema.get("type")) is not None:
        return {_ALIASES.get(each, each) for each in ([kind] if isinstance(kind, str) else kind) if isinstance(each, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(at(root, reference), root, depth + 1)
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return {KINDS.get(type(value), "string") for value in values}
    types: set[str] = set()
    for word in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(word) or ():
            types |= _types(each, root, depth + 1)
    if not types and "properties" in schema:
        return {"object"}
    return types or ({"array"} if "items" in schema else set())


Tree = str | list[tuple[str, "Tree"]]
"""A text, or elements by their names."""


def elements(text: str, mark: str) -> Tree:
    """The elements of a text whose tags have `mark` before them; the text itself if they do not nest."""
    parts = re.split(f"{re.escape(mark)}<(/?)([^<>]*)>", text)
    open_: list[tuple[str, list[tuple[str, Tree]], str]] = [("", [], parts[0])]
    for slash, name, behind in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if not slash:
            open_.append((name, [], behind))
            continue
        begun, children, said = open_.pop()
        if not open_ or begun != name:
            return text
        open_[-1][1].append((name, children or said))
    return (open_[0][1] or text) if len(open_) == 1 else text


def _shaped(tree: Tree, schema: Any, root: Mapping[str, Any]) -> Any:
    types = types_of(schema, root)
    if isinstance(tree, str):
        if not tree.strip() and types & {"array", "object"}:
            return [] if "array" in types else {}
        return json.loads(as_json(tree, types))
    if "object" not in types and all(name == "item" for name, _ in tree):
        return [_shaped(each, _inside(schema, None, root), root) for _, each in tree]
    named: dict[str, list[Tree]] = {}
    for name, each in tree:
        named.setdefault(name, []).append(each)
    # Elements of one name are a list.
    return {name: _shaped(given[0] if len(given) == 1 else [("item", each) for each in given],
                          _inside(schema, name, root), root) for name, given in named.items()}


def _inside(schema: Any, key: str | None, root: Mapping[str, Any], depth: int = 0) -> Any:
    """The schema of a property, or with None of a list's items, where a schema has one."""
    if not isinstance(schema, Mapping) or depth > 20:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _inside(at(root, reference), key, root, depth + 1)
    inner = schema.get("items") if key is None else (schema.get("properties") or {}).get(key)
    others = (_inside(each, key, root, depth + 1) for word in ("anyOf", "oneOf", "allOf") for each in schema.get(word) or ())
    return inner if inner is not None else next((one for one in others if one is not None), None)


def at(root: Mapping[str, Any], reference: Any) -> Any:
    """The place of a schema that `#/...` points to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Converts a plain-text value to JSON of the first type that fits, else to a string."""
    if types == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    lowered = bare.lower()
    if "boolean" in types and lowered in ("true", "false"):
        return lowered
    if lowered in ("null", "none") and ("null" in types or (types and "string" not in types)):
        return "null"
    if (value := read_value(bare)) is not None:
        decoded = json.loads(value)
        kind = KINDS[type(decoded)]
        if not types or kind in types or (kind == "integer" and "number" in types):
            # An unquoted text that is valid as another allowed type is not a string.
            return value
        if kind == "number" and "integer" in types and decoded == int(decoded):
            return str(int(decoded))
    return json.dumps(text, ensure_ascii=False)


def read_value(text: str) -> str | None:
    """Converts a whole text in JSON's or Python's notation to JSON; None if it is neither."""
    reader, said = Reader(), list[str]()
    reader.text, reader.ended = text, True
    try:
        for _ in reader.value(said.append):
            pass
        found = "".join(said)
        json.loads(found)
    except (MalformedError, ValueError):
        return None
    # Python's 07 would be a number, but the digits of a text are not.
    return found if not text[reader.at:].strip() and not re.match(r"[-+]?0[0-9]", text) else None
