"""The log of a server: one line an event, to standard error, as text or JSON. Prompts and answers never enter it."""

import json
import logging
import os
import socket
import sys
from datetime import UTC, datetime

LOG = logging.getLogger("penstock")


class JsonLines(logging.Formatter):
    """Each record as one JSON object: time, level, message, and the `fields` that its caller gave."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(), "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def set_up(level: str, form: str = "text") -> None:
    """Sends Penstock's own log, and uvicorn's warnings, to standard error; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if form == "json" else text)
    for log, least in ((LOG, level.upper()), (logging.getLogger("uvicorn"), logging.WARNING)):
        log.handlers[:] = [handler]
        log.setLevel(least)
        log.propagate = False


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
