"""The bodies of Ollama's API as msgspec structs, its options, and which of them are refused."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.server.openai.protocol import MAX_ENTRIES, MAX_MESSAGES, Count, Name, Tool, ToolCall, Top, Word

WHY_REFUSED = {
    "suffix": "insertion is not supported; write the prompt in the model's own fill-in-the-middle format",
    "images": "this server takes text only",
    "template": "a template is a program, and this server does not run those of its clients",
    "context": "send the conversation to /api/chat; the prefix cache finds what was computed"}
"""Why a recognised field is refused, as the second half of a sentence."""

IDLE = {f"options.{name}" for name in (
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "use_mmap", "use_mlock",
    "vocab_only", "numa", "repeat_last_n", "penalize_newline", "draft_num_predict")}
"""Options that are the server's own matter, or for which there is one way here: ignored, and named in a header."""


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling options; by default those of the model's generation_config.json."""

    num_predict: int | None = None
    """The most tokens; negative for no limit but the context's."""
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: int | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=64)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    typical_p: Literal[1] | None = None
    tfs_z: Literal[1] | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    """Of no meaning without mirostat."""


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Name
    options: Options | None = None
    keep_alive: float | Annotated[str, Meta(pattern="^-?[0-9]+(\\.[0-9]+)?(ms|s|m|h)?$")] | None = None
    """Time for which the idle model stays loaded, where the server has several; negative: for good."""


class AnswerFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of /api/chat and /api/generate."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    """false: none, where the template can say so; a level is handed to it as reasoning_effort."""
    logprobs: bool | None = None
    top_logprobs: Top | None = None


class ChatRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] = []
    """Without any: is the model there?"""
    tools: Annotated[list[Tool], Meta(max_length=MAX_ENTRIES)] | None = None


class GenerateRequest(AnswerFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate."""

    prompt: str = ""
    """Without one: is the model there?"""
    system: str | None = None
    raw: bool | None = None
    """The prompt is complete; no template is used."""
    suffix: Literal[""] | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[Any], Meta(max_length=0)] | None = None


class EmbedRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_ENTRIES)]
    truncate: bool = True
    """Keep only the first tokens of a text that is too long."""
    dimensions: Count | None = None


class EmbeddingsRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the older form."""

    prompt: str


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None
