"""Regexes, choices, grammars, structural tags and structures of dialects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.core.structure import Either, Json, Lark, Literal, Node, Regex, Repeat, Sequence, Triggered, Until
from penstock.grammar.definition import define, node_grammar
from penstock.grammar.lark import check_productive
from tests.unit.grammar.answers import judge

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(("params", "right", "wrong"), [
    ({"regex": "[a-c]{2}"}, ["ab"], ["a", "abc", "ad"]),
    ({"regex": "^a/b$"}, ["a/b"], ["a"]),
    ({"regex": "a|bc"}, ["a", "bc"], ["abc"]),
    ({"choice": ["yes", "no", 'a "b"\n']}, ["yes", 'a "b"\n'], ["ye", "maybe"]),
    ({"grammar": 'start: "a" b*\nb: "b"'}, ["a", "abb"], ["b"]),
    ({"grammar": 'root ::= "x" num+\nnum ::= [0-9]'}, ["x12"], ["x"]),
    ({"grammar": 'start: "<" %json {"oneOf": [{"type": "integer"}, {"type": "null"}]} ">"'}, ["<1>", "<null>"], ["<1.5>"]),
    ({"json_object": True}, ['{"a": [1]}'], ["[1]", "1"]),
    ({"json": json.dumps(INTEGER)}, ["12"], ["1.5"]),
], ids=str)
def test_kinds(params: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    asked = StructuredOutputsParams(**params)
    assert judge(asked, *right) == [True] * len(right)
    assert judge(asked, *wrong) == [False] * len(wrong)


@pytest.mark.parametrize(("params", "why"), [
    ({}, "exactly one of"), ({"regex": "a", "choice": ["b"]}, "regex and choice"), ({"regex": "(?=a)"}, "look-around"),
    ({"regex": "a[^\\s\\S]"}, "cannot be used|no text"), ({"choice": []}, "non-empty strings"),
    ({"grammar": "start: foo"}, "foo"),
    ({"grammar": 'start: "a" start'}, "infinitely long"), ({"grammar": 'start: %json {"contains": {}}'}, "#/contains"),
    ({"json": "{"}, "not JSON"), ({"grammar": "root ::= ("}, "neither Lark nor GBNF"),
    ({"structural_tag": {"type": "x"}}, "type"),
], ids=str)
def test_errors_name_the_field(params: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        define(StructuredOutputsParams(**params))
    assert caught.value.status == 400 and (caught.value.param or "").startswith("structured_outputs")


@pytest.mark.parametrize(("grammar", "ends"), [
    ('start: "a" | "b" start', True), ("start: a\na: b\nb: a", False), ('start: ("a" start)?', True),
    ('start: "a" start{0,2}', True),
    ('start: ["x" start] "y"', True), ('?start.2: x\nx[lazy]: /a/ start', False), ("start: x+\nx: start", False),
    ('start: TEXT\nTEXT: /a:b|c/ // x: y', True),
])
def test_endless_grammars(grammar: str, ends: bool) -> None:
    if ends:
        check_productive(grammar)
    else:
        with pytest.raises(RequestError, match="infinitely long"):
            check_productive(grammar)


def test_older_structural_tags() -> None:
    tag = {"type": "structural_tag", "triggers": ["<f="], "structures": [
        {"begin": "<f=add>", "schema": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, "end": "</f>"},
        {"begin": "<f=now>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"}]}
    assert judge(StructuredOutputsParams(structural_tag=tag), "text", 'x <f=add>{"a":1}</f> y <f=now>{}</f>', "x <f=sub>{}</f>",
                 '<f=add>{"a":"b"}</f>', "<f=") == [True, True, False, False, False]
    assert judge(StructuredOutputsParams(structural_tag=json.dumps(tag)), "<f=now>{}</f>") == [True]


def test_newer_structural_tags() -> None:
    call = {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</t>"}
    triggered = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<t>"], "tags": [call],
                                                      "at_least_one": True, "stop_after_first": True}}
    assert judge(StructuredOutputsParams(structural_tag=triggered), "a<t>1</t>b", "a", "<t>1</t><t>2</t>") == [
        True, False, False]
    sequence = {"type": "structural_tag", "format": {"type": "sequence", "elements": [
        {"type": "any_text"}, {"type": "const_string", "value": "END"},
        {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]"}, call]}]}}
    assert judge(StructuredOutputsParams(structural_tag=sequence), "abcEND1", "END<t>5</t>", "abc1") == [True, True, False]
    separated = {"type": "structural_tag", "format": {"type": "tags_with_separator", "separator": ",", "tags": [call]}}
    assert judge(StructuredOutputsParams(structural_tag=separated), "", "<t>1</t>,<t>2</t>", "<t>1</t><t>2</t>") == [
        True, True, False]


@pytest.mark.parametrize(("node", "right", "wrong"), [
    (Sequence((Literal("<p>"), Until("</p>"), Literal("</p>\n"))), ["<p>a<b</p>\n", "<p></p>\n"], ["<p>a</p></p>\n"]),
    (Repeat(Json(INTEGER), ", ", 1, 2), ["1", "1, 2"], ["", "1, 2, 3", "1 2"]),
    (Repeat(Literal("x"), "", 0, None), ["", "xxx"], ["y"]),
    (Repeat(Literal("x"), "", 2, 2), ["xx"], ["x", "xxx"]),
    (Either((Literal("a"), Regex("b+"), Lark('start: "c"'))), ["a", "bb", "c"], ["ab"]),
    (Triggered((("<", Literal("b>")), ("[", Json(INTEGER)))), ["x", "x<b>y[1 ", "<b><b>"], ["x<c>", "[a"]),
    (Triggered((("<", Literal("b>")),), 1, 1), ["x<b>y"], ["x", "<b><b>"]),
], ids=str)
def test_structures(node: Node, right: list[str], wrong: list[str]) -> None:
    grammar = node_grammar(node, {})
    assert judge(grammar, *right) == [True] * len(right)
    assert judge(grammar, *wrong) == [False] * len(wrong)


def test_special_tokens_are_tokens_and_not_text() -> None:
    lark = node_grammar(Sequence((Literal("a<|call|>b"), Until("<|end|>"), Literal("<|end|>"))),
                        {"<|call|>": 128007, "<|end|>": 128009})
    assert '"a" <[128007]> "b"' in lark and "<[128009]>" in lark and "<|" not in lark
