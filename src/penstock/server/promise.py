"""A request's class of service and deadline, and whether it would rather wait, from its body, its headers and its key."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.core.errors import RequestError
from penstock.core.request import Request
from penstock.core.service import DEFAULT, named
from penstock.server.keys import Key

CLASS, DEADLINE, WAIT = "x-penstock-class", "x-penstock-deadline", "x-penstock-wait"
"""Headers: a class, seconds from now, true or false."""

LOWEST = 2**31 - 1
"""The priority of what runs after all others and is preempted first: it is of the class batch."""


class Promise(NamedTuple):
    tier: str
    deadline: float
    waits: bool

    def give(self, requests: Sequence[Request], began: float, after: float) -> None:
        """The HTTP request came at `began`; the engine's first token is expected to be sent `after` so many seconds."""
        for request in requests:
            request.tier, request.deadline, request.waits = self
            request.beside = max(0.0, request.arrival - began) + after


def promised(classes: Collection[str], asked: str | None, headers: Mapping[str, str], key: Key | None,
             priority: int) -> Promise:
    """The body's service_tier (`asked`) counts before the header, and this before the `key`'s. RequestError if unknown."""
    default = "batch" if priority == LOWEST else DEFAULT if key is None or key.tier is None else key.tier
    tier = named(headers.get(CLASS) if asked in (None, "auto") else asked, classes, default)
    waits, deadline = headers.get(WAIT, "false").lower(), headers.get(DEADLINE)
    if waits not in ("true", "false", "1", "0"):
        raise RequestError(f"{WAIT} is {waits!r}; it is true or false", param=WAIT)
    if deadline is None:
        return Promise(tier, 0.0, waits in ("true", "1"))
    try:
        seconds = float(deadline)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise RequestError(f"{DEADLINE} is {deadline!r}; it is the number of seconds after which the answer is of no use",
                           param=DEADLINE)
    return Promise(tier, time.time() + seconds, waits in ("true", "1"))
