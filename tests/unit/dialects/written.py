"""Calls in a dialect's own words, as a model writes them: what the parsers read and the grammars allow."""

import json
from collections.abc import Mapping, Sequence as List
from typing import Any

from penstock.dialects.description import Dialect, Named, Python, Tags, Written
from penstock.dialects.schemas import KINDS


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
