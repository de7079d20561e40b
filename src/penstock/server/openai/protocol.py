"""The bodies of OpenAI's chat and completion requests as msgspec structs, and what is recognised but refused.

A field of type None is one that OpenAI or vLLM has and this server cannot honour: null is accepted, anything else refused by
name, with the reason in `WHY_REFUSED`. Unknown fields are refused, as OpenAI does. These types make the OpenAPI schema."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.core.request import MARKED_PRIORITY, PINNED
from penstock.core.sampling import MAX_BEAM_WIDTH, MAX_N, MOST_LOGPROBS, StructuredOutputsParams
from penstock.engine.retention import MAX_SPANS, Side

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Top = Annotated[int, Meta(ge=-1, le=MOST_LOGPROBS)]
"""At most the server's --max-logprobs, 20 by default; -1 is the whole vocabulary."""
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Word = Annotated[str, Meta(min_length=1, max_length=1000)]
"""A stop string or a bad word. Their lengths and numbers are limited, as each is looked for in every token's text."""
Name = Annotated[str, Meta(max_length=4096)]
"""A text that names something."""

MAX_MESSAGES = 16384
"""Messages of a conversation, and parts of a message."""

MAX_ENTRIES = 4096
"""Entries of other lists: tools, documents, biases, stop tokens."""

MAX_IDS = 1 << 20
"""Entries of a list of token ids that is not a prompt."""

Ttl = Annotated[str, Meta(pattern="^[0-9]{1,9}[smhd]$")]
"""A time like 90s, 5m, 1h or 2d."""
OnlyFalse = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]
Empty = Annotated[str, Meta(max_length=0)]
NoList = Annotated[list[Any], Meta(max_length=0)]

WHY_REFUSED: dict[str, str] = {
    "functions": "it is deprecated; use tools",
    "function_call": "it is deprecated; use tool_choice",
    "audio": "this server gives text only",
    "modalities": "this server gives text only; the only possible value is [\"text\"]",
    "web_search_options": "this server does not search the web",
    "suffix": "insertion is not supported; write the prompt in the model's own fill-in-the-middle format",
    "prompt_embeds": "prompts are text or token ids",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "this server takes text only"),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "this server does not transfer caches"),
    "moderation": "this server does not moderate"}
"""Why a recognised field is refused, as the second half of a sentence."""


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Anthropic's mark: the prompt up to here should stay in the cache."""

    type: Literal["ephemeral"]
    ttl: Ttl | None = None
    """For how long after its last use: 5m by default."""
    priority: Annotated[int, Meta(ge=0, le=PINNED)] | None = None
    """Pages of lower priority are evicted first."""


class RetainedSpan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The beginning of a context that should stay in the cache."""

    upto: Literal["prompt", "all"] | Count = "prompt"
    """The number of tokens; prompt: the whole prompt; all: prompt and answer."""
    priority: Annotated[int, Meta(ge=0, le=PINNED)] = MARKED_PRIORITY
    ttl: Ttl = "5m"


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send one more chunk before the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk."""
    include_obfuscation: OnlyFalse | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's: the whole prompt stays in the cache."""

    mode: Literal["implicit"] = "implicit"
    """explicit is not possible: every prompt is looked up in the cache. Marks inside it are `cache_control`."""
    ttl: Ttl = "30m"


class PredictedPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Prediction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    """A text that is expected to recur in the answer, such as a file to be edited: it is tried as drafts."""

    content: str | Annotated[list[PredictedPart], Meta(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ServiceFields(msgspec.Struct, kw_only=True):
    """Fields that say whose a request is and how it is served, in every dialect of OpenAI's form."""

    model: Name | None = None
    """A served name; absent means the one model that is served."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower is served first."""
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    """Cached prompts are shared only with requests of the same key that have the same salt."""
    user: Name | None = None
    """Accepted; changes nothing."""


class SamplingFields(ServiceFields, kw_only=True):
    """Fields of the chat, completions and responses endpoints that mean the same in each."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    seed: Seed | None = None
    stop: Word | Annotated[list[Word], Meta(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ENTRIES)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]],
                          Meta(max_length=MAX_ENTRIES)] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    service_tier: Name | None = None
    """A class of service: auto, default, priority (interactive), flex (batch), or a class by its own name."""
    prompt_cache_retention: Annotated[str, Meta(pattern="^(in[_-]memory|24h)$")] | None = None
    """24h keeps the whole prompt for so long; OpenAI's field."""
    prompt_cache_options: PromptCacheOptions | None = None

    # Accepted, as OpenAI does; they file the request and change no token of the answer.
    metadata: Annotated[dict[str, Any], Meta(max_length=MAX_ENTRIES)] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """A schema is always enforced to the letter."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuralTagFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"):
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructureFields(SamplingFields, kw_only=True):
    """The fields of a body that constrain the answer; no more than one of them and structured_outputs may."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerationFields(StructureFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both endpoints: streaming, vLLM's extensions, and fields without effect."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Natural | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_IDS)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=1000)] | None = None
    prompt_logprobs: Top | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MOST_LOGPROBS)] | None = None
    """Report the log probabilities of these tokens instead of the most likely ones. Needs logprobs."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep only this many of the prompt's tokens; -1 keeps as many as fit."""
    truncation_side: Side | None = None
    """The end at which the others are cut off: left by default."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in logprobs as "token_id:N"."""
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_control: CacheControl | None = None
    """Keep the whole prompt in the cache."""
    cache_retention: Annotated[list[RetainedSpan], Meta(max_length=MAX_SPANS)] | None = None
    """Spans to retain in the cache, in tokens."""
    use_beam_search: bool | None = None
    """Beam search instead of sampling: returns the n best of beam_width beams."""
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] | None = None
    """Beam width; by default n."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    """Score = log probability / length ** length_penalty; 1 by default."""
    early_stopping: bool | Literal["never"] | None = None
    """When to stop: true, at beam_width finished beams; false, when a better one is unlikely; "never", if none is possible."""

    store: bool | None = None
    include_ledger: bool | None = None
    """Add where the request's time went, in seconds, to the answer, or to a stream's last event."""

    spaces_between_special_tokens: bool | None = None
    """Spaces are put only by tokenizers that transformers calls slow; here both values mean the same."""

    # Fields with only one supported value, or none.
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class CompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, token ids, or a list of either."""
    max_tokens: Natural | None = 16
    """0 is possible with echo, to score a prompt."""
    echo: bool | None = None
    logprobs: Top | None = None
    best_of: Count | None = None
    """Only as many as n."""
    suffix: Empty | None = None
    prompt_embeds: None = None


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class InputTextPart(TextPart, kw_only=True, tag_field="type", tag="input_text"):
    """The Responses API's name for a text part of a user."""


class OutputTextPart(TextPart, kw_only=True, tag_field="type", tag="output_text"):
    """The Responses API's name for a text part of an assistant."""


class RefusalPart(msgspec.Struct, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ThinkingPart(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str


Part = TextPart | InputTextPart | OutputTextPart | RefusalPart | ThinkingPart


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = "{}"
    """JSON text, as OpenAI has it; some clients send the object."""


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """The fields of a message that are checked. All other fields are handed to the chat template as they are."""

    role: Annotated[str, Meta(min_length=1)]
    """system, developer, user, assistant, tool, function, or a role that the model's template knows."""
    content: str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    cache_control: CacheControl | None = None
    function_call: FunctionCall | None = None
    """The older form of tool_calls, answered by a message of the role function."""
    audio: None = None


class Conversation(msgspec.Struct):
    """Checks messages under the path that their errors name."""

    messages: list[Message]


AnyMessage = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Message"})]
Messages = Annotated[list[AnyMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
"""Messages as they were sent: a template may read fields that no schema knows. `Conversation` checks them."""


class NamedFunction(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]


class NamedTool(msgspec.Struct, kw_only=True):
    type: Literal["function", "custom"] = "function"
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    def name(self) -> str:
        named = self.function or self.custom
        return named.name if named is not None else ""


class AllowedTools(msgspec.Struct):
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_ENTRIES)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(NamedTool, kw_only=True):
    """A tool that must be called, or those that may or must."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise ValueError(f"tool_choice of the type {self.type} needs {self.type}")

    def names(self) -> list[str]:
        """The tools that may be called."""
        return [tool.name() for tool in ([self] if self.allowed_tools is None else self.allowed_tools.tools)]


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Grammar(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    definition: Annotated[str, Meta(min_length=1)]
    syntax: Literal["lark", "regex"]


class GrammarFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    """The text of a custom tool matches a grammar."""

    grammar: Grammar


class CustomTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool that takes one text."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    format: TextFormat | GrammarFormat | None = None


class Tool(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: Literal["function", "custom"] = "function"
    function: Function | None = None
    custom: CustomTool | None = None
    cache_control: CacheControl | None = None

    def __post_init__(self) -> None:
        if (self.function if self.type == "function" else self.custom) is None:
            raise ValueError(f"a tool of the type {self.type} needs {self.type}")


class ChatFields(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """Everything about the answer to a conversation but its messages."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning_effort: str | None = None
    """Handed to the chat template, as verbosity is; none switches thinking off. Templates that read neither ignore it."""
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """The name of one of the model's templates; a template's text only if the server trusts its clients with that."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ENTRIES)] | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    audio: None = None
    echo: bool | None = None
    """Begin the answer with the text of the last message, if that is the assistant's."""
    function_call: Literal["none"] | None = None
    functions: NoList | None = None
    include_reasoning: bool | None = None
    """false leaves reasoning out of the answer."""
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None
    moderation: None = None
    prediction: Prediction | None = None
    max_thinking_tokens: Natural | None = None
    """After so many tokens of thinking its end is forced."""
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    """vLLM's name of it; -1 sets no limit."""
    web_search_options: None = None


class ChatRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages

    def __post_init__(self) -> None:
        msgspec.convert({"messages": self.messages}, Conversation)


class ChatBatchRequest(ChatFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions/batch: several conversations, one answer to each."""

    messages: Annotated[list[Messages], Meta(min_length=1, max_length=MAX_ENTRIES)]
    prompt_logprobs: None = None

    def __post_init__(self) -> None:
        for messages in self.messages:
            msgspec.convert({"messages": messages}, Conversation)

    def conversations(self) -> list[ChatRequest]:
        return [ChatRequest(**{**msgspec.structs.asdict(self), "messages": messages}) for messages in self.messages]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: of a prompt, or of messages and what a chat template takes with them."""

    prompt: str | None = None
    messages: Messages | None = None
    model: Name | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_ENTRIES)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ENTRIES)] | None = None

    def __post_init__(self) -> None:
        if self.messages is not None:
            msgspec.convert({"messages": self.messages}, Conversation)


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_IDS)]
    model: Name | None = None
    skip_special_tokens: bool = False
