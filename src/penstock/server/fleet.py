"""The models behind one server, each with an engine of its own: which one a request gets, when they are loaded and unloaded.

A fleet of one is loaded at the start and stays. In a larger one a model is loaded when a request first names it, and unloaded
when nobody has used it for a while or when another needs the memory, the least recently used first; pinned ones stay. The files
of an unloaded model remain in the system's page cache as far as there is room, so loading it again reads no disk."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.core.errors import ConfigError, PenstockError, RequestError
from penstock.engine.async_llm import AsyncLLM
from penstock.observe.log import LOG
from penstock.server.dialect import UnavailableError

WAIT_SECONDS = 60.0
"""Time for which a model waits for another to become idle, before its request is refused."""

STOP_SECONDS = 10.0


@dataclass(eq=False)
class Slot:
    """One model: its names, its engine, or the one it would be loaded into."""

    names: list[str]
    llm: AsyncLLM
    share: float = 1.0
    """Its part of the requests that name it, beside other versions of the same name."""
    pinned: bool = False
    state: str = "unloaded"
    """unloaded | loading | ready | sleeping | failed."""
    error: str = ""
    used: float = 0.0
    """time.monotonic() of its last request's start or end."""
    users: int = 0
    """Requests that have chosen it and are not over."""
    keep: float | None = None
    """Seconds of idleness that a request asked for; None: the fleet's."""
    level: str = "2"
    """At which it was put to sleep, as vLLM counts: 1 or 2."""
    woken: Set[str] = frozenset()
    """The parts of it that /wake_up has named since."""
    offered: Set[str] = frozenset()
    """Names of adapters that it will have once it is loaded."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Loads those."""
    label: str = ""
    """The name that means it alone: the first one, of several versions with its number behind."""

    def adapts(self, name: str) -> bool:
        """Whether an adapter of this name is or will be there."""
        return name in self.llm.adapters or name in self.offered

    @property
    def absent(self) -> str:
        """The reason why it takes no requests while its engine is not ready."""
        return {"sleeping": "the model sleeps; POST /wake_up", "failed": f"the model could not be loaded: {self.error}",
                "unloaded": "the model is not loaded"}.get(self.state, "the model is still loading")


class Selection:
    """The model that a request has chosen; counted as its user until the request is over."""

    def __init__(self) -> None:
        self.slot: Slot | None = None

    def choose(self, slot: Slot | None) -> None:
        for one, change in ((self.slot, -1), (slot, 1)):
            if one is not None:
                one.users += change
                one.used = time.monotonic()
        self.slot = slot


_SELECTED: ContextVar[Selection | None] = ContextVar("penstock_model", default=None)


class Fleet:
    """The models of one server, at least one. The first is the default."""

    def __init__(self, slots: Sequence[Slot], *, keep_alive: float = 0.0, most: int | None = None) -> None:
        """`keep_alive` is after how many seconds an idle model is unloaded, 0 for never; `most` are loaded at once."""
        self.slots = list(slots)
        self.keep_alive = keep_alive
        self.most = most
        self.several = len(slots) > 1
        for slot in slots:
            versions = [one for one in slots if one.names[0] == slot.names[0]]
            slot.label = slot.names[0] if len(versions) < 2 else f"{slot.names[0]}@{versions.index(slot) + 1}"
        self._loading = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- which model

    @property
    def current(self) -> Slot:
        """The model of the request that this task serves, else the default."""
        selection = _SELECTED.get()
        return self.slots[0] if selection is None or selection.slot is None else selection.slot

    @property
    def loaded(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.llm.info is not None]

    @property
    def names(self) -> list[str]:
        """Every name that requests may use, adapters' last."""
        own = [name for slot in self.slots for name in slot.names]
        adapters = [name for slot in self.slots for name in (*slot.llm.adapters, *sorted(slot.offered))]
        return list(dict.fromkeys([*own, *adapters]))

    def find(self, name: str | None) -> Slot | None:
        """The model of a name; of several versions one by their shares, or the one that NAME@1, NAME@2, ... says."""
        if not name:
            return self.slots[0]
        for bare in (name, name.removesuffix(":latest")):
            found = [slot for slot in self.slots if bare in slot.names] or [slot for slot in self.slots if slot.adapts(bare)]
            if found:
                return random.choices(found, [slot.share for slot in found])[0]
        base, _, number = name.rpartition("@")
        versions = [slot for slot in self.slots if base in slot.names]
        return versions[int(number) - 1] if number in map(str, range(1, len(versions) + 1)) and len(versions) > 1 else None

    def named(self, name: str) -> Slot:
        """The same; RequestError 404 if there is none."""
        found = self.find(name)
        if found is None:
            raise RequestError(f"the model {name!r} is not served here; possible: {', '.join(self.names)}", param="model",
                               code="model_not_found", status=404)
        return found

    async def use(self, name: str | None) -> None:
        """Chooses the model that a request names, and loads it if need be. An unknown name is left to `State.admit`."""
        slot = self.find(name)
        selection = _SELECTED.get()
        if slot is None or selection is None:
            return
        if selection.slot is None or slot.names != selection.slot.names:
            selection.choose(slot)
        if self.several and self.current.state in ("unloaded", "failed", "loading"):
            await self.load(self.current)

    # -- loading

    async def start(self) -> None:
        """Loads what is there from the start: the only model, or the pinned ones. PenstockError: why not."""
        for slot in self.slots:
            if slot.pinned or not self.several:
                await self._start(slot)
        if self.several:
            self._watch = asyncio.create_task(self._unload_idle())

    async def load(self, slot: Slot) -> None:
        """Loads a model, after others have made room if need be. RequestError 503: why not."""
        await self._alone(self._load(slot))

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Does one such work after another, each to its end even if its client leaves: half would leave an engine behind."""
        async def locked() -> None:
            async with self._loading:
                await work

        await asyncio.shield(self._begun(locked()))

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Its error is retrieved here, because the client that would be told may be gone.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _load(self, slot: Slot) -> None:
        if slot.state == "ready" and slot.llm.dead is None:
            return
        while self.most is not None and len(self.loaded) >= self.most:
            await self._make_room(slot)
        while True:
            try:
                await self._start(slot)
                return
            except PenstockError as error:
                if not (isinstance(error, ConfigError) and "memory" in str(error) and self._idle(slot)):
                    slot.state, slot.error = "failed", str(error)
                    raise UnavailableError(f"the model {slot.names[0]!r} could not be loaded: {error}",
                                           "loading_failed") from None
                await self._make_room(slot)

    async def _start(self, slot: Slot) -> None:
        if slot.llm.dead is not None or slot.state == "failed":
            slot.llm = slot.llm.again()
        slot.state, slot.error = "loading", ""
        await slot.llm.start()
        if slot.prepare is not None:
            await slot.prepare()
        slot.state, slot.used = "ready", time.monotonic()
        if self.several:
            LOG.info("loaded %s", slot.label)

    def _idle(self, but: Slot | None) -> list[Slot]:
        """Loaded models that could be unloaded now, least recently used first. A background response outlives its request."""
        idle = [slot for slot in self.loaded if not (slot is but or slot.users or slot.llm.live or slot.pinned)]
        return sorted(idle, key=lambda slot: slot.used)

    async def _make_room(self, slot: Slot) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not (idle := self._idle(slot)):
            if time.monotonic() > until:
                raise UnavailableError(f"there is no room for the model {slot.names[0]!r}: all that are loaded are in use "
                                       "(--max-loaded-models)", "no_room")
            await asyncio.sleep(0.05)
        await self._unload(idle[0])

    async def unload(self, slot: Slot, state: str = "unloaded", patience: float = 0.0) -> None:
        """Ends a model's engine, which gives all its memory back; running requests get `patience` seconds to finish."""
        await self._alone(self._unload(slot, state, patience))

    async def _unload(self, slot: Slot, state: str = "unloaded", patience: float = 0.0) -> None:
        old, slot.llm, slot.state, slot.keep = slot.llm, slot.llm.again(), state, None
        await _end(old, patience)
        LOG.info("%s %s", "unloaded" if state == "unloaded" else "put to sleep", slot.label)

    async def replace(self, slot: Slot, folder: str, patience: float) -> None:
        """Loads other weights, and switches to them; running requests finish with the old. PenstockError: why these stay."""
        await self._alone(self._replace(slot, folder, patience))

    async def _replace(self, slot: Slot, folder: str, patience: float) -> None:
        new = slot.llm.again(replace(slot.llm.options, model=folder))
        await new.start()
        old, slot.llm, slot.state = slot.llm, new, "ready"
        self._begun(_end(old, patience))

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            await self._alone(self._unload_unused())

    async def _unload_unused(self) -> None:
        for slot in self.loaded:
            keep = self.keep_alive if slot.keep is None else slot.keep
            if slot.llm.dead is not None:
                LOG.error("the engine of %s has stopped: %s; the next request loads it again", slot.label, slot.llm.dead)
                await self._unload(slot)
            elif slot in self._idle(None) and (keep > 0 or slot.keep == 0) and time.monotonic() - slot.used > keep:
                await self._unload(slot)

    async def close(self, timeout: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for slot in self.slots:
            # A stuck engine does not read the shutdown call.
            await slot.llm.shutdown(0.0 if slot.llm.unhealthy() else timeout)

    # -- all of them

    @property
    def live(self) -> int:
        return sum(slot.llm.live for slot in self.slots)

    def unhealthy(self) -> str | None:
        """The reason why requests cannot be served now; None if they can. Of several models any may be absent."""
        return None if self.several else self.slots[0].llm.unhealthy()

    def describe(self) -> list[dict[str, Any]]:
        """Each model's names, state and use, for people and routers."""
        now = time.monotonic()
        return [{"id": slot.label, "names": slot.names, "path": slot.llm.model, "state": slot.state, "pinned": slot.pinned,
                 "share": slot.share, "requests": slot.llm.live,
                 "idle_seconds": round(now - slot.used, 1) if slot.used and not slot.users else 0.0,
                 "bytes": info.weight_bytes + info.kv_bytes + info.step_bytes if info is not None else 0, "error": slot.error}
                for slot in self.slots for info in (slot.llm.info,)]


async def _end(llm: AsyncLLM, patience: float) -> None:
    until = time.monotonic() + patience
    while llm.live and time.monotonic() < until and not llm.unhealthy():
        await asyncio.sleep(0.02)
    with contextlib.suppress(Exception):
        llm.fail_open(UnavailableError("the model is being unloaded", "unloaded"))
        await llm.shutdown(STOP_SECONDS)


class Selecting:
    """Pure ASGI: the scope of one request's choice. Requests without a body choose by ?model=."""

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self.app = app
        self.fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        selection = Selection()
        token = _SELECTED.set(selection)
        try:
            if name := parse_qs(scope["query_string"].decode("latin-1")).get("model"):
                selection.choose(self.fleet.named(name[0]))
            await self.app(scope, receive, send)
        finally:
            if selection.slot is not None:
                scope["model"] = selection.slot.label
            selection.choose(None)
            _SELECTED.reset(token)
