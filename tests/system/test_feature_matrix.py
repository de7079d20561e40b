"""Pairs of features of a chat request: each pair works, with the effect of both, or is refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.canary import calling
from tests.system.served import Served, error_of

pytestmark = pytest.mark.xdist_group("canary")

WEATHER = next(tool.schema() for tool in calling.TOOLS if tool.name == "get_weather")
PLAIN = [{"role": "user", "content": "Repeat: dog cat sun"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}

Answer = dict[str, Any]


class Feature(NamedTuple):
    """Fields of a request, their words in a refusal, and what shows in an answer that they were honoured."""

    fields: dict[str, Any]
    words: tuple[str, ...]
    shown: Callable[[Answer], bool] = lambda answer: bool(answer["choices"])


def first(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer["choices"][0]
    return found


FEATURES: dict[str, Feature] = {
    "stream": Feature({"stream": True}, ("stream",)),
    "n": Feature({"n": 2}, ("n ", "n is"), lambda answer: len(answer["choices"]) == 2),
    "logprobs": Feature({"logprobs": True, "top_logprobs": 2}, ("logprobs",), lambda answer: all(
        len(line["top_logprobs"]) == 2 for line in first(answer)["logprobs"]["content"])),
    "named logprobs": Feature({"logprobs": True, "logprob_token_ids": [5, 300]}, ("logprob",), lambda answer: all(
        len(line["top_logprobs"]) == 2 for line in first(answer)["logprobs"]["content"])),
    "prompt_logprobs": Feature({"prompt_logprobs": 1}, ("prompt_logprobs",), lambda answer: len(answer["prompt_logprobs"]) > 3),
    "schema": Feature({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
                      ("response_format", "format", "structured_outputs", "grammar", "schema"),
                      lambda answer: first(answer)["finish_reason"] == "length" or bool(
                          first(answer)["message"].get("tool_calls"))
                      or json.loads(first(answer)["message"]["content"] or "{}").get("n") in (1, 2)),
    "regex": Feature({"structured_outputs": {"regex": "[ab]{4}"}}, ("structured_outputs", "format", "regex", "grammar"),
                     lambda answer: set(first(answer)["message"]["content"] or "a") <= set("ab")),
    "tools": Feature({"tools": [WEATHER]}, ("tools", "calls")),
    "forced": Feature({"tools": [WEATHER], "tool_choice": "required"}, ("tool_choice", "tools", "grammar"),
                      lambda answer: first(answer)["finish_reason"] == "length" or bool(
                          first(answer)["message"]["tool_calls"])),
    "reasoning": Feature({"reasoning_effort": "low", "include_reasoning": False}, ("reasoning",),
                         lambda answer: not first(answer)["message"].get("reasoning")),
    "stop": Feature({"stop": ["cat"]}, ("stop",), lambda answer: "cat" not in (first(answer)["message"]["content"] or "")),
    "seed": Feature({"seed": 7, "temperature": 1.0}, ("seed", "temperature")),
    "penalties": Feature({"presence_penalty": 0.5, "repetition_penalty": 1.1}, ("penalty",)),
    "bias": Feature({"logit_bias": {"5": -100}}, ("logit_bias",)),
    "beams": Feature({"use_beam_search": True, "beam_width": 3}, ("beam", "n ")),
    "ids": Feature({"return_token_ids": True}, ("token_ids",), lambda answer: bool(answer["prompt_token_ids"])),
    "min_tokens": Feature({"min_tokens": 3}, ("min_tokens",), lambda answer: answer["usage"]["completion_tokens"] >= 3),
    "salt": Feature({"cache_salt": "s"}, ("cache_salt",)),
    "retention": Feature({"cache_control": {"type": "ephemeral"}}, ("cache_control",)),
    "priority": Feature({"priority": 5}, ("priority",)),
    "usage": Feature({"stream_options": {"include_usage": True}, "stream": True}, ("stream_options", "stream")),
    "single call": Feature({"parallel_tool_calls": False, "tools": [WEATHER]}, ("parallel", "tools")),
    "truncated": Feature({"truncate_prompt_tokens": 6}, ("truncate",), lambda answer: answer["usage"]["prompt_tokens"] <= 6),
}


@pytest.fixture(scope="module")
def server(shared: Callable[..., Served]) -> Served:
    return shared("canary", "--max-model-len", "4096")


def gathered(text: str) -> Answer:
    """The whole answer that a stream adds up to."""
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert text.rstrip().endswith("data: [DONE]") and chunks and "error" not in chunks[-1], text[-300:]
    choices: dict[int, dict[str, Any]] = {}
    answer: Answer = {"usage": {"completion_tokens": 999, "prompt_tokens": 0}, "prompt_logprobs": [1] * 9}
    for chunk in chunks:
        answer.update({key: chunk[key] for key in ("usage", "prompt_token_ids") if chunk.get(key)})
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"message": {"content": "", "tool_calls": []}, "finish_reason": None,
                                                        "logprobs": {"content": []}})
            choice["message"]["content"] += part["delta"].get("content") or ""
            choice["message"]["tool_calls"] += part["delta"].get("tool_calls") or []
            if part["delta"].get("reasoning"):
                choice["message"]["reasoning"] = part["delta"]["reasoning"]
            choice["logprobs"]["content"] += (part.get("logprobs") or {}).get("content") or []
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
    return {**answer, "choices": [choices[place] for place in sorted(choices)]}


def check(server: Served, names: tuple[str, ...]) -> str:
    """Sends a request with these features: honoured | refused."""
    body: dict[str, Any] = {"messages": PLAIN, "max_tokens": 24, "temperature": 0}
    for name in names:
        body |= FEATURES[name].fields
    answer = server.post("/v1/chat/completions", **body)
    if answer.status_code == 400:
        error = error_of(answer)
        said = f"{error['message']} {error['param']}"
        assert any(word in said for name in names for word in FEATURES[name].words), (names, error)
        return "refused"
    assert answer.status_code == 200, (names, answer.text)
    found = gathered(answer.text) if body.get("stream") else answer.json()
    for name in names:
        if name == "schema" and "stop" in names:
            # The stop string may end the answer before its JSON is whole, or while the model still thinks.
            continue
        if name == "stop" and "min_tokens" in names:
            # A stop string before min_tokens does not count, as in vLLM.
            continue
        assert FEATURES[name].shown(found), (names, name, found)
    return "honoured"


PAIRS = list(itertools.combinations(sorted(FEATURES), 2))


def test_each_feature_alone(server: Served) -> None:
    assert {name: check(server, (name,)) for name in FEATURES} == dict.fromkeys(FEATURES, "honoured")


def test_some_pairs(server: Served) -> None:
    found = [check(server, pair) for pair in Random(3).sample(PAIRS, 40)]
    assert found.count("honoured") > 25


@pytest.mark.exhaustive
def test_all_pairs(server: Served) -> None:
    found = {pair: check(server, pair) for pair in PAIRS}
    refused = [pair for pair, how in found.items() if how == "refused"]
    print(f"{len(PAIRS)} pairs, {len(refused)} refused: {refused}")
    assert len(refused) < len(PAIRS) // 4
