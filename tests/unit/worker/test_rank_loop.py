"""A rank's loop when ranks of other engines, which it steps together with, leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from penstock.core.control import Told
from penstock.core.wire import encode
from penstock.worker import process


class Left:
    """A rank whose peers are gone."""

    together, called, renews = True, True, False

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
