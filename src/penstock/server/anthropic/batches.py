"""Anthropic's message batches: run by the batch runner, with the requests in the body and the results as lines."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from penstock.core.errors import RequestError
from penstock.server.answer import json_response, utc
from penstock.server.batches.files import content_of, delete_file, write_file
from penstock.server.batches.lines import MAX_LINES, parse
from penstock.server.batches.run import ENDED, Batch, Runner, new_batch
from penstock.server.dialect import Route
from penstock.server.state import State
from penstock.server.store import Database
from penstock.server.stored import Ref, asked, listed, ref, whose

ENDPOINT = "/v1/messages"
SECONDS = 86400
"""For which a batch may run, as Anthropic's."""

_STEM = "msgbatch_"
"""The beginning of a message batch's id, which parts it from OpenAI's batches."""
_UNASKED = {"batch_cancelled": "canceled", "batch_expired": "expired"}


class BatchedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]
    """The body of POST /v1/messages. A wrong one fails alone, in the results."""


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/batches."""

    requests: Annotated[list[BatchedRequest], Meta(min_length=1, max_length=MAX_LINES)]


class MessageBatches:
    """The endpoints."""

    def __init__(self, state: State, runner: Runner) -> None:
        self.state = state
        self.runner = runner

    def routes(self) -> Sequence[Route]:
        one = "/v1/messages/batches/{batch}"
        return (
            Route("POST", "/v1/messages/batches", self.create, "Answer conversations when there is room", BatchRequest),
            Route("GET", "/v1/messages/batches", self.list, "A page of the message batches"),
            Route("GET", one, self.get, "About a message batch"),
            Route("DELETE", one, self.delete, "Delete a message batch that has ended"),
            Route("POST", one + "/cancel", self.cancel, "End a message batch"),
            Route("GET", one + "/results", self.results, "The results of a message batch, a JSON object a line"),
        )

    async def create(self, http: Request, body: BatchRequest) -> Response:
        """Begins a batch."""
        made = Ref("batch", _STEM + uuid.uuid4().hex, whose(http))
        content = b"\n".join(msgspec.json.encode({"custom_id": one.custom_id, "method": "POST", "url": ENDPOINT,
                                                  "body": one.params}) for one in body.requests)
        _, errors = await asyncio.to_thread(parse, content, ENDPOINT)
        if errors:
            raise RequestError(f"requests[{errors[0]['line'] - 1}]: {errors[0]['message']}", param="requests",
                               code="invalid_value")

        def work(database: Database) -> Batch:
            file = write_file(database, made.owner, f"{made.name}.jsonl", "batch", content)
            batch = new_batch(made.name, ENDPOINT, file["id"], SECONDS)
            batch["request_counts"]["total"] = len(body.requests)
            database.put(*made, batch)
            return batch

        batch = await self.state.store.run(work)
        self.runner.start(made)
        return json_response(_shown(http, batch, ()))

    async def list(self, http: Request) -> Response:
        owner, limit = whose(http), asked(http, 1000).limit
        after, before = (http.query_params.get(name) for name in ("after_id", "before_id"))
        if after is not None and before is not None:
            raise RequestError("after_id and before_id are both given; a page lies behind one or before the other",
                               param="before_id")

        def work(database: Database) -> tuple[list[dict[str, Any]], bool]:
            bodies, more = database.page("batch", owner, before or after, limit, before is None, _STEM)
            batches = list(map(msgspec.json.decode, bodies))[::1 if before is None else -1]
            return [_shown(http, batch, _results(database, batch, owner)) for batch in batches], more

        return listed(*await self.state.store.run(work))

    async def get(self, http: Request) -> Response:
        named = ref(http, "batch")

        def work(database: Database) -> dict[str, Any]:
            batch = named.read(database)
            return _shown(http, batch, _results(database, batch, named.owner))

        return json_response(await self.state.store.run(work))

    async def cancel(self, http: Request) -> Response:
        """Ends a batch; what is answered is kept."""
        await self.runner.cancel(ref(http, "batch"))
        return await self.get(http)

    async def delete(self, http: Request) -> Response:
        named = ref(http, "batch")

        def work(database: Database) -> None:
            batch = _ended(named.read(database))
            for name in ("input_file_id", "output_file_id", "error_file_id"):
                if batch[name] is not None:
                    delete_file(database, Ref("file", batch[name], named.owner))
            named.delete(database)

        await self.state.store.run(work)
        return json_response({"id": named.name, "type": "message_batch_deleted"})

    async def results(self, http: Request) -> Response:
        named = ref(http, "batch")
        found = await self.state.store.run(lambda database: [*_results(database, _ended(named.read(database)), named.owner)])
        return Response(b"".join(msgspec.json.encode(one) + b"\n" for one in found), media_type="application/x-jsonl")


def _ended(batch: Batch) -> Batch:
    if batch["status"] not in ENDED:
        raise RequestError("the batch has not ended", param="id", code="invalid_value")
    return batch


def _results(database: Database, batch: Batch, owner: str) -> Iterator[dict[str, Any]]:
    """The results of a batch that has ended; none of another."""
    for name in ("output_file_id", "error_file_id"):
        content = content_of(database, Ref("file", batch[name], owner)) if batch[name] is not None else b""
        for line in map(msgspec.json.decode, content.splitlines()):
            kind = _UNASKED[line["error"]["code"]] if line["error"] is not None else "errored"
            answer = {} if line["response"] is None else {"error": line["response"]["body"]}
            if line["response"] is not None and line["response"]["status_code"] == 200:
                kind, answer = "succeeded", {"message": line["response"]["body"]}
            yield {"custom_id": line["custom_id"], "result": {"type": kind, **answer}}


def _shown(http: Request, batch: Batch, results: Iterator[dict[str, Any]] | tuple[()]) -> dict[str, Any]:
    """A batch as Anthropic shows it."""
    counts, ended = batch["request_counts"], batch["status"] in ENDED
    kinds = Counter(one["result"]["type"] for one in results) if ended else Counter(
        succeeded=counts["completed"], errored=counts["failed"],
        processing=counts["total"] - counts["completed"] - counts["failed"])
    times = {name: None if batch[at] is None else utc(batch[at])
             for name, at in (("created_at", "created_at"), ("expires_at", "expires_at"), ("ended_at", "finalizing_at"),
                              ("cancel_initiated_at", "cancelling_at"))}
    return {"id": batch["id"], "type": "message_batch", "archived_at": None, **times,
            "processing_status": "ended" if ended else "canceling" if batch["status"] == "cancelling" else "in_progress",
            "request_counts": {kind: kinds[kind] for kind in ("processing", "succeeded", "errored", "canceled", "expired")},
            "results_url": f"{http.base_url}v1/messages/batches/{batch['id']}/results" if ended else None}
