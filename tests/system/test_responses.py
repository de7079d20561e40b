"""OpenAI's Responses API with canary, by the official client: every event in order, and what is done with stored responses."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.canary import calling
from tests.system.served import NAME, Served, error_of, served

WEATHER = next(tool.schema()["function"] for tool in calling.TOOLS if tool.name == "get_weather")
TOOL: Any = {"type": "function", "strict": False, **WEATHER}
PLAIN = "Repeat: dog cat"
ASK = "What is the weather in Lima?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served("canary", "--max-model-len", "2048", "--store", str(folder), "--api-key", "one,two") as server:
        server.http.headers["authorization"] = "Bearer one"
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="one", max_retries=0)


def ask(client: openai.OpenAI, given: Any = PLAIN, **how: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": given, "temperature": 0, "max_output_tokens": 60, **how})


def chat(client: openai.OpenAI, messages: list[Any], **how: Any) -> str:
    found = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=60, **how)
    return found.choices[0].message.content or ""


def test_a_response_is_the_chat_endpoints_answer(client: openai.OpenAI) -> None:
    found = ask(client, instructions="Be brief.", metadata={"a": "b"})
    said = chat(client, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PLAIN}])
    assert found.output_text == said and found.status == "completed" and found.object == "response"
    [message] = found.output
    assert message.type == "message" and message.status == "completed" and message.content[0].annotations == []
    assert found.metadata == {"a": "b"} and found.instructions == "Be brief." and found.error is None
    usage = found.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 0
    items = [{"role": "user", "content": [{"type": "input_text", "text": PLAIN}]}]
    assert ask(client, items, instructions="Be brief.").output_text == said
    cut = ask(client, max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_events_in_order(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert names == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
                     *["response.output_text.delta"] * len(deltas), "response.output_text.done", "response.content_part.done",
                     "response.output_item.done", "response.completed"]
    whole = ask(client).output_text
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == events[-4].text == last.output_text == whole
    assert {event.item_id for event in deltas} == {last.output[0].id} == {events[2].item.id}
    assert events[2].item.content == [] and events[2].item.status == "in_progress" and events[0].response.output == []


def test_tools_there_and_back(client: openai.OpenAI) -> None:
    found = ask(client, ASK, tools=[TOOL])
    [call] = found.output
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == {"city": "Lima"}
    events = list(ask(client, ASK, tools=[TOOL], stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = ask(client, [result], previous_response_id=found.id, tools=[TOOL])
    said = [{"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]
    same = chat(client, [{"role": "user", "content": ASK}, {"role": "assistant", "content": None, "tool_calls": said},
                         {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}],
                tools=[{"type": "function", "function": WEATHER}])
    assert after.output_text == same
    # The same without anything stored: the client sends back what it got.
    alone = ask(client, [{"role": "user", "content": ASK}, call.model_dump(), result], tools=[TOOL], store=False)
    assert alone.output_text == same
    forced = ask(client, PLAIN, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}, max_output_tokens=200)
    assert [item.type for item in forced.output] == ["function_call"]
    custom: Any = {"type": "custom", "name": "note", "description": "Write a note"}
    events = list(ask(client, ASK, tools=[custom], tool_choice={"type": "custom", "name": "note"}, stream=True,
                      max_output_tokens=300))
    if events[-1].type == "response.completed":
        [note] = events[-1].response.output
        assert note.type == "custom_tool_call" and isinstance(note.input, str)
        assert [event.type for event in events if "custom_tool" in event.type] == [
            "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]


def test_stored_responses(client: openai.OpenAI, server: Served) -> None:
    first = ask(client)
    assert client.responses.retrieve(first.id).model_dump() == first.model_dump()
    again = ask(client, "Repeat: sun", previous_response_id=first.id)
    assert again.output_text == chat(client, [{"role": "user", "content": PLAIN},
                                              {"role": "assistant", "content": first.output_text},
                                              {"role": "user", "content": "Repeat: sun"}])
    [item] = client.responses.input_items.list(again.id).data
    assert item.content[0].text == "Repeat: sun"
    other = openai.OpenAI(base_url=server.url + "/v1", api_key="two", max_retries=0)
    for wrong in (lambda: other.responses.retrieve(first.id), lambda: ask(other, previous_response_id=first.id),
                  lambda: client.responses.retrieve("resp_none"),
                  lambda: client.responses.retrieve(ask(client, store=False).id)):
        with pytest.raises(openai.NotFoundError):
            wrong()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    assert ask(client, "Repeat: sun", previous_response_id=again.id).status == "completed", "a chain outlives its first link"
    count = client.responses.input_tokens.count(model=NAME, input="Repeat: sun", previous_response_id=again.id)
    longer = ask(client, "Repeat: sun", previous_response_id=again.id).usage
    assert count.input_tokens == longer.input_tokens


def test_background(folder: Path, client: openai.OpenAI) -> None:
    begun = ask(client, background=True)
    assert begun.status in ("queued", "in_progress") and begun.output == []
    until = time.monotonic() + 20
    while (found := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert found.status == "completed" and found.output_text == ask(client).output_text
    assert client.responses.cancel(begun.id).status == "completed"
    events = list(ask(client, background=True, stream=True))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    again = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=2))
    assert [event.sequence_number for event in again] == list(range(3, len(events)))
    long = client.responses.create(model=NAME, input=PLAIN, background=True, previous_response_id=begun.id,
                                   extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError, match="is not finished"):
        ask(client, previous_response_id=long.id)
    with contextlib.closing(sqlite3.connect(f"file:{folder}/penstock.sqlite3?mode=ro", uri=True)) as store:
        [[kept]] = store.execute("select body from objects where id=?", [long.id])
    assert len(json.loads(kept)["context"]) == 3, "also if the server ends now"
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == "cancelled" and client.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(ask(client).id)
    with pytest.raises(openai.BadRequestError, match="store"):
        ask(client, background=True, store=False)


def test_conversations(client: openai.OpenAI, server: Served) -> None:
    made = client.conversations.create(items=[{"type": "message", "role": "user", "content": PLAIN}], metadata={"t": "x"})
    assert client.conversations.retrieve(made.id).metadata == {"t": "x"}
    first = ask(client, "Repeat: sun", conversation=made.id)
    assert first.conversation.id == made.id
    items = client.conversations.items.list(made.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant"] and items[2].content[0].text == first.output_text
    second = ask(client, "Repeat: red", conversation={"id": made.id})
    said = [{"role": item.role, "content": item.content if isinstance(item.content, str) else item.content[0].text}
            for item in items]
    assert second.output_text == chat(client, [*said, {"role": "user", "content": "Repeat: red"}])
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    added = client.conversations.items.create(made.id, items=[{"type": "message", "role": "user", "content": "Hi"}])
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id).role == "user"
    page = server.http.get(f"/v1/conversations/{made.id}/items?limit=2&order=asc").json()
    rest = server.http.get(f"/v1/conversations/{made.id}/items?order=asc&after={page['last_id']}").json()
    assert page["has_more"] and len(page["data"]) == 2 and not rest["has_more"] and len(rest["data"]) == 3
    assert client.conversations.update(made.id, metadata={"t": "y"}).metadata == {"t": "y"}
    client.conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        ask(client, conversation=made.id)


def test_structure_and_probabilities(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"animal": {"enum": ["dog", "cat"]}}, "required": ["animal"],
              "additionalProperties": False}
    found = ask(client, text={"format": {"type": "json_schema", "name": "a", "schema": schema}}, max_output_tokens=200)
    assert json.loads(found.output_text)["animal"] in ("dog", "cat")
    scored = ask(client, include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0]
    assert "".join(line.token for line in scored.logprobs).startswith(scored.text)
    assert all(len(line.top_logprobs) == 2 for line in scored.logprobs)


@pytest.mark.parametrize("body, param", [
    ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input"), ({"input": [{"type": "function_call"}]}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools"), ({"prompt": {"id": "p"}}, "prompt"), ({"colour": 1}, "colour"),
    ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"), ({"max_output_tokens": 5000}, None),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "id"), ({"model": "other"}, "model"),
    ({"input": [{"role": "user", "content": "a", "id": []}]}, "input"), ({"input": [{"type": {}, "content": "a"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": ["a"]}]}, "input"), ({"input": [{"role": 5, "content": "a"}]}, "input"),
    ({"input": []}, "input"), ({"input": None}, "input"),
])
def test_refusals(server: Served, body: dict[str, Any], param: str | None) -> None:
    answer = server.post("/v1/responses", **{"model": NAME, "input": PLAIN, **body})
    error = error_of(answer)
    assert answer.status_code in (400, 404) and (param is None or (error["param"] or "").startswith(param)), error
    assert "$." not in error["message"], "fields are called as here"


def test_truncation(server: Served) -> None:
    long = [{"role": "user", "content": "Repeat: dog " * 400}, {"role": "user", "content": PLAIN}]
    refused = server.post("/v1/responses", model=NAME, input=[*long[:1] * 3, *long[1:]], max_output_tokens=20)
    assert error_of(refused)["code"] == "context_length_exceeded"
    found = server.post("/v1/responses", model=NAME, input=[*long[:1] * 3, *long[1:]], max_output_tokens=20, temperature=0,
                        truncation="auto").json()
    assert found["status"] in ("completed", "incomplete") and found["usage"]["input_tokens"] < 2000


def test_stored_objects_outlive_the_server(folder: Path, client: openai.OpenAI, server: Served) -> None:
    found = ask(client)
    with pytest.raises(AssertionError, match="another server uses the folder"):
        Served("canary", "--store", str(folder))
    server.stop()
    with served("canary", "--max-model-len", "2048", "--store", str(folder), "--api-key", "one,two") as again:
        client = openai.OpenAI(base_url=again.url + "/v1", api_key="one", max_retries=0)
        assert client.responses.retrieve(found.id).output_text == found.output_text
