"""Anthropic's API as a dialect: /v1/messages, whole and as events, /v1/messages/count_tokens, and the shape of its errors; and
message batches, run by the batch runner, with the requests in the body and the results as lines."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.core.request import Request as EngineRequest
from penstock.engine.outputs import Delta
from penstock.server.anthropic import protocol as a
from penstock.server.anthropic.convert import chat_request
from penstock.server.batches.files import content_of, write_file
from penstock.server.batches.lines import MAX_LINES, parse
from penstock.server.batches.run import ENDED, Batch, Runner, new_batch
from penstock.server.blocks import Block, Blocks, BlocksAnswer, Change
from penstock.server.body import BodyReader
from penstock.server.dialect import EVENTS, Route, json_response, note_ignored, utc
from penstock.server.openai.chat import prepared
from penstock.server.openai.form import refusing
from penstock.server.openai.messages import count_tokens
from penstock.server.openai.protocol import ChatRequest
from penstock.server.respond import Wire, respond
from penstock.server.state import State
from penstock.server.store import Database, Ref, asked, listed, ref, whose

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
            Route("POST", "/v1/messages", self.post, "Answer a conversation, in Anthropic's form", a.MessagesRequest,
                  (EVENTS,), answer=a.Answer),
            Route("POST", "/v1/messages/count_tokens", self.count, "Count the tokens of a conversation", a.CountRequest,
                  answer=a.Counted),
            *self.batches.routes())

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
        index = self._places.setdefault(block.index, len(self._places))
        if change.what == "begin":
            empty = msgspec.to_builtins(_shown(Block(0, block.kind, block.id, block.name)))
            yield {"type": "content_block_start", "index": index, "content_block": empty}
        elif change.what == "add":
            kind, field = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                           "call": ("input_json_delta", "partial_json")}[block.kind]
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: change.text}}
        else:
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


ENDPOINT = "/v1/messages"
SECONDS = 86400
"""For which a batch may run, as Anthropic's."""

_STEM = "msgbatch_"
"""The beginning of a message batch's id, which parts it from OpenAI's batches."""
_UNASKED = {"batch_cancelled": "canceled", "batch_expired": "expired"}


class BatchedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]
    """The body of POST /v1/messages. A wrong one fails alone, in the results."""


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=MAX_LINES)]


class MessageBatches:
    def __init__(self, state: State, runner: Runner) -> None:
        self.state = state
        self.runner = runner

    def routes(self) -> Sequence[Route]:
        one = "/v1/messages/batches/{batch}"
        return (
            Route("POST", "/v1/messages/batches", self.create, "Answer conversations when there is room", BatchRequest),
            Route("GET", "/v1/messages/batches", self.list, "A page of the message batches"),
            Route("GET", one, self.get, "About a message batch"),
            Route("DELETE", one, self.delete, "Delete a message batch that has ended"),
            Route("POST", one + "/cancel", self.cancel, "End a message batch"),
            Route("GET", one + "/results", self.results, "The results of a message batch, a JSON object a line",
                  also=("application/x-jsonl",)))

    async def create(self, http: Request, body: BatchRequest) -> Response:
        made = Ref("batch", _STEM + uuid.uuid4().hex, whose(http))
        content = b"\n".join(msgspec.json.encode({"custom_id": one.custom_id, "method": "POST", "url": ENDPOINT,
                                                  "body": one.params}) for one in body.requests)
        _, errors = await asyncio.to_thread(parse, content, ENDPOINT)
        if errors:
            raise RequestError(f"requests[{errors[0]['line'] - 1}]: {errors[0]['message']}", param="requests")

        def work(database: Database) -> Batch:
            file = write_file(database, made.owner, f"{made.name}.jsonl", "batch", content)
            batch = new_batch(made.name, ENDPOINT, file["id"], SECONDS)
            batch["request_counts"]["total"] = len(body.requests)
            database.put(*made, batch)
            return batch

        batch = await self.state.store.run(work)
        self.runner.start(made)
        return json_response(_shown_batch(http, batch, ()))

    async def list(self, http: Request) -> Response:
        owner, limit = whose(http), asked(http, 1000).limit
        after, before = (http.query_params.get(name) for name in ("after_id", "before_id"))
        if after is not None and before is not None:
            raise RequestError("after_id and before_id are both given; a page lies behind one or before the other",
                               param="before_id")

        def work(database: Database) -> tuple[list[dict[str, Any]], bool]:
            batches, more = database.page("batch", owner, before or after, limit, before is None, _STEM)
            return [_shown_batch(http, batch, _results(database, batch, owner))
                    for batch in batches[::1 if before is None else -1]], more

        return listed(*await self.state.store.run(work))

    async def get(self, http: Request) -> Response:
        named = ref(http, "batch")

        def work(database: Database) -> dict[str, Any]:
            batch = named.read(database)
            return _shown_batch(http, batch, _results(database, batch, named.owner))

        return json_response(await self.state.store.run(work))

    async def cancel(self, http: Request) -> Response:
        """Ends a batch; what is answered is kept."""
        await self.runner.cancel(ref(http, "batch"))
        return await self.get(http)

    async def delete(self, http: Request) -> Response:
        named = ref(http, "batch")

        def work(database: Database) -> None:
            batch = _ended(named.read(database))
            for name in ("input_file_id", "output_file_id", "error_file_id"):
                if batch[name] is not None:
                    Ref("file", batch[name], named.owner).delete(database, "content")
            named.delete(database)

        await self.state.store.run(work)
        return json_response({"id": named.name, "type": "message_batch_deleted"})

    async def results(self, http: Request) -> Response:
        named = ref(http, "batch")
        found = await self.state.store.run(lambda database: [*_results(database, _ended(named.read(database)), named.owner)])
        return Response(b"".join(msgspec.json.encode(one) + b"\n" for one in found), media_type="application/x-jsonl")


def _ended(batch: Batch) -> Batch:
    if batch["status"] not in ENDED:
        raise RequestError("the batch has not ended", param="id")
    return batch


def _results(database: Database, batch: Batch, owner: str) -> Iterator[dict[str, Any]]:
    """The results of a batch that has ended; none of another."""
    for name in ("output_file_id", "error_file_id"):
        content = content_of(database, Ref("file", batch[name], owner)) if batch[name] is not None else b""
        for line in map(msgspec.json.decode, content.splitlines()):
            kind = _UNASKED[line["error"]["code"]] if line["error"] is not None else "errored"
            answer = {} if line["response"] is None else {"error": line["response"]["body"]}
            if line["response"] is not None and line["response"]["status_code"] == 200:
                kind, answer = "succeeded", {"message": line["response"]["body"]}
            yield {"custom_id": line["custom_id"], "result": {"type": kind, **answer}}


def _shown_batch(http: Request, batch: Batch, results: Iterator[dict[str, Any]] | tuple[()]) -> dict[str, Any]:
    counts, ended = batch["request_counts"], batch["status"] in ENDED
    kinds = Counter(one["result"]["type"] for one in results) if ended else Counter(
        succeeded=counts["completed"], errored=counts["failed"],
        processing=counts["total"] - counts["completed"] - counts["failed"])
    times = {name: None if batch[at] is None else utc(batch[at])
             for name, at in (("created_at", "created_at"), ("expires_at", "expires_at"), ("ended_at", "finalizing_at"),
                              ("cancel_initiated_at", "cancelling_at"))}
    return {"id": batch["id"], "type": "message_batch", "archived_at": None, **times,
            "processing_status": "ended" if ended else "canceling" if batch["status"] == "cancelling" else "in_progress",
            "request_counts": {kind: kinds[kind] for kind in ("processing", "succeeded", "errored", "canceled", "expired")},
            "results_url": f"{http.base_url}v1/messages/batches/{batch['id']}/results" if ended else None}
