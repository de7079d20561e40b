"""Writing calls in a dialect: the text that a model would write, which parses back to the same calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.dialects.description import Dialect, Named, Python, Tags, Written


def write(dialect: Dialect, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
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
