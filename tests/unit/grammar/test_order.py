"""Two orders of an object's properties: that of `properties` and that of `required`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.order import MAX_PARTS, with_orders
from penstock.grammar.schema import enforceable
from tests.unit.grammar.answers import judge, valid

SORTED = {"type": "object", "additionalProperties": False, "properties": {
    "answer": {"type": "string"}, "note": {"type": "null"}, "reasoning": {"type": "string"}},
    "required": ["reasoning", "answer"]}


def test_either_order_and_no_other() -> None:
    assert valid(SORTED, {"answer": "b", "reasoning": "a"}, {"answer": "b", "note": None, "reasoning": "a"}) == [True, True]
    assert valid(SORTED, {"reasoning": "a", "answer": "b"}, {"reasoning": "a", "answer": "b", "note": None}) == [True, True]
    assert valid(SORTED, {"reasoning": "a", "note": None, "answer": "b"}, {"reasoning": "a"}, {"answer": "b"}) == [False] * 3


@pytest.mark.parametrize("schema", [
    {"type": "array", "items": SORTED, "minItems": 1}, {"$ref": "#/$defs/a", "$defs": {"a": SORTED}},
    {"type": "object", "properties": {"in": SORTED}, "required": ["in"]},
    {"oneOf": [SORTED, {"type": "null"}]}, {"allOf": [SORTED, {"properties": {"answer": {"enum": ["b"]}}}]},
], ids=lambda schema: next(iter(schema)))
def test_wherever_the_object_stands(schema: dict[str, Any]) -> None:
    def place(value: Any) -> Any:
        return [value] if "items" in schema else {"in": value} if "in" in schema.get("properties", {}) else value

    for right in ({"answer": "b", "reasoning": "a"}, {"reasoning": "a", "answer": "b"}):
        assert valid(schema, place(right)) == [True], right
    assert valid(schema, place({"reasoning": "a"})) == [False]


def test_definitions_stay_where_references_find_them() -> None:
    tree = {"type": "object", "additionalProperties": False, "properties": {"kids": {"type": "array", "items": {"$ref": "#"}},
                                                                            "name": {"$ref": "#/$defs/name"}},
            "required": ["name", "kids"], "$defs": {"name": {"type": "string"}}}
    assert valid(tree, {"name": "a", "kids": [{"kids": [], "name": "b"}]}, {"kids": [], "name": 1}) == [True, False]


def test_schemas_that_cannot_be_copied_keep_one_order() -> None:
    inner = enforceable({**SORTED, "properties": {**SORTED["properties"], "note": {"$ref": "#/properties/answer"}}})
    assert with_orders(inner) is inner
    deep: dict[str, Any] = SORTED
    for _ in range(12):
        deep = {"type": "object", "properties": {"b": deep, "a": {"type": "null"}}, "required": ["a", "b"]}
    assert with_orders(deep) is deep and len(str(deep)) < 100 * MAX_PARTS


def test_a_tools_arguments_too() -> None:
    text = "start: %json " + json.dumps(SORTED)
    asked = StructuredOutputsParams(grammar=text)
    assert judge(asked, '{"reasoning": "a", "answer": "b"}', '{"answer": "b", "reasoning": "a"}') == [True, True]
