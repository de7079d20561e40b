"""Conversations: lists of items that responses read and go on with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.answer import json_response
from penstock.server.body import BodyReader
from penstock.server.dialect import Route
from penstock.server.responses import protocol as r
from penstock.server.responses.convert import messages_of
from penstock.server.state import State
from penstock.server.store import Database, owner_of

MAX_ITEMS = 16384
"""Items that a conversation may have."""


def missing(what: str, name: str) -> RequestError:
    """404 for an object that is not there, or is another's."""
    return RequestError(f"there is no {what} {name!r}; it never was, was deleted, or was the oldest (--store-days, "
                        "--store-bytes)", param="id", code="not_found", status=404)


def numbered(items: Sequence[r.Item]) -> list[r.Item]:
    """Items, each with an id and a type."""
    kinds = {"reasoning": "rs", "function_call": "fc", "message": "msg"}
    found = []
    for item in items:
        kind = item.get("type", "message")
        found.append({"id": f"{kinds.get(kind, 'item')}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **item})
    return found


def listed(items: Sequence[r.Item], http: Request) -> Response:
    """A page of items as the query asks: limit, order, after."""
    query = http.query_params
    limit = query.get("limit", "20")
    if not limit.isdigit() or not 1 <= int(limit) <= 100:
        raise RequestError(f"limit is {limit!r}; possible are 1 to 100", param="limit", code="invalid_value")
    if query.get("order", "desc") not in ("asc", "desc"):
        raise RequestError(f"order is {query['order']!r}; possible are asc and desc", param="order", code="invalid_value")
    ordered = list(items) if query.get("order", "desc") == "asc" else list(items)[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise RequestError(f"after names the item {after!r}, which is not in the list", param="after", code="invalid_value")
        ordered = ordered[places[0] + 1:]
    shown = ordered[:int(limit)]
    return json_response({"object": "list", "data": shown, "first_id": shown[0]["id"] if shown else None,
                          "last_id": shown[-1]["id"] if shown else None, "has_more": len(ordered) > len(shown)})


def read(database: Database, name: str, owner: str) -> dict[str, Any]:
    """A stored conversation. RequestError 404 if there is none."""
    found = database.get("conversation", name, owner)
    if found is None:
        raise missing("conversation", name)
    value: dict[str, Any] = msgspec.json.decode(found)
    return value


def extend(database: Database, name: str, owner: str, items: Sequence[r.Item]) -> list[r.Item]:
    """Appends items to a conversation; the items with their ids."""
    value, new = read(database, name, owner), numbered(items)
    if len(value["items"]) + len(new) > MAX_ITEMS:
        raise RequestError(f"a conversation has at most {MAX_ITEMS} items; begin another", param="conversation",
                           code="invalid_value")
    value["items"] += new
    database.put("conversation", name, owner, value)
    return new


class Conversations:
    """The endpoints."""

    def __init__(self, state: State, bodies: BodyReader) -> None:
        self.state = state
        self.bodies = bodies

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

    async def create(self, http: Request) -> Response:
        body, owner = await self.bodies.read(http, r.ConversationRequest), owner_of(http.scope["api_key"])
        messages_of(body.items or [])
        value = {"id": f"conv_{uuid.uuid4().hex}", "created_at": int(time.time()), "metadata": body.metadata or {},
                 "items": numbered(body.items or [])}
        await self.state.store.run(lambda database: database.put("conversation", str(value["id"]), owner, value))
        return json_response(_shown(value))

    async def get(self, http: Request) -> Response:
        return json_response(_shown(await self._read(http)))

    async def change(self, http: Request) -> Response:
        body, owner = await self.bodies.read(http, r.ConversationRequest), owner_of(http.scope["api_key"])
        if body.items is not None:
            raise RequestError("items cannot be changed so; add to /items, or delete there", param="items",
                               code="unsupported_parameter")
        name = http.path_params["conversation"]

        def work(database: Database) -> dict[str, Any]:
            value = {**read(database, name, owner), "metadata": body.metadata or {}}
            database.put("conversation", name, owner, value)
            return value

        return json_response(_shown(await self.state.store.run(work)))

    async def delete(self, http: Request) -> Response:
        name, owner = http.path_params["conversation"], owner_of(http.scope["api_key"])
        if not await self.state.store.run(lambda database: database.delete("conversation", name, owner)):
            raise missing("conversation", name)
        return json_response(r.Deleted(name, "conversation.deleted"))

    async def items(self, http: Request) -> Response:
        return listed((await self._read(http))["items"], http)

    async def add(self, http: Request) -> Response:
        body, owner = await self.bodies.read(http, r.ItemsRequest), owner_of(http.scope["api_key"])
        messages_of(body.items)
        name = http.path_params["conversation"]
        new = await self.state.store.run(lambda database: extend(database, name, owner, body.items))
        return json_response({"object": "list", "data": new, "first_id": new[0]["id"], "last_id": new[-1]["id"],
                              "has_more": False})

    async def item(self, http: Request) -> Response:
        name = http.path_params["item"]
        found = next((item for item in (await self._read(http))["items"] if item["id"] == name), None)
        if found is None:
            raise missing("item", name)
        return json_response(found)

    async def remove(self, http: Request) -> Response:
        name, item, owner = http.path_params["conversation"], http.path_params["item"], owner_of(http.scope["api_key"])

        def work(database: Database) -> dict[str, Any]:
            value = read(database, name, owner)
            left = [one for one in value["items"] if one["id"] != item]
            if len(left) == len(value["items"]):
                raise missing("item", item)
            value["items"] = left
            database.put("conversation", name, owner, value)
            return value

        return json_response(_shown(await self.state.store.run(work)))

    async def _read(self, http: Request) -> dict[str, Any]:
        name, owner = http.path_params["conversation"], owner_of(http.scope["api_key"])
        return await self.state.store.run(lambda database: read(database, name, owner))


def _shown(value: dict[str, Any]) -> dict[str, Any]:
    return {"id": value["id"], "object": "conversation", "created_at": value["created_at"], "metadata": value["metadata"]}
