"""Sockets between machines: who is heard."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
import zmq

from penstock.core import child


def two_ports() -> int:
    """The first of two free ports in a row."""
    while True:
        with ExitStack() as closing, socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                closing.enter_context(socket.socket()).bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.mark.parametrize(("theirs", "heard"), [("our secret", True), ("another one", False), ("", False)])
def test_only_those_who_know_the_secret_are_heard(theirs: str, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    address, contexts = f"tcp://127.0.0.1:{two_ports()}", (zmq.Context(), zmq.Context())
    monkeypatch.setenv("PENSTOCK_SECRET", "our secret")
    outbox, inbox = child.bound(contexts[0], address)
    monkeypatch.setenv("PENSTOCK_SECRET", theirs)
    sender = child.connected(contexts[1], address)
    sender.send(b"a result")
    assert bool(inbox.poll(5000 if heard else 500)) == heard
    for one in (outbox, inbox, sender):
        one.close(linger=0)
    for context in contexts:
        context.term()
