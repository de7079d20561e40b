"""The engine in a separate process: the child's main loop, the messages between child and parent, and the parent's handle.

Messages are msgpack by msgspec over two ZMQ ipc sockets; nothing is ever pickled. The child owns the engine in its main
thread. The parent handles requests and updates in tokens; `async_llm` turns them into text."""

import asyncio
import contextlib
import importlib
import itertools
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import zmq

from penstock.config.schema import EngineOptions
from penstock.core import child
from penstock.core.child import Failed, Refused
from penstock.core.control import Loading
from penstock.core.errors import EngineDeadError, RankLostError, RequestError
from penstock.core.request import EngineInfo, EngineStats, Request, Update
from penstock.engine.executor import Pending
from penstock.engine.loading import ModelFiles, find
from penstock.engine.outputs import Delta
from penstock.engine.work import collect_rarely, give_back_memory, keep_little

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

Reply = TypeVar("Reply")
News = TypeVar("News", bound=Update)

ENGINE = "penstock.engine.engine:Engine"
"""The engine's class, as module:name. Tests name another."""

IDLE_MS = 500
"""Interval of an idle engine's heartbeat."""

WRITING_MS = 10
"""The interval while cached pages are being written to stores, which needs occasional turns."""

UNDECIDED_SECONDS = 10.0
"""Time for which a request may stay unconfirmed while its grammar is compiled, so that a refusal has its own status."""
LISTEN_SECONDS = 0.002
"""The interval at which calls are looked for while a step is computed. A descriptor that the step's thread writes would need
none, but its write gives the interpreter's lock away before the next step is launched."""
STATS_SECONDS = 0.1
"""The least time between two snapshots while busy."""


# -- parent to child


class Start(msgspec.Struct, array_like=True):
    """The first message to the child, on its standard input."""

    address: str
    engine: str
    options: EngineOptions


CALLS: dict[str, Any] = {
    "submit": Request, "abort": list[str], "reset_prefix_cache": None, "look": None, "start_profile": None, "stop_profile": str,
    "load_adapter": str, "remove_adapter": str, "shutdown": None}
"""Calls that the parent may make, with the type of their argument, if any: the engine's methods, and its end (status 0)."""


class Call(msgspec.Struct, array_like=True):
    """A call of CALLS. With a `key` the child replies: Refused, Answered with a value, or `EngineOutputs.admitted`."""

    name: str
    key: str = ""
    argument: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Encoded; by default nil, since an empty Raw would leave the message one element short."""


# -- child to parent


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    info: EngineInfo


class Answered(msgspec.Struct, array_like=True, tag="answered"):
    key: str
    value: msgspec.Raw


class EngineOutputs(msgspec.Struct, Generic[News], array_like=True, tag="outputs"):
    """Outputs of a turn of the engine; without updates, a heartbeat. The parent reads updates as deltas without text."""

    updates: list[News]
    stats: EngineStats | None
    admitted: list[str] = []
    """Keys of calls that returned nothing, such as `submit`: these requests were accepted."""


ToParent = Loading | ModelFiles | Ready | Failed | Refused | Answered | EngineOutputs[Update]
FromChild = Loading | ModelFiles | Ready | Failed | Refused | Answered | EngineOutputs[Delta]


class Loop:
    """The child's loop around one engine: messages in, a turn, updates out. Sleeps on the socket while idle."""

    def __init__(self, engine: "Engine", inbox: child.Socket, send: Callable[[ToParent], None]) -> None:
        self.engine = engine
        self.inbox = inbox
        self.send = send
        self._decode = msgspec.msgpack.Decoder(Call).decode
        self._arguments = {name: msgspec.msgpack.Decoder(kind).decode for name, kind in CALLS.items() if kind is not None}
        self._stopping = False
        self._stats_due = 0.0
        self._undecided: dict[str, float] = {}
        """Requests that may still be refused, and when they are confirmed all the same."""
        self._reading: dict[str, Future[str]] = {}
        """Adapters that are being read, by the keys of the calls that asked for them."""

    def run(self) -> None:
        """Returns after the shutdown call. Exceptions of the engine pass through."""
        engine, worked = self.engine, False
        while not self._stopping:
            busy = engine.busy
            if self.inbox.poll(0 if busy else WRITING_MS if engine.writing or self._reading else IDLE_MS):
                self._take_in()
            elif worked and not busy and not engine.writing:
                # The first idle interval since the last work.
                give_back_memory()
                worked = False
            worked = worked or engine.busy
            updates = engine.turn(self._listen) if engine.busy or engine.writing else []
            for key in [key for key, found in self._reading.items() if found.done()]:
                self._reply(key, partial(engine.adapters.take, self._reading.pop(key)))
            now = time.monotonic()
            admitted = self._decided(now) if self._undecided else []
            idle = not engine.busy
            # Send a snapshot as soon as work ends, so that the statistics of an idle engine are never stale.
            if now >= self._stats_due or (idle and busy):
                self._stats_due = now + STATS_SECONDS
                self.send(EngineOutputs(updates, engine.stats(), admitted))
            elif updates or admitted:
                self.send(EngineOutputs(updates, None, admitted))

    def drop(self) -> None:
        """Forgets all calls that have come but to shut down: the parent gives them up when it hears of a loss."""
        while self.inbox.poll(0):
            self._stopping |= self._decode(self.inbox.recv()).name == "shutdown"

    def _listen(self, step: Pending) -> None:
        """Answers calls while a thread of this process computes the step. Of a device's own there is nothing to wait for."""
        if not isinstance(step, Future):
            return
        while True:
            try:
                step.exception(LISTEN_SECONDS)
                return
            except TimeoutError:
                if self.inbox.poll(0):
                    self._take_in()

    def _decided(self, now: float) -> list[str]:
        """The requests that wait for no grammar any more, and those that have waited long. An error comes as an update."""
        found = [name for name, late in self._undecided.items() if now >= late or not self.engine.undecided(name)]
        for name in found:
            del self._undecided[name]
        return found

    def _take_in(self) -> None:
        admitted: list[str] = []
        while True:
            try:
                call = self._decode(self.inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if not self._answer(call):
                continue
            if call.name == "submit" and self.engine.undecided(call.key):
                self._undecided[call.key] = time.monotonic() + UNDECIDED_SECONDS
            else:
                admitted.append(call.key)
        if admitted:
            # Send at once: a turn may take long, and clients wait for the response headers.
            self.send(EngineOutputs([], None, admitted))

    def _answer(self, call: Call) -> bool:
        """Executes a call. True if it has a key, was not refused and returned nothing, so EngineOutputs must confirm it."""
        if call.name == "shutdown":
            self._stopping = True
            return False
        decode = self._arguments.get(call.name)
        method = getattr(self.engine, call.name)
        if not call.key:
            method(*([] if decode is None else [decode(call.argument)]))
            return False
        return self._reply(call.key, lambda: method(*([] if decode is None else [decode(call.argument)])))

    def _reply(self, key: str, method: Callable[[], Any]) -> bool:
        """Sends the result of a call, now or when its future is done. True as in `_answer`."""
        try:
            value = method()
        except RequestError as error:
            self.send(Refused.of(error, key))
            return False
        except EngineDeadError as error:
            # The loop finds out at its next turn.
            self.send(Refused(f"the engine has stopped: {error}", None, "engine_dead", 503, key=key))
            return False
        except Exception as error:  # noqa: BLE001 (reported to the caller)
            # Nothing has been started yet, so only this call fails.
            traceback.print_exc()
            self.send(Refused(f"the engine could not take the request: {error!r}", None, "internal_error", 500, key=key))
            return False
        if isinstance(value, Future):
            self._reading[key] = value
            return False
        if value is None:
            return True
        # The statistics first, so that they are current when the caller has its answer.
        self.send(EngineOutputs([], self.engine.stats()))
        self.send(Answered(key, msgspec.Raw(msgspec.msgpack.encode(value))))
        return False


def main() -> None:
    """The child's entry point. Exit status: 0 after shutdown, 1 if the engine could not start or failed."""
    keep_little()
    child.run(Start, _serve)


def _serve(start: Start, inbox: child.Socket, send: Callable[[ToParent], None]) -> None:
    engine = _load(start, send)
    collect_rarely()
    loop = Loop(engine, inbox, send)
    while True:
        try:
            loop.run()
            break
        except RankLostError as error:
            send(Failed(str(error), "lost"))
            loop = Loop(loop.engine.again(), inbox, send)
            loop.drop()
            send(Ready(loop.engine.info))
    # Not after a failure: closing a broken engine may fail or hang, and the reason must be sent.
    loop.engine.close()


def _load(start: Start, send: Callable[[ToParent], None]) -> "Engine":
    options = start.options
    module, _, name = start.engine.partition(":")
    told = [0.0]

    def progress(done: int, total: int) -> None:
        now = time.monotonic()
        if now - told[0] >= 0.05 or done >= total:
            told[0] = now
            send(Loading(done, total))

    send(find(options))
    engine: Engine = getattr(importlib.import_module(module), name)(options, progress=progress)
    send(Ready(engine.info))
    return engine


class EngineProcess:
    """The parent's handle: starts the child, sends calls, and passes its messages to callbacks, all on the event loop."""

    def __init__(self, options: EngineOptions, *, on_outputs: Callable[[EngineOutputs[Delta]], None],
                 on_refused: Callable[[Refused], None], on_death: Callable[[str], None],
                 on_loading: Callable[[int, int], None] | None = None, engine: str = ENGINE) -> None:
        self.options = options
        self.engine = engine
        self.on_outputs = on_outputs
        self.on_refused = on_refused
        self.on_death = on_death
        self.on_loading = on_loading
        self.last_message = 0.0
        """time.monotonic() of the last message from the child."""
        self.starting = False
        """Never again once it was ready (`engine/replicas.py::Replicas.starting`)."""
        self.dead: str | None = None
        """The reason why the engine is gone; None while it lives."""
        self._stopping = False
        self._found: asyncio.Future[ModelFiles] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._numbers = itertools.count()
        self._asked: dict[str, asyncio.Future[Any]] = {}
        """Calls that wait for their answer."""
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromChild).decode

    @property
    def pid(self) -> int | None:
        """The child's process id, once there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> ModelFiles:
        """Starts the child and waits until it has found the model. ConfigError, ModelError or EngineDeadError: why not."""
        self._loop = asyncio.get_running_loop()
        self._found, self._ready = self._loop.create_future(), self._loop.create_future()
        self._folder = child.own_folder()
        address = f"ipc://{self._folder}/engine"
        self._context: zmq.Context[child.Socket] = zmq.Context()
        self._outbox, self._inbox = child.bound(self._context, address)
        self._loop.add_reader(self._inbox.FD, self._receive)
        words, environment = child.command("penstock.engine.process")
        self._process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.PIPE, env=environment)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Start(address, self.engine, self.options)) + b"\n")
        self.last_message = time.monotonic()
        self._watch = asyncio.create_task(self._watch_exit())
        return await self._until(self._found)

    async def ready(self) -> EngineInfo:
        """Waits until the engine can take requests, after `start`. The same errors."""
        assert self._ready is not None
        return await self._until(self._ready)

    async def _until(self, future: asyncio.Future[Reply]) -> Reply:
        try:
            return await future
        except BaseException:
            await self.stop(0.0)
            raise

    def tell(self, name: str, argument: Any = None, key: str = "") -> None:
        """Sends a call of CALLS. With a `key`, its refusal goes to `on_refused`. EngineDeadError or RequestError."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        if self._stopping:
            raise EngineDeadError("the engine is shutting down")
        try:
            # Encode the argument first, so that an encoding error is found before anything is sent.
            message = self._encode(Call(name, key, msgspec.Raw(self._encode(argument))))
        except OverflowError:
            raise RequestError("a number in the request does not fit in 64 bits; send a smaller one",
                               code="invalid_value") from None
        try:
            self._outbox.send(message, zmq.NOBLOCK)
        except zmq.Again:
            # The child has exited, and `_watch_exit` has not run yet.
            raise EngineDeadError("the engine process has gone") from None

    async def ask(self, name: str, argument: Any = None) -> Any:
        """Sends a call and waits for its value, in JSON's types. RequestError if refused; EngineDeadError."""
        key = f"#{next(self._numbers)}"
        done = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            self.tell(name, argument, key)
            return await done
        finally:
            del self._asked[key]

    def abort(self, ids: list[str]) -> None:
        """Asks that requests ("id") or sequences ("id/index") end. Nothing happens if the engine is gone."""
        if self.dead is None and not self._stopping:
            with contextlib.suppress(EngineDeadError):
                self.tell("abort", ids)

    async def stop(self, timeout: float = 10.0) -> None:
        """Ends the child: politely, and after `timeout` seconds by force. Does nothing the second time."""
        if self._process is None:
            return
        if not self._stopping:
            self._stopping = True
            if self._process.returncode is None and timeout > 0:
                with contextlib.suppress(zmq.Again):
                    self._outbox.send(self._encode(Call("shutdown")), zmq.NOBLOCK)
        try:
            await asyncio.wait_for(self._process.wait(), timeout or 0.001)
        except TimeoutError:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
        if self._watch is not None and self._watch is not asyncio.current_task():
            await self._watch
        self._close()

    def _receive(self) -> None:
        # ZMQ's descriptor is edge-triggered, so all messages must be read.
        while not self._inbox.closed:
            try:
                message = self._decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.last_message = time.monotonic()
            if isinstance(message, EngineOutputs):
                self.on_outputs(message)
            elif isinstance(message, Refused):
                self._refuse(message)
            elif isinstance(message, Loading):
                if self.on_loading:
                    self.on_loading(message.done, message.total)
            elif isinstance(message, Answered):
                _resolve(self._asked.get(message.key), msgspec.msgpack.decode(message.value))
            elif isinstance(message, ModelFiles):
                _resolve(self._found, message)
            elif isinstance(message, Ready):
                _resolve(self._ready, message.info)
            else:
                self._die(message)

    def _refuse(self, refused: Refused) -> None:
        waiting = self._asked.get(refused.key)
        if waiting is None:
            self.on_refused(refused)
        elif not waiting.done():
            waiting.set_exception(refused.error())

    async def _watch_exit(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        if not self._inbox.closed:
            self._receive()
        if not self._stopping:
            self._die(Failed(f"the engine process {child.ended(status)}"))

    def _die(self, failed: Failed) -> None:
        if self.dead is not None:
            return
        reason, lost = failed.reason, failed.kind == "lost"
        self.dead = None if lost else reason
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        assert self._found is not None and self._ready is not None
        if self._ready.done():
            # Ready comes again once a new rank is there.
            self._ready = self._loop.create_future() if lost else self._ready
            self.on_death(reason)
            return
        # The caller may not have started to wait for the second future yet.
        (self._ready if self._found.done() else self._found).set_exception(failed.error())

    def _close(self) -> None:
        if self._inbox.closed:
            return
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            # Mark the exception as retrieved: its waiter may have failed before for another reason.
            self._ready.exception()
        self._loop.remove_reader(self._inbox.FD)
        self._inbox.close()
        self._outbox.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _resolve(future: asyncio.Future[Any] | None, value: Any) -> None:
    if future is not None and not future.done():
        future.set_result(value)


if __name__ == "__main__":
    # Import by its real name instead of __main__, so that message classes are identical to those of other modules.
    from penstock.engine import process

    process.main()
