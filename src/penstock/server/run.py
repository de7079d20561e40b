"""The life cycle of a server process: listening, loading, serving, draining, stopping.

Exit status 0 after a drain, 1 if the engine could not start or died, 2 on a second signal."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import uvicorn

from penstock.config.schema import ServerOptions, Wanted
from penstock.core.errors import ConfigError
from penstock.core.request import EngineInfo
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.process import ENGINE
from penstock.engine.work import LARGE, collect_rarely, keep_little
from penstock.observe.log import LOG, notify
from penstock.server import listening
from penstock.server.app import Application
from penstock.server.connections import Connection, Connections, quiet, raise_descriptor_limit
from penstock.server.dialect import UnavailableError
from penstock.server.fleet import Fleet, Slot
from penstock.server.models import Folder

OnLoading = Callable[[int, int], None]
"""Told (bytes of weights loaded, of how many)."""

OnReady = Callable[[list[EngineInfo], str], None]
"""Told of the engines that are loaded and the server's URL."""

FAREWELL_SECONDS = 0.5
"""Time for clients of a dead engine to read their error."""

ENGINE_SECONDS = 5.0
"""Time for the engine to finish the steps in flight at shutdown."""


class Listener(uvicorn.Server):
    """uvicorn without its own signal handlers; `ServerRun` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerRun:
    def __init__(self, models: Sequence[Wanted], options: ServerOptions, *, engine: str = ENGINE,
                 on_loading: OnLoading | None = None, on_ready: OnReady | None = None) -> None:
        self.options = options
        self.on_ready = on_ready
        several = len(models) > 1
        slots = [Slot(one.names, AsyncLLM(one.options, engine=engine, stall_timeout=options.stall_timeout,
                                          template_timeout=options.template_timeout, on_loading=None if several else on_loading,
                                          on_death=None if several else self._on_death),
                      one.share, bool({*one.names} & {*options.pin}), "unloaded" if several else "loading") for one in models]
        self.fleet = Fleet(slots, keep_alive=options.keep_alive, most=options.max_loaded_models)
        self.application = Application(self.fleet, options)
        self.adapters = [] if options.lora_dir is None else [Folder(options.lora_dir, slot, several) for slot in slots]
        self.connections = Connections(options, self.application.shapes.default, raise_descriptor_limit())
        self.application.state.connections = self.connections.counts
        self._stop = asyncio.Event()
        self._began = time.monotonic()
        self._signals = 0
        self._asked: socket.socket | None = None
        """The next server asks there for the listening socket."""
        self._death = ""
        """The reason why the only engine is gone."""

    async def run(self) -> int:
        """Serves until told to stop; the exit status. PenstockError if it could not start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        options = self.options
        sockets = None
        if options.reuse_port and not options.uds:
            bound, self._asked = listening.shared(options.host, options.port)
            sockets = [bound]
            loop.add_reader(self._asked, listening.give, bound, self._asked)
        elif not options.uds:
            sockets = [listening.bind(options.host, options.port)]
        # Listening before loading: a probe is told "loading" instead of being refused.
        protocol: Any = functools.partial(Connection, self.connections)
        idle: Any = options.idle_timeout
        config = uvicorn.Config(
            quiet(self.application.asgi), http=protocol, ws="none", lifespan="off", access_log=False, log_config=None,
            server_header=False, timeout_keep_alive=idle, uds=options.uds, ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile, ssl_ca_certs=options.ssl_ca_certs, ssl_cert_reqs=options.ssl_cert_reqs,
            ssl_ciphers=options.ssl_ciphers or "DEFAULT")
        load(config)
        self._grpc = await _grpc(self.application) if options.grpc_port is not None else None
        listener = self._listener = Listener(config)
        # A server that takes over from another leaves connections to that one until it is ready.
        self._serving = None if options.reuse_port else asyncio.create_task(listener.serve(sockets))
        self._sockets = sockets
        scheme = "https" if config.is_ssl else "http"
        try:
            host = f"[{options.host}]" if ":" in options.host else options.host
            return await self._serve(f"{scheme}://{host}:{sockets[0].getsockname()[1]}" if sockets
                                     else f"{scheme}+unix://{quote(str(options.uds), safe='')}")
        finally:
            listener.should_exit = True
            if self._grpc is not None:
                await self._grpc.stop(FAREWELL_SECONDS)
            await self.fleet.close(ENGINE_SECONDS)
            with contextlib.suppress(TimeoutError):
                if self._serving is not None:
                    await asyncio.wait_for(self._serving, 5.0)
            self.application.state.store.close()

    async def _serve(self, url: str) -> int:
        starting = asyncio.create_task(self.fleet.start())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            LOG.info("stopped before the model was loaded")
            return 0
        starting.result()
        collect_rarely()
        if self._serving is None:
            self._serving = asyncio.create_task(self._listener.serve(self._sockets))
            while not self._listener.started:
                await asyncio.sleep(0.01)
        if self.on_ready:
            self.on_ready([slot.llm.info for slot in self.fleet.loaded if slot.llm.info is not None], url)
        notify(f"READY=1\nSTATUS=serving at {url}\nMAINPID={os.getpid()}")
        beside = [asyncio.create_task(self.application.batches.resume())]
        beside += [asyncio.create_task(folder.watch()) for folder in self.adapters]
        await stopping
        for task in beside:
            task.cancel()
        await self.application.batches.stop()
        if self._death:
            LOG.error("the engine has stopped: %s", self._death)
            await asyncio.sleep(FAREWELL_SECONDS)
            return 1
        return await self._drain()

    async def _drain(self) -> int:
        self.application.state.draining = True
        notify("STOPPING=1")
        if self.options.reuse_port:
            # New connections go to the server that took over.
            if self._asked is not None:
                asyncio.get_running_loop().remove_reader(self._asked)
                self._asked.close()
            for server in self._listener.servers:
                server.close()
        began = time.monotonic()
        if self.fleet.live and not self.fleet.unhealthy():
            LOG.info("stopping: %d requests are given up to %g s to finish", self.fleet.live, self.options.shutdown_timeout)
        while self.fleet.live and not self.fleet.unhealthy() and time.monotonic() - began < self.options.shutdown_timeout:
            await asyncio.sleep(0.02)
        # Looked at before the requests are failed: without any, an engine that makes no progress looks well.
        sick = self.fleet.unhealthy()
        if sick:
            LOG.error("stopping at once: %s", sick)
        if self.fleet.live:
            LOG.warning("stopping: %d requests did not finish in time and are aborted", self.fleet.live)
            for slot in self.fleet.slots:
                slot.llm.fail_open(UnavailableError("the server is shutting down", "shutting_down"))
            await asyncio.sleep(0.1)
        figures = [slot.llm.traffic.figures for slot in self.fleet.slots]
        LOG.info("stopped after %.0f s: %d answers, %d tokens in, %d out", time.monotonic() - self._began,
                 sum(sum(one.finished.values()) for one in figures), sum(one.prompt_tokens for one in figures),
                 sum(one.generation_tokens for one in figures))
        return 1 if sick else 0

    def _on_death(self, reason: str) -> None:
        self._death = reason
        self._stop.set()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            LOG.warning("stopping at once")
            for pid in (slot.llm.engine_pid for slot in self.fleet.slots):
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            sys.stderr.flush()
            os._exit(2)
        self.application.state.draining = True
        self._stop.set()


async def _grpc(application: Application) -> Any:
    """A gRPC server that listens. ConfigError if there can be none."""
    try:
        from penstock.server.kserve import service
    except ImportError:
        raise ConfigError("--grpc-port needs gRPC: pip install penstock[grpc]") from None
    return await service.serve(application.asgi, application.state)


def load(config: uvicorn.Config) -> None:
    """Reads the certificates. ConfigError for what is not usable."""
    try:
        config.load()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot serve HTTPS with --ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}, "
                          f"--ssl-ca-certs {config.ssl_ca_certs}: {reason}") from None


def serve(models: Sequence[Wanted], options: ServerOptions, *, engine: str = ENGINE,
          on_loading: OnLoading | None = None, on_ready: OnReady | None = None) -> int:
    """Runs a server in this thread, which must be the main one; the exit status. PenstockError if it could not start."""
    import uvloop

    keep_little(LARGE)
    return uvloop.run(ServerRun(models, options, engine=engine, on_loading=on_loading, on_ready=on_ready).run())

