"""The official ollama client: chat, generate, tools, schemas, embeddings, lists."""

from __future__ import annotations

import json
import os

import ollama
import pytest

MODEL = os.environ["PENSTOCK_MODEL"]
client = ollama.Client(host=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))
ASK = [{"role": "user", "content": "Repeat: dog cat"}]


def test_chat_and_generate() -> None:
    found = client.chat(MODEL, ASK, options={"temperature": 0})
    assert found.done and found.message.content and found.eval_count
    parts = list(client.chat(MODEL, ASK, stream=True, options={"temperature": 0}))
    assert "".join(part.message.content or "" for part in parts) == found.message.content and parts[-1].done
    assert client.generate(MODEL, "Repeat: dog cat", options={"temperature": 0}).response == found.message.content


def test_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(client.chat(MODEL, ASK, format=schema, think=False).message.content) == {"a": 7}


def test_vectors() -> None:
    first, second = client.embed(MODEL, ["a dog", "a cat"]).embeddings
    assert len(first) == len(second) and abs(sum(x * x for x in first) - 1) < 1e-3
    assert len(client.embeddings(MODEL, "a dog").embedding) == len(first)


def test_lists_and_errors() -> None:
    assert client.list().models[0].model == MODEL and client.ps().models[0].model == MODEL
    assert "completion" in client.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError):
        client.chat("nobody", ASK)
