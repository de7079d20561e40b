"""Reading a request's body: its content type, its size while it arrives, and its decoding into a struct.

Fields that the struct does not have are refused, but for a dialect's list of harmless ones, which are ignored and named in the
answer's headers.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from penstock.core.errors import RequestError
from penstock.observe.log import LOG
from penstock.server.errors import ExplainField, explain
from penstock.server.ignored import note_ignored

Body = TypeVar("Body")

MAX_IGNORED = 16
"""Unknown fields of one body that are ignored at most: each nested one costs decoding the body again."""

MAX_WARNED = 1000
"""Names of unknown fields that the log warns of, each once."""


class BodyReader:
    """Decodes one dialect's bodies of at most `limit` bytes."""

    def __init__(self, limit: int, explain_field: ExplainField, harmless: Container[str] = (), lenient: bool = False) -> None:
        """`explain_field` improves what a decoder says about a field. `harmless` are unknown fields that may be ignored;
        `lenient` ignores all unknown fields, nested ones too."""
        self.limit = limit
        self._explain_field = explain_field
        self._harmless = harmless
        self._lenient = lenient
        self._warned: set[str] = set()
        self._decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body as `kind`. RequestError 400, 413 or 415 naming the fault; ClientDisconnect if the client went away."""
        self._check_type(request)
        data = await self._bytes(request)
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.json.Decoder(kind)
        try:
            body: Body = decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            body = self._without_unknown(request, kind, data, error)
        return body

    def _without_unknown(self, request: Request, kind: type[Body], data: bytes, error: Exception) -> Body:
        """The body without the unknown fields that may be ignored, which the answer will name. RequestError if that does not
        mend `error`."""
        ignored: list[str] = []
        while (found := _unknown_field(error)) is not None and len(ignored) < MAX_IGNORED:
            where, name = found
            if not (self._lenient or (name in self._harmless and not where)):
                break
            try:
                if where:
                    data, dropped = _without(data, where, name), [f"{where}.{name}"]
                else:
                    data, dropped = self._without_top(data, kind)
                ignored += dropped
                body: Body = self._decoders[kind].decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as next_error:
                error = next_error
            else:
                note_ignored(request, ignored)
                self._warn(ignored)
                return body
        raise explain(error, self._explain_field) from None

    def _without_top(self, data: bytes, kind: type[Any]) -> tuple[bytes, list[str]]:
        """A JSON object without the fields that `kind` does not have and that may be ignored, and their names."""
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        dropped = [name for name in fields if name not in known and (self._lenient or name in self._harmless)]
        for name in dropped:
            del fields[name]
        return (msgspec.json.encode(fields) if dropped else data), dropped

    def _warn(self, names: list[str]) -> None:
        for name in names:
            if name not in self._harmless and name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                LOG.warning("requests have the unknown field %r, which is ignored (--unknown-fields warn)", name[:100])

    def _check_type(self, request: Request) -> None:
        # A browser may send other types across origins without asking first; JSON only after a CORS preflight.
        given = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if given != "application/json" and not given.endswith("+json"):
            raise RequestError(f"the body must be JSON: send Content-Type: application/json, not {given!r}",
                               code="unsupported_media_type", status=415)

    async def _bytes(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.limit:
            raise self._too_large(f"{int(declared):,} bytes")
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self.limit:
                raise self._too_large("more")
            chunks.append(chunk)
        return b"".join(chunks)

    def _too_large(self, size: str) -> RequestError:
        return RequestError(f"the body has {size}, at most {self.limit:,} bytes are possible (--max-body-bytes)",
                            code="request_too_large", status=413)


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def _unknown_field(error: Exception) -> tuple[str, str] | None:
    """(path of the object, name) if a decoder complains of an unknown field; the path of the whole body is empty."""
    found = _UNKNOWN.fullmatch(str(error)) if isinstance(error, msgspec.ValidationError) else None
    return None if found is None else (found[2] or "", found[1])


def _without(data: bytes, where: str, name: str) -> bytes:
    """A JSON object without the field `name` of an object inside it, at `where`."""
    whole = msgspec.json.decode(data)
    place = whole
    for index, key in _STEP.findall(where):
        place = place[int(index)] if index else place[key]
    place.pop(name, None)
    return msgspec.json.encode(whole)
