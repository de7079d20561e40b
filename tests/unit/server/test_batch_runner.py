"""Lines of a batch run in the capacity that the others of their own model leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.server.batches.lines import Ask
from penstock.server.batches.run import Runner
from penstock.server.fleet import Fleet, Slot


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
