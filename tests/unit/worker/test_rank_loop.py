"""A rank's loop when ranks of other engines, which it steps together with, leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from penstock.core.control import Told
from penstock.core.plan import Masks, StepPlan
from penstock.core.wire import encode
from penstock.worker import process


class Left:
    """A rank whose peers are gone."""

    together, called, renews = True, True, False

    @property
    def worker(self) -> Left:
        return self

    def follow(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.fixture
def sockets() -> Iterator[tuple[Any, Any]]:
    context: zmq.Context[Any] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://rank")
    outbox.connect("inproc://rank")
    yield inbox, outbox
    context.destroy(linger=0)


def test_a_normal_end_is_silent_though_others_leave_first(sockets: tuple[Any, Any]) -> None:
    inbox, outbox = sockets
    said: list[Any] = []
    threading.Timer(0.2, lambda: outbox.send(encode(Told("close")))).start()
    process.Loop(Left(), inbox, said.append).run()  # type: ignore[arg-type]
    assert not said


def test_a_loss_is_told(sockets: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_MS", 100)
    with pytest.raises(RuntimeError, match="closed by peer"):
        process.Loop(Left(), sockets[0], lambda _: None).run()  # type: ignore[arg-type]


class Masked:
    """A rank that is always called, with a step that waits for its masks."""

    together, called, renews = True, True, False

    def __init__(self) -> None:
        self.done: list[str] = []
        self.waits = False

    def follow(self) -> None:
        self.done.append("follow")

    def launch(self, plan: StepPlan) -> Masked:
        assert not self.done or self.done[-1] == "follow"
        self.done.append("launch")
        self.waits = True
        return self

    def choose(self, masks: Masks) -> None:
        assert masks.bits.size == 2
        self.done.append("choose")
        self.waits = False

    def ended(self) -> bool:
        return False


def test_a_rank_follows_no_other_engines_step_before_its_masks_have_come(sockets: tuple[Any, Any]) -> None:
    """Another rank of its engine may have them already, and waits for this one to choose tokens."""
    inbox, outbox = sockets
    rank = Masked()
    outbox.send(encode(Told("launch", msgspec.Raw(encode(StepPlan(0))))))

    def masks() -> None:
        time.sleep(0.1)
        outbox.send(encode(Told("choose", msgspec.Raw(encode(Masks(np.zeros((1, 2), np.int32)))))))
        outbox.send(encode(Told("close")))

    thread = threading.Thread(target=masks)
    thread.start()
    process.Loop(rank, inbox, lambda _: None).run()  # type: ignore[arg-type]
    thread.join()
    assert [one for one in rank.done if one != "follow"] == ["launch", "choose"]
    assert rank.done[rank.done.index("launch") + 1] == "choose"
