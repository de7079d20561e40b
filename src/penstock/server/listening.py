"""The listening socket of a server, and how the next server takes it over (--reuse-port).

Both processes then accept from one queue, so that no connection is lost when the older one closes its end: a socket of its own
would take its queue with it. The next server asks at a Unix socket of an abstract name, which it gets too."""

import contextlib
import os
import socket
import struct

from penstock.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. ConfigError says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port (0 picks a free "
                          "one)") from None
    return bound


def shared(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """(listening socket, the one at which it is asked for): of a server of this user that runs there, else new ones."""
    name = f"\0penstock/{os.getuid()}/{host}/{port or os.getpid()}"
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError, ValueError):
        asking.settimeout(5.0)
        asking.connect(name)
        if _of_this_user(asking):
            bound, asked = (socket.socket(fileno=found) for found in socket.recv_fds(asking, 1, 2)[1])
            return bound, asked
    bound, asked = bind(host, port), socket.socket(socket.AF_UNIX)
    try:
        asked.bind(name)
    except OSError as error:
        raise ConfigError(f"--reuse-port cannot be offered to the next server: {error.strerror}") from None
    asked.listen()
    asked.setblocking(False)
    return bound, asked


def give(bound: socket.socket, asked: socket.socket) -> None:
    """Hands both to a server that asks, if the other process that has them has not."""
    with contextlib.suppress(OSError):
        asking, _ = asked.accept()
        with asking:
            if _of_this_user(asking):
                socket.send_fds(asking, [b"\0"], [bound.fileno(), asked.fileno()])


def _of_this_user(peer: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
