"""Processes that others of ours start by exec: their sockets, how they end, and what they say if they fail.

A child gets its first message on standard input, a pipe that only its parent holds; later ones come and go over two ZMQ sockets
in a folder that only this user may enter.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from penstock.core.errors import ConfigError, EngineDeadError, ModelError, PenstockError, RequestError
from penstock.core.wire import encode

Socket = zmq.Socket[bytes]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A child could not start, or cannot go on: it ends after this. `kind`: config, model or other."""

    reason: str
    kind: str = "other"

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Prints the trace of an error that is no message for the user."""
        if isinstance(error, ConfigError | ModelError):
            return cls(str(error), "config" if isinstance(error, ConfigError) else "model")
        traceback.print_exc()
        return cls(str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}")

    def error(self) -> PenstockError:
        """The error, in the parent."""
        return {"config": ConfigError, "model": ModelError}.get(self.kind, EngineDeadError)(self.reason)


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """A RequestError, field by field. `key`: of the call that raised it."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    retry: float | None = None
    key: str = ""

    @classmethod
    def of(cls, error: RequestError, key: str = "") -> Refused:
        return cls(error.message, error.param, error.code, error.status, error.retry, key)

    def error(self) -> RequestError:
        """The error, in the parent."""
        return RequestError(self.message, param=self.param, code=self.code, status=self.status, retry=self.retry)


# -- in the parent


def command(module: str) -> tuple[list[str], dict[str, str]]:
    """The command line of a child that runs `module`, and its environment, in which it imports the same package."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
    return [sys.executable, "-P", "-m", module], environment


def bound(context: zmq.Context[Socket], address: str) -> tuple[Socket, Socket]:
    """Sockets to a child and from it."""
    sockets = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket, end in zip(sockets, ("-in", "-out"), strict=True):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address + end)
    return sockets


_LONGEST_ROOT = 64
"""Bytes of a temporary folder's path; ours and its sockets add up to 43."""


def own_folder() -> str:
    """Creates a temporary folder named after this process. Removes folders of dead processes, because a killed process leaves
    its folder behind. Its path is short, because it has Unix sockets, whose paths may have 107 bytes: where TMPDIR is longer,
    /tmp serves."""
    root = Path(tempfile.gettempdir())
    if len(os.fsencode(root)) > _LONGEST_ROOT:
        root = Path("/tmp")
    for folder in root.glob("penstock-*-*"):
        number = folder.name.split("-")[1]
        with contextlib.suppress(OSError):
            if number.isdigit() and not Path("/proc", number).exists() and not folder.is_symlink() \
                    and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"penstock-{os.getpid()}-", dir=root)


def ended(status: int) -> str:
    """Describes the end of a process in words."""
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"exited with status {status}"


# -- in the child


def run(start: type[Any], body: Callable[[Any, Socket, Callable[[Any], None]], None]) -> NoReturn:
    """Runs `body` with the first message, which has the `address` of the sockets, the socket of the others, and a function that
    sends to the parent. Then ends the process: with status 1 if `body` raised an error, which the parent is told."""
    # The parent decides when to stop; a terminal's Ctrl-C or a service manager's SIGTERM reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = msgspec.json.decode(sys.stdin.buffer.readline(), type=start)
    threading.Thread(target=_die_with_parent, name="penstock-parent-watch", daemon=True).start()
    context: zmq.Context[Socket] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), connected(context, first.address)
    inbox.set_hwm(0)
    inbox.connect(first.address + "-in")

    def send(message: Any) -> None:
        outbox.send(encode(message))

    status = 0
    try:
        body(first, inbox, send)
    except Exception as error:  # noqa: BLE001 (reported to the parent)
        status = 1
        send(Failed.of(error))
    inbox.close(linger=0)
    outbox.close()
    context.term()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit without joining threads of native libraries.
    os._exit(status)


def connected(context: zmq.Context[Socket], address: str) -> Socket:
    """A socket to the parent. Messages leave before the context ends, within 5 s."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 5000)
    socket.connect(address + "-out")
    return socket


def _die_with_parent() -> None:
    """Exits when standard input ends: only the parent holds the other end of this pipe."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
