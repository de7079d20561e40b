"""Reading a request's body: its size while it arrives, its depth, and its decoding into a struct.

Unknown fields are refused, but for those that a dialect lists as harmless: they are ignored, and named in a header."""

import functools
import re
from collections.abc import Callable, Container
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from penstock.core.errors import RequestError
from penstock.observe.log import LOG
from penstock.server.dialect import ExplainField, explain, note_ignored
from penstock.server.limits import too_large
from penstock.server.state import State

Body = TypeVar("Body")

_BYTES_A_CHARACTER = 16
"""Bytes of JSON that are decoded in the time of tokenizing one character."""

MAX_IGNORED = 16
"""Unknown fields of one body that are ignored at most: each nested one costs decoding the body again."""

MAX_WARNED = 1000
"""Names of unknown fields that the log warns of, each once."""


class BodyReader:
    """Decodes one dialect's bodies within the server's limits."""

    def __init__(self, state: State, explain_field: ExplainField, harmless: Container[str] = ()) -> None:
        """`explain_field` improves what a decoder says of a field; `harmless` are unknown fields that may be ignored."""
        self._limits = state.limits
        self._fleet = state.fleet
        self._explain_field = explain_field
        self._harmless = harmless
        self._lenient = state.options.unknown_fields == "warn"
        """Whether all unknown fields are ignored, nested ones too."""
        self._warned: set[str] = set()
        self._decoder = functools.cache(msgspec.json.Decoder)

    async def read(self, request: Request, kind: type[Body] | Callable[[Container[str]], type[Body]]) -> Body:
        """The body as `kind`, or the type that `kind` names for its fields; its length is in the scope as `body_bytes`, its
        model chosen and loaded. RequestError 400, 408, 413, 415 or 503 naming it; ClientDisconnect if the client left."""
        data = await self.raw(request)
        request.scope["body_bytes"] = len(data)
        work = self._fleet.current.llm.work
        body = await work.run(len(data) // _BYTES_A_CHARACTER, lambda: self._decode(request, kind, data))
        if hasattr(body, "model"):
            await self._fleet.use(body.model)
        return body

    async def raw(self, request: Request) -> bytes:
        """The bytes of the body. RequestError 408, 413, 415 or 503; ClientDisconnect if the client went away."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise RequestError(f"the body is encoded as {encoding[:100]!r}; send it as it is, without Content-Encoding",
                               code="unsupported_media_type", status=415)
        declared = request.headers.get("content-length", "")
        most = self._limits.options.max_body_bytes
        if declared.isdigit() and int(declared) > most:
            raise too_large(f"{int(declared):,} bytes", most)
        chunks: list[bytes] = []
        with self._limits.receiving() as count:
            async for chunk in request.stream():
                count(len(chunk))
                chunks.append(chunk)
        size = sum(map(len, chunks))
        return await self._fleet.current.llm.work.run(size // _BYTES_A_CHARACTER, lambda: b"".join(chunks))

    def _decode(self, request: Request, kind: type[Body] | Callable[[Container[str]], type[Body]], data: bytes) -> Body:
        self._limits.check_json(data)
        ignored: list[str] = []
        try:
            if not isinstance(kind, type):
                kind = kind(msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys())
            decoder = self._decoder(kind)
            while True:
                try:
                    body: Body = decoder.decode(data)
                    break
                except msgspec.ValidationError as error:
                    data, dropped = self._without_unknown(data, kind, error)
                    if not dropped or len(ignored) >= MAX_IGNORED:
                        raise
                    ignored += dropped
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise explain(error, self._explain_field) from None
        if ignored:
            note_ignored(request, ignored)
            self._warn(ignored)
        return body

    def _without_unknown(self, data: bytes, kind: type[Any], error: Exception) -> tuple[bytes, list[str]]:
        """The body without the unknown field of which a decoder complains, if it may be ignored, and its name. Of the whole
        body's fields all others like it go at once."""
        found = _UNKNOWN.fullmatch(str(error))
        where, name = (found[2] or "", found[1]) if found else ("", "")
        path = f"{where}.{name}" if where else name
        if found is None or not (self._lenient or path in self._harmless):
            return data, []
        if where:
            return _without(data, where, name), [path]
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        known = {field.encode_name for field in msgspec.structs.fields(kind)}
        dropped = [name for name in fields if name not in known and (self._lenient or name in self._harmless)]
        for name in dropped:
            del fields[name]
        return msgspec.json.encode(fields), dropped

    def _warn(self, names: list[str]) -> None:
        for name in names:
            if name not in self._harmless and name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                LOG.warning("requests have the unknown field %r, which is ignored (--unknown-fields warn)", name[:100])


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def _without(data: bytes, where: str, name: str) -> bytes:
    """A JSON object without the field `name` of an object inside it, at `where`."""
    whole = msgspec.json.decode(data)
    place = whole
    for index, key in _STEP.findall(where):
        place = place[int(index)] if index else place[key]
    place.pop(name, None)
    return msgspec.json.encode(whole)
