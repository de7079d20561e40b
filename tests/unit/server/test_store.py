"""The store of objects: owners, pages, bounds and age."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.server import store
from penstock.server.batches.files import sweep, write_file
from penstock.server.store import FAILED, Database, Store, owner_of


def database(most_bytes: int = 1000, most_seconds: float = 100.0) -> Database:
    return Database(sqlite3.connect(":memory:", isolation_level=None), most_bytes, most_seconds)


def test_objects_belong_to_their_owner() -> None:
    found = database()
    found.put("response", "a", "x", b"1")
    assert found.get("response", "a", "x") == b"1" and found.get("response", "a", "y") is None
    assert not found.delete("response", "a", "y") and found.delete("response", "a", "x") and not found.delete("response", "a",
                                                                                                              "x")
    assert owner_of(b"") == "" and owner_of(b"k") != owner_of(b"l")


def test_pages() -> None:
    found = database()
    for place in range(5):
        found.put("file", f"f{place}", "x", str(place).encode(), created=float(place))
    assert found.page("file", "x", None, 3) == ([4, 3, 2], True)
    assert found.page("file", "x", "f2", 3) == ([1, 0], False)
    assert found.page("file", "x", "f2", 3, newest_first=False) == ([3, 4], False)
    assert found.page("file", "y", None, 3) == ([], False)
    for owner, after in (("x", "gone"), ("y", "f2")):
        with pytest.raises(RequestError, match="not in the list") as caught:
            found.page("file", owner, after, 3)
        assert caught.value.param == "after"


def test_the_oldest_leave_and_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = database()
    found.put("file", "kept", "x", b"f" * 2000)
    for place in range(20):
        found.put("response", f"r{place:02}", "x", b"r" * 100, created=store.time.time() + place)
        assert found.bytes_of("response") <= 1000
    assert found.get("response", "r19", "x") and not found.get("response", "r00", "x") and found.get("file", "kept", "x")
    # Overwriting does not grow the account for good.
    for _ in range(50):
        found.put("response", "r19", "x", b"r" * 100)
    assert found.bytes_of("response") >= 800
    now = store.time.time()
    monkeypatch.setattr(store.time, "time", lambda: now + 1000)
    found.put("response", "new", "x", b"1")
    assert found.bytes_of("response") == 1, "the others were too old"


def test_reads_follow_writes_and_one_server_uses_a_folder(tmp_path: Path) -> None:
    async def run() -> None:
        first = Store(str(tmp_path), 1000, 1)
        for place in range(100):
            first.submit(lambda database, place=place: database.put("file", "a", "", str(place).encode()))
        assert await first.run(lambda database: database.get("file", "a", "")) == b"99"
        with pytest.raises(ConfigError, match="another server"):
            Store(str(tmp_path), 1000, 1)
        first.close()
        second = Store(str(tmp_path), 1000, 1)
        assert await second.run(lambda database: database.get("file", "a", "")) == b"99"
        second.close()

    asyncio.run(run())


def test_a_damaged_file_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "penstock.sqlite3").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"penstock\.sqlite3: file is not a database; move it away"):
            Store(str(tmp_path), 1000, 1)
    (tmp_path / "penstock.sqlite3").unlink()
    (tmp_path / "penstock.sqlite3").mkdir()
    with pytest.raises(ConfigError, match="unable to open"):
        Store(str(tmp_path), 1000, 1)


def test_work_that_fails_writes_nothing() -> None:
    """A disk that becomes full in the midst of an upload leaves no file without its content."""
    async def run() -> None:
        found = Store(None, 1 << 20, 1)

        def bounded(database: Database) -> None:
            pages = database.sql("pragma page_count").fetchone()[0]
            database.sql(f"pragma max_page_count={pages + 2}")

        await found.run(bounded)
        with pytest.raises(RequestError, match="full") as caught:
            await found.run(lambda database: write_file(database, "x", "a", "batch", b"a" * 100_000))
        assert caught.value.code == FAILED
        assert await found.run(lambda database: (database.page("file", "x", None, 9), database.bytes_of("content"))) == (
            ([], False), 0)
        found.close()

    asyncio.run(run())


def test_expired_files_leave_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found, now = database(), store.time.time()
    for name, expires in (("soon", int(now) + 60), ("later", int(now) + 600), ("never", None)):
        write_file(found, "x", name, "batch", b"f" * 100, expires)
    sweep(found)
    assert found.bytes_of("content") == 300
    monkeypatch.setattr(store.time, "time", lambda: now + 100)
    sweep(found)
    assert found.bytes_of("content") == 200
    assert {file["filename"] for file in found.page("file", "x", None, 9)[0]} == {"later", "never"}
