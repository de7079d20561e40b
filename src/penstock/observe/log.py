"""The log of a server: one line an event, to standard error, as text or JSON. Prompts and answers never enter it."""

import json
import logging
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
