"""litellm's OpenAI-compatible provider: text, streams, calls and structured answers."""

import json
import os

import litellm
import pytest

HOW = {"model": f"openai/{os.environ['PENSTOCK_MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none",
       "temperature": 0, "max_tokens": 200}
ASK = [{"role": "user", "content": "What is the weather in Lima?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Current temperature in a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_calls(choice: object, stream: bool) -> None:
    found = litellm.completion(**HOW, messages=ASK, tools=[TOOL], tool_choice=choice, stream=stream)
    if stream:
        found = litellm.stream_chunk_builder(list(found), messages=ASK)
    [call] = found.choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Lima"}


def test_structured() -> None:
    schema = {"name": "person", "schema": {"type": "object", "properties": {"age": {"type": "integer", "maximum": 120}},
                                           "required": ["age"], "additionalProperties": False}}
    found = litellm.completion(**HOW, messages=ASK, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(found.choices[0].message.content)["age"] <= 120


def test_text_in_a_stream() -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**HOW, messages=ASK, stream=True)]
    assert "".join(pieces)
