"""The official test suite of JSON Schema, and maskbench: what is accepted is enforced to the letter, the rest is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define
from penstock.grammar.schema import UnenforceableError, resolve_in
from tests.data import DATA, need
from tests.unit.grammar.answers import judge

DRAFTS = ("draft2020-12", "draft7")
SCHEMAS = DATA / "schemas"


def _files(draft: str) -> list[Path]:
    return sorted((need(SCHEMAS / "json-schema-test-suite") / draft).rglob("*.json"))


def _check_case(schema: Any, tests: list[dict[str, Any]], count: Counter[str]) -> None:
    try:
        define(StructuredOutputsParams(json=schema))
    except UnenforceableError as error:
        count["refused"] += 1
        assert error.pointer.startswith("#")
        # The pointer leads somewhere in the schema that was sent.
        if isinstance(schema, dict):
            resolve_in(schema, error.pointer)
        return
    count["accepted"] += 1
    for test in tests:
        for ascii_only in (False, True):
            [found] = judge(StructuredOutputsParams(json=schema), json.dumps(test["data"], ensure_ascii=ascii_only))
            assert test["valid"] or not found, ("accepted but not enforced", schema, test)
        count["valid" if test["valid"] else "invalid"] += 1
        count["valid accepted"] += bool(test["valid"] and judge(
            StructuredOutputsParams(json=schema), json.dumps(test["data"], ensure_ascii=False))[0])


def _check_suite(draft: str, every: int) -> Counter[str]:
    count: Counter[str] = Counter()
    cases = [case for file in _files(draft) for case in json.loads(file.read_text())]
    for case in cases[::every]:
        _check_case(case["schema"], case["tests"], count)
    return count


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_sample_of_the_suite(draft: str) -> None:
    count = _check_suite(draft, 7)
    assert count["accepted"] > 25 and count["refused"] > 5 and count["invalid"] > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_whole_suite(draft: str) -> None:
    count = _check_suite(draft, 1)
    print(draft, dict(count))
    assert count["accepted"] > 230


@pytest.mark.exhaustive
def test_maskbench() -> None:
    count: Counter[str] = Counter()
    with gzip.open(need(SCHEMAS / "maskbench.jsonl.gz"), "rt") as lines:
        for line in lines:
            case = json.loads(line)
            _check_case(case["schema"], case["tests"], count)
    print(dict(count))
    assert count["refused"] <= 0.06 * (count["refused"] + count["accepted"])
