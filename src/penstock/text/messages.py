"""Converts OpenAI's chat messages to the shape that a chat template expects.

`template.py` determines that shape by rendering small trial conversations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import RequestError

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Kinds of content parts that are text, and the field that holds it."""

_MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "file",
                "input_file")

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields by which clients send back an assistant's reasoning."""


@dataclass(frozen=True)
class Shape:
    """The message formats that a template supports."""

    parts: bool
    """`content` as a list of parts; otherwise it must be a string."""
    strings: bool
    """`content` as a string."""
    arguments: bool
    """A tool call's arguments as an object; otherwise as JSON text, the way OpenAI's API has them."""
    developer: bool
    """The role developer; otherwise such messages are given as system, which OpenAI defines it to replace."""
    null: bool = False
    """A `content` of null, as beside tool calls; otherwise it is given as the empty string."""
    function: bool = False
    """The role function; otherwise such messages, OpenAI's older tool results, are given as tool."""


def check(messages: Any) -> list[dict[str, Any]]:
    """A copy of the messages without null fields. RequestError (param messages) for anything but text messages."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise _refusal(f"messages must be a list of objects with a role and content, got {type(messages).__name__}")
    if not messages:
        raise _refusal("messages is empty; send at least one message")
    checked = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _refusal(f"messages[{place}] must be an object with a role and content, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise _refusal(f"messages[{place}] needs a role, such as system, user, assistant or tool")
        # Templates test for a field's presence, and would show a None as the word.
        message = {key: value for key, value in message.items() if value is not None}
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            message["content"] = _text_parts(content, f"messages[{place}].content")
        checked.append(message)
    return _with_tool_calls(checked)


def _with_tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with OpenAI's older function_call as one of tool_calls, whose id the function's answer then carries."""
    identifier = ""
    for place, message in enumerate(messages):
        if "function_call" in message and "tool_calls" not in message:
            identifier = f"call{place:05d}"
            message["tool_calls"] = [{"id": identifier, "type": "function", "function": message.pop("function_call")}]
        elif message["role"] == "function":
            message.setdefault("tool_call_id", identifier)
    return messages


def _text_parts(content: Any, where: str) -> list[dict[str, Any]]:
    """The parts of a content, all as {"type": "text", "text": ...}."""
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise _refusal(f"{where} must be a string or a list of parts, got {type(content).__name__}")
    parts = []
    for place, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind in _MEDIA_PARTS:
            raise RequestError(f"{where}[{place}] is of type {kind!r}, but this model takes text only; remove it",
                               param="messages", code="unsupported_content")
        field = _TEXT_PARTS.get(kind) if isinstance(part, Mapping) else None
        if field is None or not isinstance(part.get(field), str):
            known = ", ".join(_TEXT_PARTS)
            raise _refusal(f"{where}[{place}] is of type {kind!r} without text; possible are parts of the types {known}, each "
                           "with its text")
        parts.append({"type": "text", "text": part[field]})
    return parts


def shape(message: dict[str, Any], wanted: Shape) -> dict[str, Any]:
    """A checked message in the shape that a template takes."""
    content = message.get("content")
    if content is None:
        # transformers hands null on, and many templates fail without the field.
        message = {**message, "content": None if wanted.null else ""}
    elif isinstance(content, list) and not wanted.parts:
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    elif isinstance(content, str) and not wanted.strings:
        message = {**message, "content": [{"type": "text", "text": content}]}
    if message["role"] == "developer" and not wanted.developer:
        message = {**message, "role": "system"}
    elif message["role"] == "function" and not wanted.function:
        message = {**message, "role": "tool"}
    reasoning = next((message[field] for field in _REASONING if message.get(field) is not None), None)
    if reasoning is not None:
        # Most templates read reasoning_content, gpt-oss's reads thinking.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _refusal(f"tool_calls must be a list, got {type(calls).__name__}")
    return {**message, "tool_calls": [_shape_call(call, wanted.arguments) for call in calls]}


def _shape_call(call: Any, as_object: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _refusal("each of tool_calls must be an object with a function that has a name and arguments")
    arguments = function.get("arguments")
    if as_object and isinstance(arguments, str):
        try:
            found = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            found = None
        # A model may have written arguments that are no JSON object; they are shown to it as it wrote them.
        arguments = found if isinstance(found, dict) else arguments
    elif not as_object and not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif arguments is None:
        arguments = {}
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_value")
