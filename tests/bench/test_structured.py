"""bench/structured.py: its engine of ours accepts what is valid, and what it counts as refused is refused by us."""

from __future__ import annotations

import structured
from tests.data import DATA, need


def test_our_engine_judges_instances() -> None:
    engine = structured.Penstock(need(DATA / "tokenizers" / "gpt2"))
    cases = [{"name": "a", "schema": {"type": "integer"}, "tests": [{"data": 3, "valid": True}, {"data": "x", "valid": False}]},
             {"name": "b", "schema": {"$ref": "http://elsewhere"}, "tests": [{"data": 3, "valid": True}]}]
    count = structured.measure(engine, cases, 60.0)["count"]
    assert count == {"schemas": 2, "valid accepted": 1, "invalid rejected": 1, "refused": 1, "refused: UnenforceableError": 1}
