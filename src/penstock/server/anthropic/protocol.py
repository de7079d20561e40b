"""The bodies and answers of Anthropic's messages as msgspec structs, and which of its fields are refused."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.server.openai.protocol import MAX_ENTRIES, MAX_MESSAGES, CacheControl, Count, Name, Natural, Word

WHY_REFUSED = {
    "mcp_servers": "this server does not connect to others",
    "container": "this server does not run code",
    "context_management": "this server does not edit conversations",
    "inference_geo": "this server runs where it runs",
    "speed": "there is one speed",
    "diagnostics": "this server's figures are at /metrics"}
"""Why a recognised field is refused, as the second half of a sentence."""


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Refused: this server takes text only."""

    source: Any = None
    cache_control: CacheControl | None = None


class DocumentBlock(ImageBlock, kw_only=True, tag_field="type", tag="document"):
    """Refused, as images are."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Another server's thinking, unreadable here: left out."""

    data: str


Block = TextBlock | ImageBlock | DocumentBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


class Message(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class Tool(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    """custom; tools that Anthropic runs itself (web_search_20250305, ...) are refused."""
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    """After so many tokens of thinking its end is forced, where the prompt shows that the model begins with thinking."""
    display: Literal["summarized", "omitted"] | None = None
    """omitted leaves thinking out of the answer; a summary is the whole of it here."""


class JsonFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    """Handed to the chat template as reasoning_effort."""
    format: JsonFormat | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a message and of counting its tokens."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: None = None
    container: None = None
    context_management: None = None
    inference_geo: None = None
    speed: None = None
    diagnostics: None = None
    user_profile_id: Name | None = None
    """Accepted, as the next one is; they change nothing."""
    workspace_id: Name | None = None


class CountRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Natural | None = None
    stop_sequences: Annotated[list[Word], Meta(max_length=64)] | None = None
    metadata: dict[str, Any] | None = None
    """Accepted; changes nothing."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Accepted; there is one tier."""
    cache_control: CacheControl | None = None
    """Keep the whole prompt in the cache."""
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class AnswerBlock(msgspec.Struct, omit_defaults=True):
    """A block of the answer: text, thinking or tool_use."""

    type: str
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Any = UNSET


class Usage(msgspec.Struct):
    input_tokens: int
    """Tokens that were neither read from the cache nor kept in it on request."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    """Up to the last cache_control mark, beyond what was read."""
    cache_read_input_tokens: int = 0
    service_tier: str = "standard"


class Answer(msgspec.Struct):
    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    type: str = "message"
    role: str = "assistant"


class Counted(msgspec.Struct):
    input_tokens: int
