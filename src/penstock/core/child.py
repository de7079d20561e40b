"""Processes that others of ours start by exec: their sockets, how they end, and what they say if they fail.

A child gets its first message on standard input, a pipe that only its parent holds; later ones come and go over two ZMQ sockets
in a folder that only this user may enter, or over TCP to another machine, encrypted for those who know PENSTOCK_SECRET."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq
from zmq.utils import z85

from penstock.core.errors import ConfigError, EngineDeadError, ModelError, PenstockError, RequestError
from penstock.core.wire import encode

Socket = zmq.Socket[bytes]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A child could not start, or cannot go on: it ends after this. `kind`: config, model, other, or lost: it goes on."""

    reason: str
    kind: str = "other"

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Prints the trace of an error that is no message for the user."""
        if isinstance(error, ConfigError | ModelError):
            return cls(str(error), "config" if isinstance(error, ConfigError) else "model")
        traceback.print_exc()
        return cls(str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}")

    def error(self) -> PenstockError:
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
    def of(cls, error: RequestError, key: str = "") -> "Refused":
        return cls(error.message, error.param, error.code, error.status, error.retry, key)

    def error(self) -> RequestError:
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
    for socket, end in zip(sockets, _ends(address), strict=True):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        _secure(socket, end, server=True)
        try:
            socket.bind(end)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen: {error.strerror}; of several machines, master_addr has to be an address of "
                              "machine 0, and the ports that follow master_port have to be free there") from None
    return sockets


def _ends(address: str) -> tuple[str, str]:
    """The addresses to a child and from it: of TCP two ports in a row."""
    if not address.startswith("tcp:"):
        return address + "-in", address + "-out"
    host, _, port = address.rpartition(":")
    return address, f"{host}:{int(port) + 1}"


def _secure(socket: Socket, address: str, server: bool = False) -> None:
    """Over TCP, both sides prove that they know the secret: it makes the server's keys, of which none is ever sent (CURVE)."""
    secret = os.environ.get("PENSTOCK_SECRET", "")
    if not address.startswith("tcp:"):
        return
    if not secret and not address.startswith("tcp://127.0.0.1:"):
        raise ConfigError("several machines need a shared secret: set the environment variable PENSTOCK_SECRET to the same "
                          "text on each")
    # A machine that is gone closes no connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
    if secret:
        private = z85.encode(sha256(secret.encode()).digest())
        public = zmq.curve_public(private)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(*((zmq.CURVE_SERVER, 1) if server else (zmq.CURVE_SERVERKEY, public)))


_LONGEST_ROOT = 64
"""Bytes of a temporary folder's path; ours and its sockets add up to 43."""


def own_folder() -> str:
    """Creates a temporary folder named after this process. Removes folders of dead processes, because a killed process leaves
    its folder behind. Its path is short, as Unix sockets' must be (107 bytes): /tmp serves where TMPDIR is longer."""
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
    over = threading.Event()
    _secure(inbox, first.address)
    if first.address.startswith("tcp:"):
        monitor = inbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        threading.Thread(target=_die_without, args=(monitor, over), name="penstock-link-watch", daemon=True).start()
    inbox.connect(_ends(first.address)[0])

    def send(message: Any) -> None:
        outbox.send(encode(message))

    status = 0
    try:
        body(first, inbox, send)
    except Exception as error:  # noqa: BLE001 (reported to the parent)
        status = 1
        send(Failed.of(error))
    over.set()
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
    _secure(socket, address)
    socket.connect(_ends(address)[1])
    return socket


def _die_without(monitor: Socket, over: threading.Event) -> None:
    """Exits soon after the connection to another machine was lost, unless all is over then."""
    with contextlib.suppress(zmq.ContextTerminated):
        monitor.recv_multipart()
    if not over.wait(_LOST_SECONDS):
        sys.stderr.write("the connection to machine 0 was lost, or its PENSTOCK_SECRET is another one\n")
        sys.stderr.flush()
        os._exit(1)
    # The context waits for all of its sockets.
    monitor.close(linger=0)


_LOST_SECONDS = 2.0


def _die_with_parent() -> None:
    """Exits when standard input ends: only the parent holds the other end of this pipe."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
