"""Random calls, written in each dialect and read back, cut anywhere."""

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from penstock.dialects.description import Dialect
from penstock.dialects.known import DIALECTS
from penstock.dialects.message import Built, Content, Message
from penstock.dialects.parser import Parser
from tests.unit.dialects.written import write

WRITERS = sorted(name for name, dialect in DIALECTS.items() if dialect.written is not None)
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r"), max_size=12) | st.sampled_from(
    ["", 'a "quoted" word', "it's", "a\\b", "x < y & z",
     "{brace} [bracket] (paren)", "line\nline", "\n", "\nline\n\n", "naïve ☕ 東京", "3", "true", "\\n"])
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-10**12, 10**12) | TEXT
                      | st.floats(allow_nan=False, allow_infinity=False, width=32),
                      lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.sampled_from(["k", "b c", "ü"]), inner, max_size=3),
                      max_leaves=6)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "f", "a1_b"]),
                           st.dictionaries(st.sampled_from(["city", "n", "x_y"]), VALUES, max_size=3)), min_size=1, max_size=3)
KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}


def read(dialect: Dialect, pieces: list[str], **how: Any) -> Message:
    parser = Parser(dialect, prompt="", new_id=lambda kind: kind, **how)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    built = Built()
    built.add(events)
    assert built.message(parser.malformed) == parser.message()
    return parser.message()


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12, deadline=None)
@given(calls=CALLS, seed=st.integers(0, 2**32))
def test_calls_come_back(name: str, calls: list[tuple[str, dict[str, Any]]], seed: int) -> None:
    dialect, rng = DIALECTS[name], Random(seed)
    calls = [(tool, arguments) for tool, arguments in calls][:3 if dialect.parallel else 1]
    # Types are a schema's business: each call gets a tool of its own, whose schema says what its values are.
    calls = [(f"{tool}_{place}", arguments) for place, (tool, arguments) in enumerate(calls)]
    tools = [{"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": {
        key: {"type": KINDS[type(value)]} for key, value in arguments.items()}}}} for tool, arguments in calls]
    text = write(dialect, calls)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, whole = read(dialect, pieces, tools=tools), read(dialect, [text], tools=tools)
    assert found == whole
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls, text
    assert not whole.content and not whole.malformed


@pytest.mark.parametrize("name", WRITERS)
def test_text_beside_calls_and_every_cut(name: str) -> None:
    dialect = DIALECTS[name]
    calls = [("f", {"city": "São \"P\"", "n": 3}), ("g", {})][:2 if dialect.parallel else 1]
    before = "" if dialect.harmony or any(block.first for block in dialect.blocks) else "Let me look."
    text = before + write(dialect, calls)
    whole = read(dialect, [text])
    assert whole.content == before and [call.name for call in whole.calls] == [name for name, _ in calls]
    for cut in range(len(text) + 1):
        assert read(dialect, [text[:cut], text[cut:]]) == whole
    assert read(dialect, list(text)) == whole


@pytest.mark.parametrize("name", WRITERS)
def test_no_beginning_of_an_answer_loses_text(name: str) -> None:
    """An answer that breaks off anywhere becomes text with a flag, or a call that was complete; never an error."""
    dialect = DIALECTS[name]
    tools = [{"function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}, "n": {"type": "array"}}}}}]
    text = "Hm. " * (not dialect.harmony) + write(dialect, [("f", {"city": "Rome", "n": [1, {"k": None}]})])
    for cut in range(0, len(text), 3):
        found = read(dialect, [text[:cut]], tools=tools)
        assert read(dialect, list(text[:cut]), tools=tools) == found
        if not found.calls and not dialect.harmony:
            # The header of a message is never content.
            header = f"{re.escape(dialect.header)}.*?(?={re.escape(dialect.blocks[0].begin)}|$)"
            said = re.sub(header, "", text[:cut]) if dialect.header else text[:cut]
            assert found.content.rstrip() == said.rstrip()
        for call in found.calls:
            assert json.loads(call.arguments) in ({"city": "Rome", "n": [1, {"k": None}]}, {})


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(WRITERS), seed=st.integers(0, 2**32))
def test_garbled_calls_are_the_same_however_cut(name: str, seed: int) -> None:
    dialect, rng = DIALECTS[name], Random(seed)
    calls = [("f", {"city": "Rome", "n": [1, 2]}), ("g", {"x": "a b"})]
    text = list("Hm. " + write(dialect, calls[:2 if dialect.parallel else 1]))
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        text[at:at + rng.randint(0, 3)] = rng.choice(["", "}", '"', "<", "\\", "[", dialect.markers()[0]])
    said = "".join(text)
    whole = read(dialect, [said])
    assert read(dialect, list(said)) == whole
    for _ in range(5):
        cut = rng.randint(0, len(said))
        assert read(dialect, [said[:cut], said[cut:]]) == whole


@pytest.mark.parametrize("name", ["hermes", "openai"])
def test_text_without_markers_is_neither_kept_nor_parsed_again(name: str) -> None:
    """An answer of any length costs the same for each piece."""
    dialect = DIALECTS[name]
    parser = Parser(dialect, prompt="")
    parser.push("<|channel|>final<|message|>" if dialect.harmony else "Well, ")
    resumed = parser._work
    parser.push("so ")
    parser._work = iter(())  # type: ignore[assignment]  # resuming this would end the answer
    for _ in range(1000):
        assert parser.push("a word ") == [Content("a word ")]
    parser._work = resumed
    assert len(parser.reader.text) < 100
    parser.push("a <to" if not dialect.harmony else "a <|e")
    parser.push("n of soup")
    parser.finish()
    assert parser.message().content.endswith("a word a <ton of soup" if not dialect.harmony else "a word a <|en of soup")
