"""Writes calls in a dialect: the text that a model would write, which parses back to the same calls, and the structure of an
answer that must be calls, which `grammar/` enforces."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any

from msgspec.structs import replace

from penstock.core.structure import Either, Json, Literal, Node, Quoted, Regex, Repeat, Sequence, Triggered, Until
from penstock.dialects.description import HARMONY, Block, Dialect, Named, Python, Tags, Written
from penstock.dialects.description import Json as JsonForm
from penstock.dialects.schemas import KINDS, Tools
from penstock.dialects.values import Values, filled


def write(dialect: Dialect, calls: List[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns the text of these calls, each (name, arguments). AssertionError for a dialect that writes none."""
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
    return how.joiner.join(how.parameter.format(
        key=key, value=_value(how, form, value), string=json.dumps(isinstance(value, str)), kind=_kind(value))
        for key, value in arguments.items())


def _kind(value: Any) -> str:
    """JSON's name of a value's type."""
    return "number" if KINDS[type(value)] == "integer" else KINDS[type(value)]


def _value(how: Written, form: object, value: Any) -> str:
    if isinstance(form, Tags):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # The reader strips one line break at each end, and the text around the value has none.
        bare = form.trim and "\n{value}\n" not in how.parameter
        return f"\n{text}\n" if bare and text.strip("\n") != text else text
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
        # Calls begin like text, and only at the start of the answer. The first literal extends to the point where no text can
        # follow.
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
    first = replace(how, call=how.call.removeprefix(dialect.lead))
    calls = _one_or_more(dialect, first, how, tools, parallel)
    said = Triggered(((dialect.lead, calls),), 0, 1, last=True)
    return Either((calls, *(Sequence((Literal(each.removeprefix(dialect.lead)), said)) for each in dialect.hidden)))


def _either(dialect: Dialect, how: Written, tools: Tools) -> Node:
    """Returns the structure of a call of one of the tools."""
    return Either(tuple(_call(dialect, how, tools, name) for name in tools.names))


def _call(dialect: Dialect, how: Written, tools: Tools, name: str) -> Node:
    properties, schema = tools.properties(name)
    fields: dict[str, Node] = {"name": Literal(name), "index": Regex("[0-9]{1,3}")}
    if not how.parameter:
        grammars = {key: value["lark"] for key, value in properties.items() if isinstance(value, Mapping) and "lark" in value}
        if grammars:
            # The text of a custom tool is its only parameter.
            [(key, grammar)] = grammars.items()
            fields["arguments"] = Sequence((Literal(f'{{"{key}": '), Quoted(grammar), Literal("}")))
            return filled(how.call, fields)
        # Parameters that the schema does not list are allowed only if it says so.
        fields["arguments"] = Json({"properties": {}, "additionalProperties": False, **schema, "type": "object"})
        return filled(how.call, fields)
    fields["arguments"] = Values(how, dialect.blocks[0].form, schema).all()
    return filled(how.call, fields)
