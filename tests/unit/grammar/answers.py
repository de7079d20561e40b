"""Judges texts under grammars, with a vocabulary of single bytes."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar import definition


def judge(params: StructuredOutputsParams | str, *texts: str) -> list[bool]:
    """Which of the texts are whole answers under what is asked for, or under a grammar."""
    grammar = params if isinstance(params, str) else definition.define(params)
    first = LLMatcher(definition._bytes_tokenizer(), grammar, log_level=0)
    assert not first.is_error(), first.get_error()
    found = []
    for text in texts:
        matcher, data = first.deep_copy(), list(text.encode())
        found.append(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
    return found


def valid(schema: Any, *values: Any) -> list[bool]:
    """Which of the values can be written under a schema."""
    return judge(StructuredOutputsParams(json=schema), *(json.dumps(value, ensure_ascii=False) for value in values))
