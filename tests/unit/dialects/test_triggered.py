"""Answers whose calls are constrained once they have begun: the grammar of each dialect that can be."""

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.core.errors import RequestError
from penstock.dialects.description import Dialect, Python
from penstock.dialects.known import DIALECTS
from penstock.dialects.parser import Parser
from penstock.dialects.schemas import Tools
from penstock.dialects.writing import structure, triggered
from penstock.grammar.definition import _bytes_tokenizer, limits, node_grammar
from tests.unit.dialects.written import write
from tests.unit.grammar.answers import judge

GIVEN = [{"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"],
    "additionalProperties": False}}}]
TOOLS = Tools(GIVEN)
HELD = sorted(name for name, dialect in DIALECTS.items() if triggered(dialect, TOOLS, True) is not None)


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
    assert set(HELD) == {name for name, dialect in DIALECTS.items() if dialect.written is not None}


@pytest.mark.parametrize(("text", "right"), [
    ("all\nHello", True), ('all\nI look.>>>look\n{"city": "Lima"}', True), ('look\n{"city": "Lima"}', True),
    ('look\n{"city": "Lima"}>>>look\n{"city": "Rome"}', True), ("hook\n{}", False), ("Hello", False),
    ("all\nHi>>>hook\n{}", False), ('look\n{"town": "Lima"}', False)])
def test_the_first_recipient_where_the_prompt_has_begun_a_message(text: str, right: bool) -> None:
    assert accepts(DIALECTS["functionary_v3.2"], text, ()) == right


LOOK = '{"name":"look","args":{"city":"Lima"}}'
HEADER, SAID, INVOKE, ENDED = "<|message_model|>", "<|content_text|>", "<|content_invoke_tool_json|>", "<|end_message|>"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("text", "right"), [
    (f"{SAID}Hi{ENDED}", True),
    (f"<|content_thinking|>hm{ENDED}{HEADER}{SAID}Hi{ENDED}{HEADER}look{INVOKE}{LOOK}{ENDED}", True),
    (f"look{INVOKE}{LOOK}{ENDED}", True), (f"{INVOKE}{LOOK}{ENDED}{HEADER}look{INVOKE}{LOOK}{ENDED}", True),
    (f"look{INVOKE}{LOOK.replace('look', 'hook')}{ENDED}", False), (f"{INVOKE}{LOOK.replace('city', 'town')}{ENDED}", False),
    (f"{INVOKE}{LOOK}{ENDED}{HEADER}{SAID}Hi", False)])
def test_messages_with_headers_are_free_until_a_call(text: str, right: bool, marked: bool) -> None:
    special = (HEADER, SAID, INVOKE, ENDED, "<|content_thinking|>") if marked else ()
    assert accepts(DIALECTS["inkling"], text, special) == right


@pytest.mark.parametrize("name", BARE)
def test_calls_that_begin_like_text(name: str) -> None:
    dialect = DIALECTS[name]
    good = write(dialect, [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome"})])
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        good = good.replace("'", '"')
    assert accepts(dialect, good, ())
    for text in ("", "Hello < [1] {x} there.", "[See](this)", '{"a": 1}', "[1, 2]", "```json\n[1]\n```", "f(x)"):
        assert accepts(dialect, text, ()), text
    for text in (good.replace("look", "hook"), good.replace("city", "town"), good + " And now?"):
        assert not accepts(dialect, text, ()), text
    for text in (good.replace("look", "hook"), "Let me see. " + good, "\n" + good):
        parser = Parser(dialect, GIVEN)
        parser.push(text)
        parser.finish()
        # Text is never read as a call that was not held to its schema.
        assert not parser.message().calls or not accepts(dialect, text, ())


@pytest.mark.parametrize(("name", "text"), [
    ("llama3_json", '<|python_tag|>{"name": "look"}'), ("llama4_pythonic", '[look(city="Lima")]'),
    ("granite", '[{"name": "look", "arguments": {}}]'), ("smollm3", "<code>look(n=1)</code>"),
    ("xlam", 'So: [{"name": "look", "arguments": {}}]'), ("gemma3", "So:\n```tool_code\nlook(n=1)\n```")])
def test_other_ways_to_call_are_closed(name: str, text: str) -> None:
    dialect = DIALECTS[name]
    parser = Parser(dialect, GIVEN)
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
        assert accepts(DIALECTS["openai"], text, special) == right, special


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", sorted({*HELD} - {*BARE, "openai", "functionary_v3.2"}))
def test_text_is_free_and_calls_are_held(name: str, marked: bool) -> None:
    dialect = DIALECTS[name]
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
    two = write(DIALECTS["hermes"], [("look", {"city": "Lima"}), ("look", {"city": "Rome"})])
    assert accepts(DIALECTS["hermes"], two, ()) and not accepts(DIALECTS["hermes"], two, (), parallel=False)


def test_a_text_between_tags_fits_its_pattern() -> None:
    tools = Tools([{"name": "note", "parameters": {"properties": {"input": {"type": "string", "pattern": "^a[<b]*$"}}}}])
    grammar = node_grammar(structure(DIALECTS["qwen3_coder"], tools, True), {})
    for text, right in (("a<b", True), ("ab</parameter>", False), ("c", False)):
        call = write(DIALECTS["qwen3_coder"], [("note", {"input": text})])
        assert judge(grammar, call) == [right], text


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3_coder", "functiongemma"])
def test_a_custom_tools_grammar(name: str) -> None:
    grammar = 'start: "say " STRING ("\\n" start)?\nSTRING: /"[^"\\n]*"/'
    dialect = DIALECTS[name]
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
        parser = Parser(dialect)
        parser.tools = tools
        parser.push(call)
        parser.finish()
        assert json.loads(parser.message().calls[0].arguments) == {"input": text}


@pytest.mark.parametrize("name", sorted(name for name in HELD if DIALECTS[name].parallel and name != "openai"))
def test_several_calls_can_be_forced(name: str) -> None:
    dialect = DIALECTS[name]
    two = write(dialect, [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome"})])
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        two = two.replace("'", '"')
    assert judge(node_grammar(structure(dialect, TOOLS, True), {}), two.removeprefix(dialect.lead)) == [True]


@pytest.mark.parametrize("name", sorted(name for name, one in DIALECTS.items()
                                        if one.written is not None and not one.harmony))
def test_a_forced_answer_may_have_several_calls(name: str) -> None:
    dialect = DIALECTS[name]
    calls = [("look", {"city": "Lima", "n": 3}), ("look", {"city": "Rome", "n": 1})]
    one, two = (write(dialect, calls[:count]).removeprefix(dialect.lead) for count in (1, 2))
    if any(isinstance(block.form, Python) for block in dialect.blocks):
        one, two = one.replace("'", '"'), two.replace("'", '"')
    for parallel in (True, False):
        grammar = node_grammar(structure(dialect, TOOLS, parallel), {})
        assert judge(grammar, one, two, "Hm. " + one) == [True, parallel and dialect.parallel, False]


COLOURS = {"Colour": {"enum": ["red", "green"]}}


@pytest.mark.parametrize(("schema", "right", "wrong"), [
    ({"$ref": "#/$defs/Colour"}, ["red"], ["blue"]), ({"allOf": [{"$ref": "#/$defs/Colour"}]}, ["green"], ["blue"]),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "string", "pattern": "^x+$"}]}, ["red", "xx"], ["blue", "redx"]),
    ({"type": "string", "anyOf": [{"minLength": 3}, {"enum": ["a"]}]}, ["a", "abc"], ["b"]),
    ({"type": "string", "enum": ["a", "ab"], "minLength": 2}, ["ab"], ["a"]),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c"]),
    ({"type": ["string", "null"]}, ["Lima", "null", "5", "nullable"], ['"a"', " None"]),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}, ["red", "null"], ["blue", "none"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]), (True, ["3", '"x"'], ["x"])])
@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m3"])
def test_strings_between_tags_keep_every_keyword(name: str, schema: Any, right: list[str], wrong: list[str]) -> None:
    tools = Tools([{"name": "f", "parameters": {"$defs": COLOURS, "properties": {"c": schema}, "required": ["c"]}}])
    grammar = node_grammar(structure(DIALECTS[name], tools, True), {})
    assert judge(grammar, *(write(DIALECTS[name], [("f", {"c": text})]) for text in (*right, *wrong))) == \
        [True] * len(right) + [False] * len(wrong)
    if schema is True:
        return
    for text in right:
        parser = Parser(DIALECTS[name])
        parser.tools = tools
        parser.push(write(DIALECTS[name], [("f", {"c": text})]))
        parser.finish()
        assert json.loads(parser.message().calls[0].arguments) == {"c": None if text == "null" else text}


@pytest.mark.parametrize(("schema", "place"), [
    ({"properties": {"c": {"type": "string", "not": {"const": "a"}}}}, "#/properties/c/not"),
    ({"properties": {"c": {"type": "string", "pattern": "a", "allOf": [{"pattern": "b"}]}}}, "#/properties/c/pattern"),
    ({"properties": {"c": {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}}},
     "#/properties/c/oneOf"),
    ({"properties": {"c": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "string", "anyOf": [{"$ref": "#/$defs/A"}]}}},
     "anyOf"),
    ({"properties": {"c": {"type": "string"}}, "anyOf": [{"required": ["c"]}, {"required": ["d"]}]}, "#/anyOf")])
def test_what_tags_cannot_keep_is_refused_by_its_place(schema: Any, place: str) -> None:
    with pytest.raises(RequestError, match=f"cannot be enforced at .*{re.escape(place)}"):
        structure(DIALECTS["qwen3_coder"], Tools([{"name": "f", "parameters": schema}]), True)


MARK = "]<]minimax[>["
KIDS = {"type": "array", "items": {"$ref": "#/$defs/Node"}}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": KIDS}, "required": ["v"]}
NESTED: dict[str, Any] = {"$defs": {"Node": NODE}, "type": "object", "properties": {
    "home": {"type": "object", "properties": {
        "city": {"type": "string"}, "zip": {"type": ["string", "null"]},
        "rooms": {"type": "array", "items": {"type": "object", "properties": {"size": {"type": "integer", "minimum": 1}},
                                             "required": ["size"]}, "maxItems": 2}}, "required": ["city"]},
    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, "tree": {"$ref": "#/$defs/Node"},
    "free": {"type": "object"}}}


def elements(value: Any) -> str:
    """As MiniMax M3's template writes a value."""
    if isinstance(value, dict):
        return "".join(f"{MARK}<{key}>{elements(each)}{MARK}</{key}>" for key, each in value.items())
    if isinstance(value, list):
        return "".join(elements({"item": each}) for each in value)
    return value if isinstance(value, str) else json.dumps(value)


def held_and_read(dialect: Dialect, tools: Tools, call: str, arguments: Any, right: bool) -> None:
    """Whether the grammar allows the call is as said; read back, it has these arguments in any case."""
    assert judge(node_grammar(structure(dialect, tools, True), {}), call) == [right]
    parser = Parser(dialect)
    parser.tools = tools
    parser.push(call)
    parser.finish()
    assert json.loads(parser.message().calls[0].arguments) == arguments


@pytest.mark.parametrize(("arguments", "right"), [
    ({"home": {"city": "Oslo <x>", "zip": None, "rooms": [{"size": 3}, {"size": 4}]}}, True), ({"home": {"zip": "x"}}, False),
    ({"home": {"city": "A", "zip": "5"}}, True), ({"home": {"city": "A", "rooms": [{"size": 0}]}}, False),
    ({"home": {"city": "A", "rooms": [{"size": 1}] * 3}}, False), ({"home": {"city": "A", "street": "B"}}, False),
    ({"tags": ["a", "b c", "3"]}, True), ({"tags": None}, True), ({"tags": []}, True), ({"tree": {"v": 1, "kids": []}}, True)])
def test_values_within_tags_are_elements(arguments: Any, right: bool) -> None:
    dialect, tools = DIALECTS["minimax_m3"], Tools([{"name": "f", "parameters": NESTED}])
    call = f'{MARK}<tool_call>\n{MARK}<invoke name="f">{elements(arguments)}{MARK}</invoke>\n{MARK}</tool_call>'
    held_and_read(dialect, tools, call, arguments, right)


def test_values_whose_names_are_open_stay_json_within_tags() -> None:
    dialect, tools = DIALECTS["minimax_m3"], Tools([{"name": "f", "parameters": NESTED}])
    for arguments in ({"free": {"a": [1]}}, {"tree": {"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}]}}):
        said = {key: json.dumps(value) if key == "free" else value for key, value in arguments.items()}
        if "tree" in said:
            said["tree"] = {"v": 1, "kids": [json.dumps(each) for each in arguments["tree"]["kids"]]}
        call = f'{MARK}<tool_call>\n{MARK}<invoke name="f">{elements(said)}{MARK}</invoke>\n{MARK}</tool_call>'
        held_and_read(dialect, tools, call, arguments, True)
