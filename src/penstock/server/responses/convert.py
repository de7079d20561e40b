"""A request for a response as a request of the chat endpoint, and input items as its messages."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.server.openai.form import converted
from penstock.server.openai.protocol import ChatRequest, JsonObjectFormat, SamplingFields
from penstock.server.responses import protocol as r

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text",
          "reasoning_text": "text"}
"""Parts that are text, and their field."""


def items_of(given: r.Input | None) -> list[r.Item]:
    """Input as items; a text is a user's message. RequestError for an id, type or role that is no text."""
    if given is None:
        return []
    for place, item in enumerate(given if isinstance(given, list) else ()):
        for name in ("id", "type", "role"):
            if item.get(name) is not None:
                _string(item, name, f"input[{place}]")
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}] \
        if isinstance(given, str) else list(given)


def chat_request(body: r.ResponseRequest, items: Sequence[r.Item]) -> ChatRequest:
    """The same as a chat; `items` are all, those of earlier responses too. RequestError for items and tools unknown here."""
    messages = messages_of(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise RequestError("Missing required parameter: 'input'", param="input", code="missing_required_parameter")
    fields: dict[str, Any] = {"messages": messages, "parallel_tool_calls": body.parallel_tool_calls, "stream": body.stream,
                              "chat_template_kwargs": body.chat_template_kwargs,
                              "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
        fields["tool_choice"] = _choice(body.tool_choice)
    elif body.tool_choice not in (None, "auto", "none"):
        raise RequestError("tool_choice is only possible with tools", param="tool_choice")
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
        if isinstance(body.text.format, r.JsonSchemaFormat):
            schema = {name: value for name, value in msgspec.to_builtins(body.text.format).items() if name != "type"}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(body.text.format, JsonObjectFormat):
            fields["response_format"] = {"type": "json_object"}
    for name in SamplingFields.__struct_fields__:
        value = getattr(body, name)
        fields[name] = msgspec.to_builtins(value, str_keys=False) if isinstance(value, msgspec.Struct) else value
    if body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return converted(fields, ChatRequest, "input")


def _tool(tool: r.FunctionTool | r.CustomTool) -> dict[str, Any]:
    said = {name: value for name, value in msgspec.to_builtins(tool).items() if value is not None}
    kind = said.pop("type")
    if isinstance(tool, r.CustomTool) and isinstance(tool.format, r.Grammar):
        said["format"] = {"type": "grammar", "grammar": {"definition": tool.format.definition, "syntax": tool.format.syntax}}
    return {"type": kind, kind: said}


def _choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        tools = [{"type": tool.type, tool.type: {"name": tool.name}} for tool in choice.tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if not choice.name:
        raise RequestError(f"tool_choice of the type {choice.type} needs a name", param="tool_choice")
    return {"type": choice.type, choice.type: {"name": choice.name}}


def messages_of(items: Sequence[r.Item]) -> list[dict[str, Any]]:
    """Items as messages: reasoning and calls belong to the assistant's message beside them."""
    messages: list[dict[str, Any]] = []
    open_message: dict[str, Any] | None = None

    def assistant() -> dict[str, Any]:
        nonlocal open_message
        if open_message is None:
            open_message = {"role": "assistant", "content": None}
            messages.append(open_message)
        return open_message

    for place, item in enumerate(items):
        where, kind = f"input[{place}]", item.get("type") or ("message" if "role" in item else None)
        if kind == "message" and item.get("role") == "assistant":
            message = assistant()
            text = _text(item.get("content"), where)
            if message["content"] is not None or message.get("tool_calls"):
                open_message = None
                message = assistant()
            message["content"] = text
        elif kind == "message":
            open_message = None
            messages.append({"role": str(item.get("role", "user")), "content": _text(item.get("content"), where)})
        elif kind == "reasoning":
            if open_message is not None and (open_message["content"] is not None or open_message.get("tool_calls")):
                open_message = None
            if thought := _thought(item, where):
                message = assistant()
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind in ("function_call", "custom_tool_call"):
            arguments = _string(item, "arguments", where) if kind == "function_call" else \
                msgspec.json.encode({"input": _string(item, "input", where)}).decode()
            call = {"id": _string(item, "call_id", where), "type": "function",
                    "function": {"name": _string(item, "name", where), "arguments": arguments}}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            open_message = None
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where),
                             "content": _text(item.get("output"), where, "output")})
        else:
            raise RequestError(f"{where} is of the type {kind!r}; possible are message, reasoning, function_call, "
                               "function_call_output, custom_tool_call, custom_tool_call_output and item_reference",
                               param="input", code="unsupported_content")
    return messages


def _string(item: r.Item, name: str, where: str) -> str:
    found = item.get(name)
    if not isinstance(found, str):
        raise RequestError(f"{where}.{name}: expected a string", param="input", code="invalid_type")
    return found


def _text(content: Any, where: str, name: str = "content") -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}.{name}: expected a string or a list of parts", param="input", code="invalid_type")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXTS.get(str(kind), "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(f"{where}.{name}[{place}] is of the type {kind!r}; this server takes text only, in parts of the "
                               "types input_text, output_text and refusal", param="input", code="unsupported_content")
        texts.append(text)
    return "\n".join(texts)


def _thought(item: r.Item, where: str) -> str:
    """The text of a reasoning item: its own, or what this server wrote into encrypted_content."""
    if item.get("content"):
        return _text(item["content"], where)
    try:
        return base64.b64decode(str(item.get("encrypted_content") or ""), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        # Another server's, unreadable here.
        return ""
