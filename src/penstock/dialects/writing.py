"""The structure of an answer that must be calls of a dialect, which `grammar/` enforces. Parameters between markers are text,
elements where tags nest, or JSON."""

import itertools
import json
from collections.abc import Mapping, Sequence as List
from string import Formatter
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.structure import Either, Json, Literal, Node, Quoted, Regex, Repeat, Sequence, Text, Triggered, Until
from penstock.dialects.description import HARMONY, Block, Dialect, Form, Json as JsonForm, Named, Tags, Written
from penstock.dialects.schemas import Tools, at, types_of

_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef",
                        "extends", "disallow", "contentSchema", "contentMediaType", "contentEncoding"})
"""Keywords that restrict strings, lists and objects beyond `_STRINGS`, `_LISTS` and `_OBJECTS`."""
_OBJECTS = frozenset({"minProperties", "maxProperties", "patternProperties", "dependentRequired", "dependentSchemas",
                      "dependencies", "propertyNames", "enum", "const"})
_LISTS = frozenset({"prefixItems", "additionalItems", "uniqueItems", "contains", "enum", "const"})
_STRINGS = frozenset({"type", "enum", "const", "pattern", "format", "minLength", "maxLength"})
_NO_TEXT = r"""(?s:\s*["'].*)|\s*(?i:null|none)\s*"""
"""Texts that are not read as themselves where null is possible too."""
_MOST = 64
"""The alternatives of one string."""


class Values:
    def __init__(self, how: Written, form: Form, root: Mapping[str, Any]) -> None:
        """`root` is the schema of the tool's arguments. RequestError for a keyword in it that cannot be enforced."""
        self._how, self._form = how, form
        self._mark = form.nested if isinstance(form, Tags) else ""
        self._root = root
        self._definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        for word in root.keys() & (_COMBINING | _OBJECTS):
            raise _unenforceable(f"#/{word}", "this model's dialect writes parameters one by one")

    def all(self) -> Node:
        """Returns the structure of all parameters: those that are required, then any of the others."""
        return self._listed(self._root, "#", self._how.joiner, frozenset())

    def _listed(self, schema: Mapping[str, Any], place: str, joiner: str, seen: frozenset[str]) -> Node:
        required = schema.get("required") or ()
        properties = schema.get("properties") or {}
        parts = {key: self._parameter(key, properties.get(key, True), f"{place}/properties/{key}", seen)
                 for key in (*properties, *required)}
        return _joined([parts[key] for key in parts if key in required],
                       [parts[key] for key in parts if key not in required], joiner)

    def _parameter(self, key: str, schema: Any, place: str, seen: frozenset[str] = frozenset()) -> Node:
        """Returns the structure of a parameter or of an element in one."""
        how, form = self._how, self._form
        behind = how.parameter.split("{value}")[1].replace("{key}", key)
        stop = self._mark or (form.quote if isinstance(form, Named) else behind)
        string = types_of(schema, self._root) == {"string"}
        found = [filled(how.parameter, {"key": Literal(key), "value": value, "string": Literal(json.dumps(string)),
                                        "kind": Literal("string") if string else Regex("number|boolean|null|object|array")})
                 for value in self._values(schema, place, stop, seen)]
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _values(self, schema: Any, place: str, stop: str, seen: frozenset[str]) -> List[Node]:
        form, types = self._form, types_of(schema, self._root)
        if not isinstance(schema, Mapping):
            return [Json(schema)]
        if "lark" in schema:
            if isinstance(form, Tags | Named):
                raise RequestError("the Lark grammar of a custom tool cannot be enforced: this model's dialect writes texts "
                                   'between tags. Send a regex (syntax "regex"), or leave format out', param="tools",
                                   code="unsupported_parameter")
            return [Quoted(schema["lark"])]
        if isinstance(form, Named) and types == {"string"}:
            return [Sequence((Literal(stop), each, Literal(stop))) for each in self._texts(schema, place, stop)]
        if isinstance(form, Tags) and (types == {"string"} or (types == {"string", "null"} and not form.typed)):
            return self._texts(schema, place, stop)
        return (self._elements(schema, place, types, seen) if self._mark else None) or [Json({**schema, **self._definitions})]

    def _elements(self, schema: Mapping[str, Any], place: str, types: frozenset[str],
                  seen: frozenset[str]) -> List[Node] | None:
        """The alternatives of a value of nested elements; None if its schema leaves names open or says more than these say."""
        said = schema.keys() & (_COMBINING | _OBJECTS | _LISTS)
        if said == {"$ref"} and schema["$ref"] not in seen:
            target = at(self._root, schema["$ref"])
            return None if not isinstance(target, Mapping) else self._elements(target, place, types, seen | {schema["$ref"]})
        if types in ({"object", "null"}, {"array", "null"}):
            [kind] = types - {"null"}
            inner = [each for each in schema.get("anyOf") or () if types_of(each, self._root) == {kind}]
            if said and (said != {"anyOf"} or len(inner) != 1 or len(schema["anyOf"]) != 2):
                return None
            found = self._elements(inner[0] if said else {**schema, "type": kind}, place, frozenset({kind}), seen)
            return None if found is None else [*found, Literal("null")]
        if said:
            return None
        names, closed = "".join(schema.get("properties") or ()), isinstance(schema.get("additionalProperties", False), bool)
        if types == {"object"} and names and closed and "<" not in names and ">" not in names:
            return [self._listed(schema, place, "", seen)]
        if types == {"array"} and isinstance(schema.get("items"), Mapping):
            most = schema.get("maxItems")
            return [Repeat(self._parameter("item", schema["items"], f"{place}/items", seen), "", int(schema.get("minItems", 0)),
                           None if most is None else int(most))]
        return None

    def _texts(self, schema: Mapping[str, Any], place: str, stop: str) -> List[Node]:
        """The alternatives of a string as it is, and null where it is possible."""
        flat = self._flat(schema, place, 0)
        nullable = "null" in types_of(schema, self._root)
        unlike, found = (_NO_TEXT,) if nullable else (), list[Node]()
        for one in flat:
            types, given = types_of(one, {}), one.get("enum", [one["const"]] if "const" in one else None)
            if "null" in types and (given is None or None in given):
                found.append(Text({"enum": ["null"]}, stop))
            if "string" not in types:
                continue
            held = {key: one[key] for key in ("pattern", "format", "minLength", "maxLength") if key in one}
            texts = None if given is None else [each for each in given if isinstance(each, str)]
            if texts is not None and not held and not nullable and len(flat) == 1:
                found.append(Either(tuple(map(Literal, texts))))
            elif texts is not None:
                # A literal would end before a longer alternative has been tried.
                found.append(Text({**held, "enum": texts}, stop, unlike))
            else:
                found.append(Text(held, stop, unlike) if held or nullable else Until(stop))
        return found

    def _flat(self, schema: Any, place: str, depth: int) -> list[dict[str, Any]]:
        """The alternatives of a string's schema, in the keywords of strings alone."""
        if not isinstance(schema, Mapping) or depth > 20:
            raise _unenforceable(place, "its references lead back to themselves" if depth > 20 else "no object")
        groups = [[{key: each for key, each in schema.items() if key in _STRINGS}]]
        for word in schema.keys() & _COMBINING:
            inside, inner = f"{place}/{word}", schema[word]
            if word == "$ref":
                inner = [at(self._root, inner)]
            elif word not in ("allOf", "anyOf", "oneOf") or not isinstance(inner, list):
                inner = []
            parts = [self._flat(each, inside, depth + 1) for each in inner]
            flat = [each for part in parts for each in part]
            if word == "oneOf" and len(parts) > 1:
                _check_apart(flat, inside)
            if not flat:
                raise _unenforceable(inside, "this model's dialect writes strings as plain text between tags")
            groups += parts if word == "allOf" else [flat]
        found = [_merged(parts, place) for parts in itertools.islice(itertools.product(*groups), _MOST + 1)]
        if len(found) > _MOST:
            raise _unenforceable(place, f"it has more than {_MOST} alternatives")
        return found


def filled(template: str, fields: Mapping[str, Node]) -> Node:
    """Fills the placeholders of a template of `Written` with nodes."""
    parts: list[Node] = []
    said = ""
    for text, field, _, _ in Formatter().parse(template):
        said += text
        if field is None:
            continue
        node = fields[field]
        if isinstance(node, Literal):
            said += node.text
            continue
        parts += [Literal(said), node] if said else [node]
        said = ""
    return Sequence((*parts, Literal(said)) if said else tuple(parts))


def _joined(needed: list[Node], free: list[Node], joiner: str) -> Node:
    """Returns the required parts, then any of the optional ones, in order, with a joiner between adjacent parts."""
    if not needed and joiner:
        # Each optional part may be the first.
        return Either((Literal(""), *[_joined([part], free[place + 1:], joiner) for place, part in enumerate(free)]))
    found: list[Node] = []
    for place, part in enumerate(needed):
        found += [Literal(joiner), part] if place and joiner else [part]
    found += [Either((Literal(""), Sequence((Literal(joiner), part)) if joiner else part)) for part in free]
    return Sequence(tuple(found)) if found else Literal("")


def _check_apart(alternatives: List[Mapping[str, Any]], place: str) -> None:
    """RequestError unless no two alternatives of a oneOf have a value in common: types and enumerations show it."""
    listed = [each for one in alternatives
              for each in one.get("enum", [one["const"]] if "const" in one else [f"any {one.get('type')}"])]
    if len(listed) != len(set(map(json.dumps, listed))):
        raise _unenforceable(place, "a string could match several of its schemas; use anyOf")


def _merged(parts: tuple[dict[str, Any], ...], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(part.items() for part in parts):
        if found.setdefault(key, value) != value:
            raise _unenforceable(f"{place}/{key}", "two schemas of one string have it; merge them")
    return found


def _unenforceable(place: str, why: str) -> RequestError:
    return RequestError(f"the schema cannot be enforced at {place}: {why}", param="tools", code="unsupported_schema")


def structure(dialect: Dialect, tools: Tools, parallel: bool) -> Node:
    """Returns the structure of a whole answer that must call one of the tools. AssertionError for a dialect without calls."""
    how = dialect.written
    assert how is not None, f"{dialect.name} writes no calls"
    return _one_or_more(dialect, replace(how, call=how.call.removeprefix(dialect.lead)), how, tools, parallel)


def triggered(dialect: Dialect, tools: Tools, parallel: bool) -> Node | None:
    """Returns the structure of text that may end with calls, each complete. None for a dialect that writes no calls."""
    how = dialect.written
    if how is None:
        return None
    if dialect.harmony:
        return _messages(dialect, how, tools)
    begins = tuple(dict.fromkeys(block.begin for block in dialect.blocks if not block.bare))
    if dialect.lead in begins:
        return _addressed(dialect, how, tools, parallel)
    unlike = tuple(_bare_call(block) for block in dialect.blocks if block.bare)
    # The header of the message with a call is text like any other: the call itself has the name too.
    call = how.call.removeprefix(dialect.lead + "{name}") if dialect.lead else how.call
    begin = next((each for each in begins if (how.head + call).startswith(each)), None)
    reasoning = dialect.reasoning
    special = (*dialect.hidden, dialect.header, *((*reasoning.start, *reasoning.end) if reasoning else ()))
    never = tuple(each for each in begins if each != begin)
    if begin is None:
        # Calls begin like text, and only at the answer's start. The first literal extends to where no text can follow.
        first = replace(how, head="", call=how.head.replace("{", "{{") + how.call)
        calls = _one_or_more(dialect, first, how, tools, parallel)
        return Triggered((), 0, 1, never, special, last=True, start=calls, unlike=unlike)
    first = replace(how, head=how.head.removeprefix(begin)) if how.head else replace(how, call=call.removeprefix(begin))
    calls = _one_or_more(dialect, first, how, tools, parallel)
    return Triggered(((begin, calls),), 0, 1, never, special, last=True, unlike=unlike)


def _one_or_more(dialect: Dialect, first: Written, how: Written, tools: Tools, parallel: bool) -> Node:
    """Returns the structure of calls, of which `first` is the way to write the first one."""
    calls = _either(dialect, first, tools)
    if parallel and dialect.parallel:
        calls = Repeat(calls, how.separator, 1) if first.call == how.call else Sequence(
            (calls, Repeat(Sequence((Literal(how.separator), _either(dialect, how, tools))))))
    return Sequence((Literal(first.head), calls, Literal(how.tail)))


_KEYS = "name|tool_name|function|arguments|parameters|type|id"
_SPACES = "[ \\t\\r\\n]*"


def _bare_call(block: Block) -> str:
    """Returns a regex of the start of a call in a block whose marker may also be text: what matches it counts as a call."""
    opening = rf'\{{{_SPACES}"(?:{_KEYS})"' if isinstance(block.form, JsonForm) else r"[A-Za-z_][A-Za-z0-9_.\-]*\("
    marker = "".join(f"\\x{{{ord(char):x}}}" for char in block.begin) if not block.keep else ""
    begins = rf"{marker}{_SPACES}(?:\[{_SPACES})?{opening}"
    return f"^{_SPACES}{begins}" if block.first else begins


def _messages(dialect: Dialect, how: Written, tools: Tools) -> Node:
    """Returns the structure of harmony's answers: messages to the user or to the model itself, the last of which may call a
    tool. No text is outside a message, so a call can begin only with its header."""
    start, channel, message, end = HARMONY[0], HARMONY[1], HARMONY[2], HARMONY[4]
    said = [Sequence((Literal(f"{channel}{name}{message}"), Until(end), Literal(end), Literal(start + "assistant")))
            for name in ("analysis", "commentary", "final")]
    last = Sequence((Literal(f"{channel}final{message}"), Until(end)))
    return Sequence((Repeat(Either(tuple(said))), Either((last, _either(dialect, how, tools)))))


def _addressed(dialect: Dialect, how: Written, tools: Tools, parallel: bool) -> Node:
    """Returns the structure of messages that name their recipients (user or tool), the first of which the prompt began."""
    calls = _one_or_more(dialect, replace(how, call=how.call.removeprefix(dialect.lead)), how, tools, parallel)
    said = Triggered(((dialect.lead, calls),), 0, 1, last=True)
    return Either((calls, *(Sequence((Literal(each.removeprefix(dialect.lead)), said)) for each in dialect.hidden)))


def _either(dialect: Dialect, how: Written, tools: Tools) -> Node:
    return Either(tuple(_call(dialect, how, tools, name) for name in tools.names))


def _call(dialect: Dialect, how: Written, tools: Tools, name: str) -> Node:
    properties, schema = tools.properties(name)
    fields: dict[str, Node] = {"name": Literal(name), "index": Regex("[0-9]{1,3}")}
    grammars = {key: value["lark"] for key, value in properties.items() if isinstance(value, Mapping) and "lark" in value}
    if how.parameter:
        fields["arguments"] = Values(how, dialect.blocks[0].form, schema).all()
    elif grammars:
        # The text of a custom tool is its only parameter.
        [(key, grammar)] = grammars.items()
        fields["arguments"] = Sequence((Literal(f'{{"{key}": '), Quoted(grammar), Literal("}")))
    else:
        # Parameters that the schema does not list are allowed only if it says so.
        fields["arguments"] = Json({"properties": {}, "additionalProperties": False, **schema, "type": "object"})
    return filled(how.call, fields)
