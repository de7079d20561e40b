"""Objects that outlive a request (responses, conversations, files, batches), in SQLite.

One thread of its own makes all calls, in their order: who reads after a write finds what was written. Objects belong to the
API key that made them. They have a bound and an age, but for files and batches, which stay until they are deleted or expire."""

import asyncio
import fcntl
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.core.errors import ConfigError, RequestError
from penstock.observe.log import LOG

Result = TypeVar("Result")

KEPT = ("response", "events", "conversation")
"""Kinds that leave when they are too old, or the oldest first when there are too many bytes."""

_PRUNE_SECONDS = 60.0

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
        """`folder` None: in memory, gone with the server. ConfigError if it cannot be used or another server uses it."""
        self.folder = None if folder is None else Path(folder).expanduser()
        self._most = (most_bytes, most_days * 86400.0)
        self._lock = None if self.folder is None else _locked(self.folder)
        self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._database: Database | None = None

    def submit(self, work: "Callable[[Database], Result]") -> Future[Result]:
        """Has the thread do `work`, from any thread. A failure is logged."""
        future = self._thread.submit(lambda: work(self._open()))
        future.add_done_callback(_report)
        return future

    async def run(self, work: "Callable[[Database], Result]") -> Result:
        """The result of `work`. RequestError as it raises, 500 if the store cannot be used."""
        try:
            return await asyncio.wrap_future(self._thread.submit(lambda: work(self._open())))
        except sqlite3.Error as error:
            raise RequestError(f"the server's store cannot be used: {error}", code="store_failed", status=500) from error

    def _open(self) -> "Database":
        if self._database is None:
            path = ":memory:" if self.folder is None else str(self.folder / "penstock.sqlite3")
            self._database = Database(sqlite3.connect(path, check_same_thread=False, isolation_level=None), *self._most)
        return self._database

    def close(self) -> None:
        """Ends the thread when all calls are done."""
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
                "size=excluded.size",
                 kind, name, owner, now if created is None else created, len(body), body)
        if kind in KEPT:
            self._kept += len(body)
            if self._kept > self.most_bytes or now - self._pruned > _PRUNE_SECONDS:
                self._prune(now)

    def get(self, kind: str, name: str, owner: str) -> bytes | None:
        """An object of this owner."""
        found = self.sql("select body from objects where kind=? and id=? and owner=?", kind, name, owner).fetchone()
        return found[0] if found else None

    def delete(self, kind: str, name: str, owner: str) -> bool:
        """Whether there was one."""
        return self.sql("delete from objects where kind=? and id=? and owner=?", kind, name, owner).rowcount > 0

    def page(self, kind: str, owner: str, after: str | None, limit: int, newest_first: bool = True, stem: str = "",
             ) -> tuple[list[bytes], bool]:
        """(a page of a list by age, behind the object `after`, of ids that begin with `stem`; whether there are more)."""
        sign, order = ("<", "desc") if newest_first else (">", "asc")
        where, values = "kind=? and owner=? and substr(id, 1, ?)=?", [kind, owner, len(stem), stem]
        if after is not None:
            where += f" and (created, id) {sign} (select created, id from objects where kind=? and id=?)"
            values += [kind, after]
        rows = self.sql(f"select body from objects where {where} order by created {order}, id {order} limit ?",
                        *values, limit + 1).fetchall()
        return [body for body, in rows[:limit]], len(rows) > limit

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
    error = future.exception()
    if error is not None:
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
