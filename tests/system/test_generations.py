"""A thousand constrained answers, of a trained model and of random weights: those that finish are valid under their schemas."""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import RequestError
from penstock.core.sampling import StructuredOutputsParams
from penstock.grammar.definition import define
from tests.data import DATA

COUNT = int(os.environ.get("PENSTOCK_TEST_GENERATIONS", "1000"))
ROOT = Path(DATA) if DATA else Path("missing")
NAMES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "String": "string", "HashMap": "object"}
"""Types as BFCL writes them."""

Case = tuple[str, dict[str, Any]]
"""A prompt and a schema."""


def functions() -> Iterator[Case]:
    for path in sorted(ROOT.glob("tools/bfcl/BFCL_v4_*python.json")) + sorted(ROOT.glob("tools/bfcl/BFCL_v4_multiple.json")):
        for line in path.read_text().splitlines():
            case = json.loads(line)
            yield case["question"][0][0]["content"], _typed(case["function"][0]["parameters"])


def _typed(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: NAMES.get(value, value) if key == "type" and isinstance(value, str) else _typed(value)
                for key, value in schema.items() if key not in ("optional", "default")}
    return [_typed(value) for value in schema] if isinstance(schema, list) else schema


def dialogues() -> Iterator[Case]:
    with gzip.open(ROOT / "tools/sgd_train.jsonl.gz", "rt") as lines:
        for line in lines:
            case = json.loads(line)
            tool = case["tools"][0]
            yield str(case["messages"][0]["content"])[:300], (tool.get("function") or tool)["parameters"]


def documents() -> Iterator[Case]:
    with gzip.open(ROOT / "schemas/maskbench.jsonl.gz", "rt") as lines:
        for line in lines:
            case = json.loads(line)
            yield f"A document of the kind {case['name']}.", case["schema"]


def cases(count: int) -> list[Case]:
    """Of each kind a third, without schemas that are refused."""
    found: list[Case] = []
    for at, kind in enumerate((functions, dialogues, documents)):
        every = {functions: 1, dialogues: 40, documents: 17}[kind]
        for place, (prompt, schema) in enumerate(kind()):
            if len(found) >= count * (at + 1) // 3:
                break
            if place % every:
                continue
            try:
                define(StructuredOutputsParams(json=schema))
            except RequestError:
                continue
            found.append((prompt, schema))
    return found


def infinite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(infinite, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["auto", "dummy"])
def test_what_finishes_is_valid(weights: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if not ROOT.joinpath("tools").is_dir():
        pytest.skip("needs the functions and schemas of PENSTOCK_TEST_DATA")
    rng, asked = Random(3), cases(COUNT // 2)
    params = [SamplingParams(temperature=rng.choice((0.0, 0.3, 0.7, 1.0, 1.5, 2.0)), max_tokens=512, seed=at,
                             structured_outputs=StructuredOutputsParams(json=schema)) for at, (_, schema) in enumerate(asked)]
    with LLM(max_num_seqs=64, max_model_len=1024, load_format=weights) as llm:
        outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    finished, wrong, cut, unjudged = 0, [], 0, 0
    for (_, schema), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            cut += answer.finish_reason == "length"
            continue
        finished += 1
        try:
            value = json.loads(answer.text)
            assert not infinite(value), answer.text
            jsonschema.validators.validator_for(schema)(schema).validate(value)
        except (ValueError, AssertionError, jsonschema.ValidationError) as error:
            wrong.append((answer.text[:200], str(error)[:200]))
        except Exception:
            unjudged += 1
    print(f"\n{weights}: {len(asked)} answers, {finished} finished, {len(wrong)} of them wrong, {unjudged} not judged; {cut} "
          f"reached max_tokens, {len(asked) - finished - cut} ended otherwise")
    assert not wrong, wrong[:5]
    assert finished > len(asked) // 10 and finished + cut == len(asked) and unjudged < len(asked) // 50
