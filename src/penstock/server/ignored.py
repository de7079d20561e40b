"""The response header `x-penstock-ignored`: names the fields of a request that were accepted and changed nothing."""

from collections.abc import Iterable
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

HEADER = b"x-penstock-ignored"

MAX_NAMED = 32
"""Names in the header at most; a client may send any number."""

_KEY = "penstock_ignored"


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Has the response to `request` name these fields."""
    request.scope.setdefault(_KEY, []).extend(names)


def ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header for the fields that were noted, or none."""
    names = list(dict.fromkeys(scope.get(_KEY, ())))[:MAX_NAMED]
    return [(HEADER, ", ".join(quote(name[:64], safe="[]") for name in names).encode())] if names else []
