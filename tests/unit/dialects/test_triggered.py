"""Answers whose calls are constrained once they have begun: the grammar of each dialect that can be."""

import json
import re

import pytest
from llguidance import LLMatcher

from penstock.core.errors import RequestError
from penstock.dialects.choice import dialects
from penstock.dialects.description import Dialect, Python
from penstock.dialects.parser import Parser
from penstock.dialects.schemas import Tools
from penstock.dialects.writing import structure, triggered, write
from penstock.grammar.definition import _bytes_tokenizer, limits, node_grammar
from tests.unit.grammar.answers import judge

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


BARE = ("gemma3", "llama3_json", "pythonic", "xlam")
"""Dialects whose calls begin like text: they are calls at the start of an answer alone."""


def test_every_dialect_can_be_held() -> None:
    """All but Functionary 3.2, where the prompt has begun a message."""
    assert set(HELD) == {name for name, dialect in dialects().items() if dialect.written is not None and not dialect.lead}


@pytest.mark.parametrize("name", BARE)
def test_calls_that_begin_like_text(name: str) -> None:
    dialect = dialects()[name]
    good = write(dialect, [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome"})])
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        good = good.replace("'", '"')
    assert accepts(dialect, good, ())
    for text in ("", "Hello < [1] {x} there.", "[See](this)", '{"a": 1}', "[1, 2]", "```json\n[1]\n```", "f(x)"):
        assert accepts(dialect, text, ()), text
    for text in (good.replace("look", "hook"), good.replace("city", "town"), good + " And now?"):
        assert not accepts(dialect, text, ()), text
    for text in (good.replace("look", "hook"), "Let me see. " + good, "\n" + good):
        parser = Parser(dialect, TOOLS.given)
        parser.push(text)
        parser.finish()
        # Text is never read as a call that was not held to its schema.
        assert not parser.message().calls or not accepts(dialect, text, ())


@pytest.mark.parametrize(("name", "text"), [
    ("llama3_json", '<|python_tag|>{"name": "look"}'), ("llama4_pythonic", '[look(city="Lima")]'),
    ("granite", '[{"name": "look", "arguments": {}}]'), ("smollm3", "<code>look(n=1)</code>"),
    ("xlam", 'So: [{"name": "look", "arguments": {}}]'), ("gemma3", "So:\n```tool_code\nlook(n=1)\n```")])
def test_other_ways_to_call_are_closed(name: str, text: str) -> None:
    dialect = dialects()[name]
    parser = Parser(dialect, TOOLS.given)
    parser.push(text)
    parser.finish()
    assert parser.message().calls or parser.malformed
    assert not accepts(dialect, text, ())


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"


@pytest.mark.parametrize(("text", "right"), [
    ("<|channel|>final<|message|>Hello", True), (THOUGHT + "<|channel|>final<|message|>Hi", True),
    (THOUGHT + CALL + '{"city": "Lima"}', True), (CALL + "{}", False),
    (CALL.replace("look", "hook") + '{"city": "Lima"}', False), ("Hello", False),
    ("<|channel|>analysis<|message|>hm", False), ("<|channel|>analysis to=functions.look<|message|>{}", False)])
def test_harmony_calls_by_its_header_alone(text: str, right: bool) -> None:
    for special in (HARMONY_TOKENS, ()):
        assert accepts(dialects()["openai"], text, special) == right, special


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", sorted({*HELD} - {*BARE, "openai"}))
def test_text_is_free_and_calls_are_held(name: str, marked: bool) -> None:
    dialect = dialects()[name]
    begins = tuple(block.begin for block in dialect.blocks if not block.bare)
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


def test_a_text_between_tags_fits_its_pattern() -> None:
    tools = Tools([{"name": "note", "parameters": {"properties": {"input": {"type": "string", "pattern": "^a[<b]*$"}}}}])
    grammar = node_grammar(structure(dialects()["qwen3_coder"], tools, True), {})
    for text, right in (("a<b", True), ("ab</parameter>", False), ("c", False)):
        call = write(dialects()["qwen3_coder"], [("note", {"input": text})])
        assert judge(grammar, call) == [right], text


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "functiongemma"])
def test_a_custom_tools_grammar(name: str) -> None:
    grammar = 'start: "say " STRING ("\\n" start)?\nSTRING: /"[^"\\n]*"/'
    dialect = dialects()[name]
    tools = Tools([{"name": "note", "parameters": {"properties": {"input": {"type": "string", "lark": grammar}},
                                                   "required": ["input"]}}])
    if name in ("qwen3_coder", "functiongemma"):
        with pytest.raises(RequestError, match="Lark grammar of a custom tool"):
            structure(dialect, tools, True)
        return
    held = node_grammar(structure(dialect, tools, True), {})
    for text, right in (('say "x\\y"', True), ('say "x"\nsay ""', True), ('say "x"\n', False), ("say x", False)):
        call = write(dialect, [("note", {"input": text})])
        if name == "pythonic":
            call = call.replace(repr(text), json.dumps(text))
        assert judge(held, call) == [right], text
        parser = Parser(dialect, tools.given)
        parser.push(call)
        parser.finish()
        assert json.loads(parser.message().calls[0].arguments) == {"input": text}


@pytest.mark.parametrize("name", sorted(name for name in HELD if dialects()[name].parallel and name != "openai"))
def test_several_calls_can_be_forced(name: str) -> None:
    dialect = dialects()[name]
    two = write(dialect, [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome"})])
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        two = two.replace("'", '"')
    assert judge(node_grammar(structure(dialect, TOOLS, True), {}), two) == [True]


@pytest.mark.parametrize("name", sorted(name for name, one in dialects().items()
                                        if one.written is not None and not one.harmony))
def test_a_forced_answer_may_have_several_calls(name: str) -> None:
    dialect = dialects()[name]
    calls = [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome", "n": 1})]
    one, two = (write(dialect, calls[:count]).removeprefix(dialect.lead) for count in (1, 2))
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        one, two = one.replace("'", '"'), two.replace("'", '"')
    for parallel in (True, False):
        grammar = node_grammar(structure(dialect, TOOLS, parallel), {})
        assert judge(grammar, one, two, "Hm. " + one) == [True, parallel and dialect.parallel, False]
