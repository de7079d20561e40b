"""Answers read by the model's dialect: reasoning and tool calls as OpenAI's and vLLM's fields, whole or in chunks.

Owns these shapes and which tools a request offers; how text is read is `dialects/`'s."""

import json
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.errors import RequestError
from penstock.dialects.message import Arguments, CallBegins, CallEnds, CallFails, Content, Event, ReasoningText
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta
from penstock.server.openai.answers import CompletionDetails
from penstock.server.openai.protocol import ChatRequest, GrammarFormat, TokenizeRequest


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CalledCustom(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    input: str | None = None


class CallChunk(msgspec.Struct, omit_defaults=True):
    """A call, or in a chunk what is new of it."""

    index: int | UnsetType = UNSET
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallChunk] | None = None


class AnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same; clients read one or the other."""
    tool_calls: list[CallChunk] | UnsetType = UNSET


class Flags(msgspec.Struct, omit_defaults=True):
    """Fields of a choice that only this server has."""

    malformed_tool_call: bool = False
    """Something that began as a tool call was none; its text stands in the content, unless a call was forced."""


def offered(body: ChatRequest | TokenizeRequest) -> list[dict[str, Any]]:
    """The tools that this request lets the model call, as functions. RequestError where tool_choice names another."""
    choice = body.tool_choice
    tools = [as_function(msgspec.to_builtins(tool)) for tool in body.tools or ()] if choice != "none" else []
    if choice in (None, "none", "auto", "required"):
        return tools
    names = choice.names() if not isinstance(choice, str) else []
    known = [tool["function"]["name"] for tool in tools]
    if missing := [name for name in names if name not in known]:
        raise RequestError(f"tool_choice names {', '.join(missing)}; the tools are {', '.join(known)}", param="tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names]


def forced(body: ChatRequest) -> bool:
    """Whether the answer must be a call."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice == "required"
    return choice.allowed_tools is None or choice.allowed_tools.mode == "required"


def strict(body: ChatRequest, tools: list[dict[str, Any]]) -> bool:
    """Whether one of the `tools` that are offered wants its calls held to a schema or grammar."""
    asked = {tool.function.name for tool in body.tools or () if tool.function is not None and tool.function.strict}
    asked |= {tool.custom.name for tool in body.tools or ()
              if tool.custom is not None and isinstance(tool.custom.format, GrammarFormat)}
    return any(tool["function"]["name"] in asked for tool in tools)


def as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates know it: a custom one is a function of one text, and its grammar a keyword of that text."""
    if tool.get("type") != "custom":
        return {"type": "function", **tool}
    custom = tool["custom"]
    text, grammar = {"type": "string"}, (custom.get("format") or {}).get("grammar")
    if grammar is not None and grammar["syntax"] == "lark":
        text["lark"] = grammar["definition"]
    elif grammar is not None:
        text["pattern"] = f"^(?:{grammar['definition']})$"
    return {"type": "function", "function": {
        "name": custom["name"], "description": custom.get("description", ""),
        "parameters": {"type": "object", "properties": {"input": text}, "required": ["input"]}}}


class Reading:
    def __init__(self, parser: Parser, body: ChatRequest, details: CompletionDetails) -> None:
        """`details` count reasoning: a token that makes nothing certain, such as a marker, goes with the text behind it."""
        self.parser = parser
        self.include_reasoning = body.include_reasoning is not False
        self.one = body.parallel_tool_calls is False
        self.forced = forced(body)
        self.custom = {tool.custom.name for tool in body.tools or () if tool.custom is not None}
        self.details = details
        self._silent, self._thinks = 0, False
        self._index: dict[int, int] = {}
        """A call's index in the answer, by the parser's."""
        self._inputs: dict[int, list[str]] = {}
        """Arguments of custom calls, whose input is known when they are whole."""

    @property
    def flags(self) -> Flags | UnsetType:
        return Flags(True) if self.parser.malformed else UNSET

    def events(self, delta: Delta) -> list[Event]:
        """The events that a delta makes certain."""
        events = self.parser.push(delta.text) + (self.parser.finish() if delta.finish_reason else [])
        self._silent += len(delta.token_ids)
        if events:
            self._thinks = isinstance(events[-1], ReasoningText)
        if events or delta.finish_reason:
            self.details.reasoning_tokens += self._silent if self._thinks else 0
            self._silent = 0
        return events

    def chunk(self, events: list[Event]) -> ChunkDelta:
        """Some events as what is new of a message."""
        delta = ChunkDelta()
        for event in events:
            self._add(delta, event)
        return delta

    def _add(self, delta: ChunkDelta, event: Event) -> None:
        match event:
            case Content(text) if not self.forced:
                delta.content = (delta.content or "") + text
            case ReasoningText(text) if self.include_reasoning:
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
            case CallBegins(number, call_id, name) if not (self.one and self._index):
                index = self._index[number] = len(self._index)
                delta.tool_calls = delta.tool_calls or []
                if name in self.custom:
                    self._inputs[number] = []
                    delta.tool_calls.append(CallChunk(index, call_id, "custom", custom=CalledCustom(name, "")))
                else:
                    delta.tool_calls.append(CallChunk(index, call_id, "function", CalledFunction(name, "")))
            case Arguments(number, text) if number in self._inputs:
                self._inputs[number].append(text)
            case Arguments(number, text) if number in self._index:
                self._more(delta, self._index[number], text)
            case CallEnds(number) if number in self._inputs:
                said = custom_input("".join(self._inputs.pop(number)))
                delta.tool_calls = [*(delta.tool_calls or ()), CallChunk(self._index[number], custom=CalledCustom(input=said))]
            case CallFails(number):
                self._inputs.pop(number, None)

    @staticmethod
    def _more(delta: ChunkDelta, index: int, text: str) -> None:
        last = delta.tool_calls[-1] if delta.tool_calls else None
        if last is not None and last.index == index and last.function is not None:
            last.function.arguments = (last.function.arguments or "") + text
        else:
            delta.tool_calls = [*(delta.tool_calls or ()), CallChunk(index, function=CalledFunction(arguments=text))]

    def whole(self) -> AnswerMessage:
        found = self.parser.message()
        calls = found.calls[:1] if self.one else found.calls
        message = AnswerMessage("" if self.forced else found.content or (None if calls or found.reasoning else ""))
        if found.reasoning and self.include_reasoning:
            message.reasoning = message.reasoning_content = found.reasoning
        if calls:
            message.tool_calls = [
                CallChunk(id=call.id, type="custom", custom=CalledCustom(call.name, custom_input(call.arguments)))
                if call.name in self.custom else
                CallChunk(id=call.id, type="function", function=CalledFunction(call.name, call.arguments)) for call in calls]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The answer's own reason, tool_calls where it ends with calls as it wants."""
        return "tool_calls" if reason == "stop" and self.parser.message().calls else reason


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets."""
    found = json.loads(arguments).get("input", arguments)
    return found if isinstance(found, str) else json.dumps(found)

