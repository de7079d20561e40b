"""Stored objects over HTTP: whose they are, 404 for those that are not there, and pages of lists."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.answer import json_response
from penstock.server.store import Database, owner_of


class Ref(NamedTuple):
    """The object that a request's path names, as its owner's."""

    kind: str
    name: str
    owner: str

    def read(self, database: Database) -> dict[str, Any]:
        """The object. RequestError 404 if there is none."""
        found = database.get(*self)
        if found is None:
            raise missing(self.kind, self.name)
        value: dict[str, Any] = msgspec.json.decode(found)
        return value

    def delete(self, database: Database) -> None:
        """Deletes the object. RequestError 404 if there is none."""
        if not database.delete(*self):
            raise missing(self.kind, self.name)


def ref(http: Request, kind: str) -> Ref:
    """The object that the path's parameter of the name `kind` names."""
    return Ref(kind, http.path_params[kind], whose(http))


def whose(http: Request) -> str:
    """The owner of objects that a request makes and sees."""
    return owner_of(http.scope["api_key"])


def missing(kind: str, name: str) -> RequestError:
    """404 for an object that is not there, or is another's."""
    return RequestError(f"{kind.capitalize()} with id {name!r} not found; it never was, was deleted, or was the oldest "
                        "(--store-days, --store-bytes)", param="id", code="not_found", status=404)


def number(text: str) -> int | None:
    """A whole number of a query or a form; None for anything else, and for one of more than nine digits."""
    return int(text) if re.fullmatch("-?[0-9]{1,9}", text) else None


class Asked(NamedTuple):
    """The part of a list that a query asks for."""

    after: str | None
    limit: int
    newest_first: bool


def asked(http: Request, most: int = 100) -> Asked:
    """The query's after, limit and order. RequestError naming the one at fault."""
    query = http.query_params
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not 1 <= (number(limit) or 0) <= most:
        raise RequestError(f"limit is {limit!r}; possible are 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order!r}; possible are asc and desc", param="order")
    return Asked(query.get("after"), int(limit), order == "desc")


def listed(data: Sequence[dict[str, Any]], more: bool) -> Response:
    """A page of objects."""
    return json_response({"object": "list", "data": data, "first_id": data[0]["id"] if data else None,
                          "last_id": data[-1]["id"] if data else None, "has_more": more})
