"""Tools over HTTP with canary: calls in OpenAI's shape, streamed and not, chosen by the model or forced."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from penstock.canary import calling
from penstock.cli.main import main
from tests.system.served import NAME, Served, served

pytestmark = pytest.mark.xdist_group("canary")

SHARE = 0.99


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared("canary", "--max-model-len", "4096")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


WEATHER = next(tool.schema() for tool in calling.TOOLS if tool.name == "get_weather")
TIMER = next(tool.schema() for tool in calling.TOOLS if tool.name == "set_timer")
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Lima?"}]


def gathered(stream: Any) -> tuple[str, list[dict[str, str]], str | None]:
    """(content, calls, finish_reason) of a stream, checking that it comes as OpenAI's does."""
    content, calls, finish = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.id is not None:
                    assert part.index == len(calls) and part.type == "function" and part.function.name
                    calls.append({"name": part.function.name, "arguments": ""})
                else:
                    assert part.function.name is None
                calls[part.index]["arguments"] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    return content, calls, finish


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_the_message_of_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    """An empty text and a list of calls, as vLLM's clients read it; a call that the limit cut off is none."""
    asked: dict[str, Any] = {"model": NAME, "messages": ASK, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == "" and len(whole.message.tool_calls) == 1 and whole.finish_reason == "tool_calls"
    cut = client.chat.completions.create(**asked, max_tokens=2).choices[0]
    assert (cut.message.content, cut.message.tool_calls, cut.finish_reason) == ("", None, "length")
    assert gathered(client.chat.completions.create(**asked, max_tokens=2, stream=True)) == ("", [], "length")


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_canary_calls_the_right_tool(client: openai.OpenAI, streamed: bool) -> None:
    items = [calling.call(Random(seed), 0.3) for seed in range(40)]
    good = 0
    for item in items:
        how: Any = {"model": NAME, "messages": item.messages, "tools": list(item.tools), "temperature": 0}
        if streamed:
            content, calls, finish = gathered(client.chat.completions.create(**how, stream=True))
        else:
            choice = client.chat.completions.create(**how).choices[0]
            content, finish = choice.message.content or "", choice.finish_reason
            calls = [{"name": call.function.name, "arguments": call.function.arguments}
                     for call in choice.message.tool_calls or ()]
        wanted = json.loads(item.answer.split("\n")[1])
        good += (not content and finish == "tool_calls" and
                 [(call["name"], json.loads(call["arguments"])) for call in calls] == [(wanted["name"], wanted["arguments"])])
    assert good >= SHARE * len(items), f"{good} of {len(items)}"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_timer"}},
                                    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                                        {"type": "function", "function": {"name": "set_timer"}}]}}])
@pytest.mark.parametrize("temperature", [0, 2])
def test_a_forced_call_cannot_fail(client: openai.OpenAI, choice: Any, temperature: float) -> None:
    how: Any = {"model": NAME, "messages": [{"role": "user", "content": "Repeat: dog"}], "tools": [WEATHER, TIMER],
                "tool_choice": choice, "temperature": temperature, "seed": 1, "parallel_tool_calls": False}
    found = client.chat.completions.create(**how, max_tokens=400).choices[0]
    if found.finish_reason == "length":
        return
    [call] = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and not found.message.content
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "set_timer" or choice == "required"
    assert arguments.keys() == ({"minutes"} if call.function.name == "set_timer" else {"city"})
    content, calls, _ = gathered(client.chat.completions.create(**how, max_tokens=400, stream=True))
    assert not content and calls == [{"name": call.function.name, "arguments": call.function.arguments}]


def test_custom_tools_get_text(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "note", "description": "Write a note"}}
    found = client.chat.completions.create(model=NAME, messages=ASK, tools=[tool], tool_choice={
        "type": "custom", "custom": {"name": "note"}}, temperature=0, max_tokens=200).choices[0]
    if found.finish_reason != "length":
        [call] = found.message.tool_calls
        assert call.type == "custom" and call.custom.name == "note" and isinstance(call.custom.input, str)


def test_without_tools_a_call_is_text(server: Served) -> None:
    plain = server.post("/v1/chat/completions", messages=ASK, tools=[WEATHER], tool_choice="none", temperature=0).json()
    assert "tool_calls" not in plain["choices"][0]["message"] and plain["choices"][0]["finish_reason"] != "tool_calls"


def test_a_call_that_breaks_off_is_text_with_a_flag(server: Served) -> None:
    body: dict[str, Any] = {"messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 16}
    [choice] = server.post("/v1/chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["x_penstock"] == {"malformed_tool_call": True}
    assert choice["message"]["content"].startswith("<tool_call>") and "tool_calls" not in choice["message"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"max_thinking_tokens": -5}, "max_thinking_tokens")])
def test_what_cannot_be_honoured_is_refused(server: Served, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/chat/completions", messages=ASK, tools=[WEATHER], **fields)
    assert answer.status_code == 400 and param in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])


CODES: Any = {"type": "function", "function": {"name": "get_weather", "description": "Current temperature in a city",
                                                "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"], "additionalProperties": False}}}
"""The schema of a tool that canary calls with other arguments, if nobody holds it to them."""


def strict(tool: Any) -> Any:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.mark.parametrize("streamed", [False, True])
def test_strict_tools_are_enforced_under_auto(client: openai.OpenAI, streamed: bool) -> None:
    def called(tool: Any, **more: Any) -> tuple[str, list[dict[str, str]], str | None]:
        how: Any = {"model": NAME, "messages": ASK, "tools": [tool], "temperature": 0, "max_tokens": 300, **more}
        if streamed:
            return gathered(client.chat.completions.create(**how, stream=True))
        found = client.chat.completions.create(**how).choices[0]
        return found.message.content or "", [{"name": call.function.name, "arguments": call.function.arguments}
                                             for call in found.message.tool_calls or ()], found.finish_reason
    _, [free], _ = called(CODES)
    assert json.loads(free["arguments"]).keys() != {"city", "days"}
    content, [held], finish = called(strict(CODES))
    arguments = json.loads(held["arguments"])
    assert not content and finish == "tool_calls" and held["name"] == "get_weather"
    assert arguments.keys() == {"city", "days"} and arguments["city"] in ("Rome", "Oslo") and type(arguments["days"]) is int


def test_custom_tools_have_the_format_of_their_regex(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "custom": {"name": "note", "description": "Write a note", "format": {
        "type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-Z]{3}-[0-9]{2}"}}}}
    found = client.chat.completions.create(model=NAME, messages=ASK, tools=[tool], tool_choice={
        "type": "custom", "custom": {"name": "note"}}, temperature=1, seed=1, max_tokens=100).choices[0]
    [call] = found.message.tool_calls
    assert re.fullmatch("[A-Z]{3}-[0-9]{2}", call.custom.input)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_custom_tools_have_the_format_of_their_lark_grammar(client: openai.OpenAI, choice: Any) -> None:
    def tool(grammar: str) -> Any:
        return {"type": "custom", "custom": {"name": "note", "description": "Write a note", "format": {
            "type": "grammar", "grammar": {"syntax": "lark", "definition": grammar}}}}

    lines = 'start: LINE ("\\n" LINE)?\nLINE: /"[a-z]{1,5}"/'
    for seed in range(3):
        found = client.chat.completions.create(model=NAME, messages=ASK, tools=[tool(lines)], tool_choice=choice, temperature=1,
                                               seed=seed, max_tokens=100).choices[0]
        assert choice == "auto" or found.message.tool_calls
        for call in found.message.tool_calls or ():
            assert re.fullmatch('"[a-z]{1,5}"(\n"[a-z]{1,5}")?', call.custom.input), call
    for grammar in ("start: ~/a/", "start: other"):
        with pytest.raises(openai.BadRequestError, match="grammar"):
            client.chat.completions.create(model=NAME, messages=ASK, tools=[tool(grammar)], tool_choice=choice)


def test_constrain_tools_holds_every_call_whatever_the_dialect() -> None:
    with served("canary", "--max-model-len", "2048", "--constrain-tools", "auto") as server:
        [choice] = server.post("/v1/chat/completions", messages=ASK, tools=[CODES], temperature=0,
                               max_tokens=300).json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}
    with served("canary", "--max-model-len", "2048", "--tool-call-parser", "llama3_json") as server:
        # Calls in this dialect begin like text; canary writes another, so its answer is text.
        [choice] = server.post("/v1/chat/completions", messages=ASK, tools=[strict(CODES)], temperature=0,
                               max_tokens=20).json()["choices"]
        assert choice["message"]["content"] and "tool_calls" not in choice["message"]


class GetWeather(BaseModel):
    """Current temperature in a city"""

    city: str
    days: int


def test_the_sdks_helpers_parse_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    how: Any = {"model": NAME, "messages": ASK, "tools": [tool], "temperature": 0, "max_tokens": 300}
    [call] = client.chat.completions.parse(**how).choices[0].message.tool_calls or ()
    found = call.function.parsed_arguments
    assert isinstance(found, GetWeather) and found.city == "Lima"
    with client.chat.completions.stream(**how) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.parsed_arguments == found
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 1 and "".join(event.arguments_delta for event in pieces) == streamed.function.arguments
    assert [event.name for event in events if event.type == "tool_calls.function.arguments.done"] == ["get_weather"]


def test_generate_passes_tools_through(server: Served, tmp_path: Path) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "temperature": 0, "max_tokens": 100}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["generate", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--url", server.url, "--quiet"]) == 0
    [answer] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    [choice] = answer["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Lima"}'}


def test_chat_shows_calls_and_asks_for_results(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ASK[0]['content']}\n21 degrees\n"))
    assert main(["chat", "--url", server.url, "--tools", str(tmp_path / "tools.json"), "--temperature", "0",
                 "--max-tokens", "60"]) == 0
    call, *answer = capsys.readouterr().out.splitlines()
    assert call == 'get_weather({"city": "Lima"})' and any(answer)


def test_strict_tools_where_the_prompt_begins_the_thinking() -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if tools %}<tool_call>{% endif %}<think>"
    body: dict[str, Any] = {"messages": ASK, "tools": [strict(CODES)], "temperature": 0, "max_tokens": 20}
    with served("canary", "--max-model-len", "512", "--chat-template", template) as server:
        for fields in body, {"messages": ASK, "temperature": 0, "max_tokens": 20, "thinking_token_budget": -1}:
            answer = server.post("/v1/chat/completions", **fields).json()
            assert answer["choices"][0]["message"]["reasoning"]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20
        for more, param in ({"max_thinking_tokens": 5}, "max_thinking_tokens"), ({"use_beam_search": True}, "tools"):
            answer = server.post("/v1/chat/completions", **body, **more)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
            assert "cannot be honoured" in answer.json()["error"]["message"]
