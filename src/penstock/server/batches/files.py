"""/v1/files: JSON lines that batches read and write. Uploads are multipart forms, which are read here."""

import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.dialect import BYTES, Route, explain, json_response
from penstock.server.openai.form import OpenAIForm
from penstock.server.responses.protocol import Deleted
from penstock.server.store import Database, Ref, asked, listed, number, ref, whose

Purpose = Literal["batch", "batch_output", "user_data", "assistants", "fine-tune", "vision", "evals"]


class FileForm(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/files."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose
    anchor: Literal["created_at"] = msgspec.field(name="expires_after[anchor]", default="created_at")
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | None = msgspec.field(name="expires_after[seconds]", default=None)


MAX_PARTS = 16
"""Parts of one form."""

MAX_HEAD = 4096
"""Bytes before a field's content: its name and a file's."""

_BOUNDARY = re.compile(r'boundary="?([^";,]{1,70})"?')
_NAME = re.compile(rb'\bname="([^"]*)"')
_FILENAME = re.compile(rb'\bfilename="([^"]*)"')


def form(content_type: str, data: bytes) -> dict[str, tuple[str | None, bytes]]:
    """(file name, content) of each field of a multipart form. RequestError if it is none."""
    found = _BOUNDARY.search(content_type)
    if not content_type.startswith("multipart/form-data") or found is None:
        raise RequestError("the body must be a form: send Content-Type: multipart/form-data with the fields file and purpose",
                           code="unsupported_media_type", status=415)
    mark = b"\r\n--" + found[1].encode("latin-1")
    fields: dict[str, tuple[str | None, bytes]] = {}
    pieces = (b"\r\n" + data).split(mark, MAX_PARTS + 2)
    if len(pieces) > MAX_PARTS + 2:
        raise RequestError(f"the form has more than {MAX_PARTS} parts", code="invalid_value")
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise RequestError("the form is not complete: its last boundary is missing", code="invalid_value")
    for piece in pieces[1:-1]:
        end = piece.find(b"\r\n\r\n", 0, MAX_HEAD)
        name = _NAME.search(piece, 0, max(0, end))
        if name is None:
            raise RequestError(f"a part of the form has no name, or more than {MAX_HEAD} bytes before its content",
                               code="invalid_value")
        filename = _FILENAME.search(piece, 0, end)
        fields[name[1].decode("utf-8", "replace")] = (
            filename[1].decode("utf-8", "replace") if filename is not None else None, piece[end + 4:])
    return fields


def write_file(database: Database, owner: str, filename: str, purpose: str, content: bytes,
               expires_at: int | None = None) -> dict[str, Any]:
    """Stores a file; its object."""
    value = {"id": f"file-{uuid.uuid4().hex}", "object": "file", "bytes": len(content), "created_at": int(time.time()),
             "expires_at": expires_at, "filename": filename, "purpose": purpose, "status": "processed"}
    database.put("file", str(value["id"]), owner, value)
    database.put("content", str(value["id"]), owner, content)
    return value


def sweep(database: Database) -> None:
    expired = "select id from objects where kind='file' and json_extract(cast(body as text), '$.expires_at') <= ?"
    database.sql(f"delete from objects where kind in ('file', 'content') and id in ({expired})", time.time())


def read_file(database: Database, file: Ref) -> dict[str, Any]:
    """A file's object. RequestError 404 if there is none, or no longer."""
    sweep(database)
    return file.read(database)


def content_of(database: Database, file: Ref) -> bytes:
    """A file's content. RequestError as `read_file`."""
    read_file(database, file)
    return database.get(*file._replace(kind="content")) or b""


class Files(OpenAIForm):
    def routes(self) -> Sequence[Route]:
        one = "/v1/files/{file}"
        return (
            Route("POST", "/v1/files", self.upload, "Store a file, sent as a form with the fields file and purpose", FileForm,
                  form=True),
            Route("GET", "/v1/files", self.list, "A page of the files"),
            Route("GET", one, self.get, "About a file"),
            Route("DELETE", one, self.delete, "Delete a file", answer=Deleted),
            Route("GET", one + "/content", self.content, "A file's content", also=(BYTES,)))

    async def upload(self, http: Request) -> Response:
        """Stores a file of at most --max-body-bytes, while all files have at most --store-bytes."""
        owner, fields = whose(http), form(http.headers.get("content-type", ""), await self.bodies.raw(http))
        values: dict[str, Any] = {name[:100]: value[:100].decode("utf-8", "replace") for name, (_, value) in fields.items()}
        if (age := values.get("expires_after[seconds]")) is not None:
            values["expires_after[seconds]"] = number(age) or age
        try:
            said = msgspec.convert(values, FileForm)
        except msgspec.ValidationError as error:
            possible = f"; possible are {', '.join(get_args(Purpose))}"
            raise explain(error, lambda where, text: text + possible * (where == "purpose")) from None
        expires = int(time.time()) + said.seconds if said.seconds else None
        filename, content = fields["file"]

        def work(database: Database) -> dict[str, Any]:
            sweep(database)
            if database.bytes_of("content", "file") + len(content) > database.most_bytes:
                raise RequestError(f"all files together would have more than {database.most_bytes:,} bytes (--store-bytes); "
                                   "delete some", param="file", code="store_full", status=413)
            return write_file(database, owner, filename or "file", said.purpose, content, expires)

        return json_response(await self.state.store.run(work))

    async def list(self, http: Request) -> Response:
        owner, (after, limit, newest) = whose(http), asked(http, 10_000)

        def work(database: Database) -> tuple[list[dict[str, Any]], bool]:
            sweep(database)
            return database.page("file", owner, after, limit, newest, purpose=http.query_params.get("purpose"))

        return listed(*await self.state.store.run(work))

    async def get(self, http: Request) -> Response:
        return json_response(await self.state.store.run(lambda database: read_file(database, ref(http, "file"))))

    async def delete(self, http: Request) -> Response:
        file = ref(http, "file")
        await self.state.store.run(lambda database: file.delete(database, "content"))
        return json_response(Deleted(file.name, "file"))

    async def content(self, http: Request) -> Response:
        content = await self.state.store.run(lambda database: content_of(database, ref(http, "file")))
        return Response(content, media_type=BYTES)
