"""The keywords of JSON Schema are enforced, rewritten into others, or refused by name and place."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define
from penstock.grammar.patterns import translate
from penstock.grammar.schema import UnenforceableError
from tests.unit.grammar.answers import judge, valid

STRING, NUMBER = {"type": "string"}, {"type": "number"}
LOOP = {"type": "object", "properties": {"next": {"$ref": "#"}}}

REFUSED: list[tuple[Any, str]] = [
    (False, "#"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "object", "properties": {"a/b": {"type": "array", "contains": {}}}}, "#/properties/a~1b/contains"),
    ({"$defs": {"x": {"format": "planet"}}, "$ref": "#/$defs/x"}, "#/$defs/x/format"),
    ({"items": {"not": {"pattern": "a"}}}, "#/items/not"),
    ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "#/oneOf/0"),
    ({"$ref": "http://example.com/other.json"}, "#/$ref"),
    ({"$ref": "#/$defs/nothing"}, "#/$ref"),
    ({"$dynamicRef": "#x"}, "#/$dynamicRef"),
    ({"anyOf": [{"type": "string", "contentMediaType": "application/json"}]}, "#/anyOf/0/contentMediaType"),
    ({"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]}, "#/unevaluatedProperties"),
    ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "#/if"),
    ({"const": "nul\x00"}, "#/const"),
    ({**LOOP, "required": ["next"]}, "#"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
    ({"$ref": "#"}, "#"),
    # These are found by compiling; the place is the deepest that fails for itself.
    ({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]},
     "#/properties/a"),
    ({"properties": {"deep": {"items": {"type": "string", "pattern": "(?=x)"}}}}, "#/properties/deep/items"),
    ({"type": "strin"}, "#"),
    ({"type": "object", "required": ["x"], "additionalProperties": False}, "#"),
]


@pytest.mark.parametrize(("schema", "pointer"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_where_it_stands(schema: Any, pointer: str) -> None:
    with pytest.raises(RequestError) as caught:
        define(StructuredOutputsParams(json=schema))
    assert f"at {pointer}:" in caught.value.message
    assert caught.value.status == 400 and caught.value.param == "structured_outputs.json"
    assert caught.value.code == "unsupported_schema"


CASES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [1.5, None]),
    ({"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]}, [2, 6], [3, 4, 5]),
    ({"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
     [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"properties": {"kind": {"const": "x"}, "v": STRING}, "required": ["kind"]},
                {"properties": {"kind": {"const": "y"}, "v": NUMBER}, "required": ["kind"]}], "type": "object"},
     [{"kind": "x", "v": "s"}, {"kind": "y", "v": 1}], [{"kind": "x", "v": 1}, {"kind": "z"}, {}]),
    ({"not": {"type": "string"}}, [1, None, [], {}], ["a"]),
    ({"type": "string", "not": {"enum": ["ab", "b"]}}, ["a", "abc", "", "c", "ba"], ["ab", "b"]),
    ({"type": "integer", "not": {"enum": [0, 5]}}, [-1, 1, 4, 6], [0, 5]),
    ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "dependentRequired": {"a": ["b"]}},
     [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    ({"type": "object", "properties": {"a": NUMBER}, "dependencies": {"a": {"properties": {"b": STRING}, "required": ["b"]}}},
     [{}, {"a": 1, "b": "x"}], [{"a": 1}, {"a": 1, "b": 1}]),
    ({"if": {"properties": {"k": {"const": True}}, "required": ["k"]}, "then": {"properties": {"v": STRING}},
      "else": {"properties": {"v": NUMBER}}, "type": "object"}, [{"k": True, "v": "s"}, {"v": 1}], [{"k": True, "v": 1},
                                                                                                   {"v": "s"}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": NUMBER}, [{"x1": 1}], [{"y": 1},
                                                                                                          {"x": "s"}]),
    ({"type": "object", "propertyNames": {"enum": ["p", "q"]}}, [{}, {"p": 1, "q": None}], [{"r": 1}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"type": "string", "nullable": True}, ["a", None], [1]),
    ({"type": "array", "items": NUMBER, "minItems": 1.0, "uniqueItems": False}, [[1, 1]], [[]]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-13-01"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:60Z"], ["2024-02-29T22:59:60Z", "2024-02-29"]),
    ({"type": "integer", "format": "int32"}, [2**31 - 1], [2**31]),
    ({"type": "string", "contentEncoding": "base64"}, ["QQ=="], ["Q"]),
    ({"type": "string", "pattern": r"^.$"}, ["a", "é"], ["\r", "\u2028"]),
    ({"type": "string", "pattern": r"^\s$"}, [" ", "\ufeff"], ["\x85", "a"]),
    (LOOP, [{}, {"next": {"next": {}}}], [{"next": 1}]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "maxLength": 2}}}, ["ab"], ["abc"]),
    ({"$ref": "#name", "$defs": {"a": {"$anchor": "name", "type": "string"}}}, ["ab"], [1]),
    (True, [1, "a", None], []),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES, ids=str)
def test_rewritten_keywords_keep_their_meaning(schema: Any, right: list[Any], wrong: list[Any]) -> None:
    assert valid(schema, *right) == [True] * len(right)
    assert valid(schema, *wrong) == [False] * len(wrong)


def test_a_property_cannot_be_smuggled_in_by_escapes() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert judge(StructuredOutputsParams(json=schema), '{"\\u0061":"x"}', '{"a":1}') == [False, True]


def test_a_schema_cannot_loosen_its_own_options() -> None:
    schema = {"type": "array", "items": {}, "x-guidance": {"whitespace_flexible": False, "lenient": True}}
    assert judge(StructuredOutputsParams(json=schema), "[1, 2]") == [True]


def test_whitespace_is_bounded() -> None:
    pretty = '{\n    "a": [\n        1,\n        2\n    ]\n}'
    endless = '{"a":' + "\n" * 3 + "[]}"
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    assert judge(StructuredOutputsParams(json=schema), pretty, endless) == [True, False]
    assert judge(StructuredOutputsParams(json=schema, disable_any_whitespace=True), '{"a": []}', '{"a":[]}') == [False, True]
    assert judge(StructuredOutputsParams(json=schema, whitespace_pattern=r"\n+"), endless) == [True]


def test_additional_properties_can_be_disabled() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    closed = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    assert judge(closed, '{"a":{"b":1}}', '{"c":1}', '{"a":{"c":1}}') == [True, False, False]


def test_large_and_deep_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": {"x": deep}}
    with pytest.raises(UnenforceableError, match="nested more than 64"):
        define(StructuredOutputsParams(json=deep))
    with pytest.raises(UnenforceableError, match="at most 1000000"):
        define(StructuredOutputsParams(json={"description": "x" * 1_000_001}))


@pytest.mark.parametrize(("pattern", "same"), [
    (r"^\d+$", "^[0-9]+$"), (r"[^\w.]", "[^A-Za-z0-9_.]"), (r"[[a]", r"[\[a]"), (r"[a&&b]", r"[a\&\&b]"), ("[]", r"[^\s\S]"),
    ("[^]", r"[\s\S]"), (r"\cJ", r"\u{a}"), (r"[\b]", r"[\x08]"), (r"a\/b", "a/b"), (r"\ud83d\udc32", r"\u{1f432}"),
])
def test_patterns_are_translated(pattern: str, same: str) -> None:
    assert translate(pattern) == same
