"""OpenAI's files and batches as a dialect."""

import uuid
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.engine.retention import seconds_of
from penstock.server.answer import json_response
from penstock.server.batches.files import Files, read_file
from penstock.server.batches.lines import ENDPOINTS
from penstock.server.batches.run import Runner, new_batch
from penstock.server.dialect import Route
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.protocol import Name, Ttl
from penstock.server.responses.protocol import Metadata
from penstock.server.state import State
from penstock.server.store import Database
from penstock.server.stored import Ref, asked, listed, ref, whose

_STEM = "batch_"
"""The beginning of a batch's id; Anthropic's batches lie beside these in the store."""


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: Name
    endpoint: Annotated[str, Meta(max_length=100)]
    completion_window: Ttl = "24h"
    """Lines that are not answered by then expire; OpenAI's only one is 24h."""
    metadata: Metadata | None = None
    output_expires_after: None = None


class Batches(OpenAIForm):
    """The dialect over one server's state; `runner` does the work."""

    def __init__(self, state: State, runner: Runner) -> None:
        super().__init__(state)
        self.runner = runner
        self.files = Files(state)

    def routes(self) -> Sequence[Route]:
        one = "/v1/batches/{batch}"
        return (
            *self.files.routes(),
            Route("POST", "/v1/batches", self.create, "Answer the lines of a file when there is room for them", BatchRequest),
            Route("GET", "/v1/batches", self.list, "A page of the batches"),
            Route("GET", one, self.get, "About a batch"),
            Route("POST", one + "/cancel", self.cancel, "End a batch"),
        )

    async def create(self, http: Request, body: BatchRequest) -> Response:
        """Begins a batch. Its lines are checked before any is asked."""
        owner = whose(http)
        if body.endpoint not in ENDPOINTS:
            raise RequestError(f"endpoint is {body.endpoint!r}; possible are {', '.join(ENDPOINTS)}", param="endpoint")
        batch = new_batch(_STEM + uuid.uuid4().hex, body.endpoint, body.input_file_id,
                          seconds_of(body.completion_window, "completion_window"), body.completion_window, body.metadata)
        made = Ref("batch", batch["id"], owner)

        def work(database: Database) -> None:
            read_file(database, Ref("file", body.input_file_id, owner))
            database.put(*made, batch)

        await self.state.store.run(work)
        self.runner.start(made)
        return json_response(batch)

    async def list(self, http: Request) -> Response:
        owner, (after, limit, newest) = whose(http), asked(http)
        bodies, more = await self.state.store.run(lambda database: database.page("batch", owner, after, limit, newest, _STEM))
        return listed([*map(msgspec.json.decode, bodies)], more)

    async def get(self, http: Request) -> Response:
        return json_response(await self.state.store.run(ref(http, "batch").read))

    async def cancel(self, http: Request) -> Response:
        """Ends a batch; what is answered is kept."""
        await self.runner.cancel(ref(http, "batch"))
        return await self.get(http)
