"""Conversations: lists of items that responses read and go on with."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.answer import json_response
from penstock.server.dialect import Route
from penstock.server.responses import protocol as r
from penstock.server.responses.convert import messages_of
from penstock.server.state import StateRoutes
from penstock.server.store import Database
from penstock.server.stored import Ref, asked, listed, missing, ref, whose

MAX_ITEMS = 16384
"""Items that a conversation may have."""


def numbered(items: Sequence[r.Item]) -> list[r.Item]:
    """Items, each with an id and a type."""
    kinds = {"reasoning": "rs", "function_call": "fc", "message": "msg"}
    found = []
    for item in items:
        kind = item.get("type", "message")
        found.append({"id": f"{kinds.get(kind, 'item')}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **item})
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
            Route("DELETE", one + "/items/{item}", self.remove, "Delete one of its items"),
        )

    async def create(self, http: Request, body: r.ConversationRequest) -> Response:
        messages_of(body.items or [])
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
            raise RequestError("items cannot be changed so; add to /items, or delete there", param="items",
                               code="unsupported_parameter")

        def work(database: Database) -> dict[str, Any]:
            value = {**conversation.read(database), "metadata": body.metadata or {}}
            database.put(*conversation, value)
            return value

        return json_response(_shown(await self.state.store.run(work)))

    async def delete(self, http: Request) -> Response:
        conversation = ref(http, "conversation")
        await self.state.store.run(conversation.delete)
        return json_response(r.Deleted(conversation.name, "conversation.deleted"))

    async def items(self, http: Request) -> Response:
        return listed_items((await self._read(http))["items"], http)

    async def add(self, http: Request, body: r.ItemsRequest) -> Response:
        conversation = ref(http, "conversation")
        messages_of(body.items)
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
            value = conversation.read(database)
            left = [one for one in value["items"] if one["id"] != item]
            if len(left) == len(value["items"]):
                raise missing("item", item)
            value["items"] = left
            database.put(*conversation, value)
            return value

        return json_response(_shown(await self.state.store.run(work)))

    async def _read(self, http: Request) -> dict[str, Any]:
        return await self.state.store.run(ref(http, "conversation").read)


def _shown(value: dict[str, Any]) -> dict[str, Any]:
    return {"id": value["id"], "object": "conversation", "created_at": value["created_at"], "metadata": value["metadata"]}
