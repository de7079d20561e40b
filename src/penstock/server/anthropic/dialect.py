"""Anthropic's API as a dialect: /v1/messages, whole and as events, /v1/messages/count_tokens, and the shape of its errors."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.core.request import Request as EngineRequest
from penstock.engine.outputs import Delta
from penstock.server.answer import json_response, note_ignored
from penstock.server.anthropic import protocol as a
from penstock.server.anthropic.batches import MessageBatches
from penstock.server.anthropic.convert import chat_request
from penstock.server.batches.run import Runner
from penstock.server.blocks import Block, Blocks, BlocksAnswer, Change
from penstock.server.body import BodyReader
from penstock.server.dialect import Route
from penstock.server.openai.chat import prepared
from penstock.server.openai.form import refusing
from penstock.server.openai.messages import count_tokens
from penstock.server.openai.protocol import ChatRequest
from penstock.server.respond import Wire, respond
from penstock.server.state import State

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
"""Anthropic's error types by HTTP status."""

_ENDS = {"length": "max_tokens", "stop": "end_turn", "abort": "end_turn"}


def named_event(value: dict[str, Any]) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))


WIRE = Wire(keep_alive=named_event({"type": "ping"}), done=b"", failed=named_event)


class Anthropic:
    def __init__(self, state: State, runner: Runner) -> None:
        self.state = state
        self.bodies = BodyReader(state, refusing(a.WHY_REFUSED))
        self.batches = MessageBatches(state, runner)

    def routes(self) -> Sequence[Route]:
        return (
            Route("POST", "/v1/messages", self.post, "Answer a conversation, in Anthropic's form", a.MessagesRequest, True,
                  answer=a.Answer),
            Route("POST", "/v1/messages/count_tokens", self.count, "Count the tokens of a conversation", a.CountRequest,
                  answer=a.Counted),
            *self.batches.routes(),
        )

    def error_body(self, error: RequestError) -> Any:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    async def post(self, http: Request, body: a.MessagesRequest) -> Response:
        self.state.admit(body.model)
        chat = self._chat(http, body)
        thinking = body.thinking
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
            ready = await self._budgeted(http, chat, thinking.budget_tokens)
        else:
            ready = await prepared(self.state, http, chat)
        answer = MessageAnswer(f"msg_{http.scope['request_id']}", ready.model, ready.request,
                               Blocks(ready.parser(self.state), chat.parallel_tool_calls is False),
                               thinking is None or (thinking.type != "disabled" and thinking.display != "omitted"))
        return await respond(http, self.state.llm.open([ready.request]), answer, bool(body.stream), WIRE)

    async def _budgeted(self, http: Request, chat: ChatRequest, budget: int) -> Any:
        """A request whose thinking has a limit, where that can be enforced; the answer's headers say where it cannot."""
        try:
            return await prepared(self.state, http, msgspec.structs.replace(chat, max_thinking_tokens=budget))
        except RequestError as error:
            if error.param != "max_thinking_tokens":
                raise
        note_ignored(http, ["thinking.budget_tokens"])
        return await prepared(self.state, http, chat)

    async def count(self, http: Request, body: a.CountRequest) -> Response:
        self.state.admit(body.model)
        return json_response(a.Counted(await count_tokens(self.state, http, self._chat(http, body))))

    def _chat(self, http: Request, body: a.PromptFields) -> ChatRequest:
        for name in ("metadata", "service_tier"):
            if getattr(body, name, None) is not None:
                note_ignored(http, [name])
        return chat_request(body)


class MessageAnswer(BlocksAnswer):
    """Builds the answer to one request from deltas."""

    def __init__(self, answer_id: str, model: str, request: EngineRequest, blocks: Blocks, thinking: bool) -> None:
        """`thinking`: whether thinking is shown."""
        super().__init__(blocks)
        self.id = answer_id
        self.model = model
        self.request = request
        self.thinking = thinking
        self._started = False
        self._places: dict[int, int] = {}
        """Index of each shown block in the answer."""

    # -- streamed

    def events(self, deltas: list[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            changes = self.take(delta)
            if not self._started:
                self._started = True
                start = a.Answer(self.id, self.model, [], None, None, self._usage(0))
                parts.append(named_event({"type": "message_start", "message": msgspec.to_builtins(start)}))
            parts += [named_event(found) for change in changes for found in self._change(change)]
        return b"".join(parts)

    def _change(self, change: Change) -> Iterable[dict[str, Any]]:
        block = change.block
        if block.kind == "reasoning" and not self.thinking:
            return
        if change.what == "begin":
            index = self._places[block.index] = len(self._places)
            empty = msgspec.to_builtins(_shown(Block(0, block.kind, block.id, block.name)))
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            return
        index = self._places[block.index]
        if change.what == "add":
            kind, field = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                           "call": ("input_json_delta", "partial_json")}[block.kind]
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: change.text}}
            return
        if block.kind == "reasoning":
            yield {"type": "content_block_delta", "index": index, "delta": {"type": "signature_delta", "signature": ""}}
        yield {"type": "content_block_stop", "index": index}

    def last_events(self) -> bytes:
        reason, sequence = self._stop()
        return named_event({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
                            "usage": msgspec.to_builtins(self._usage(self.output_tokens))}) + \
            named_event({"type": "message_stop"})

    # -- whole

    def whole(self) -> a.Answer:
        shown = [_shown(block) for block in self.blocks.all
                 if not block.failed and (block.kind != "reasoning" or self.thinking)]
        return a.Answer(self.id, self.model, shown, *self._stop(), self._usage(self.output_tokens))

    # -- both

    def _stop(self) -> tuple[str | None, str | None]:
        """(stop_reason, stop_sequence)"""
        end = self.end
        if end is None:
            return None, None
        if end.finish_reason == "stop" and self.blocks.calls:
            return "tool_use", None
        if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return _ENDS.get(end.finish_reason or "", "end_turn"), None

    def _usage(self, output_tokens: int) -> a.Usage:
        marked = max((span.upto for span in self.request.retain), default=0)
        prompt = len(self.request.prompt_ids)
        cached = self.cached_tokens
        created = max(0, min(marked, prompt) - cached)
        return a.Usage(prompt - cached - created, output_tokens, created, cached)


def _shown(block: Block) -> a.AnswerBlock:
    if block.kind == "text":
        return a.AnswerBlock("text", text=block.text)
    if block.kind == "reasoning":
        return a.AnswerBlock("thinking", thinking=block.text, signature="")
    return a.AnswerBlock("tool_use", id=block.id, name=block.name, input=block.arguments())
