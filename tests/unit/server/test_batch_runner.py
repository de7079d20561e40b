"""Lines of a batch run in the capacity that the others of their own model leave."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.server.batches import lines
from penstock.server.batches.files import write_file
from penstock.server.batches.lines import Ask
from penstock.server.batches.run import Runner, new_batch
from penstock.server.fleet import Fleet, Slot
from penstock.server.store import Database, Store
from penstock.server.stored import Ref


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
