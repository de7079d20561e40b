"""The asyncio frontend: concurrent requests from text to text, with the engine in a separate process.

It joins tokenization and checks (`inputs.py`), text (`outputs.py`), the bookkeeping of open requests (`traffic.py`) and their
readers (`stream.py`). All runs on one event loop, except long work (`work.py`) and chat templates (`rendering.py`)."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from penstock import canary
from penstock.config.resolve import replicas
from penstock.config.schema import EngineOptions, engine_options
from penstock.core import service
from penstock.core.child import Refused
from penstock.core.errors import EngineDeadError, PenstockError, RequestError
from penstock.core.request import Adapter, EngineInfo, EngineStats, Request, Span
from penstock.core.sampling import SamplingParams
from penstock.engine.adapters import located
from penstock.engine.ledger import bound
from penstock.engine.loading import inputs_of, load_text
from penstock.engine.outputs import Delta, Outputs, RequestOutput
from penstock.engine.process import ENGINE, EngineOutputs, EngineProcess
from penstock.engine.rendering import Conversation, Renderers
from penstock.engine.replicas import Replicas
from penstock.engine.retention import Marked
from penstock.engine.stream import Stream
from penstock.engine.traffic import Track, Traffic
from penstock.engine.work import Workers, give_back_memory
from penstock.observe.figures import Figures
from penstock.observe.log import LOG
from penstock.text import ChatTemplate, Tokenizer

_TELL_SECONDS = 10.0
"""Seconds between two lines of the log that name the limit that binds."""


class AsyncLLM:
    """vLLM's AsyncLLM in call shape. `await start()` first, `await shutdown()` last."""

    def __init__(self, model: str | EngineOptions = canary.NAME, *, engine: str = ENGINE, stall_timeout: float = 60.0,
                 template_timeout: float = 10.0, on_loading: Callable[[int, int], None] | None = None,
                 on_death: Callable[[str], None] | None = None, **options: Any) -> None:
        """`model` is a folder or hub id, with the fields of EngineOptions as `options`; or the EngineOptions themselves.

        `on_loading` is told (bytes of weights loaded, of how many), `on_death` the reason if the engine goes. After
        `stall_timeout` seconds without progress open requests fail and new ones are refused; `template_timeout` is how long a
        chat template may take for one conversation. ConfigError for an option that does not exist."""
        self.options = engine_options(model, options)
        self.stall_timeout = stall_timeout
        self.template_timeout = template_timeout
        self.on_death = on_death
        self.info: EngineInfo | None = None
        """Set once the engine is ready."""
        self.stats = EngineStats()
        self.traffic = Traffic()
        """The open requests, and what was counted of all."""
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
        self.traffic.figures = Figures(info.max_model_len)
        self._progress = time.monotonic()
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        self.info = info
        self._watch = asyncio.create_task(self._watch_progress())

    def again(self, options: EngineOptions | None = None) -> "AsyncLLM":
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
    def errored(self) -> bool:
        return self.dead is not None

    @property
    def live(self) -> int:
        return len(self.traffic)

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
        if self.live and now - self._progress > self.stall_timeout:
            return f"the engine is stuck: {self.live} requests are open and no step ended for {now - self._progress:.0f} s"
        return None

    async def _watch_progress(self) -> None:
        """Fails all open requests once the engine is stuck, so that no client waits forever. At rest, gives memory back."""
        interval = min(1.0, self.stall_timeout / 4)
        seen = told = time.monotonic()
        limits, worked = list[float](), True
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
            if self.live or self.work.waiting_size:
                worked = True
            elif worked:
                # The first look at rest since the last work.
                await asyncio.to_thread(give_back_memory, at_rest=True)
                worked = False
            reason = self.unhealthy()
            if reason is not None and self.live and self.dead is None:
                LOG.error("%s; its %d requests fail", reason, self.live)
                self.fail_open(RequestError(reason, code="engine_stuck", status=503))

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self.info is None:
            raise EngineDeadError("the engine is not started")

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

        Ids come from `new_id` and are used once, so that a late update of an aborted request cannot reach another request."""
        self._check_alive()
        assert self.info is not None
        self.traffic.check_room(requests, self.options.max_num_queued_reqs + self.info.max_num_seqs)
        now = time.monotonic()
        if not self.live:
            self._progress = now
        stream = Stream(self.work, self.drop)
        try:
            for request in requests:
                self.traffic.open(request, stream, now)
                self.outputs.register(request)
                self._process.tell("submit", request, request.id)
                self.traffic.figures.started(request)
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
        `request_id` is for `abort`; RequestError if it is in use. `service_tier` is its class of service."""
        self._check_alive()
        name = self.new_id()
        given = request_id or name
        if given in self._given:
            raise RequestError(f"a request with id {given!r} is running already; ids must be unique", param="request_id",
                               code="duplicate_request_id")
        self._given[given] = name
        try:
            request = await self.work.run(len(prompt) if isinstance(prompt, str) else 0, lambda: self.inputs.request(
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
        """Ends the owner's open streams of these names, which may have a prefix (cmpl-NAME). The names that were found."""
        streams = [stream for stream in self.traffic.streams if stream.name and stream.owner == owner]
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
                raise RequestError(f"{name!r} has already been loaded", param="lora_name", code="adapter_exists")
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
        return bool(await self._ask("reset_prefix_cache"))

    async def start_profile(self) -> None:
        await self._ask("start_profile")

    async def stop_profile(self, folder: str) -> list[str]:
        """Ends that. Returns the traces in `folder`: one of each engine, unless its ranks are on several machines."""
        return list(await self._ask("stop_profile", folder))

    async def look(self) -> dict[str, Any]:
        """The engine's work at this moment (`engine/view.py::View.look`). EngineDeadError if there is none."""
        return dict(await self._ask("look"))

    async def _ask(self, method: str, *arguments: str) -> Any:
        self._check_alive()
        return await self._process.ask(method, *arguments)

    def drop(self, stream: Stream) -> None:
        """Forgets a stream's open requests and aborts them in the engine."""
        ids = list(stream.open)
        stream.open.clear()
        for name in ids:
            self.outputs.forget(name)
            self.traffic.figures.finished["abort"] += self.traffic.forget(name).open
        if ids:
            self._process.abort(ids)

    def fail_open(self, error: PenstockError) -> None:
        for stream in self.traffic.streams:
            stream.close(error)

    # -- messages from the process

    def _on_outputs(self, outputs: EngineOutputs[Delta]) -> None:
        now = time.monotonic()
        if outputs.stats is not None:
            self.stats = outputs.stats
            if self.info is not None:
                self.info.cache_identity = outputs.stats.cache_identity
            if outputs.stats.steps != self._steps:
                self._steps = outputs.stats.steps
                self._progress = now
        for name in outputs.admitted:
            if (track := self.traffic.get(name)) is not None:
                track.stream.confirm(name)
        if not outputs.updates:
            return
        self._progress = now
        # Each stream gets all of the step at once.
        ready: dict[Stream, list[Delta]] = {}
        for delta in outputs.updates:
            track = self.traffic.get(delta.request_id)
            if track is not None:
                self.traffic.count_update(delta, track)
                if self.outputs.complete(delta):
                    self._take(delta, track, now, ready)
        self.traffic.count_step(now)
        for stream, deltas in ready.items():
            stream.put(deltas, now)
        aborts = self.outputs.take_aborts()
        if aborts:
            self._process.abort(aborts)

    def _take(self, delta: Delta, track: Track, now: float, ready: dict[Stream, list[Delta]]) -> None:
        """Counts a delta and adds it to those that its stream gets."""
        if delta.token_ids:
            self.traffic.count_tokens(track, delta, now)
        if delta.finish_reason == "error":
            track.stream.close(RequestError(f"the request failed: {delta.error}", code="generation_failed",
                                            status=delta.status))
            return
        ready.setdefault(track.stream, []).append(delta)
        if delta.finish_reason is not None:
            self.traffic.count_end(track, delta, now)
            if track.open == 0:
                self.traffic.forget(delta.request_id)
                track.stream.end(delta.request_id)

    def _on_refused(self, refused: Refused) -> None:
        track = self.traffic.get(refused.key)
        if track is None:
            return
        self.traffic.figures.refused += 1
        track.open = 0
        track.stream.close(refused.error())

    def _on_death(self, reason: str) -> None:
        self.fail_open(EngineDeadError(reason))
        if self.on_death:
            self.on_death(reason)
