"""Constrained answers over HTTP: OpenAI's and vLLM's fields, the official client's Pydantic helper, errors with pointers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from penstock import canary
from penstock.text import Tokenizer
from tests.system.served import NAME, Served

pytestmark = pytest.mark.xdist_group("canary")

MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0,
                                                                                            "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


class Pet(BaseModel):
    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)


class Person(BaseModel):
    name: str = Field(max_length=8)
    pets: list[Pet] = Field(max_length=2)
    nick: str | None = Field(max_length=5)


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared("canary", "--max-model-len", "4096")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def _chat(client: openai.OpenAI, **fields: Any) -> Any:
    known = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 200, "seed": 3}
    return client.chat.completions.create(**{**known, **fields})


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_schema_streamed_and_not(client: openai.OpenAI, temperature: float) -> None:
    whole = _chat(client, response_format=FORMAT, temperature=temperature).choices[0]
    assert whole.finish_reason == "stop"
    person = json.loads(whole.message.content)
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99
    parts = [chunk.choices[0].delta.content or "" for chunk in _chat(
        client, response_format=FORMAT, temperature=temperature, stream=True)]
    assert "".join(parts) == whole.message.content


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {}, {
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}], ids=["effort", "on", "template"])
def test_thinking_that_is_switched_off_does_not_begin(client: openai.OpenAI, off: dict[str, Any]) -> None:
    """A constrained answer begins at once, however much the model wants to think; otherwise thinking may come first."""
    [begin] = Tokenizer.load(canary.model_folder()).encode("<think>", add_special_tokens=False)
    found = _chat(client, response_format=FORMAT, logit_bias={begin: 100}, max_completion_tokens=40, **off).choices[0].message
    assert bool(found.reasoning) != bool(off)
    if off:
        assert json.loads(found.content).keys() == {"name", "age"}


def test_the_clients_own_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Person, max_completion_tokens=300,
                                           temperature=1.0, seed=4)
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person) and len(person.pets) <= 2


def test_too_few_tokens_is_length(client: openai.OpenAI) -> None:
    assert _chat(client, response_format=FORMAT, max_completion_tokens=3).choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Person, max_completion_tokens=3)


@pytest.mark.parametrize(("fields", "pattern"), [
    ({"response_format": {"type": "json_object"}}, None),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_regex": "x{2}"}, "xx"), ({"guided_choice": ["up"]}, "up"), ({"guided_grammar": 'root ::= "a" "b"?'}, "ab?"),
    ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 4}}, "[34]"),
    ({"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": [
        {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}]}}, "[^<]*(<n>-?[0-9]+</n>[^<]*)*"),
], ids=str)
def test_every_field(server: Served, fields: dict[str, Any], pattern: str | None) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=60, temperature=0.8, seed=2, **fields).json()
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        text = choice["message"]["content"]
        assert re.fullmatch(pattern, text, re.DOTALL) if pattern else isinstance(json.loads(text), dict)
    else:
        assert pattern is None or "<" in pattern, answer


def test_completions_too(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="The number", max_tokens=9, n=2, extra_body={
        "structured_outputs": {"regex": "[0-9]{2}"}})
    assert all(re.fullmatch("[0-9]{2}", choice.text) for choice in answer.choices)


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {
        "type": "array", "uniqueItems": True}}}}}}, "response_format.json_schema.schema", "#/properties/a/uniqueItems"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer", "minimum": 2,
                                                                                        "maximum": 1}}}},
     "response_format.json_schema.schema", "greater than maximum"),
    ({"structured_outputs": {"json": {"contains": {}}}}, "structured_outputs.json", "#/contains"),
    ({"guided_regex": "(?=x)"}, "guided_regex", "look-around"),
    ({"guided_regex": "x", "response_format": {"type": "json_object"}}, "guided_regex", "both constrain"),
    ({"structured_outputs": {"regex": "x"}, "use_beam_search": True, "n": 2}, "structured_outputs", "beam search"),
], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Served, fields: dict[str, Any], param: str, message: str, stream: bool) -> None:
    answer = server.post("/v1/chat/completions", messages=MESSAGES, stream=stream, max_tokens=5, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_that_compiling_finds_has_a_status(server: Served, stream: bool) -> None:
    """The vocabulary by which grammars are checked first has a special token of that name, canary's has none."""
    answer = server.post("/v1/chat/completions", messages=MESSAGES, stream=stream, max_tokens=5,
                         structured_outputs={"grammar": 'start: "a" <end>'})
    assert answer.status_code == 400 and "grammar" in answer.json()["error"]["message"]


def test_figures(server: Served) -> None:
    metrics = server.http.get("/metrics").text
    for name in ("grammars_compiled", "grammars_cached", "forced_tokens", "masked_tokens"):
        found = re.search(rf"^penstock:{name}_total{{[^}}]*}} ([0-9.e+]+)$", metrics, re.MULTILINE)
        assert found and float(found[1]) > 0, name
