"""OpenAI's Responses API as a dialect: create (whole, streamed, in the background), retrieve, delete, cancel, input items; and
conversations, lists of items that responses read and go on with."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.core.errors import EngineDeadError, RequestError, UnsupportedError
from penstock.engine.stream import Stream
from penstock.server.blocks import Blocks
from penstock.server.dialect import EVENTS, Route, as_request_error, json_response, note_ignored
from penstock.server.openai.answers import namer
from penstock.server.openai.chat import Prepared, prepared
from penstock.server.openai.form import OpenAIForm, error_body, explain, in_terms, refusing
from penstock.server.openai.messages import count_tokens
from penstock.server.openai.protocol import ChatRequest
from penstock.server.respond import SSE_HEADERS, Wire, respond
from penstock.server.responses import protocol as r
from penstock.server.responses.answer import ResponseAnswer, describe
from penstock.server.responses.convert import chat_request, items_of, messages_of
from penstock.server.state import State, StateRoutes
from penstock.server.store import Database, Ref, asked, listed, missing, number, ref, whose


class Stored(msgspec.Struct):
    response: dict[str, Any]
    input: list[r.Item]
    """Its own input items."""
    context: list[r.Item]
    """All that a response after it begins with: earlier items, its input, its output."""


class Running:
    """A response that runs in the background, and those who read its events."""

    def __init__(self, answer: ResponseAnswer, stream: Stream, owner: str) -> None:
        self.answer = answer
        self.owner = owner
        self.events: list[bytes] = []
        self.done = False
        self.task: asyncio.Task[None] | None = None
        self._stream = stream
        self._changed = asyncio.Event()
        self._add(answer.opening())

    async def run(self) -> None:
        """To the end of its stream."""
        try:
            await self._stream.admitted()
            self._add(self.answer.started())
            async for deltas in self._stream:
                self._add(self.answer.events(deltas))
            self._add(self.answer.last_events() if not self.done else b"")
        except (RequestError, EngineDeadError) as error:
            self._add(self.answer.failed(error_body(as_request_error(error))) if not self.done else b"")
        self.done = True
        self._add(b"")

    def cancel(self) -> None:
        """Ends it, with what there is."""
        if not self.done:
            self.done = True
            self.answer.cancel()
            self._stream.close()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Events behind number `after`, as they come."""
        at = after + 1
        while True:
            changed = self._changed
            for event in self.events[at:]:
                yield event
            at = max(at, len(self.events))
            if self.done:
                return
            await changed.wait()

    def _add(self, events: bytes) -> None:
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self._changed.set()
        self._changed = asyncio.Event()


class Responses(OpenAIForm):
    def __init__(self, state: State) -> None:
        super().__init__(state, refusing(r.WHY_REFUSED, _explain_field))
        self.conversations = Conversations(state)
        self.running: dict[str, Running] = {}

    def routes(self) -> Sequence[Route]:
        one = "/v1/responses/{response}"
        return (
            Route("POST", "/v1/responses", self.post, "Answer items, OpenAI's newer form of a conversation",
                  r.ResponseRequest, (EVENTS,)),
            Route("POST", "/v1/responses/input_tokens", self.input_tokens, "Count the tokens of a response's input",
                  r.ResponseRequest, answer=r.InputTokens),
            Route("GET", one, self.get, "A stored response, or with stream=true the events of one in the background",
                  also=(EVENTS,)),
            Route("DELETE", one, self.delete, "Delete a stored response", answer=r.Deleted),
            Route("POST", one + "/cancel", self.cancel, "End a response that runs in the background"),
            Route("GET", one + "/input_items", self.input_items, "A page of a response's input"),
            *self.conversations.routes())

    # -- making

    async def post(self, http: Request, body: r.ResponseRequest) -> Response:
        state = self.state
        state.admit(body.model)
        if body.background and body.store is False:
            raise RequestError("background can only be used when `store` is true, since its response is fetched later",
                               param="background")
        owner, conversation = whose(http), _name(body.conversation)
        history = await self._history(body, owner)
        new = numbered(_resolved(items_of(body.input), history))
        ready, chat = await self._prepared(http, body, [*history, *new])
        response = describe(f"resp_{uuid.uuid4().hex}", ready.model, body, conversation)

        def finished(answer: ResponseAnswer) -> None:
            self._keep(answer.response, history, new, owner, body, conversation)

        answer = ResponseAnswer(response, len(ready.request.prompt_ids),
                                Blocks(ready.parser(state), body.parallel_tool_calls is False),
                                namer(state, chat) if chat.logprobs else None, body, finished)
        stream = state.llm.open([ready.request])
        if body.background:
            return await self._in_background(answer, stream, owner, body, Stored(response, new, [*history, *new]))
        wire = Wire(opening=lambda: answer.opening() + answer.started(), done=b"", failed=answer.failed)
        return await respond(http, stream, answer, bool(body.stream), wire)

    async def _history(self, body: r.ResponseRequest, owner: str) -> list[r.Item]:
        previous, conversation = body.previous_response_id, _name(body.conversation)
        if previous is not None and conversation is not None:
            raise RequestError("previous_response_id and conversation both say what came before; send one of them",
                               param="previous_response_id")
        if conversation is not None:
            found: list[r.Item] = (await self.state.store.run(Ref("conversation", conversation, owner).read))["items"]
            return found
        if previous is None:
            return []
        stored = await self._stored(Ref("response", previous, owner))
        if stored.response["status"] in ("queued", "in_progress"):
            raise RequestError(f"the response {previous!r} is not finished; wait for its end, or cancel it",
                               param="previous_response_id", code="response_not_finished")
        return stored.context

    async def _prepared(self, http: Request, body: r.ResponseRequest, items: list[r.Item]) -> tuple[Prepared, ChatRequest]:
        """The request for the engine. With truncation, older items are left out until the rest fits."""
        if body.reasoning is not None and (body.reasoning.summary or body.reasoning.generate_summary):
            note_ignored(http, ["reasoning.summary"])
        while True:
            chat = chat_request(body, items)
            try:
                return await prepared(self.state, http, chat), chat
            except RequestError as error:
                if error.code != "context_length_exceeded" or body.truncation != "auto" or len(items) < 2:
                    raise in_terms(error, _NAMES) from None
            items = items[-(-len(items) // 4):]
            while len(items) > 1 and str(items[0].get("type", "")).endswith("_output"):
                # The call that it answers is gone.
                items = items[1:]

    def _keep(self, response: dict[str, Any], history: list[r.Item], new: list[r.Item], owner: str, body: r.ResponseRequest,
              conversation: str | None) -> None:
        output = response["output"]
        stored = msgspec.json.encode(Stored(response, new, [*history, *new, *output])) if body.store is not False else None
        added = [*new, *output] if conversation is not None and response["status"] in ("completed", "incomplete") else []

        if stored is not None:
            self.state.store.submit(lambda database: database.put("response", response["id"], owner, stored,
                                                                  response["created_at"]))
        if added:
            named = Ref("conversation", str(conversation), owner)
            self.state.store.submit(lambda database: extend(database, named, added))

    async def _in_background(self, answer: ResponseAnswer, stream: Stream, owner: str, body: r.ResponseRequest,
                             stored: Stored) -> Response:
        response, name = answer.response, answer.response["id"]
        await stream.admitted()
        running = self.running[name] = Running(answer, stream, owner)
        first = msgspec.json.encode(stored)
        self.state.store.submit(lambda database: database.put("response", name, owner, first, response["created_at"]))

        async def run() -> None:
            try:
                await running.run()
                if body.stream:
                    events = msgspec.json.encode([event.decode() for event in running.events])
                    self.state.store.submit(lambda database: database.put("events", name, owner, events))
            finally:
                del self.running[name]

        running.task = asyncio.create_task(run())
        if body.stream:
            return StreamingResponse(running.follow(-1), headers=SSE_HEADERS, media_type=EVENTS)
        return json_response(response)

    async def input_tokens(self, http: Request, body: r.ResponseRequest) -> Response:
        self.state.admit(body.model)
        history = await self._history(body, whose(http))
        chat = chat_request(body, [*history, *_resolved(items_of(body.input), history)])
        return json_response(r.InputTokens(await count_tokens(self.state, http, chat, "input")))

    # -- what was made

    async def _stored(self, response: Ref) -> Stored:
        stored = msgspec.convert(await self.state.store.run(response.read), Stored)
        if stored.response["status"] in ("queued", "in_progress") and response.name not in self.running:
            why = {"code": "server_error", "message": "the server stopped before this response was finished"}
            stored.response |= {"status": "failed", "error": why}
        return stored

    def _running(self, response: Ref) -> Running | None:
        found = self.running.get(response.name)
        return found if found is not None and found.owner == response.owner else None

    async def get(self, http: Request) -> Response:
        response = ref(http, "response")
        running = self._running(response)
        if http.query_params.get("stream") == "true":
            given = http.query_params.get("starting_after", "-1")
            if (after := number(given)) is None or after < -1:
                raise RequestError(f"starting_after is {given!r}; possible is an event's sequence_number",
                                   param="starting_after")
            if running is not None:
                return StreamingResponse(running.follow(after), headers=SSE_HEADERS, media_type=EVENTS)
            await self._stored(response)
            found = await self.state.store.run(lambda database: database.get(*response._replace(kind="events")))
            if found is None:
                raise RequestError("this response has no events to read again; only those with background and stream have",
                                   param="stream")
            events = msgspec.json.decode(found, type=list[str])[after + 1:]
            return Response("".join(events), headers=SSE_HEADERS, media_type=EVENTS)
        return json_response(running.answer.response if running is not None else (await self._stored(response)).response)

    async def delete(self, http: Request) -> Response:
        response = ref(http, "response")
        if (running := self._running(response)) is not None:
            running.cancel()
        await self.state.store.run(lambda database: response.delete(database, "events"))
        return json_response(r.Deleted(response.name, "response"))

    async def cancel(self, http: Request) -> Response:
        response = ref(http, "response")
        if (running := self._running(response)) is not None:
            running.cancel()
            return json_response(running.answer.response)
        stored = await self._stored(response)
        if not stored.response["background"]:
            raise RequestError("Cannot cancel a synchronous response, only one in the background; hang up", param="id")
        return json_response(stored.response)

    async def input_items(self, http: Request) -> Response:
        return listed_items((await self._stored(ref(http, "response"))).input, http)


def _name(conversation: str | r.ConversationId | None) -> str | None:
    return conversation.id if isinstance(conversation, r.ConversationId) else conversation


def _resolved(items: list[r.Item], history: list[r.Item]) -> list[r.Item]:
    """Items with references replaced by what they refer to. RequestError for one that refers to nothing."""
    known = {item.get("id"): item for item in [*history, *items] if item.get("type") != "item_reference"}
    found = []
    for item in items:
        if item.get("type") == "item_reference":
            if item.get("id") not in known:
                raise missing("item", str(item.get("id")))
            if known[item["id"]] not in history:
                found.append(known[item["id"]])
        else:
            found.append(item)
    return found


_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
          "response_format.json_schema.schema": "text.format.schema"}
"""Fields of a chat by what they are called here."""


def _explain_field(where: str, text: str) -> RequestError | str:
    if where.startswith("tools") and where.endswith(".type"):
        return f"{text[:1].lower()}{text[1:]}; possible are function and custom: this server runs no tools itself"
    return explain(where, text)


MAX_ITEMS = 16384
"""Items that a conversation may have."""


def numbered(items: Sequence[r.Item]) -> list[r.Item]:
    kinds = {"reasoning": "rs", "function_call": "fc", "message": "msg"}
    found = []
    for item in items:
        kind, given = item.get("type") or "message", {name: value for name, value in item.items() if value is not None}
        found.append({"id": f"{kinds.get(kind, 'item')}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **given})
    return found


def listed_items(items: Sequence[r.Item], http: Request) -> Response:
    """A page of items as the query asks: limit, order, after."""
    after, limit, newest_first = asked(http)
    ordered = list(items)[::-1] if newest_first else list(items)
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise RequestError(f"after names the item {after!r}, which is not in the list", param="after")
        ordered = ordered[places[0] + 1:]
    return listed(ordered[:limit], len(ordered) > limit)


def extend(database: Database, conversation: Ref, items: Sequence[r.Item]) -> list[r.Item]:
    """Appends items to a conversation; the items with their ids."""
    value, new = conversation.read(database), numbered(items)
    if len(value["items"]) + len(new) > MAX_ITEMS:
        raise RequestError(f"a conversation has at most {MAX_ITEMS} items; begin another", param="conversation")
    value["items"] += new
    database.put(*conversation, value)
    return new


class Conversations(StateRoutes):
    def routes(self) -> Sequence[Route]:
        one = "/v1/conversations/{conversation}"
        return (
            Route("POST", "/v1/conversations", self.create, "Begin a conversation", r.ConversationRequest),
            Route("GET", one, self.get, "A conversation"),
            Route("POST", one, self.change, "Change a conversation's metadata", r.ConversationRequest),
            Route("DELETE", one, self.delete, "Delete a conversation", answer=r.Deleted),
            Route("GET", one + "/items", self.items, "A page of its items"),
            Route("POST", one + "/items", self.add, "Append items", r.ItemsRequest),
            Route("GET", one + "/items/{item}", self.item, "One of its items"),
            Route("DELETE", one + "/items/{item}", self.remove, "Delete one of its items"))

    async def create(self, http: Request, body: r.ConversationRequest) -> Response:
        messages_of(items_of(body.items))
        value = {"id": f"conv_{uuid.uuid4().hex}", "created_at": int(time.time()), "metadata": body.metadata or {},
                 "items": numbered(body.items or [])}
        made = Ref("conversation", str(value["id"]), whose(http))
        await self.state.store.run(lambda database: database.put(*made, value))
        return json_response(_shown(value))

    async def get(self, http: Request) -> Response:
        return json_response(_shown(await self._read(http)))

    async def change(self, http: Request, body: r.ConversationRequest) -> Response:
        conversation = ref(http, "conversation")
        if body.items is not None:
            raise UnsupportedError("items cannot be changed so; add to /items, or delete there", "items")
        changed = await self.state.store.run(lambda database: conversation.change(database, metadata=body.metadata or {}))
        return json_response(_shown(changed))

    async def delete(self, http: Request) -> Response:
        conversation = ref(http, "conversation")
        await self.state.store.run(conversation.delete)
        return json_response(r.Deleted(conversation.name, "conversation.deleted"))

    async def items(self, http: Request) -> Response:
        return listed_items((await self._read(http))["items"], http)

    async def add(self, http: Request, body: r.ItemsRequest) -> Response:
        conversation = ref(http, "conversation")
        messages_of(items_of(body.items))
        return listed(await self.state.store.run(lambda database: extend(database, conversation, body.items)), False)

    async def item(self, http: Request) -> Response:
        name = http.path_params["item"]
        found = next((item for item in (await self._read(http))["items"] if item["id"] == name), None)
        if found is None:
            raise missing("item", name)
        return json_response(found)

    async def remove(self, http: Request) -> Response:
        conversation, item = ref(http, "conversation"), http.path_params["item"]

        def work(database: Database) -> dict[str, Any]:
            items = conversation.read(database)["items"]
            left = [one for one in items if one["id"] != item]
            if len(left) == len(items):
                raise missing("item", item)
            return conversation.change(database, items=left)

        return json_response(_shown(await self.state.store.run(work)))

    async def _read(self, http: Request) -> dict[str, Any]:
        return await self.state.store.run(ref(http, "conversation").read)


def _shown(value: dict[str, Any]) -> dict[str, Any]:
    return {"id": value["id"], "object": "conversation", "created_at": value["created_at"], "metadata": value["metadata"]}
