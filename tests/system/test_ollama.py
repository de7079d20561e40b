"""Ollama's API with canary: by plain HTTP with the shapes that its clients expect, and by its own client."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.canary import calling
from tests.system.served import NAME, Served

pytestmark = pytest.mark.xdist_group("canary")

WEATHER = next(tool.schema() for tool in calling.TOOLS if tool.name == "get_weather")
ASK = [{"role": "user", "content": "What is the weather in Lima?"}]
PLAIN = [{"role": "user", "content": "Repeat: dog cat"}]
GREEDY = {"temperature": 0, "num_predict": 60}


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared("canary", "--max-model-len", "4096")


def whole(server: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **{"model": NAME, "options": GREEDY, "stream": False, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.post(path, **{"model": NAME, "options": GREEDY, **body})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def openai(server: Served, **body: Any) -> dict[str, Any]:
    found = server.post("/v1/chat/completions", **{"temperature": 0, "max_tokens": 60, **body}).json()
    message: dict[str, Any] = found["choices"][0]["message"]
    return message


def test_chat(server: Served) -> None:
    said = openai(server, messages=PLAIN)["content"]
    found = whole(server, "/api/chat", messages=PLAIN)
    assert found["message"] == {"role": "assistant", "content": said} and found["done"] and found["done_reason"] == "stop"
    assert found["prompt_eval_count"] > 5 and found["eval_count"] > 1 and found["total_duration"] >= found["eval_duration"] > 0
    *parts, last = streamed(server, "/api/chat", messages=PLAIN, model=f"{NAME}:latest")
    assert "".join(part["message"]["content"] for part in parts) == said and not any(part["done"] for part in parts)
    assert last["done"] and last["eval_count"] == found["eval_count"] and last["model"] == f"{NAME}:latest"
    cut = whole(server, "/api/chat", messages=PLAIN, options={**GREEDY, "num_predict": 1})
    assert cut["done_reason"] == "length" and cut["eval_count"] == 1
    assert whole(server, "/api/chat")["done_reason"] == "load"


def test_tools_there_and_back(server: Served) -> None:
    message = whole(server, "/api/chat", messages=ASK, tools=[WEATHER])["message"]
    [call] = message["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Lima"}} and not message["content"]
    parts = streamed(server, "/api/chat", messages=ASK, tools=[WEATHER])
    calls = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert [one["function"] for one in calls] == [call["function"]]
    after = whole(server, "/api/chat", tools=[WEATHER], messages=[
        *ASK, message, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}])
    assert after["message"]["content"]


def test_generate(server: Served) -> None:
    said = openai(server, messages=[{"role": "system", "content": "Be brief."}, *PLAIN])["content"]
    asked = {"prompt": PLAIN[0]["content"], "system": "Be brief."}
    assert whole(server, "/api/generate", **asked)["response"] == said
    *parts, last = streamed(server, "/api/generate", **asked)
    assert "".join(part["response"] for part in parts) == said and last["done"] and last["response"] == ""
    raw = server.post("/v1/completions", prompt="Repeat: dog", temperature=0, max_tokens=9).json()["choices"][0]["text"]
    assert whole(server, "/api/generate", prompt="Repeat: dog", raw=True, options={**GREEDY,
                                                                                   "num_predict": 9})["response"] == raw
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    found = whole(server, "/api/generate", prompt="Count", format=schema, options={**GREEDY, "num_predict": 100})
    assert json.loads(found["response"])["n"] in (1, 2)
    scored = whole(server, "/api/generate", **asked, logprobs=True, top_logprobs=2)
    assert len(scored["logprobs"]) == scored["eval_count"] and len(scored["logprobs"][0]["top_logprobs"]) == 2
    assert whole(server, "/api/generate")["done_reason"] == "load"


def test_embed(server: Served) -> None:
    wanted = [one["embedding"] for one in server.post("/v1/embeddings", input=["a dog", "a cat"]).json()["data"]]
    found = whole_embed(server, input=["a dog", "a cat"])
    np.testing.assert_allclose(found["embeddings"], wanted, atol=1e-5)
    assert found["prompt_eval_count"] > 1
    older = server.post("/api/embeddings", model=NAME, prompt="a dog").json()["embedding"]
    np.testing.assert_allclose(older, wanted[0], atol=1e-5)
    # Fewer characters than the context has tokens, and more tokens.
    assert whole_embed(server, input="\U0001f40d" * 3000)["prompt_eval_count"] > 4000
    long = "a dog " * 5000
    [found] = whole_embed(server, input=long)["embeddings"]
    np.testing.assert_allclose(found, whole_embed(server, input=long + "the end")["embeddings"][0], atol=1e-5)
    assert server.post("/api/embed", model=NAME, input=long, truncate=False).status_code == 400


def whole_embed(server: Served, **body: Any) -> dict[str, Any]:
    answer = server.post("/api/embed", model=NAME, **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_models(server: Served) -> None:
    [tag] = server.http.get("/api/tags").json()["models"]
    assert tag["name"] == tag["model"] == NAME and tag["size"] > 0 and len(tag["digest"]) == 64
    [loaded] = server.http.get("/api/ps").json()["models"]
    assert loaded["name"] == NAME and loaded["context_length"] == 4096
    shown = server.post("/api/show", model=NAME).json()
    assert {"completion", "tools"} <= set(shown["capabilities"]) and "messages" in shown["template"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert server.http.get("/api/version").json()["version"]


@pytest.mark.parametrize("path, body, status, word", [
    ("/api/chat", {"model": "other", "messages": PLAIN}, 404, "other"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "text only"),
    ("/api/chat", {"messages": PLAIN, "options": {"mirostat": 1}}, 400, "mirostat"),
    ("/api/chat", {"messages": PLAIN, "options": {"colour": 1}}, 400, "colour"),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "insertion"),
    ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
    ("/api/pull", {"model": "llama3"}, 501, "penstock serve"),
])
def test_refusals(server: Served, path: str, body: dict[str, Any], status: int, word: str) -> None:
    answer = server.post(path, **{"model": NAME, **body})
    assert answer.status_code == status and word in answer.json()["error"], answer.text


def test_options_of_the_host_are_named(server: Served) -> None:
    answer = server.post("/api/generate", model=NAME, prompt="x", stream=False, options={"num_ctx": 4096, "num_predict": 1})
    assert answer.headers["x-penstock-ignored"] == "options.num_ctx"


def test_official_client(server: Served) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    said = openai(server, messages=PLAIN)["content"]
    assert client.chat(model=NAME, messages=PLAIN, options=GREEDY).message.content == said
    parts = list(client.chat(model=NAME, messages=PLAIN, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == said and parts[-1].done
    call = client.chat(model=NAME, messages=ASK, options=GREEDY, tools=[WEATHER]).message.tool_calls[0]
    assert call.function.name == "get_weather" and call.function.arguments == {"city": "Lima"}
    assert client.generate(model=NAME, prompt="Repeat: dog cat", options=GREEDY).response == said
    assert len(client.embed(model=NAME, input=["a", "b"]).embeddings) == 2
    assert client.list().models[0].model == NAME and client.ps().models[0].model == NAME
    assert "completion" in client.show(NAME).capabilities
    with pytest.raises(ollama.ResponseError, match="not served"):
        client.chat(model="other", messages=PLAIN)
