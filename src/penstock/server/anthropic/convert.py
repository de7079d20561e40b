"""A request for a message as one of the chat endpoint, which knows templates, tools, constraints and the cache's marks."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.core.errors import RequestError, UnsupportedError
from penstock.server.anthropic import protocol as a
from penstock.server.openai.form import converted
from penstock.server.openai.protocol import ChatRequest


def chat_request(body: a.PromptFields) -> ChatRequest:
    """The same conversation, tools and parameters. RequestError for blocks and tools that this server does not have."""
    fields: dict[str, Any] = {"model": body.model, "messages": messages_of(body)}
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None and body.tools:
        fields |= _choice(body.tool_choice)
    elif body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        raise RequestError("tool_choice is only possible with tools", param="tool_choice")
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        # Templates know the switch by one of these names; others are ignored by them.
        on = body.thinking.type == "enabled"
        variables = {"enable_thinking": on, "thinking": on, **variables}
    if variables:
        fields["chat_template_kwargs"] = variables
    output = body.output_config
    if output is not None and output.effort is not None:
        fields["reasoning_effort"] = output.effort
    if output is not None and output.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema, "name": "answer"}}
    if body.messages[-1].role == "assistant":
        # The answer goes on with what the client has written for the model.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, a.MessagesRequest):
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream, "temperature": body.temperature, "top_p": body.top_p,
                   "top_k": body.top_k, "stop": body.stop_sequences or None, "cache_salt": body.cache_salt,
                   "priority": body.priority}
        if body.cache_control is not None:
            fields["cache_control"] = msgspec.to_builtins(body.cache_control)
    return converted(fields, ChatRequest)


def _tool(tool: a.Tool) -> dict[str, Any]:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        what = f"is of the type {tool.type}, which Anthropic runs itself" if tool.type not in (None, "custom") else \
            "has no input_schema"
        raise UnsupportedError(f"tools: {tool.name} {what}; possible are tools of the client with an input_schema", "tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None},
            **_mark(tool.cache_control)}


def _choice(choice: a.ToolChoice) -> dict[str, Any]:
    found: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)}
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice of the type tool needs a name", param="tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _mark(control: Any) -> dict[str, Any]:
    return {} if control is None else {"cache_control": msgspec.to_builtins(control)}


def messages_of(body: a.PromptFields) -> list[dict[str, Any]]:
    """The messages as a chat template's: system first, results of tools as messages of their own."""
    found: list[dict[str, Any]] = []
    if body.system:
        content = body.system if isinstance(body.system, str) else [_part(block) for block in body.system]
        found.append({"role": "system", "content": content})
    for place, message in enumerate(body.messages):
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            found.append(_assistant(message.content, f"messages[{place}]"))
        else:
            found += _others(message, f"messages[{place}]")
    return found


def _assistant(blocks: list[a.Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": []}
    for place, block in enumerate(blocks):
        if isinstance(block, a.TextBlock):
            message["content"].append(_part(block))
        elif isinstance(block, a.ThinkingBlock):
            message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
        elif isinstance(block, a.ToolUseBlock):
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            message.setdefault("tool_calls", []).append(call)
            message |= _mark(block.cache_control)
        elif not isinstance(block, a.RedactedBlock):
            raise _refused(block, f"{where}.content[{place}]")
    message["content"] = message["content"] or None
    return message


def _others(message: a.Message, where: str) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        if isinstance(block, a.TextBlock):
            parts.append(_part(block))
        elif isinstance(block, a.ToolResultBlock):
            if parts:
                yield {"role": message.role, "content": parts}
                parts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block, f"{where}.content[{place}]"),
                   **_mark(block.cache_control)}
        else:
            raise _refused(block, f"{where}.content[{place}]")
    if parts:
        yield {"role": message.role, "content": parts}


def _result(block: a.ToolResultBlock, where: str) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = []
    for place, part in enumerate(block.content):
        if not isinstance(part, a.TextBlock):
            raise _refused(part, f"{where}.content[{place}]")
        texts.append(part.text)
    return "\n".join(texts)


def _part(block: a.TextBlock) -> dict[str, Any]:
    return {"type": "text", "text": block.text, **_mark(block.cache_control)}


def _refused(block: Any, where: str) -> RequestError:
    kind = block.__struct_config__.tag
    why = "this model takes text only" if kind in ("image", "document") else "it has no place in a message of this role"
    return RequestError(f"{where} is of the type {kind}, but {why}; remove it", param="messages", code="unsupported_content")
