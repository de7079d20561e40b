"""Anthropic's messages with canary: by plain HTTP with the shapes that its clients expect, and by its own client."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.canary import calling
from tests.system.served import NAME, Served, served

WEATHER = next(tool.schema()["function"] for tool in calling.TOOLS if tool.name == "get_weather")
TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
ASK = [{"role": "user", "content": "What is the weather in Lima?"}]
PLAIN = [{"role": "user", "content": "Repeat: dog cat"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("canary", "--max-model-len", "2048", "--api-key", "secret") as server:
        server.http.headers["x-api-key"] = "secret"
        yield server


def ask(server: Served, messages: list[Any], **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", **{"model": NAME, "max_tokens": 100, "temperature": 0, "messages": messages, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Served, messages: list[Any], **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    body = {"model": NAME, "max_tokens": 100, "temperature": 0, "messages": messages, "stream": True, **body}
    text = server.post("/v1/messages", **body).text
    pairs = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == data["type"] for name, data in events)
    return [data for _, data in events if data["type"] != "ping"]


def refusal(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error" and body["error"].keys() == {"type", "message"}
    found: dict[str, Any] = body["error"]
    return found


def test_text_whole_and_streamed(server: Served) -> None:
    whole = ask(server, PLAIN)
    assert whole["type"] == "message" and whole["role"] == "assistant" and whole["id"].startswith("msg_")
    assert whole["model"] == NAME and whole["stop_reason"] == "end_turn" and whole["stop_sequence"] is None
    [block] = whole["content"]
    assert block["type"] == "text" and "dog" in block["text"]
    start, begin, *deltas, end, change, stop = streamed(server, PLAIN)
    assert [one["type"] for one in (start, begin, end, change, stop)] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {one["type"] for one in deltas} == {"content_block_delta"} and {one["index"] for one in deltas} == {0}
    assert "".join(one["delta"]["text"] for one in deltas) == block["text"]
    assert change["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert change["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


def test_tools_there_and_back(server: Served) -> None:
    whole = ask(server, ASK, tools=[TOOL])
    assert whole["stop_reason"] == "tool_use"
    [call] = whole["content"]
    assert call["type"] == "tool_use" and call["name"] == "get_weather" and call["input"] == {"city": "Lima"}
    events = streamed(server, ASK, tools=[TOOL])
    begin = next(one for one in events if one["type"] == "content_block_start")["content_block"]
    assert begin == {"type": "tool_use", "id": begin["id"], "name": "get_weather", "input": {}}
    parts = [one["delta"]["partial_json"] for one in events if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"city": "Lima"} and events[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    after = ask(server, [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}], tools=[TOOL])
    # The same conversation in OpenAI's form has the same prompt.
    said = {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": json.dumps(call["input"])}}
    same = server.post("/v1/chat/completions", messages=[
        *ASK, {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}], tools=[{"type": "function", "function": WEATHER}],
        temperature=0, max_tokens=100).json()
    assert after["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    forced = ask(server, PLAIN, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert [one["type"] for one in forced["content"]] == ["tool_use"]
    kept = ask(server, ASK, tools=[TOOL], tool_choice={"type": "none"})
    assert all(one["type"] == "text" for one in kept["content"])


def test_ends(server: Served) -> None:
    text = ask(server, PLAIN)["content"][0]["text"]
    cut = ask(server, PLAIN, stop_sequences=[text[2:5]])
    assert cut["stop_reason"] == "stop_sequence" and cut["stop_sequence"] == text[2:5] and cut["content"][0]["text"] == text[:2]
    assert ask(server, PLAIN, max_tokens=1)["stop_reason"] == "max_tokens"
    on = ask(server, [*PLAIN, {"role": "assistant", "content": text[:3]}])
    assert on["content"][0]["text"] == text[3:], "the answer goes on where the client began it"


def test_count_and_cache(server: Served) -> None:
    system = [{"type": "text", "text": "You repeat words. " * 20, "cache_control": {"type": "ephemeral"}}]
    counted = server.post("/v1/messages/count_tokens", model=NAME, messages=PLAIN, system=system).json()["input_tokens"]
    first, again = (ask(server, PLAIN, system=system)["usage"] for _ in range(2))
    for usage in (first, again):
        parts = (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"])
        assert sum(parts) == counted and min(parts) >= 0
    assert first["cache_creation_input_tokens"] > 50 and again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    plain = server.post("/v1/messages/count_tokens", model=NAME, messages=PLAIN).json()["input_tokens"]
    assert plain < counted


@pytest.mark.parametrize("body, status, kind, word", [
    ({"model": "other"}, 404, "not_found_error", "'other'"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"colour": 1}, 400, "invalid_request_error", "colour"),
    ({"container": "c"}, 400, "invalid_request_error", "does not run code"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error", "web_search"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error", "image"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, 400,
     "invalid_request_error", "tool_use"),
    ({"max_tokens": 5000}, 400, "invalid_request_error", "max_tokens"),
])
def test_refusals(server: Served, body: dict[str, Any], status: int, kind: str, word: str) -> None:
    answer = server.post("/v1/messages", **{"model": NAME, "max_tokens": 9, "messages": PLAIN, **body})
    error = refusal(answer)
    assert answer.status_code == status and error["type"] == kind and word in error["message"], error


def test_keys(server: Served) -> None:
    for headers, status in (({}, 401), ({"x-api-key": "wrong"}, 401), ({"authorization": "Bearer secret"}, 200)):
        answer = httpx.post(server.url + "/v1/messages", headers=headers, timeout=60,
                            json={"model": NAME, "max_tokens": 2, "messages": PLAIN})
        assert answer.status_code == status
        if status == 401:
            assert refusal(answer)["type"] == "authentication_error"


def test_official_client(server: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
    greedy: Any = {"extra_body": {"temperature": 0}}
    how: Any = {"model": NAME, "max_tokens": 100, "messages": PLAIN, **greedy}
    whole = client.messages.create(**how)
    with client.messages.stream(**how) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text and final.usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(model=NAME, max_tokens=100, messages=ASK, tools=[TOOL], **greedy) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and final.content[0].input == {"city": "Lima"}
    [model] = client.models.list().data
    assert model.id == model.display_name == NAME and client.models.retrieve(NAME).created_at.year >= 2026
    assert client.messages.count_tokens(model=NAME, messages=PLAIN).input_tokens > 3
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**how, "max_tokens": 5000})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**how, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.create(**how)


BATCH = [{"custom_id": word, "params": {"model": NAME, "max_tokens": 20, "temperature": 0, "messages": [
    {"role": "user", "content": f"Repeat: {word} cat"}]}} for word in ("dog", "sun", "sea")]


def batch_ended(server: Served, name: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (found := server.http.get(f"/v1/messages/batches/{name}").json())["processing_status"] != "ended":
        assert time.monotonic() < until and found["results_url"] is None, found
        time.sleep(0.05)
    return dict(found)


def test_message_batches_are_listed_in_pages_and_apart_from_openais(server: Served) -> None:
    made = [server.post("/v1/messages/batches", requests=BATCH[:1]).json()["id"] for _ in range(3)]
    for name in made:
        batch_ended(server, name)

    def page(query: str) -> list[str]:
        return [one["id"] for one in server.http.get(f"/v1/messages/batches?{query}").json()["data"]]

    newest = made[::-1]
    assert page("limit=3") == newest
    assert page(f"limit=1&after_id={newest[0]}") == newest[1:2] and page(f"limit=5&after_id={newest[1]}")[:1] == newest[2:]
    assert page(f"limit=1&before_id={newest[2]}") == newest[1:2] and page(f"limit=5&before_id={newest[2]}") == newest[:2]
    assert "both given" in refusal(server.http.get("/v1/messages/batches?after_id=a&before_id=b"))["message"]
    assert not [one for one in server.http.get("/v1/batches").json()["data"] if one["id"] in made]
    for name in made:
        server.http.delete(f"/v1/messages/batches/{name}")


def test_a_message_batch_has_a_result_for_each_request(server: Served) -> None:
    wrong = {"custom_id": "wrong", "params": {"model": NAME, "max_tokens": 0, "messages": PLAIN}}
    made = server.post("/v1/messages/batches", requests=[*BATCH, wrong]).json()
    assert made["id"].startswith("msgbatch_") and made["type"] == "message_batch" and made["request_counts"]["processing"] == 4
    found = batch_ended(server, made["id"])
    assert found["request_counts"] == {"processing": 0, "succeeded": 3, "errored": 1, "canceled": 0, "expired": 0}
    assert found["ended_at"].endswith("Z") and found["results_url"] == f"{server.url}/v1/messages/batches/{made['id']}/results"
    lines = server.http.get(found["results_url"]).text.splitlines()
    results = {one["custom_id"]: one["result"] for one in map(json.loads, lines)}
    for one in BATCH:
        alone = ask(server, one["params"]["messages"], max_tokens=20)
        assert results[one["custom_id"]]["message"]["content"] == alone["content"]
        assert results[one["custom_id"]]["type"] == "succeeded"
    assert results["wrong"]["type"] == "errored" and results["wrong"]["error"]["error"]["type"] == "invalid_request_error"
    listed = server.http.get("/v1/messages/batches?limit=1").json()
    assert [one["id"] for one in listed["data"]] == [made["id"]] and listed["data"][0]["request_counts"]["succeeded"] == 3
    deleted = server.http.delete(f"/v1/messages/batches/{made['id']}").json()
    assert deleted == {"id": made["id"], "type": "message_batch_deleted"}
    assert refusal(server.http.get(f"/v1/messages/batches/{made['id']}"))["type"] == "not_found_error"
    assert server.http.get("/v1/files").json()["data"] == []


def test_a_message_batch_can_be_cancelled(server: Served) -> None:
    long = [{"custom_id": f"r{place}", "params": {**BATCH[0]["params"], "max_tokens": 1500, "messages": [
        {"role": "user", "content": f"Write a long list {place}"}], "stop_sequences": ["\u0007"]}} for place in range(600)]
    made = server.post("/v1/messages/batches", requests=long).json()
    assert refusal(server.http.get(f"/v1/messages/batches/{made['id']}/results"))["message"] == "the batch has not ended"
    assert server.post(f"/v1/messages/batches/{made['id']}/cancel").json()["processing_status"] in ("canceling", "ended")
    found = batch_ended(server, made["id"])
    counts = found["request_counts"]
    assert counts["canceled"] > 0 and counts["canceled"] + counts["succeeded"] == 600 and found["cancel_initiated_at"]
    kinds = Counter(json.loads(line)["result"]["type"] for line in server.http.get(found["results_url"]).text.splitlines())
    assert kinds["canceled"] == counts["canceled"]
    assert "already" in refusal(server.post(f"/v1/messages/batches/{made['id']}/cancel"))["message"]
    twice = server.post("/v1/messages/batches", requests=[BATCH[0], BATCH[0]])
    assert twice.status_code == 400 and "requests[1]" in refusal(twice)["message"]
    unnamed = server.post("/v1/messages/batches", requests=[{"custom_id": "a b", "params": {}}])
    assert unnamed.status_code == 400


def test_the_document_describes_errors_as_they_are(server: Served) -> None:
    """Each dialect's own: Anthropic's have no param, Ollama's are a text."""
    paths = server.http.get("/openapi.json").json()["paths"]
    for path, kind in (("/v1/messages", dict), ("/v1/messages/batches", dict), ("/api/embed", str), ("/v1/completions", dict)):
        schema = paths[path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = server.http.get("/openapi.json").json()["components"]["schemas"]["Error"]
        error = server.http.post(path, content=b"{", headers={"Content-Type": "application/json"}).json()
        assert list(schema["properties"]) == schema["required"] == list(error) and isinstance(error["error"], kind)
        inner = schema["properties"]["error"]
        assert inner["type"] == (["string", "null"] if kind is str else "object")
        assert kind is str or inner["required"] == list(error["error"])
