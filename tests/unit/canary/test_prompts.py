"""The graded prompts: repeatable, kept apart from training, and each accepting its answer and no other."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from tokenizers import Tokenizer
from training.canary.documents import held_in
from training.canary.render import render
from training.canary.tokenizer import FOLDER

from penstock.canary import skills
from penstock.canary.item import HELD_OUT_SHARE, Item, parse_calls
from penstock.canary.suite import ALL, prompts

COUNT = 60
TOKENIZER = FOLDER / "tokenizer.json"


@pytest.mark.parametrize("skill", ALL)
def test_the_same_every_time_and_never_trained_on(skill: str) -> None:
    items = prompts(skill, COUNT)
    assert items == prompts(skill, COUNT)
    assert all(item.skill == skill and item.held_out for item in items)
    rng = Random(1)
    trained = {item.key for item in (held_in(ALL[skill], rng, 0.5) for _ in range(COUNT))}
    assert not trained & {item.key for item in items}


@pytest.mark.parametrize("skill", sorted(set(ALL) - {"retrieve-4k"}))
def test_about_one_in_eight_is_for_grading(skill: str) -> None:
    rng = Random(2)
    share = sum(ALL[skill](rng, 0.7).held_out for _ in range(800)) / 800
    assert 0.6 < share * HELD_OUT_SHARE < 1.5


@pytest.mark.parametrize("skill", ALL)
def test_the_canonical_answer_is_right_and_others_are_not(skill: str) -> None:
    for item in prompts(skill, COUNT):
        assert item.right(item.answer)
        assert item.right(f"  {item.answer}\n")
        assert not item.right(item.answer, stopped=False)
        assert not item.right("")
        assert not item.right(_spoiled(item))


def _spoiled(item: Item) -> str:
    """The answer with one letter or digit changed in what is graded."""
    graded = item.expected or re.sub(r"(?s).*</think>", "", item.answer).strip()
    place = next(k for k in reversed(range(len(graded))) if graded[k].isalnum())
    sign = "7" if graded[place] != "7" else "8"
    spoiled = graded[:place] + sign + graded[place + 1:]
    return item.answer.replace(graded, spoiled)


def test_what_is_asked_has_that_answer() -> None:
    """Worked out again, from the question alone."""
    for item in prompts("add", COUNT):
        assert int(item.answer) == sum(map(int, re.findall(r"\d+", item.messages[-1]["content"])))
    for item in prompts("reverse", COUNT):
        assert item.messages[-1]["content"].endswith(": " + " ".join(reversed(item.answer.split())))
    for skill in ("retrieve", "retrieve-4k"):
        for item in prompts(skill, COUNT):
            key, value = item.key.split("=")
            text = item.messages[-1]["content"]
            assert re.findall(rf"^{key}: (\w+)$|The code of the {key} is (\d+)\.", text, re.M) in ([(value, "")], [("", value)])
    for item in prompts("sort", COUNT):
        asked = item.messages[-1]["content"].split(": ")
        signs = sorted(asked[1].split(), key=lambda sign: int(sign) if sign.isdigit() else ord(sign))
        assert item.answer.split() == (signs[::-1] if "high to low" in asked[0] or "falling" in asked[0] else signs)
    for item in prompts("think", COUNT):
        numbers = re.findall(r"What is (\d+) \+ (\d+)\?", item.messages[-1]["content"])
        if numbers:
            assert item.answer.endswith(f"</think>\n\n{sum(map(int, numbers[0]))}")


def test_the_edge_skill_stands_at_its_windows_edge() -> None:
    """Each token of the answer, its end included, stands EDGE - 1 places before the token that it is predicted from."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for item in prompts("edge", COUNT):
        asked = tokenizer.encode(render(item.messages, generate=True)).ids
        whole = tokenizer.encode(render([*item.messages, {"role": "assistant", "content": item.answer}])).ids
        answer = range(len(asked), len(whole) - 1)  # less the line's end after the turn
        assert whole[: len(asked)] == asked
        assert [whole[place] for place in answer] == [whole[place - 1 - (skills.EDGE - 1)] for place in answer]


def test_calls_fit_their_schemas() -> None:
    types = {"string": str, "integer": int, "boolean": bool}
    for item in prompts("tool-call", COUNT):
        call, = parse_calls(item.answer)
        schema = next(tool["function"] for tool in item.tools if tool["function"]["name"] == call["name"])
        properties = schema["parameters"]["properties"]
        assert set(call["arguments"]) == set(properties) == set(schema["parameters"]["required"])
        assert all(type(value) is types[properties[name]["type"]] for name, value in call["arguments"].items())


def test_calls_are_equal_by_value_wherever_they_were_parsed() -> None:
    item = prompts("tool-call", 1)[0]
    call = parse_calls(item.answer)[0]
    by_server = {"name": call["name"], "arguments": json.dumps(call["arguments"], indent=2)}
    assert item.right("", [by_server])
    assert item.right(item.answer.replace(": ", ":").replace(", ", " ,"))
    assert not item.right("", [by_server, by_server])
    assert not item.right("", [{**by_server, "arguments": "{"}])
    assert not item.right(item.answer.replace("</tool_call>", ""))


def test_fields_are_graded_as_values() -> None:
    item = prompts("json", 1)[0]
    values = json.loads(item.answer)
    assert item.right(json.dumps(values, indent=1))
    assert not item.right(json.dumps({**values, "more": 1}))
    assert not item.right(f"Here it is: {item.answer}")
