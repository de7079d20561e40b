"""Reading a request's body: its content type, its size while it arrives, and its decoding into a struct."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from penstock.core.errors import RequestError
from penstock.server.errors import ExplainField, explain

Body = TypeVar("Body")


class BodyReader:
    """Decodes one dialect's bodies of at most `limit` bytes."""

    def __init__(self, limit: int, explain_field: ExplainField) -> None:
        """`explain_field` improves what a decoder says about a field."""
        self.limit = limit
        self._explain_field = explain_field
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
            raise explain(error, self._explain_field) from None
        return body

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
