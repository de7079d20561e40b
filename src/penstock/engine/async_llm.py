"""The asyncio frontend: concurrent requests from text to text, with the engine in a separate process.

It owns the frontend's half of every request: tokenization, detokenization, stop strings, output streams, and statistics.
Everything runs on one event loop, except long work (`work.py`) and chat templates (`rendering.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from penstock import canary
from penstock.config.options import engine_options
from penstock.config.resolve import replicas
from penstock.config.schema import EngineOptions
from penstock.core import service
from penstock.core.child import Refused
from penstock.core.errors import EngineDeadError, PenstockError, RequestError
from penstock.core.request import Adapter, EngineInfo, EngineStats, Request, Span, Timings, Update
from penstock.core.sampling import MAX_OPEN_LIST_WORDS, SamplingParams
from penstock.engine.adapters import located
from penstock.engine.ledger import bound, ledger
from penstock.engine.loading import inputs_of, load_text
from penstock.engine.outputs import Delta, Outputs, RequestOutput
from penstock.engine.process import ENGINE, EngineOutputs, EngineProcess
from penstock.engine.rendering import Conversation, Renderers
from penstock.engine.replicas import Replicas
from penstock.engine.retention import Marked
from penstock.engine.work import Workers
from penstock.observe.figures import Figures
from penstock.observe.log import LOG
from penstock.text import ChatTemplate, Tokenizer

_ENDED = 200
"""Sequences that `AsyncLLM.ended` remembers."""
_TELL_SECONDS = 10.0
"""Seconds between two lines of the log that name the limit that binds."""


class Track:
    """Progress of one open request, for its stream and the statistics. Times are time.monotonic()."""

    __slots__ = ("arrived", "cached", "first", "last", "open", "queued", "request", "stream", "tokens")

    def __init__(self, request: Request, stream: Stream, now: float) -> None:
        self.request = request
        self.stream = stream
        self.arrived = now
        self.open = request.params.n
        """Sequences that have not ended."""
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.tokens: dict[int, int] = {}
        self.queued = self.cached = 0.0  # seconds in the queue, prompt tokens that the cache had


class Stream:
    """Outputs of one or several requests as they arrive. Close it, or iterate it to its end.

    `async for deltas in stream` yields all deltas since the last iteration, at least one. Raises RequestError when a request
    was refused or failed, EngineDeadError when the engine died; the other requests of the stream are then aborted.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.work = llm.work
        """Runs the encoding of long answers."""
        self._deltas: list[Delta] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self.open: set[str] = set()
        """Ids of requests that have not ended."""
        self.unconfirmed: set[str] = set()
        """Ids of requests that the engine may still refuse."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.ledger: dict[str, float] = {}
        self.ledger_at = 0.0
        """Where the time of the sequence went that ended last, and when that was: time.time()."""
        self.name, self.owner = "", b""
        """The id by which its client knows it, and whose it is: for `AsyncLLM.abort_named`."""
        self.ends: dict[str, None] = {}
        """Totals over the stream's requests, and the finish reasons in order of appearance; for the log."""

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[Delta]:
        return await self.next()

    async def next(self, seconds: float | None = None) -> list[Delta]:
        """The next deltas, or an empty list if none arrives within `seconds`. StopAsyncIteration after the end."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            if not await self._wait(seconds):
                return []
        deltas, self._deltas = self._deltas, []
        return deltas

    async def admitted(self) -> None:
        """Returns once the engine has accepted all requests. Otherwise raises the error that reading would raise."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self.unconfirmed:
                return
            await self._wait(None)

    async def _wait(self, seconds: float | None) -> bool:
        """Waits for `_wake`; False if that took longer than `seconds`."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._expire) if seconds is not None else None
        try:
            return await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    def close(self, error: BaseException | None = None) -> None:
        """Aborts the open requests. A waiting reader gets `error`, or the end of the stream. May be called at any time, and
        repeatedly."""
        self._llm.drop(self)
        if self._error is None:
            self._error = error
        self.unconfirmed.clear()
        self._wake()

    def put(self, delta: Delta) -> None:
        """Adds a delta for the reader."""
        self._deltas.append(delta)
        self._wake()

    def confirm(self, request_id: str) -> None:
        """Called when the engine has accepted one of the requests."""
        self.unconfirmed.discard(request_id)
        self._wake()

    def end(self, request_id: str) -> None:
        """Called when one of the requests has ended."""
        self.open.discard(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class AsyncLLM:
    """vLLM's AsyncLLM in call shape. `await start()` first, `await shutdown()` last."""

    def __init__(self, model: str | EngineOptions = canary.NAME, *, engine: str = ENGINE, stall_timeout: float = 60.0,
                 template_timeout: float = 10.0, on_loading: Callable[[int, int], None] | None = None,
                 on_death: Callable[[str], None] | None = None, **options: Any) -> None:
        """`model` is a folder or hub id, with the fields of EngineOptions as `options`; or the EngineOptions themselves.

        `on_loading` is told (bytes of weights loaded, of how many), `on_death` the reason if the engine goes. After
        `stall_timeout` seconds without progress open requests fail and new ones are refused; `template_timeout` is how long a
        chat template may take for one conversation. ConfigError for an option that does not exist.
        """
        self.options = engine_options(model, options)
        self.stall_timeout = stall_timeout
        self.template_timeout = template_timeout
        self.on_death = on_death
        self.info: EngineInfo | None = None
        """Set once the engine is ready."""
        self.stats = EngineStats()
        self.figures = Figures(1)
        self.ended: deque[dict[str, Any]] = deque(maxlen=_ENDED)
        """The sequences that ended last, for people who watch."""
        self.adapters: dict[str, Adapter] = {}
        self._adapter_locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By the names that requests call them."""
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self._made_with: Any = {"engine": engine, "stall_timeout": stall_timeout, "template_timeout": template_timeout,
                                "on_loading": on_loading, "on_death": on_death}
        told: dict[str, Any] = {"on_outputs": self._on_outputs, "on_refused": self._on_refused, "on_death": self._on_death,
                                "on_loading": on_loading, "engine": engine}
        self._process: EngineProcess | Replicas = (
            EngineProcess(self.options, **told) if self.options.data_parallel_size == 1 and self.options.restart == "none" else
            Replicas(replicas(self.options), **told))
        self._tracks: dict[str, Track] = {}
        self._tenant_tokens: Counter[str] = Counter()
        self._list_words = 0
        """The device memory used by the open requests' sampling parameters, in 4-byte words."""
        self._names = itertools.count()
        self._given: dict[str, str] = {}
        """Request id chosen by the caller of `generate` -> the engine's request id."""
        self._progress = 0.0
        self._steps = -1
        self.work = Workers()
        """Runs work that would block the event loop."""
        self._renderers: Renderers | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the engine process; the tokenizer is loaded meanwhile. ConfigError, ModelError or EngineDeadError: why not."""
        found = await self._process.start()
        try:
            self.tokenizer, self.template = await asyncio.to_thread(load_text, found, self.options)
            if self.template is not None:
                self._renderers = Renderers(self.template, self.template_timeout)
        except BaseException:
            await self._process.stop(0.0)
            raise
        info = await self._process.ready()
        self.inputs = inputs_of(found, self.tokenizer, self.template, info, self.options)
        self.outputs = Outputs(self.tokenizer)
        self.figures = Figures(info.max_model_len)
        self._progress = time.monotonic()
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        self.info = info
        self._watch = asyncio.create_task(self._watch_progress())

    def again(self, options: EngineOptions | None = None) -> AsyncLLM:
        """Another one, not started, made as this one was, with other `options` if given."""
        return AsyncLLM(self.options if options is None else options, **self._made_with)

    async def shutdown(self, timeout: float = 10.0) -> None:
        """Aborts the open requests and ends the engine process."""
        self.fail_open(EngineDeadError("the engine is shutting down"))
        if self._watch is not None:
            self._watch.cancel()
        if self._renderers is not None:
            self._renderers.close()
        await self._process.stop(timeout)

    # -- health

    @property
    def dead(self) -> str | None:
        """The reason why the engine is gone; None while it lives."""
        return self._process.dead

    @property
    def model(self) -> str:
        """The model's name or folder, as it was given."""
        return self.options.model

    @property
    def disk(self) -> tuple[str | None, bool]:
        """The options cache_disk and cache_disk_adopt."""
        return self.options.cache_disk, self.options.cache_disk_adopt

    @property
    def errored(self) -> bool:
        return self.dead is not None

    @property
    def live(self) -> int:
        """The number of open requests."""
        return len(self._tracks)

    @property
    def silence(self) -> float:
        """Seconds since the last message from the engine."""
        return time.monotonic() - self._process.last_message

    @property
    def engine_pid(self) -> int | None:
        return self._process.pid

    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now (loading, dead, silent, or busy without progress); None if healthy."""
        if self.dead is not None:
            return f"the engine has stopped: {self.dead}"
        if self.info is None or self._process.starting:
            return "the model is still loading"
        now = time.monotonic()
        if self.silence > self.stall_timeout:
            return f"the engine is stuck: it has sent nothing for {self.silence:.0f} s"
        if self._tracks and now - self._progress > self.stall_timeout:
            return f"the engine is stuck: {self.live} requests are open and no step ended for {now - self._progress:.0f} s"
        return None

    async def _watch_progress(self) -> None:
        """Fails all open requests once the engine is stuck, so that no client waits forever."""
        interval = min(1.0, self.stall_timeout / 4)
        seen = told = time.monotonic()
        limits = list[float]()
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - seen > 5 * interval:
                # This process itself was suspended and may have unread messages from the engine.
                self._process.last_message = self._progress = now
            seen = now
            if now - told >= _TELL_SECONDS:
                if self.stats.limits != limits:
                    LOG.info("%s (%d run, %d wait)", bound(limits, self.stats.limits, now - told), self.stats.running,
                             self.stats.waiting)
                limits, told = self.stats.limits, now
            reason = self.unhealthy()
            if reason is not None and self._tracks and self.dead is None:
                LOG.error("%s; its %d requests fail", reason, self.live)
                self.fail_open(RequestError(reason, code="engine_stuck", status=503))

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.info is None:
            raise EngineDeadError("the engine is not started")

    def _check_room(self, requests: Sequence[Request]) -> None:
        """RequestError 503 if there are more requests than the engine runs and queues. A busy engine refuses them itself; this
        check bounds the requests sent to an engine that does not answer."""
        assert self.info is not None
        words = sum(request.list_words for request in requests)
        if words > MAX_OPEN_LIST_WORDS:
            raise RequestError(f"bad_words, logit_bias and allowed_token_ids of all n sequences take {4 * words:,} bytes of "
                               f"device memory; at most {4 * MAX_OPEN_LIST_WORDS:,} are possible; send fewer, or a lower n",
                               param="n", code="invalid_value")
        if self._list_words + words > MAX_OPEN_LIST_WORDS:
            self.figures.refused += 1
            raise RequestError("the lists of other requests (bad_words, logit_bias, allowed_token_ids) take "
                               "all the device memory there is for them; try again in a moment", code="overloaded", status=503)
        most = self.options.max_num_queued_reqs + self.info.max_num_seqs
        if self.live >= most:
            self.figures.refused += 1
            raise RequestError(f"{self.live} requests are open; at most {most} run and wait (--max-num-queued-reqs); try again "
                               "in a moment", code="queue_full", status=503)

    # -- requests

    def new_id(self) -> str:
        """A new request id, unique in this frontend."""
        return f"r{next(self._names)}"

    async def render(self, conversation: Conversation, size: int) -> Marked:
        """Renders a conversation with the model's chat template in a separate process. `size` is its approximate number of
        characters. RequestError if there is no template, if it refuses, or if it takes too long."""
        renderers = self._renderers
        if renderers is None:
            raise RequestError("there is no tokenizer (skip_tokenizer_init), so no chat template; send token ids",
                               param="messages", code="no_tokenizer")
        return await self.work.run(size, lambda: renderers.render(conversation), always=True)

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submits requests whose outputs share one stream. EngineDeadError if there is no engine, RequestError for a request
        that cannot be encoded; then none of them is open.

        Ids come from `new_id` and are used once, so that a late update of an aborted request cannot reach another request.
        """
        self._check_alive()
        self._check_room(requests)
        now = time.monotonic()
        if not self._tracks:
            self._progress = now
        stream = Stream(self)
        try:
            for request in requests:
                self._tracks[request.id] = Track(request, stream, now)
                self._tenant_tokens[request.tenant] += len(request.prompt_ids)
                self._list_words += request.list_words
                stream.open.add(request.id)
                stream.unconfirmed.add(request.id)
                stream.prompt_tokens += len(request.prompt_ids)
                self.outputs.register(request)
                self._process.tell("submit", request, request.id)
                self.figures.started(request)
        except BaseException:
            # Undo the bookkeeping of all these requests, whichever failed.
            stream.close()
            raise
        return stream

    async def generate(self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
                       priority: int = 0, cache_salt: str | None = None, retention: Sequence[Span] = (),
                       service_tier: str | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's whole output so far, each time it has grown. Closing the generator aborts the request.

        Cached prompts are shared only with requests of equal `cache_salt`; `retention` gives the spans to keep cached.
        `request_id` is for `abort`; RequestError if it is in use. `service_tier` is its class of service.
        """
        self._check_alive()
        name = self.new_id()
        given = request_id or name
        if given in self._given:
            raise RequestError(f"a request with id {given!r} is running already; ids must be unique", param="request_id",
                               code="duplicate_request_id")
        self._given[given] = name
        try:
            size = len(prompt) if isinstance(prompt, str) else 0
            request = await self.work.run(size, lambda: self.inputs.request(
                name, prompt, sampling_params, priority=priority, salt=cache_salt or "", retain=retention))
            if service_tier is not None:
                request.tier = service.named(service_tier, self.inputs.info.classes)
            output = RequestOutput.empty(request, prompt if isinstance(prompt, str) else None, self.tokenizer)
            output.request_id = given
            async with self.open([request]) as stream:
                async for deltas in stream:
                    for delta in deltas:
                        output.add(delta)
                    yield output
        finally:
            del self._given[given]

    async def abort(self, request_id: str) -> None:
        """Ends a request; its output ends with finish_reason "abort". Unknown ids are ignored."""
        self._process.abort([self._given.get(request_id, request_id)])

    def abort_named(self, names: Sequence[str], owner: bytes) -> list[str]:
        """Ends the owner's open streams that answer under these names, which may have a prefix (cmpl-NAME). Their readers get
        a RequestError. The names that were found."""
        streams = {track.stream for track in self._tracks.values() if track.stream.name and track.stream.owner == owner}
        found = []
        for name in names:
            for stream in streams:
                if name == stream.name or name.endswith((f"-{stream.name}", f"_{stream.name}")):
                    stream.close(RequestError("the request was aborted by its client (/abort_requests)", code="aborted"))
                    found.append(name)
        return found

    async def load_adapter(self, name: str, folder: str, *, replace: bool = False) -> None:
        """Serves the adapter in `folder`, or of a hub id, as `name`. RequestError if it is wrong or the name taken."""
        async with self._adapter_locks[name]:
            old = self.adapters.get(name)
            self._check_alive()
            if (old is not None and not replace) or name == self.model:
                raise RequestError(f"{name!r} is taken; unload that adapter first", param="lora_name", code="adapter_exists")
            found = await asyncio.to_thread(located, name, folder)
            self.adapters[name] = Adapter(name, found, await self._process.ask("load_adapter", found))
            if old is not None:
                await self._process.ask("remove_adapter", old.digest)

    async def unload_adapter(self, name: str) -> None:
        """Serves an adapter no longer; its open requests finish. RequestError 404 if there is none of this name."""
        self._check_alive()
        if name not in self.adapters:
            raise RequestError(f"there is no adapter {name!r}; there are {', '.join(self.adapters) or 'none'}",
                               param="lora_name", code="adapter_not_found", status=404)
        await self._process.ask("remove_adapter", self.adapters.pop(name).digest)

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, in every tier. EngineDeadError if there is no engine."""
        self._check_alive()
        done: bool = await self._process.ask("reset_prefix_cache")
        return done

    async def look(self) -> dict[str, Any]:
        """The engine's work at this moment (`engine/view.py::View.look`). EngineDeadError if there is none."""
        self._check_alive()
        found: dict[str, Any] = await self._process.ask("look")
        return found

    def drop(self, stream: Stream) -> None:
        """Forgets a stream's open requests and aborts them in the engine."""
        ids = list(stream.open)
        stream.open.clear()
        for name in ids:
            track = self._forget(name)
            self.outputs.forget(name)
            self.figures.finished["abort"] += track.open
        if ids:
            self._process.abort(ids)

    def _forget(self, name: str) -> Track:
        """Removes a request from the bookkeeping and returns its track."""
        track = self._tracks.pop(name)
        tenant = track.request.tenant
        self._tenant_tokens[tenant] -= len(track.request.prompt_ids)
        self._list_words -= track.request.list_words
        if not self._tenant_tokens[tenant]:
            del self._tenant_tokens[tenant]
        return track

    def tokens_in_flight(self, tenant: str) -> int:
        """The number of prompt tokens of this tenant's open requests."""
        return self._tenant_tokens[tenant]

    def fail_open(self, error: PenstockError) -> None:
        """Ends every open stream with `error`."""
        for stream in {track.stream for track in self._tracks.values()}:
            stream.close(error)

    # -- messages from the process

    def _on_outputs(self, outputs: EngineOutputs) -> None:
        now = time.monotonic()
        if outputs.stats is not None:
            self.stats = outputs.stats
            if self.info is not None:
                self.info.cache_identity = outputs.stats.cache_identity
            if outputs.stats.steps != self._steps:
                self._steps = outputs.stats.steps
                self._progress = now
        for name in outputs.admitted:
            if name in self._tracks:
                self._tracks[name].stream.confirm(name)
        if not outputs.updates:
            return
        self._progress = now
        known = [update for update in outputs.updates if update.request_id in self._tracks]
        for update in known:
            self._count_update(update)
        for delta in self.outputs.push(known):
            self._deliver(delta, now)
        aborts = self.outputs.take_aborts()
        if aborts:
            self._process.abort(aborts)

    def _deliver(self, delta: Delta, now: float) -> None:
        track = self._tracks.get(delta.request_id)
        if track is None:
            return
        if delta.token_ids:
            if not track.tokens:
                track.stream.cached_tokens += delta.cached_tokens
            track.stream.output_tokens += len(delta.token_ids)
            self._count_tokens(track, delta.index, len(delta.token_ids), now)
        if delta.finish_reason == "error":
            track.stream.close(RequestError(f"the request failed: {delta.error}", code="generation_failed",
                                            status=delta.status))
            return
        if delta.finish_reason is not None:
            track.stream.ends[delta.finish_reason] = None
            track.open -= 1
            self._count_end(track, delta, now)
            delta.ledger = track.stream.ledger = ledger(delta.timings or Timings(track.request.arrival))
            track.stream.ledger_at = time.time()
        track.stream.put(delta)
        if track.open == 0:
            self._forget(delta.request_id)
            track.stream.end(delta.request_id)

    def _on_refused(self, refused: Refused) -> None:
        track = self._tracks.get(refused.key)
        if track is None:
            return
        self.figures.refused += 1
        track.open = 0
        track.stream.close(refused.error())

    def _on_death(self, reason: str) -> None:
        self.fail_open(EngineDeadError(reason))
        if self.on_death:
            self.on_death(reason)

    # -- statistics

    def _count_update(self, update: Update) -> None:
        if update.finish_reason == "error":
            self.figures.finished["error"] += 1
        track = self._tracks[update.request_id]
        if update.token_ids and not update.index and not track.tokens:
            self.figures.computed_prompts.observe(len(track.request.prompt_ids) - update.cached_tokens)
        track.cached = update.cached_tokens or track.cached
        timings = update.timings
        if timings is not None and timings.first_scheduled:
            track.queued = timings.first_scheduled - timings.arrival
            self.figures.ended(timings)

    def _count_tokens(self, track: Track, index: int, count: int, now: float) -> None:
        figures = self.figures
        figures.generation_tokens += count
        last = track.last.get(index)
        if last is None:
            figures.first_token.observe(now - track.arrived)
            track.first[index] = now
            track.tokens[index] = count
        else:
            figures.between_tokens.observe((now - last) / count, count)
            track.tokens[index] += count
        track.last[index] = now

    def _count_end(self, track: Track, delta: Delta, now: float) -> None:
        figures, tokens = self.figures, track.tokens.get(delta.index, 0)
        figures.finished[delta.finish_reason or "stop"] += 1
        figures.end_to_end.observe(now - track.arrived)
        figures.output_lengths.observe(tokens)
        past = time.time() - now
        self.ended.append({"id": delta.request_id, "arrival": past + track.arrived, "queued": track.queued,
                           "first": past + track.first.get(delta.index, now), "finished": past + now, "output": tokens,
                           "prompt": len(track.request.prompt_ids), "cached": int(track.cached),
                           "priority": track.request.priority, "reason": delta.finish_reason})
        if tokens > 1:
            figures.per_token.observe((now - track.first[delta.index]) / (tokens - 1))
