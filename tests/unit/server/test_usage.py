"""The tokens of reasoning that a chat's usage counts: the same however the answer is sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.core.request import Request, Timings
from penstock.core.sampling import SamplingParams
from penstock.dialects.choice import by_name
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta
from penstock.server.openai.answers import Namer
from penstock.server.openai.chat import ChatAnswer
from penstock.server.openai.protocol import ChatRequest

PIECES = ("<think>", "\n", "Lima", " is", " in", " Peru", ".", "\n", "</think>", "\n\n", "It", " is", ".")
"""Texts of tokens. Seven are reasoning and what comes before it; those between it and the content count as content."""


def answer(count: int = 1) -> ChatAnswer:
    body = msgspec.convert({"messages": [{"role": "user", "content": "?"}], "n": count, "stream": True,
                            "stream_options": {"include_usage": True}}, ChatRequest)
    request = Request("r", [1, 2, 3], SamplingParams(n=count))
    return ChatAnswer("id", "model", [request], body, Namer(None, False),
                      [lambda: Parser(by_name("hermes"), prompt="")], None)


def deltas(choice: int = 0) -> list[Delta]:
    return [Delta("r", choice, [place], "stop" if place == len(PIECES) - 1 else None, text=text)
            for place, text in enumerate(PIECES)]


def usage(events: bytes) -> dict[str, Any]:
    """Of a stream's last event."""
    found: dict[str, Any] = json.loads(events.decode().strip().split("\n\n")[-1].removeprefix("data: "))["usage"]
    return found


@pytest.mark.parametrize("size", [1, 2, 5, len(PIECES)])
def test_reasoning_is_counted_by_token(size: int) -> None:
    """A slow reader gets several tokens in an event."""
    streamed, whole = answer(), answer()
    for at in range(0, len(PIECES), size):
        streamed.events(deltas()[at:at + size])
        whole.add(deltas()[at:at + size])
    said = whole.whole()
    assert said.choices[0].message.reasoning == "Lima is in Peru." and said.choices[0].message.content == "It is."
    told = usage(streamed.last_events())
    assert told == msgspec.to_builtins(said.usage)
    assert told == {"prompt_tokens": 3, "completion_tokens": 13, "total_tokens": 16, "prompt_tokens_details": {
        "cached_tokens": 0, "audio_tokens": 0, "cached_tokens_by_tier": {}}, "completion_tokens_details": {
        "reasoning_tokens": 7, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}


def test_choices_add_up() -> None:
    streamed = answer(2)
    streamed.events([delta for pair in zip(deltas(0), deltas(1), strict=True) for delta in pair])
    assert usage(streamed.last_events())["completion_tokens_details"]["reasoning_tokens"] == 14


def test_drafts_are_counted_beside() -> None:
    whole = answer()
    last = deltas()
    last[-1].timings = Timings(drafts=2, drafted_tokens=6, accepted_tokens=3)
    whole.add(last)
    details = whole.whole().usage.completion_tokens_details
    assert (details.reasoning_tokens, details.accepted_prediction_tokens, details.rejected_prediction_tokens,
            details.acceptance_length) == (7, 3, 3, 2.5)
