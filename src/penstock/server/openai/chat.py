"""POST /v1/chat/completions: messages through the model's template, and the answer in OpenAI's shape."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError, UnsupportedError
from penstock.core.request import EngineInfo, Request as EngineRequest, TokenLogprobs
from penstock.dialects.parser import Parser
from penstock.engine.outputs import Delta
from penstock.server.dialect import note_ignored
from penstock.server.openai.answers import ChoicesAnswer, Head, Namer, Usage, chat_content, namer, prompt_entries
from penstock.server.openai.form import in_terms
from penstock.server.openai.messages import choose, ignored, render
from penstock.server.openai.prepare import check_stream, prepare, sampling_params, structure_of
from penstock.server.openai.protocol import ChatRequest, ToolChoice
from penstock.server.openai.reading import AnswerMessage, ChunkDelta, Flags, Reading, forced, offered, strict
from penstock.server.respond import Frame, event, respond
from penstock.server.state import State


class ChunkChoice(msgspec.Struct):
    index: int
    delta: ChunkDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    x_penstock: Flags | UnsetType = UNSET


class Chunk(Head):
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str | None = None
    service_tier: str | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    ledger: dict[str, Any] | UnsetType = UNSET


class AnswerChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    x_penstock: Flags | UnsetType = UNSET


class ChatCompletion(Head):
    choices: list[AnswerChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[msgspec.Raw | None] | None = None
    kv_transfer_params: None = None
    metadata: None = None
    moderation: None = None
    ledger: dict[str, Any] | UnsetType = UNSET


class ChatAnswer(ChoicesAnswer):
    def __init__(self, name: str, model: str, requests: Sequence[EngineRequest], body: ChatRequest, namer: Namer,
                 new_parsers: Sequence[Callable[[], Parser]], info: EngineInfo | None, echoes: Sequence[str] = ("",)) -> None:
        """`new_parsers` and `echoes`, the texts that answers begin with, are of each request."""
        super().__init__(name, model, requests, body, namer, info)
        self.echoes = echoes
        self.want_logprobs = bool(body.logprobs)
        self.readings = [Reading(new_parser(), body, self.details) for new_parser in new_parsers for _ in range(self.n)]
        self._plain = not (self.want_logprobs or self.want_ids or self.usage_always or forced(body))

    def add(self, deltas: Iterable[Delta]) -> None:
        super().add(deltas)
        for delta in deltas:
            reading = self.readings[self.first[delta.request_id] + delta.index]
            if delta.finish_reason or not reading.parser.is_content(delta.text):
                reading.events(delta)

    def event(self, choice: int, delta: Delta, parts: Sequence[Delta] = ()) -> bytes:
        """A choice begins with an event that names the role, as OpenAI's does."""
        growth, reading, opening = self.growths[choice], self.readings[choice], b""
        if not growth.started:
            growth.started, begun = True, ChunkDelta("assistant", self.echoes[choice // self.n])
            opening = event(self._chunk(ChunkChoice(choice, begun), first=True))
        self.count(delta)
        if self._plain and not delta.finish_reason and reading.parser.is_content(delta.text):
            frame = self.frames.get(choice)
            if frame is None:
                frame = self.frames[choice] = Frame(self._chunk(ChunkChoice(choice, ChunkDelta(content="\0"))), "content")
            return opening + frame.event(delta.text)
        said = reading.chunk([one for part in parts or (delta,) for one in reading.events(part)])
        if said == ChunkDelta() and not (delta.finish_reason or self.want_logprobs or self.want_ids):
            return opening
        if said == ChunkDelta() and not delta.finish_reason:
            said.content = ""
        line = ChunkChoice(choice, said)
        if self.want_logprobs:
            line.logprobs = self._scores(delta.logprobs or [])
        if self.want_ids:
            line.token_ids = delta.token_ids
        if delta.finish_reason:
            line.finish_reason, line.stop_reason = reading.finish_reason(delta.finish_reason), delta.stop_reason
            line.x_penstock = reading.flags
        return opening + event(self._chunk(line))

    def _chunk(self, line: ChunkChoice, first: bool = False) -> Chunk:
        chunk = Chunk(self.id, self.created, self.model, [line], system_fingerprint=self.system_fingerprint,
                      usage=self.chunk_usage())
        if first and self.service_tier is not None:
            chunk.service_tier = self.service_tier
        if first and self.want_ids and len(self.requests) == 1:
            chunk.prompt_token_ids = self.requests[0].prompt_ids
        return chunk

    def last_events(self) -> bytes:
        if not (self.usage_at_end or self.want_ledger):
            return b""
        return event(Chunk(self.id, self.created, self.model, [], system_fingerprint=self.system_fingerprint,
                           usage=self.usage() if self.usage_at_end else UNSET, ledger=self.ledger))

    def whole(self) -> ChatCompletion:
        lines = []
        for index, (growth, reading) in enumerate(zip(self.growths, self.readings, strict=True)):
            logprobs = self._scores(growth.logprobs) if self.want_logprobs else None
            message, echo = reading.whole(), self.echoes[index // self.n]
            if echo:
                message.content = echo + (message.content or "")
            lines.append(AnswerChoice(index, message, logprobs, reading.finish_reason(growth.finish_reason),
                                      growth.stop_reason, growth.token_ids if self.want_ids else None, reading.flags))
        answer = ChatCompletion(self.id, self.created, self.model, lines, self.usage(), ledger=self.ledger,
                                system_fingerprint=self.system_fingerprint, service_tier=self.service_tier)
        if self.want_ids and len(self.requests) == 1:
            answer.prompt_token_ids = self.requests[0].prompt_ids
        if self.requests[0].params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_entries(self.growths[0].prompt_logprobs or [], self.namer)
        return answer

    def _scores(self, lines: list[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_content(lines, self.namer), "refusal": None}


class Prepared(NamedTuple):
    model: str
    """The served name by which it was asked."""
    request: EngineRequest
    prompt: str
    """The prompt's text, as the template wrote it."""
    tools: list[dict[str, Any]]
    """The tools that the model may call."""

    def parser(self, state: State) -> Parser:
        return state.llm.inputs.parser(self.prompt, self.tools)


async def answer(state: State, http: Request, *bodies: ChatRequest) -> Response:
    """Answers one chat request, or several that differ in their messages alone. RequestError for what cannot be honoured."""
    body, ready = bodies[0], [await prepared(state, http, bodies[0])]
    state.limits.work(len(bodies), ready[0].request.params)
    ready += [await prepared(state, http, other) for other in bodies[1:]]
    requests = [one.request for one in ready]
    state.limits.check_tenant(state.llm.traffic.tenant_tokens[requests[0].tenant], requests, http.scope["key"])
    for request in requests[1:]:
        request.follows = requests[0].id
    whole = ChatAnswer(f"chatcmpl-{body.request_id or http.scope['request_id']}", ready[0].model, requests, body,
                       namer(state, body), [partial(one.parser, state) for one in ready], state.llm.info,
                       [_echo(one) for one in bodies])
    return await respond(http, state.llm.open(requests), whole, bool(body.stream))


def _echo(body: ChatRequest) -> str:
    """The text of the last message, if it is the assistant's and `echo` asks for it."""
    last = body.messages[-1]
    said = last.get("content") if body.echo and last["role"] == "assistant" else None
    return said if isinstance(said, str) else "\n".join(part.get("text", "") for part in said or ())


async def prepared(state: State, http: Request, body: ChatRequest) -> Prepared:
    """Renders and checks a conversation, for every dialect that has them. RequestError for what cannot be honoured."""
    model = state.admit(body.model)
    check(body)
    prompt = await render(state, http, body)
    note_ignored(http, ignored(choose(state.llm.template, body.chat_template, True), body))
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(body, state.llm.inputs.defaults, limit, logprobs)
    tools = offered(body)
    budget = body.thinking_token_budget if body.max_thinking_tokens is None else body.max_thinking_tokens
    budget = None if budget == -1 else budget
    must, inputs = forced(body), state.llm.inputs
    held = not must and params.structured_outputs is None and (strict(body, tools) or (inputs.constrain_tools and bool(tools)))
    if budget is not None or params.structured_outputs is not None or must:
        off = body.reasoning_effort == "none" or (body.chat_template_kwargs or {}).get("enable_thinking") is False
        params = params.replace(**inputs.thinking(prompt.text, budget, off))
    if held and params.reasoning_end_ids:
        raise UnsupportedError("max_thinking_tokens cannot be honoured beside calls that are constrained once they have begun "
                               "(strict tools, --constrain-tools); leave it out, or send tool_choice required",
                               "max_thinking_tokens")
    if must or held:
        # A tool that is named is called once.
        named = isinstance(body.tool_choice, ToolChoice) and body.tool_choice.allowed_tools is None
        grammar = await state.llm.work.run(len(prompt.text), lambda: inputs.calling(
            tools, must=must, parallel=body.parallel_tool_calls is not False and not named))
        params = params.replace(grammar=grammar)
    try:
        # A template writes its own special tokens.
        [request] = await prepare(state, http, [prompt], params, body, add_special_tokens=bool(body.add_special_tokens),
                                  parsed=True, predicted=body.prediction.text if body.prediction else "")
    except RequestError as error:
        longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise in_terms(error, {"prompt": "messages", "logprobs": "top_logprobs", "grammar": "tools",
                               "max_tokens": longest}) from None
    return Prepared(model, request, prompt.text, tools)


def check(body: ChatRequest) -> None:
    """RequestError for fields that contradict each other."""
    check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs is only possible when logprobs is true", param="top_logprobs")
    if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
        raise RequestError("max_tokens and max_completion_tokens are two names of one limit; give one of them",
                           param="max_tokens")
    if body.tool_choice not in (None, "none") and not body.tools:
        raise RequestError("tool_choice is only possible with tools", param="tool_choice")
    if forced(body) and structure_of(body) is not None:
        raise RequestError("tool_choice forces a call, so the answer cannot also have another format", param="tool_choice")
