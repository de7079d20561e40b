"""Tells a service manager how a server is: systemd's protocol (sd_notify), which is a datagram to the socket it names."""

import os
import socket

from penstock.observe.log import LOG


def notify(state: str) -> None:
    """Sends a state such as READY=1 or STOPPING=1. Does nothing where no manager waits for it ($NOTIFY_SOCKET)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            # An @ stands for the zero byte that begins an abstract name.
            channel.connect("\0" + address[1:] if address[0] == "@" else address)
            channel.sendall(state.encode())
    except OSError as error:
        LOG.warning("the service manager cannot be told %s: %s", state.split("\n")[0], error.strerror)
