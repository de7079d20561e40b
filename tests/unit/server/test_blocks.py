"""Blocks of an answer, and Anthropic's events of them: thinking, text and calls, however the text is cut."""

from __future__ import annotations

import json

import msgspec
import pytest

from penstock.core.request import Request, Span
from penstock.core.sampling import SamplingParams
from penstock.dialects.choice import by_name
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta
from penstock.server.anthropic.dialect import MessageAnswer
from penstock.server.blocks import Blocks

TEXT = ("<think>\nLima is in Peru.\n</think>\n\nLet me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": "
        "{\"city\": \"Lima\"}}\n</tool_call>\n<tool_call>\n"
        "{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def parser() -> Parser:
    return Parser(by_name("hermes"), TOOLS, prompt="", new_id=lambda kind: "call")


def deltas(text: str, size: int, finish: str = "stop") -> list[Delta]:
    parts = [text[at:at + size] for at in range(0, len(text), size)]
    return [Delta("r", 0, [1], finish if place == len(parts) - 1 else None, text=part, cached_tokens=3 if not place else 0)
            for place, part in enumerate(parts)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks(size: int) -> None:
    blocks = Blocks(parser())
    changes = [change for delta in deltas(TEXT, size) for change in blocks.push(delta.text, delta.finish_reason is not None)]
    assert [(block.kind, block.text.strip()) for block in blocks.all] == [
        ("reasoning", "Lima is in Peru."), ("text", "Let me look."), ("call", '{"city": "Lima"}'), ("call", '{"city": "Rome"}')]
    open_now = None
    for change in changes:
        # Blocks follow each other, and only the open one grows.
        assert (open_now is None) == (change.what == "begin") and (open_now in (None, change.block.index))
        open_now = None if change.what == "end" else change.block.index
    assert open_now is None and len([c for c in changes if c.what == "begin"]) == 4
    one = Blocks(parser(), one_call=True)
    one.push(TEXT, True)
    assert [block.kind for block in one.all] == ["reasoning", "text", "call"]


def message(shown: bool = True) -> MessageAnswer:
    request = Request("r", list(range(10)), SamplingParams(), retain=[Span(8)])
    return MessageAnswer("msg_1", "model", request, Blocks(parser()), shown)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_anthropic_events_add_up(size: int) -> None:
    streamed, whole = message(), message()
    events = [streamed.events([delta]) for delta in deltas(TEXT, size)]
    text = b"".join([*events, streamed.last_events()]).decode()
    found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    whole.add(deltas(TEXT, size))
    answer = msgspec.to_builtins(whole.whole())
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["stop_reason"] == "tool_use" and answer["content"][3]["input"] == {"city": "Rome"}
    # 10 tokens of prompt, of which 3 were read and 8 are marked to be kept.
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (2, 5, 3)
    blocks: list[dict[str, str]] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"type": event["content_block"]["type"], "text": ""})
        elif event["type"] == "content_block_delta":
            field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}.get(
                event["delta"]["type"])
            blocks[event["index"]]["text"] += event["delta"][field] if field else ""
    for block, wanted in zip(blocks, answer["content"], strict=True):
        assert block["type"] == wanted["type"]
        assert block["text"] == wanted.get("text", wanted.get("thinking", block["text"]))
    assert json.loads(blocks[3]["text"]) == {"city": "Rome"}
    assert found[-2]["usage"]["output_tokens"] == usage["output_tokens"] == len(deltas(TEXT, size))


def test_thinking_can_be_left_out() -> None:
    answer = message(shown=False)
    text = b"".join(answer.events([delta]) for delta in deltas(TEXT, 5)).decode()
    assert "thinking" not in text and '"index":0,"content_block":{"type":"text"' in text
    whole = message(shown=False)
    whole.add(deltas("<think>\nCut", 3, "length"))
    assert whole.whole().content == [] and whole.whole().stop_reason == "max_tokens"
