"""Objects that outlive a request (responses, conversations, files, batches), in SQLite, and over HTTP: whose they are, 404 for
those that are not there, and pages of lists.

One thread of its own makes all calls, in their order: who reads after a write finds what was written. Objects belong to the
API key that made them. They have a bound and an age, but for files and batches, which stay until they are deleted or expire."""

import asyncio
import fcntl
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import ConfigError, RequestError
from penstock.observe.log import LOG
from penstock.server.dialect import json_response

Result = TypeVar("Result")

KEPT = ("response", "events", "conversation")
"""Kinds that leave when they are too old, or the oldest first when there are too many bytes."""

FAILED = "store_failed"
"""The error's code where the store cannot be used, which may pass: a full disk, say."""

_FILE, _PRUNE_SECONDS = "penstock.sqlite3", 60.0

_TABLES = """
create table if not exists objects(kind text, id text, owner text, created real, size integer, body blob,
                                   primary key(kind, id));
create index if not exists by_age on objects(kind, owner, created);
create table if not exists lines(batch text, place integer, custom_id text, answer blob, failed integer,
                                 primary key(batch, place));
"""


def owner_of(key: bytes) -> str:
    """Returns the owner of an object: a hash of the API key, or nothing without one."""
    return blake2b(key, digest_size=16, person=b"owner").hexdigest() if key else ""


class Store:
    """One server's objects. Methods that take a `Database` run in its thread, by `run` or `submit`."""

    def __init__(self, folder: str | None, most_bytes: int, most_days: float) -> None:
        """`folder` None: in memory, gone with the server. ConfigError if it or its file cannot be used, or another server uses
        it."""
        self.folder = None if folder is None else Path(folder).expanduser()
        self._most = (most_bytes, most_days * 86400.0)
        self._lock = None if self.folder is None else _locked(self.folder)
        self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._database: Database | None = None
        try:
            self._thread.submit(self._do, lambda _: None).result()
        except sqlite3.Error as error:
            self.close()
            raise ConfigError(f"cannot use {self.folder}/{_FILE}: {error}; move it away, or choose another --store") from None

    def submit(self, work: "Callable[[Database], Result]") -> Future[Result]:
        """Has the thread do `work`, from any thread: all its writes or none. A failure is logged."""
        future = self._thread.submit(lambda: self._do(work))
        future.add_done_callback(_report)
        return future

    async def run(self, work: "Callable[[Database], Result]") -> Result:
        """The result of `work`, of whose writes all or none are made. RequestError as it raises, 500 if the store cannot be
        used."""
        try:
            return await asyncio.wrap_future(self._thread.submit(lambda: self._do(work)))
        except sqlite3.Error as error:
            raise RequestError(f"the server's store cannot be used: {error}", code=FAILED, status=500) from error

    def _do(self, work: "Callable[[Database], Result]") -> Result:
        if self._database is None:
            path = ":memory:" if self.folder is None else str(self.folder / _FILE)
            self._database = Database(sqlite3.connect(path, check_same_thread=False, isolation_level=None), *self._most)
        self._database.sql("begin immediate")
        with self._database.connection:
            return work(self._database)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._database is not None:
            self._database.connection.close()
            self._database = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


class Database:
    """The calls, in the store's thread."""

    def __init__(self, connection: sqlite3.Connection, most_bytes: int, most_seconds: float) -> None:
        self.connection = connection
        self.most_bytes = most_bytes
        self._most_seconds = most_seconds
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=normal")
        connection.executescript(_TABLES)
        self._kept = self.bytes_of(*KEPT)
        """At least the bytes of what is kept."""
        self._pruned = 0.0

    def sql(self, text: str, *values: Any) -> sqlite3.Cursor:
        return self.connection.execute(text, values)

    def put(self, kind: str, name: str, owner: str, value: Any, created: float | None = None) -> None:
        """Writes an object, new or not, as JSON; `value` may be bytes already."""
        body = value if isinstance(value, bytes) else msgspec.json.encode(value)
        now = time.time()
        self.sql("insert into objects values(?,?,?,?,?,?) on conflict(kind, id) do update set body=excluded.body, "
                "size=excluded.size", kind, name, owner, now if created is None else created, len(body), body)
        if kind in KEPT:
            self._kept += len(body)
            if self._kept > self.most_bytes or now - self._pruned > _PRUNE_SECONDS:
                self._prune(now)

    def get(self, kind: str, name: str, owner: str) -> bytes | None:
        found = self.sql("select body from objects where kind=? and id=? and owner=?", kind, name, owner).fetchone()
        return found[0] if found else None

    def delete(self, kind: str, name: str, owner: str) -> bool:
        """Whether there was one."""
        return self.sql("delete from objects where kind=? and id=? and owner=?", kind, name, owner).rowcount > 0

    def page(self, kind: str, owner: str, after: str | None, limit: int, newest_first: bool = True, stem: str = "",
             purpose: str | None = None) -> tuple[list[dict[str, Any]], bool]:
        """(a page of a list by age, behind the object `after`, of ids that begin with `stem`, of files with this `purpose` if
        one is given; whether there are more)."""
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        where, values = "kind=? and owner=? and substr(id, 1, ?)=?", [kind, owner, len(stem), stem]
        if after is not None:
            if self.get(kind, after, owner) is None:
                raise RequestError(f"the page begins behind {after[:100]!r}, which is not in the list; it never was, or was "
                                   "deleted", param="after")
            where += f" and (created, id) {sign} (select created, id from objects where kind=? and id=?)"
            values += [kind, after]
        if purpose is not None:
            where += " and json_extract(cast(body as text), '$.purpose')=?"
            values.append(purpose)
        rows = self.sql(f"select body from objects where {where} order by created {order}, id {order} limit ?",
                        *values, limit + 1).fetchall()
        return [msgspec.json.decode(body) for body, in rows[:limit]], len(rows) > limit

    def all(self, kind: str) -> list[tuple[str, str, bytes]]:
        """(id, owner, body) of every object of a kind, oldest first."""
        return self.sql("select id, owner, body from objects where kind=? order by created", kind).fetchall()

    def bytes_of(self, *kinds: str) -> int:
        marks = ",".join("?" * len(kinds))
        return int(self.sql(f"select coalesce(sum(size), 0) from objects where kind in ({marks})", *kinds).fetchone()[0])

    def _prune(self, now: float) -> None:
        """Deletes what is too old, and if there is too much, the oldest until a tenth is free."""
        marks, self._pruned = ",".join("?" * len(KEPT)), now
        self.sql(f"delete from objects where kind in ({marks}) and created < ?", *KEPT, now - self._most_seconds)
        self._kept = self.bytes_of(*KEPT)
        if self._kept <= self.most_bytes:
            return
        oldest = self.sql(f"select kind, id, size from objects where kind in ({marks}) order by created", *KEPT).fetchall()
        for kind, name, size in oldest:
            if self._kept <= 0.9 * self.most_bytes:
                break
            self.sql("delete from objects where kind=? and id=?", kind, name)
            self._kept -= size


def _report(future: Future[Any]) -> None:
    if (error := future.exception()) is not None:
        LOG.error("the store failed: %s: %s", type(error).__name__, error)


def _locked(folder: Path) -> Any:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another server uses the folder {folder}; choose another --store") from None
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {error.strerror}; choose another --store") from None
    return lock


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

    def change(self, database: Database, **fields: Any) -> dict[str, Any]:
        """The object, now with these fields. RequestError 404 if there is none."""
        value = {**self.read(database), **fields}
        database.put(*self, value)
        return value

    def delete(self, database: Database, *beside: str) -> None:
        """Deletes the object, and those of the kinds `beside` under its name. RequestError 404 if there is none."""
        if not database.delete(*self):
            raise missing(self.kind, self.name)
        for kind in beside:
            database.delete(*self._replace(kind=kind))


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
    return json_response({"object": "list", "data": data, "first_id": data[0]["id"] if data else None,
                          "last_id": data[-1]["id"] if data else None, "has_more": more})
