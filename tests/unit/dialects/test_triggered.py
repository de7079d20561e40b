"""Answers whose calls are constrained once they have begun: the grammar of each dialect that can be."""

import re

import pytest
from llguidance import LLMatcher

from penstock.core.errors import RequestError
from penstock.dialects.choice import dialects
from penstock.dialects.description import Dialect, Python
from penstock.dialects.schemas import Tools
from penstock.dialects.writing import structure, triggered, write
from penstock.grammar.definition import _bytes_tokenizer, limits, node_grammar

TOOLS = Tools([{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"],
    "additionalProperties": False}}}])
HELD = sorted(name for name, dialect in dialects().items() if triggered(dialect, TOOLS, True) is not None)


def accepts(dialect: Dialect, text: str, special: tuple[str, ...], parallel: bool = True) -> bool:
    """Whether the whole text is an answer, with these markers as special tokens."""
    ids = {marker: 300 + place for place, marker in enumerate(special)}
    node = triggered(dialect, TOOLS, parallel)
    assert node is not None
    matcher = LLMatcher(_bytes_tokenizer(512), node_grammar(node, ids), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    split = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    tokens = [token for part in split for token in ([ids[part]] if part in ids else part.encode())]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_which_dialects_can_be_held() -> None:
    left = {name for name, dialect in dialects().items() if dialect.written is not None} - set(HELD)
    assert left == {"gemma3", "granite", "llama3_json", "llama4_pythonic", "openai", "pythonic", "smollm3", "xlam"}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_text_is_free_and_calls_are_held(name: str, marked: bool) -> None:
    dialect = dialects()[name]
    begins = tuple(block.begin for block in dialect.blocks)
    reasoning = dialect.reasoning
    special = (*begins, *((reasoning.start[0], reasoning.end[0]) if reasoning else ())) if marked else ()
    assert accepts(dialect, "Hello < [ {x} there.", special) and accepts(dialect, "", special)
    good = write(dialect, [("look", {"city": "Lima", "n": 3})])
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        good = good.replace("'", '"')
    assert accepts(dialect, "Let me see. " + good, special)
    assert not accepts(dialect, "Let me see. " + good.replace("look", "hook"), special)
    assert not accepts(dialect, good.replace("city", "town"), special)
    assert not accepts(dialect, good + " And now?", special)
    for begin in begins:
        assert not accepts(dialect, "Hm. " + begin + "?", special)
    if reasoning:
        assert accepts(dialect, f"{reasoning.start[0]}hm{reasoning.end[0]}So: {good}", special)
        if reasoning.call_ends:
            assert not accepts(dialect, reasoning.start[0] + good.replace("look", "hook"), special)


def test_one_call_where_no_more_are_wanted() -> None:
    two = write(dialects()["hermes"], [("look", {"city": "Lima"}), ("look", {"city": "Rome"})])
    assert accepts(dialects()["hermes"], two, ()) and not accepts(dialects()["hermes"], two, (), parallel=False)


def test_a_text_between_tags_with_a_pattern_is_refused() -> None:
    tools = Tools([{"name": "note", "parameters": {"properties": {"input": {"type": "string", "pattern": "^a$"}}}}])
    with pytest.raises(RequestError, match="pattern of the tools' parameter input cannot be enforced"):
        structure(dialects()["qwen3_coder"], tools, True)
