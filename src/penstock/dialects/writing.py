"""Writing calls in a dialect: the text that a model would write, which parses back to the same calls; and the structure of an
answer that must be calls, by which `grammar/` constrains it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from string import Formatter
from typing import Any

from penstock.core.errors import RequestError
from penstock.core.structure import Either, Json, Literal, Node, Regex, Repeat, Sequence, Triggered, Until
from penstock.dialects.description import Dialect, Form, Named, Python, Tags, Written
from penstock.dialects.schemas import Tools


def write(dialect: Dialect, calls: List[tuple[str, Mapping[str, Any]]]) -> str:
    """The text of these calls, (name, arguments) each. AssertionError for a dialect that has none."""
    how = dialect.written
    assert how is not None, f"{dialect.name} writes no calls"
    said = [how.call.format(name=name, arguments=_arguments(dialect, how, arguments), index=index, id=f"call_{index}")
            for index, (name, arguments) in enumerate(calls)]
    if dialect.harmony:
        return "<|call|><|start|>assistant".join(said)
    return how.head + how.separator.join(said) + how.tail


def _arguments(dialect: Dialect, how: Written, arguments: Mapping[str, Any]) -> str:
    if not how.parameter:
        return json.dumps(arguments, ensure_ascii=False)
    form = dialect.blocks[0].form
    return how.joiner.join(how.parameter.format(key=key, value=_value(form, value), string=json.dumps(isinstance(value, str)))
                           for key, value in arguments.items())


def _value(form: object, value: Any) -> str:
    if isinstance(form, Tags):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if isinstance(form, Python):
        return repr(value)
    return _quoted(value, form.quote) if isinstance(form, Named) else json.dumps(value, ensure_ascii=False)


def _quoted(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_quoted(key, quote)}:{_quoted(each, quote)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(each, quote) for each in value) + "]"
    return json.dumps(value)


def structure(dialect: Dialect, tools: Tools, parallel: bool) -> Node:
    """Returns the structure of a whole answer that must call one of the tools. AssertionError for a dialect without calls."""
    how = dialect.written
    assert how is not None, f"{dialect.name} writes no calls"
    return _calls(dialect, how, tools, parallel)


def triggered(dialect: Dialect, tools: Tools, parallel: bool) -> Node | None:
    """Returns the structure of an answer that may call the tools: text, then calls; a call once begun must be completed.
    None for a dialect whose calls cannot be told from text where they begin."""
    how = dialect.written
    begins = tuple(dict.fromkeys(block.begin for block in dialect.blocks))
    begin = next((each for each in begins if how is not None and (how.head + how.call).startswith(each)), None)
    if how is None or begin is None or any(block.bare for block in dialect.blocks):
        return None
    rest = replace(how, head=how.head.removeprefix(begin)) if how.head else replace(how, call=how.call.removeprefix(begin))
    body = _calls(dialect, rest, tools, False)
    if parallel and dialect.parallel:
        again = Repeat(Sequence((Literal(how.separator), _either(dialect, how, tools))))
        body = Sequence((Literal(rest.head), _either(dialect, rest, tools), again, Literal(how.tail)))
    reasoning = dialect.reasoning
    special = (*dialect.hidden, *((*reasoning.start, *reasoning.end) if reasoning else ()))
    return Triggered(((begin, body),), 0, 1, tuple(each for each in begins if each != begin), special, last=True)


def _calls(dialect: Dialect, how: Written, tools: Tools, parallel: bool) -> Node:
    calls = _either(dialect, how, tools)
    if parallel and dialect.parallel:
        calls = Repeat(calls, how.separator, 1)
    return Sequence((Literal(how.head), calls, Literal(how.tail)))


def _either(dialect: Dialect, how: Written, tools: Tools) -> Node:
    """A call of one of the tools."""
    return Either(tuple(_call(dialect, how, tools, name) for name in tools.names))


def _call(dialect: Dialect, how: Written, tools: Tools, name: str) -> Node:
    properties, required, schema = tools.properties(name)
    fields: dict[str, Node] = {"name": Literal(name), "index": Regex("[0-9]{1,3}")}
    if not how.parameter:
        # Parameters that the schema does not list are possible only where it says so.
        fields["arguments"] = Json({"properties": {}, "additionalProperties": False, **schema, "type": "object"})
        return _filled(how.call, fields)
    form = dialect.blocks[0].form
    parts = {key: _parameter(how, form, key, value, tools.types(name, key), schema) for key, value in properties.items()}
    fields["arguments"] = _joined([parts[key] for key in parts if key in required],
                                  [parts[key] for key in parts if key not in required], how.joiner)
    return _filled(how.call, fields)


def _joined(needed: list[Node], free: list[Node], joiner: str) -> Node:
    """The needed parts, then any of the free ones, in order, with a joiner between any two."""
    if not needed and joiner:
        # Each of the free parts may be the first.
        starts = [_joined([part], free[place + 1:], joiner) for place, part in enumerate(free)]
        return Either((Literal(""), *starts))
    found: list[Node] = []
    for place, part in enumerate(needed):
        found += [Literal(joiner), part] if place and joiner else [part]
    found += [Either((Literal(""), Sequence((Literal(joiner), part)) if joiner else part)) for part in free]
    return Sequence(tuple(found)) if found else Literal("")


def _parameter(how: Written, form: Form, key: str, schema: Any, types: frozenset[str], root: Mapping[str, Any]) -> Node:
    whole = schema if not isinstance(schema, Mapping) or "$defs" not in root else {**schema, "$defs": root["$defs"]}
    text = types == {"string"}
    value: Node = Json(whole)
    stop = form.quote if isinstance(form, Named) else how.parameter.split("{value}")[1]
    if text and not isinstance(form, Python):
        unheld = sorted({"pattern", "format", "minLength", "maxLength"} & set(schema))
        if unheld:
            raise RequestError(f"{unheld[0]} of the tools' parameter {key} cannot be enforced: this model's dialect writes "
                               "texts between tags. Leave it out, or use enum", param="tools", code="unsupported_schema")
        given = schema.get("enum", [schema["const"]] if "const" in schema else None)
        value = Either(tuple(Literal(str(each)) for each in given)) if given else Until(stop)
        if isinstance(form, Named):
            value = Sequence((Literal(stop), value, Literal(stop)))
    return _filled(how.parameter, {"key": Literal(key), "value": value, "string": Literal(json.dumps(text))})


def _filled(template: str, fields: Mapping[str, Node]) -> Node:
    """A template of `Written` with nodes in its places."""
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
