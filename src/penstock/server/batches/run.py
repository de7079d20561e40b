"""Runs batches in the capacity that others leave: their lines go through the application's own routes, at the lowest priority.

Each answer is in the store before it counts. A batch that the server's end has cut off goes on at the next start; lines that
were being answered are asked again, so that each has one answer. `Batches` has OpenAI's routes of files and batches."""

import asyncio
import contextlib
import functools
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from penstock.core.errors import RequestError
from penstock.engine.retention import seconds_of
from penstock.observe.log import LOG
from penstock.server.batches.files import Files, content_of, read_file, write_file
from penstock.server.batches.lines import ENDPOINTS, Ask, answer_of, answered, parse, write_answer, written
from penstock.server.dialect import ErrorShapes, Route, json_response
from penstock.server.fleet import Slot
from penstock.server.inside import inside
from penstock.server.openai.form import OpenAIForm
from penstock.server.openai.protocol import Name, Ttl
from penstock.server.promise import LOWEST
from penstock.server.responses.protocol import Metadata
from penstock.server.state import State
from penstock.server.store import FAILED, Database, Ref, asked, listed, ref, whose

BUSY = (429, 503)
PAUSE_SECONDS = 0.5
"""Until a line that found the server busy is asked again."""
STORE_SECONDS = 5.0
"""Until a batch goes on whose answers could not be stored."""

ENDED = ("completed", "failed", "expired", "cancelled")

Batch = dict[str, Any]
"""A batch as OpenAI shows it."""


def new_batch(name: str, endpoint: str, file: str, seconds: float, window: str = "24h", metadata: Any = None) -> Batch:
    """A batch of the lines of a file that has not begun."""
    now = int(time.time())
    times = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
    return {"id": name, "object": "batch", "endpoint": endpoint, "errors": None, "input_file_id": file,
            "completion_window": window, "status": "validating", "output_file_id": None, "error_file_id": None,
            "created_at": now, "expires_at": now + int(seconds), **dict.fromkeys(times),
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata}


class Runner:
    """The batches that run now. Everything is on the event loop but the store's calls."""

    def __init__(self, state: State, app: ASGIApp, shapes: Callable[[], ErrorShapes]) -> None:
        """`app` answers requests whose keys were checked; `shapes` gives it the shapes of errors."""
        self.state = state
        self._app = app
        self._shapes = shapes
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._flying: Counter[Slot] = Counter()
        """Lines that are asked now, by their model."""
        self._failed: dict[Slot, tuple[int, bytes]] = {}
        """The answer for lines of models that could not be loaded: a trial takes an engine's start, and others' loads wait."""

    async def resume(self) -> None:
        """Goes on with what an earlier server left."""
        for name, owner, body in await self.state.store.run(lambda database: database.all("batch")):
            if msgspec.json.decode(body)["status"] in ("validating", "in_progress", "finalizing", "cancelling"):
                self.start(Ref("batch", name, owner))

    def start(self, named: Ref) -> None:
        task = self._tasks[named.name] = asyncio.create_task(self._run(named))
        task.add_done_callback(lambda _: self._tasks.pop(named.name, None))

    async def stop(self) -> None:
        """Stops all, to be resumed by the next server."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self, named: Ref) -> None:
        """Ends a batch: its open lines are aborted, and all without an answer get an error. RequestError if it has ended."""
        await self._check_open(named)
        # First its task ends: it may be about to write another status.
        if (task := self._tasks.get(named.name)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._check_open(named)
        await self._change(named, status="cancelling", cancelling_at=int(time.time()))
        self.start(named)

    async def _check_open(self, named: Ref) -> None:
        status = (await self.state.store.run(named.read))["status"]
        if status in ENDED:
            raise RequestError(f"the batch is {status} already", param="id")

    # -- one batch

    async def _run(self, named: Ref) -> None:
        while True:
            try:
                await self._work(named)
                return
            except RequestError as error:
                if error.code != FAILED:
                    # Its file has gone.
                    await self._fail(named, [{"code": error.code, "line": None, "message": error.message, "param": None}])
                    return
                # The store has failed, which may pass (a full disk): what was answered is kept.
                LOG.error("the batch %s goes on in %.0f s: %s", named.name, STORE_SECONDS, error.message)
                await asyncio.sleep(STORE_SECONDS)
            except Exception:
                LOG.exception("the batch %s stopped; it goes on at the next start", named.name)
                raise

    async def _work(self, named: Ref) -> None:
        def read(database: Database) -> tuple[Batch, bytes, set[int], int]:
            batch = named.read(database)
            content = content_of(database, Ref("file", batch["input_file_id"], named.owner))
            return batch, content, *answered(database, named.name)

        batch, content, done, failed = await self.state.store.run(read)
        asks, errors = await asyncio.to_thread(parse, content, batch["endpoint"])
        if errors:
            await self._fail(named, errors)
            return
        counts = {"total": len(asks), "completed": len(done) - failed, "failed": failed}
        if batch["status"] == "validating":
            batch = await self._change(named, status="in_progress", in_progress_at=int(time.time()), request_counts=counts)
        left = [ask for ask in asks if ask.place not in done]
        reason = "batch_cancelled" if batch["status"] == "cancelling" else None
        if reason is None:
            reason = await self._ask_all(named, batch, left, counts)
        await self._finish(named, asks, reason)

    async def _ask_all(self, named: Ref, batch: Batch, left: list[Ask], counts: dict[str, int]) -> str | None:
        """Asks lines as there is room for them. The reason why some were not asked, if so."""
        pending: set[asyncio.Task[None]] = set()
        waiting: dict[Slot, deque[Ask]] = {}
        for ask in left:
            waiting.setdefault(self._slot(ask), deque()).append(ask)
        for tried in waiting:
            self._failed.pop(tried, None)
        try:
            while True:
                room = batch["expires_at"] - time.time()
                if room <= 0:
                    return "batch_expired"
                if (slot := self._next(waiting, bool(pending))) is not None:
                    self._flying[slot] += 1
                    task = asyncio.create_task(self._ask(named, slot, waiting[slot].popleft(), counts))
                    task.add_done_callback(functools.partial(self._landed, slot))
                    pending.add(task)
                    continue
                if not pending and not any(waiting.values()):
                    return None
                done, pending = await asyncio.wait(pending or {asyncio.create_task(asyncio.sleep(PAUSE_SECONDS))},
                                                   timeout=min(room, PAUSE_SECONDS), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if done:
                    await self._change(named, request_counts=counts)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _landed(self, slot: Slot, _: asyncio.Task[None]) -> None:
        self._flying[slot] -= 1

    def _next(self, waiting: dict[Slot, deque[Ask]], busy: bool) -> Slot | None:
        """The model whose next line may be asked now. One that is not loaded waits while lines of others run (`busy`)."""
        ready = [slot for slot, asks in waiting.items() if asks and self._spare(slot)]
        loaded = [slot for slot in ready if slot.llm.info is not None]
        return next(iter(loaded or ([] if busy else ready)), None)

    def _slot(self, ask: Ask) -> Slot:
        """The model that a line names; the first for one that is unknown, whose line will be refused."""
        name = ask.body.get("model")
        return (self.state.fleet.find(name) if isinstance(name, str) else None) or self.state.fleet.slots[0]

    def _spare(self, slot: Slot) -> bool:
        """Whether one more line of this model may run: half of its rows, less what others use, and one line in any case."""
        info, flying = slot.llm.info, self._flying[slot]
        if self.state.draining or (slot.llm.unhealthy() and not (info is None and self.state.fleet.several)):
            return False
        # The first line loads a model that is not there.
        return flying < 1 if info is None else flying < max(1, info.max_num_seqs // 2 - max(0, slot.llm.live - flying))

    async def _ask(self, named: Ref, slot: Slot, ask: Ask, counts: dict[str, int]) -> None:
        request_id = f"{named.name}-{ask.place}"
        body = msgspec.json.encode({"priority": LOWEST, **ask.body})
        while True:
            status, content = self._failed.get(slot) or await self._send(ask.url, body, named.owner, request_id)
            if status in BUSY and slot.state == "failed":
                self._failed[slot] = status, content
            if status not in BUSY or slot in self._failed:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        if slot.llm.dead is not None and slot not in self._failed:
            raise RuntimeError("the engine has stopped")
        answer = await asyncio.to_thread(lambda: answer_of(ask.custom_id, request_id, status, msgspec.Raw(content)))
        failed = status != 200
        await self.state.store.run(lambda database: write_answer(database, named.name, ask, answer, failed))
        counts["failed" if failed else "completed"] += 1

    async def _send(self, path: str, body: bytes, owner: str, request_id: str) -> tuple[int, bytes]:
        """(status, content) of an answer of the application to a request of this owner."""
        status, chunks = 500, list[bytes]()

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                chunks.append(message.get("body", b""))

        # The key itself is not kept; batches of a key share a cache among themselves.
        scope, receive = inside("POST", path, body, [(b"content-type", b"application/json")], asyncio.Event(), client=None,
                                server=None, request_id=request_id, api_key=owner.encode(), admin=False, key=None,
                                error_shape=self._shapes().of(path))
        with contextlib.suppress(Exception):
            await self._app(scope, receive, send)
        content = b"".join(chunks)
        return (status, content) if content else (500, b'{"error":{"message":"the request failed unexpectedly"}}')

    async def _finish(self, named: Ref, asks: list[Ask], reason: str | None) -> None:
        """Writes the files. Lines without an answer get `reason`, so that each has one."""
        why = {"batch_expired": "the batch's completion window ended before this line was answered",
               "batch_cancelled": "the batch was cancelled before this line was answered"}

        def work(database: Database) -> None:
            name, owner = named.name, named.owner
            done, _ = answered(database, name)
            for ask in asks:
                if ask.place not in done:
                    error = {"code": str(reason), "message": why.get(str(reason), "not asked")}
                    write_answer(database, name, ask, answer_of(ask.custom_id, "", 0, None, error), True)
            done, failed = answered(database, name)
            files = {}
            for kind, wrong in (("output", False), ("error", True)):
                if content := written(database, name, wrong):
                    files[f"{kind}_file_id"] = write_file(database, owner, f"{name}_{kind}.jsonl", "batch_output",
                                                          content)["id"]
            status = {None: "completed", "batch_expired": "expired", "batch_cancelled": "cancelled"}[reason]
            now = int(time.time())
            named.change(database, **files, **{f"{status}_at": now}, status=status, finalizing_at=now, request_counts={
                "total": len(asks), "completed": len(done) - failed, "failed": failed})
            database.sql("delete from lines where batch=?", name)

        await self.state.store.run(work)

    async def _fail(self, named: Ref, errors: list[dict[str, Any]]) -> None:
        await self._change(named, status="failed", failed_at=int(time.time()), errors={"object": "list", "data": errors})

    async def _change(self, named: Ref, **fields: Any) -> Batch:
        return await self.state.store.run(lambda database: named.change(database, **fields))


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
            Route("POST", one + "/cancel", self.cancel, "End a batch"))

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
        return listed(*await self.state.store.run(lambda database: database.page("batch", owner, after, limit, newest, _STEM)))

    async def get(self, http: Request) -> Response:
        return json_response(await self.state.store.run(ref(http, "batch").read))

    async def cancel(self, http: Request) -> Response:
        """Ends a batch; what is answered is kept."""
        await self.runner.cancel(ref(http, "batch"))
        return await self.get(http)
