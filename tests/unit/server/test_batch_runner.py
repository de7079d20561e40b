"""Lines of a batch run in the capacity that the others of their own model leave."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.server.batches import lines
from penstock.server.batches.files import content_of, write_file
from penstock.server.batches.lines import Ask
from penstock.server.batches.run import Runner, new_batch
from penstock.server.fleet import Fleet, Slot
from penstock.server.store import Database, Ref, Store


def model(name: str, rows: int | None, live: int = 0) -> Slot:
    info = None if rows is None else SimpleNamespace(max_num_seqs=rows)
    llm: Any = SimpleNamespace(info=info, live=live, adapters={}, unhealthy=lambda: None if rows else "loading", dead=None)
    return Slot([name], llm)


def runner(*slots: Slot) -> Runner:
    state: Any = SimpleNamespace(fleet=Fleet(slots), draining=False)
    return Runner(state, None, lambda: None)  # type: ignore[arg-type, return-value]


def started(found: Runner, name: str | None) -> int:
    """Lines of a model that start at once."""
    ask = Ask("a", "/v1/completions", {} if name is None else {"model": name})
    count = 0
    while found._spare(slot := found._slot(ask)):
        found._flying[slot] += 1
        slot.llm.live += 1  # type: ignore[misc]
        count += 1
    return count


def test_each_model_has_its_own_spare_rows() -> None:
    found = runner(model("small", 4), model("large", 64, live=10), model("absent", None))
    assert started(found, "large") == 22, "half of its rows, less what others use"
    assert started(found, "small") == 2 and started(found, "absent") == 1, "whatever the other models do"
    assert started(found, "nobody") == 0, "the first model refuses it, once it has room"


def test_one_model_is_waited_for() -> None:
    assert started(runner(model("only", None)), None) == 0
    assert started(runner(model("only", 8, live=8)), None) == 1, "one line in any case"


def test_a_batch_is_cancelled_while_its_lines_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task must not write over the new status when the lines are found good at that moment."""
    checked, named = threading.Event(), Ref("batch", "batch_1", "")
    state: Any = SimpleNamespace(store=Store(None, 1 << 20, 1.0), fleet=Fleet([model("one", 4)]), draining=False)

    def slow(content: bytes, endpoint: str) -> Any:
        checked.wait(10)
        return lines.parse(content, endpoint)

    class Told(Runner):
        async def _change(self, named: Ref, **fields: Any) -> dict[str, Any]:
            batch = await super()._change(named, **fields)
            if fields.get("status") == "cancelling":
                checked.set()
                await asyncio.sleep(0.1)
            return batch

    def begin(database: Database) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
        file = write_file(database, "", "lines", "batch", msgspec.json.encode(line))
        database.put(*named, new_batch(named.name, "/v1/completions", file["id"], 60.0))

    async def run() -> dict[str, Any]:
        found = Told(state, None, lambda: None)  # type: ignore[arg-type, return-value]
        await state.store.run(begin)
        found.start(named)
        await asyncio.sleep(0.05)
        await found.cancel(named)
        await asyncio.gather(*found._tasks.values())
        return await state.store.run(named.read)

    monkeypatch.setattr("penstock.server.batches.run.parse", slow)
    batch = asyncio.run(run())
    state.store.close()
    assert batch["status"] == "cancelled" and batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


def test_a_batch_waits_for_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that could not be stored are asked for again, once there is room, and those that were stored are not."""
    named, asked = Ref("batch", "batch_1", ""), list[bytes]()
    state: Any = SimpleNamespace(store=Store(None, 1 << 20, 1.0), fleet=Fleet([model("one", 2)]), draining=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((await receive())["body"])
        if len(asked) == 2:
            await state.store.run(lambda database: bound(database, 0))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": msgspec.json.encode("a" * 50_000)})

    def bound(database: Database, more: int) -> None:
        database.sql(f"pragma max_page_count={database.sql('pragma page_count').fetchone()[0] + more}")

    def begin(database: Database) -> None:
        lines = [msgspec.json.encode({"custom_id": str(place), "url": "/v1/completions", "body": {}}) for place in range(3)]
        file = write_file(database, "", "lines", "batch", b"\n".join(lines))
        database.put(*named, new_batch(named.name, "/v1/completions", file["id"], 60.0))

    async def run() -> tuple[dict[str, Any], bytes]:
        found = Runner(state, app, lambda: SimpleNamespace(of=lambda _: None))  # type: ignore[arg-type, return-value]
        await state.store.run(begin)
        found.start(named)
        await asyncio.sleep(0.3)
        status = (await state.store.run(named.read))["status"]
        assert status == "in_progress" and len(asked) >= 2
        await state.store.run(lambda database: bound(database, 1000))
        await asyncio.gather(*found._tasks.values())
        batch = await state.store.run(named.read)
        return batch, await state.store.run(lambda database: content_of(database, Ref("file", batch["output_file_id"], "")))

    monkeypatch.setattr("penstock.server.batches.run.STORE_SECONDS", 0.05)
    batch, content = asyncio.run(run())
    state.store.close()
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [msgspec.json.decode(line)["custom_id"] for line in content.splitlines()] == ["0", "1", "2"]


def test_a_model_that_cannot_be_loaded_fails_its_own_lines() -> None:
    """They were asked again for ever, each trial at the cost of an engine's start, and others' lines waited for them."""
    named, asked = Ref("batch", "batch_1", ""), list[str]()
    slots = [model("good", 2), model("broken", None)]
    state: Any = SimpleNamespace(store=Store(None, 1 << 20, 1.0), fleet=Fleet(slots), draining=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(msgspec.json.decode((await receive())["body"])["model"])
        if asked[-1] == "broken":
            slots[1].state, slots[1].llm.dead = "failed", RuntimeError("no such folder")  # type: ignore[misc]
        await send({"type": "http.response.start", "status": 503 if asked[-1] == "broken" else 200})
        await send({"type": "http.response.body", "body": b'{"error":{}}'})

    def begin(database: Database) -> None:
        lines = [msgspec.json.encode({"custom_id": str(place), "url": "/v1/completions",
                                      "body": {"model": "good" if place == 3 else "broken"}}) for place in range(4)]
        file = write_file(database, "", "lines", "batch", b"\n".join(lines))
        database.put(*named, new_batch(named.name, "/v1/completions", file["id"], 2.0))

    async def run() -> dict[str, Any]:
        found = Runner(state, app, lambda: SimpleNamespace(of=lambda _: None))  # type: ignore[arg-type, return-value]
        await state.store.run(begin)
        found.start(named)
        await asyncio.gather(*found._tasks.values())
        return await state.store.run(named.read)

    batch = asyncio.run(run())
    state.store.close()
    assert batch["status"] == "completed" and batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    assert sorted(asked) == ["broken", "good"]
