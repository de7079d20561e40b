"""The log of a server: one line an event, to standard error. Prompts and answers never enter it."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("penstock")


def set_up(level: str) -> None:
    """Sends Penstock's own log, and uvicorn's warnings, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    LOG.handlers[:] = [handler]
    LOG.setLevel(level.upper())
    LOG.propagate = False
    uvicorn = logging.getLogger("uvicorn")
    uvicorn.handlers[:] = [handler]
    uvicorn.setLevel(logging.WARNING)
    uvicorn.propagate = False
