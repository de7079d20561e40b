"""The bodies of the Responses API as msgspec structs, and which of its fields are refused.

Output items and events are plain dicts: they are stored, sent back as input and shown again as they are."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.server.openai import protocol
from penstock.server.openai.protocol import MAX_ENTRIES, MAX_MESSAGES, Name, OnlyFalse, SamplingFields, TextFormat, Top

WHY_REFUSED = {
    "prompt": "this server keeps no prompt templates; send the text as instructions and input",
    "context_management": "this server does not edit conversations",
    "moderation": "this server does not moderate",
    "personality": "models have no presets of style here; write it into the instructions",
    "max_tool_calls": "it limits tools that OpenAI runs itself, and there are none here"}
"""Why a recognised field is refused, as the second half of a sentence."""

Item = dict[str, Any]
Input = str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)]


class JsonSchemaFormat(protocol.JsonSchema, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    name: str
    schema: dict[str, Any]


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | protocol.JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: str | None = None
    """Handed to the chat template."""


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    """Handed to the chat template."""
    summary: str | None = None
    """Accepted; reasoning is shown as it is, not summarised."""
    generate_summary: str | None = None


class FunctionTool(protocol.Function, kw_only=True, omit_defaults=False, tag_field="type", tag="function"):
    pass


class Grammar(protocol.Grammar, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    pass


class CustomTool(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    format: TextFormat | Grammar | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom"]
    name: Annotated[str, Meta(min_length=1)]


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Meta(max_length=MAX_ENTRIES)] | None = None


class ConversationId(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: Name


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: OnlyFalse | None = None


Metadata = Annotated[dict[str, Any], Meta(max_length=MAX_ENTRIES)]


class ResponseRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses; and of /v1/responses/input_tokens, which reads only what the prompt is made of."""

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationId | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto drops the oldest items that do not fit."""
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    """false: nothing of it is kept."""
    background: bool | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]],
                       Meta(max_length=8)] | None = None
    max_output_tokens: protocol.Count | None = None
    top_logprobs: Top | None = None

    prompt: None = None
    context_management: None = None
    personality: None = None
    moderation: None = None
    max_tool_calls: None = None


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/conversations, and of one to change its metadata."""

    items: Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    metadata: Metadata | None = None


class ItemsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


