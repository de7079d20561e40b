"""instructor in its modes for OpenAI's API: the answer is a Pydantic object, by a call or by a schema."""

import os

import instructor
import openai
import pytest
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


MODEL = os.environ["PENSTOCK_MODEL"]
ASK = [{"role": "user", "content": "Describe a person: Ann is 37 years old."}]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_object(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(), mode=mode)
    found = client.chat.completions.create(model=MODEL, messages=ASK, response_model=Person, max_tokens=200, max_retries=0)
    assert isinstance(found, Person) and 0 <= found.age <= 120


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_partial_objects_in_a_stream(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(), mode=mode)
    found = list(client.chat.completions.create_partial(model=MODEL, messages=ASK, response_model=Person, max_tokens=200,
                                                        max_retries=0))
    assert found[-1].name is not None and found[-1].age is not None
