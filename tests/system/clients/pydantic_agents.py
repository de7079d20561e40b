"""pydantic-ai: agents with a structured output by a tool and by a schema, and with a tool of their own."""

import os

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


PROVIDER = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
MODEL = OpenAIChatModel(os.environ["PENSTOCK_MODEL"], provider=PROVIDER)
SETTINGS = ModelSettings(max_tokens=200, temperature=0.0)


@pytest.mark.parametrize("way", [ToolOutput, NativeOutput])
def test_structured_output(way: type) -> None:
    agent = Agent(MODEL, output_type=way(Person), model_settings=SETTINGS)
    assert isinstance(agent.run_sync("Ann is 37 years old.").output, Person)


def test_a_tool_is_called_and_its_result_goes_back() -> None:
    agent = Agent(MODEL, model_settings=SETTINGS)
    asked: list[str] = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Current temperature in a city"""
        asked.append(city)
        return "18 degrees"

    assert agent.run_sync("What is the weather in Lima?").output
    assert asked == ["Lima"]


def test_text_in_a_stream() -> None:
    async def run() -> str:
        async with Agent(MODEL, model_settings=SETTINGS).run_stream("Say hello.") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    import asyncio

    assert asyncio.run(run())
