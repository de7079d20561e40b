"""The official anthropic SDK: messages whole and streamed, tools, counting, models, errors."""

from __future__ import annotations

import os

import anthropic
import pytest

MODEL = os.environ["PENSTOCK_MODEL"]
client = anthropic.Anthropic(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key="none")
ASK = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Repeat: dog cat"}]}


def test_messages() -> None:
    found = client.messages.create(**ASK)
    assert found.role == "assistant" and found.content[0].type == "text" and found.usage.output_tokens > 0
    used = found.usage
    prompt = used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert client.messages.count_tokens(model=MODEL, messages=ASK["messages"]).input_tokens == prompt


def test_streams() -> None:
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


def test_tools() -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tool = {"name": "weather", "input_schema": schema}
    found = client.messages.create(**{**ASK, "max_tokens": 200}, tools=[tool], tool_choice={"type": "tool", "name": "weather"})
    call = next(block for block in found.content if block.type == "tool_use")
    assert call.input == {"city": "Rome"} and found.stop_reason == "tool_use"


def test_models_and_errors() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**ASK, "max_tokens": 0})
