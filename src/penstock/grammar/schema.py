"""Makes JSON schemas enforceable: a keyword is enforced, rewritten into others, or refused with its JSON pointer.

`enforceable` returns a schema with the same valid values, all of whose keywords llguidance enforces. Nothing is approximated: a
keyword that cannot be kept exactly raises `UnenforceableError`. `compiling.py` compiles."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from penstock.core.errors import RequestError
from penstock.grammar.formats import ENCODINGS, KNOWN, schema_of
from penstock.grammar.keywords import ANNOTATIONS, COUNTS, IN_PLACE, LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, REFUSED, SCHEMAS
from penstock.grammar.negation import any_of, disjoint, negate
from penstock.grammar.patterns import translate

MAX_CHARACTERS = 1_000_000
"""Maximum length of a schema as compact JSON."""
MAX_DEPTH = 64
"""Maximum nesting depth of a schema's objects and arrays."""
MAX_BRANCHES = 64
"""Maximum branches of a oneOf, whose pairs are compared."""

_WHITESPACE = r"[ \t]{1,4}|[ \t]{0,4}\r?\n[ \t]{0,40}"
"""A few blanks, or a line break and an indentation. Without a limit a model may write white space until max_tokens."""
OPTIONS = {"json_allowed_escapes": '"\\bfnrt', "whitespace_pattern": _WHITESPACE}
"""llguidance's options. Numeric escapes are excluded: a name spelled with them would pass for another. None is needed."""

_UNWRITABLE = re.compile(r"[^\n\r\t\b\f -\x7e\x80-\U0010ffff]")
_LLGUIDANCE = "x-guidance"
"""llguidance reads options from this key of a schema. The specification treats other unknown keywords as annotations."""


class UnenforceableError(RequestError):
    """A schema or a part of it cannot be enforced. `pointer` is the JSON pointer of the keyword at fault."""

    def __init__(self, pointer: str, why: str) -> None:
        super().__init__(f"the schema cannot be enforced at {pointer or '#'}: {why}", code="unsupported_schema")
        self.pointer = pointer
        self.why = why


def enforceable(schema: Any) -> Any:
    """Returns a copy that llguidance enforces completely. Raises UnenforceableError with the pointer and the reason."""
    if isinstance(schema, bool):
        if not schema:
            raise UnenforceableError("#", "no value is valid under it")
        return {}
    if not isinstance(schema, dict):
        raise UnenforceableError("#", f"a schema must be an object or a boolean, got {type(schema).__name__}")
    _check_size(schema)
    walk = _Walk(copy.deepcopy(schema))
    walk.visit(walk.root, "#")
    if not can_end(walk.root, walk.resolve):
        raise UnenforceableError("#", "every value that is valid under it is infinitely long, because a reference that "
                                 "leads back to itself is required; make it optional, or allow null")
    return walk.root


def token(name: str) -> str:
    """Returns a name as a reference token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve_in(root: Any, reference: str) -> Any:
    """Resolves a reference within the document: "#", "#/a/b" or "#anchor". Raises KeyError if the target does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise KeyError(reference)
    fragment = reference[1:]
    if fragment and not fragment.startswith("/"):
        for schema, _ in children(root, "#", deep=True):
            if isinstance(schema, dict) and (schema.get("$anchor") == fragment or schema.get("$id") == reference):
                return schema
        raise KeyError(reference)
    found = root
    for part in fragment.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise KeyError(reference)
    return found


def children(schema: Any, pointer: str, deep: bool = False) -> Iterator[tuple[Any, str]]:
    """Yields the subschemas of a schema with their pointers. `deep`: also itself, its definitions and all nested ones."""
    if deep:
        yield schema, pointer
    if not isinstance(schema, dict):
        return
    found: list[tuple[Any, str]] = []
    for key in (*MAPS_OF_SCHEMAS, "dependencies", *(("$defs", "definitions") if deep else ())):
        if isinstance(schema.get(key), dict):
            found += [(value, f"{pointer}/{key}/{token(name)}") for name, value in schema[key].items()]
    for key in (*LISTS_OF_SCHEMAS, "items"):
        if isinstance(schema.get(key), list):
            found += [(value, f"{pointer}/{key}/{at}") for at, value in enumerate(schema[key])]
    found += [(schema[key], f"{pointer}/{key}") for key in (*SCHEMAS, "items")
              if key in schema and not isinstance(schema[key], list)]
    for value, place in found:
        if deep:
            yield from children(value, place, deep)
        else:
            yield value, place


def _check_size(schema: Any) -> None:
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise UnenforceableError("#", f"it is nested more than {MAX_DEPTH} levels deep; name parts of it in $defs")
        if isinstance(value, dict | list):
            stack += [(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
    size = len(json.dumps(schema, separators=(",", ":"), ensure_ascii=False))
    if size > MAX_CHARACTERS:
        raise UnenforceableError("#", f"it has {size} characters; at most {MAX_CHARACTERS} are possible")


class _Walk:
    """Rewrites the schemas of a document in place, each once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._seen: set[int] = set()
        self._inner_ids = any(isinstance(part, dict) and part is not root and isinstance(part.get("$id"), str)
                              and not part["$id"].startswith("#") for part, _ in children(root, "#", deep=True))

    def resolve(self, reference: str) -> Any:
        return resolve_in(self.root, reference)

    def visit(self, schema: Any, pointer: str) -> None:
        """Makes the schema at `pointer` and all its subschemas enforceable."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise UnenforceableError(pointer, f"a schema must be an object or a boolean, got {type(schema).__name__}")
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        for key in list(schema):
            if key in _REWRITES:
                # An earlier rewrite may have removed the keyword.
                if key in schema:
                    _REWRITES[key](self, schema, f"{pointer}/{token(key)}")
            elif key in REFUSED:
                raise UnenforceableError(f"{pointer}/{token(key)}", REFUSED[key])
            elif key in COUNTS and isinstance(schema[key], float) and schema[key].is_integer():
                schema[key] = int(schema[key])
            elif key in ("const", "enum"):
                _check_writable(schema[key], f"{pointer}/{key}")
            elif key == _LLGUIDANCE:
                del schema[key]
        for part, place in list(children(schema, pointer)):
            self.visit(part, place)
        if "$ref" in schema:
            self._follow(schema, pointer)

    def _follow(self, schema: dict[str, Any], pointer: str) -> None:
        reference = schema["$ref"]
        if "$id" in schema or self._inner_ids:
            raise UnenforceableError(f"{pointer}/$ref", "references are not followed in a document with several $id; remove "
                                     "the inner ones")
        try:
            target = self.resolve(reference)
        except KeyError:
            raise UnenforceableError(f"{pointer}/$ref", f"{reference!r} names nothing in this schema; other documents are not "
                                "fetched") from None
        self.visit(target, reference)

    # -- rewriting. Each takes a schema that has the keyword, and the keyword's pointer.

    def unique_items(self, schema: dict[str, Any], pointer: str) -> None:
        if schema.pop("uniqueItems") is True and not schema.get("maxItems", 2) <= 1:
            raise UnenforceableError(pointer, "that all items differ cannot be enforced; leave it out, or allow one item")

    def format(self, schema: dict[str, Any], pointer: str) -> None:
        name = schema.pop("format")
        meaning = schema_of(name)
        if meaning is None:
            raise UnenforceableError(pointer, f"the format {name!r} is not known; known are {', '.join(KNOWN)}. Use pattern")
        self._also(schema, meaning)

    def content_encoding(self, schema: dict[str, Any], pointer: str) -> None:
        name = schema.pop("contentEncoding")
        if name not in ENCODINGS:
            raise UnenforceableError(pointer, f"{name!r} is not known; known are {', '.join(ENCODINGS)}. Use pattern instead")
        self._also(schema, ENCODINGS[name])

    def pattern(self, schema: dict[str, Any], _pointer: str) -> None:
        if isinstance(schema["pattern"], str):
            schema["pattern"] = translate(schema["pattern"])

    def pattern_properties(self, schema: dict[str, Any], _pointer: str) -> None:
        if isinstance(schema["patternProperties"], dict):
            schema["patternProperties"] = {translate(key): value for key, value in schema["patternProperties"].items()}

    def properties(self, schema: dict[str, Any], pointer: str) -> None:
        found = schema["properties"]
        if not isinstance(found, dict):
            raise UnenforceableError(pointer, "it must be an object")
        for name in found:
            _check_writable(name, f"{pointer}/{token(name)}")

    def nullable(self, schema: dict[str, Any], _pointer: str) -> None:
        """Rewrites OpenAPI 3.0's `nullable`, which adds null to a type."""
        if schema.pop("nullable") is True and isinstance(schema.get("type"), str):
            schema["type"] = list(dict.fromkeys((schema["type"], "null")))
            if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
                schema["enum"] = [*schema["enum"], None]

    def one_of(self, schema: dict[str, Any], pointer: str) -> None:
        """Rewrites oneOf as anyOf; each branch excludes those that it may overlap, so that no value is valid under two."""
        branches = schema["oneOf"]
        if not isinstance(branches, list) or not branches:
            raise UnenforceableError(pointer, "it must be a list of schemas")
        if len(branches) > MAX_BRANCHES:
            raise UnenforceableError(pointer, f"it has {len(branches)} branches; at most {MAX_BRANCHES} can be told apart. "
                                     "Use anyOf")
        context = {key: value for key, value in schema.items() if key in ("type", "properties", "additionalProperties")}
        exact = []
        for at, branch in enumerate(branches):
            parts = [branch]
            for other_at, other in enumerate(branches):
                if other_at == at or disjoint(_within(branch, context), _within(other, context), self.resolve):
                    continue
                opposite = negate(_beyond(_within(branch, context), other), self.resolve)
                if opposite is None:
                    raise UnenforceableError(f"{pointer}/{at}", f"a value may be valid under this branch and under branch "
                                             f"{other_at}, which oneOf forbids and which cannot be enforced; use anyOf, or "
                                             "give the branches a required property with different const values")
                parts.append(copy.deepcopy(opposite))
            exact.append(branch if len(parts) == 1 else {"allOf": parts})
        del schema["oneOf"]
        self._alternatives(schema, exact)

    def negation(self, schema: dict[str, Any], pointer: str) -> None:
        opposite = negate(schema.pop("not"), self.resolve)
        if opposite is None:
            raise UnenforceableError(pointer, "the opposite of this schema cannot be enforced; say what is allowed instead")
        if opposite is not True:
            schema.setdefault("allOf", []).append(copy.deepcopy(opposite))

    def condition(self, schema: dict[str, Any], pointer: str) -> None:
        condition = schema.pop("if")
        then, otherwise = schema.pop("then", True), schema.pop("else", True)
        if then in (True, {}) and otherwise in (True, {}):
            return
        opposite = negate(condition, self.resolve)
        if opposite is None:
            raise UnenforceableError(pointer, "the opposite of this condition cannot be enforced; use anyOf with the two cases")
        self._alternatives(schema, [{"allOf": [condition, then]}, {"allOf": [copy.deepcopy(opposite), otherwise]}])

    def alone(self, schema: dict[str, Any], pointer: str) -> None:
        """Drops keywords without effect: then and else without if, minContains and maxContains without contains."""
        key = pointer.rpartition("/")[2]
        if ("if" if key in ("then", "else") else "contains") not in schema:
            del schema[key]

    def dependencies(self, schema: dict[str, Any], pointer: str) -> None:
        """Rewrites dependencies: the property is absent, or it is present and the required properties or the schema hold."""
        found = schema.pop(pointer.rpartition("/")[2])
        if not isinstance(found, dict):
            raise UnenforceableError(pointer, "it must be an object")
        for name, wanted in found.items():
            if wanted in (True, [], {}):
                continue
            holds: Any = {"required": wanted} if isinstance(wanted, list) else wanted
            there = {"type": "object", "required": [name]}
            others = [] if schema.get("type") == "object" else [{"type": ["null", "boolean", "array", "number", "string"]}]
            self._alternatives(schema, [*others, {"type": "object", "properties": {name: False}}, {"allOf": [there, holds]}])

    def property_names(self, schema: dict[str, Any], pointer: str) -> None:
        names = schema.pop("propertyNames")
        if names in (True, {}):
            return
        simple = isinstance(names, dict) and not schema.keys() & {"properties", "patternProperties"}
        says = {key: value for key, value in names.items() if key not in ANNOTATIONS} if simple else {}
        says.pop("type", None)
        others = schema.get("additionalProperties", True)
        if names is False:
            schema["maxProperties"] = 0
        elif says.keys() == {"pattern"}:
            schema |= {"patternProperties": {says["pattern"]: others}, "additionalProperties": False}
        elif says.keys() == {"enum"} and all(isinstance(name, str) for name in says["enum"]):
            schema |= {"properties": {name: copy.deepcopy(others) for name in says["enum"]}, "additionalProperties": False}
        else:
            raise UnenforceableError(pointer, "names of properties can be constrained by a pattern or an enum alone, in a "
                                     "schema without properties and patternProperties")

    def unevaluated(self, schema: dict[str, Any], pointer: str) -> None:
        """Rewrites "unevaluated" keywords as "additional" ones, which they equal if no other applicator is present."""
        key = pointer.rpartition("/")[2]
        wanted, plain = schema.pop(key), "additionalProperties" if key == "unevaluatedProperties" else "items"
        if wanted in (True, {}) or plain in schema:
            return
        if any(other in schema for other in (*IN_PLACE, "contains")):
            raise UnenforceableError(pointer, f"beside allOf, anyOf, oneOf, not, if, $ref and contains it cannot be enforced; "
                                     f"put {plain} into the subschemas instead")
        schema[plain] = wanted

    def _also(self, schema: dict[str, Any], meaning: dict[str, Any]) -> None:
        """Adds keywords to a schema; its present keywords stay in force."""
        if schema.keys() & meaning.keys():
            schema.setdefault("allOf", []).append(dict(meaning))
        else:
            schema |= meaning

    def _alternatives(self, schema: dict[str, Any], cases: list[Any]) -> None:
        """Adds the condition that one of `cases` holds."""
        found = any_of(cases)
        if isinstance(found, dict) and found.keys() == {"anyOf"} and "anyOf" not in schema:
            schema |= found
        else:
            schema.setdefault("allOf", []).append(found)


def _check_writable(value: Any, pointer: str) -> None:
    """Refuses control characters that can only be written as numeric escapes, which are excluded."""
    if isinstance(value, str):
        if (bad := next((character for character in value if _UNWRITABLE.match(character)), None)) is not None:
            raise UnenforceableError(pointer, f"the control character U+{ord(bad):04X} is not possible in a string")
    elif isinstance(value, list):
        for at, part in enumerate(value):
            _check_writable(part, f"{pointer}/{at}")
    elif isinstance(value, dict):
        for name, part in value.items():
            _check_writable(name, f"{pointer}/{token(name)}")
            _check_writable(part, f"{pointer}/{token(name)}")


def _within(branch: Any, context: dict[str, Any]) -> Any:
    """Returns a branch narrowed by its parent's keywords, to compare it with the other branches."""
    return {**context, **branch} if isinstance(branch, dict) else branch


def _beyond(branch: Any, other: Any) -> Any:
    """Returns the part of `other` that `branch` lacks; excluding it from `branch` excludes `other`."""
    if not isinstance(branch, dict) or not isinstance(other, dict):
        return other
    return {key: value for key, value in other.items() if key not in _INDEPENDENT or branch.get(key, ...) != value}


_INDEPENDENT = frozenset({"type", "enum", "const", "properties", "required", "minLength", "maxLength", "pattern", "minimum",
                          "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"})
"""Keywords whose meaning does not depend on other keywords of the schema."""

_REWRITES: dict[str, Callable[[_Walk, dict[str, Any], str], None]] = {
    "uniqueItems": _Walk.unique_items, "format": _Walk.format, "contentEncoding": _Walk.content_encoding,
    "nullable": _Walk.nullable, "oneOf": _Walk.one_of, "not": _Walk.negation, "if": _Walk.condition,
    "then": _Walk.alone, "else": _Walk.alone, "minContains": _Walk.alone, "maxContains": _Walk.alone,
    "dependencies": _Walk.dependencies, "dependentRequired": _Walk.dependencies, "dependentSchemas": _Walk.dependencies,
    "propertyNames": _Walk.property_names, "properties": _Walk.properties, "pattern": _Walk.pattern,
    "patternProperties": _Walk.pattern_properties,
    "unevaluatedProperties": _Walk.unevaluated, "unevaluatedItems": _Walk.unevaluated}


def can_end(root: Any, resolve: Callable[[str], Any]) -> bool:
    """False if `root` certainly has no finite value: its references recurse without end, which llguidance does not detect.

    Computes a least fixed point: no subschema has a finite value at first, and each round adds those whose parts have one."""
    ends: dict[int, bool] = {}
    nodes: dict[int, Any] = {}
    stack = [root]
    while stack:
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in nodes:
            nodes[id(part)] = part
            stack += [child for group in _groups(part, resolve) for child in group]

    def known(schema: Any) -> bool:
        return ends.get(id(schema), False) if isinstance(schema, dict) else schema is not False

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
