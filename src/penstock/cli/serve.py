"""Serve a model over an OpenAI-compatible HTTP API.

Options are generated from `config/schema.py`; what is printed while loading is decided here."""

import os
import signal
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from penstock import __version__
from penstock.cli.api import add_layout, add_models, laid_out, model_or_canary, models_of
from penstock.config.flags import add_accepted, add_flags, from_args, integer
from penstock.config.schema import EngineOptions, ServerOptions, Wanted, place
from penstock.core.errors import ConfigError
from penstock.parallel.axis import places

if TYPE_CHECKING:
    from penstock.core.request import EngineInfo  # which loads numpy: --help is quicker without

KEY_VARIABLE = "PENSTOCK_API_KEY"

STEP_TARGET_MS = 50.0
"""Default of --step-target-ms while people watch tokens arrive."""


def add(parser: ArgumentParser) -> None:
    add_models(parser)
    parser.add_argument("--config", metavar="FILE.yaml", help="read flags from a YAML file (port: 8001); those given here win")
    add_layout(parser)
    add_flags(parser, EngineOptions, skip=("model",))
    add_flags(parser, ServerOptions)
    add_accepted(parser)


def run(args: Namespace) -> int:
    """Serves until a signal; the exit status."""
    for name in ("nnodes", "node_rank", "master_addr", "master_port"):
        # As torchrun and its launchers name them.
        if not hasattr(args, name) and (value := os.environ.get(name.upper())):
            setattr(args, name, value if name == "master_addr" else integer(value))
    options = with_key(from_args(args, ServerOptions))
    engine_options = from_args(args, EngineOptions, model=model_or_canary(args))
    if engine_options.node_rank:
        from penstock.engine import remote
        from penstock.observe.log import set_up

        set_up(options.log_level, options.log_format)
        here = engine_options.local_ranks
        own = [one for one in places(place(engine_options)) if one.rank // here == engine_options.node_rank]
        asked: list[float] = []
        # Machine 0, often told at the same moment, may need these ranks to finish requests. A second signal ends at once.
        signal.signal(signal.SIGTERM, lambda *_: asked.append(0 if asked else time.monotonic() + options.shutdown_timeout))
        return remote.run(msgspec.json.encode(engine_options), own, engine_options.restart == "ranks", asked)
    if engine_options.step_target_ms is None:
        engine_options = replace(engine_options, step_target_ms=STEP_TARGET_MS)
    wanted = models_of(args)
    if len(wanted) == 1:
        engine_options, why = laid_out(args, replace(engine_options, model=wanted[0][1]))
        if why:
            print(f"layout: {why}", flush=True)
    elif args.layout is not None:
        raise ConfigError("layout auto is for one model; name the ranks of several by their flags")
    return run_server([Wanted(names or options.served_model_name or [model], replace(engine_options, model=model), share)
                       for names, model, share in wanted], options)


def run_server(models: Sequence[Wanted], options: ServerOptions, engine: str | None = None) -> int:
    """Serves, printing progress, the memory plan and the address. `engine` names another engine class, for tests."""
    # Late: the web framework must not slow `--help`.
    from penstock.engine.process import ENGINE
    from penstock.observe.log import set_up
    from penstock.server.run import serve

    set_up(options.log_level, options.log_format)
    progress = LoadingLine()
    names = ", ".join(dict.fromkeys(one.options.model if len(models) == 1 else one.names[0] for one in models))
    print(f"Penstock {__version__}, {'loading' if len(models) == 1 else 'serving, each loaded when it is asked for:'} {names}",
          flush=True)

    def ready(infos: "list[EngineInfo]", url: str) -> None:
        progress.end()
        for info in infos:
            print(memory_plan(info), flush=True)
        print(addresses(url), flush=True)

    try:
        return serve(models, options, engine=engine or ENGINE, on_loading=progress.show, on_ready=ready)
    finally:
        progress.end()


def addresses(url: str) -> str:
    """The server's addresses for people, and how others reach it if it listens on every address of the machine."""
    place = urlsplit(url)
    lines = []
    if place.hostname in ("0.0.0.0", "::"):
        port, url = place.port, f"http://127.0.0.1:{place.port}"
        lines.append(f"  listening on every address of this machine: http://{socket.gethostname()}:{port} from elsewhere")
    lines += [f"  API {url}/v1, its description {url}/docs, metrics {url}/metrics", f"ready at {url}"]
    return "\n".join(lines)


def with_key(options: ServerOptions) -> ServerOptions:
    """The options with the key of the environment, if there is one."""
    key = os.environ.get(KEY_VARIABLE)
    return replace(options, api_key=[*options.api_key, key]) if key else options


class LoadingLine:
    """Progress of loading: one line that is rewritten on a terminal, a line every tenth elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._tenth = -1
        self._open = False

    def show(self, done: int, total: int) -> None:
        tenth = 10 * done // max(1, total)
        text = f"  {size(done)} of {size(total)} ({100 * done // max(1, total)} %)"
        if self._terminal:
            print(f"\r{text}   ", end="", flush=True)
            self._open = True
        elif tenth > self._tenth:
            print(text, flush=True)
        self._tenth = max(tenth, self._tenth)

    def end(self) -> None:
        """Leaves the line, if it is still being rewritten."""
        if self._open:
            print(flush=True)
            self._open = False


def memory_plan(info: "EngineInfo") -> str:
    """Describes the division of memory and the length of context that fits."""
    return "\n".join([
        f"{info.architecture}, {info.dtype}, on {info.device}",
        f"  weights          {size(info.weight_bytes):>10}",
        f"  largest step     {size(info.step_bytes):>10}   {info.max_num_batched_tokens:,} tokens",
        *([f"  CUDA graphs      {size(info.graph_bytes):>10}   {info.graphs} captured in {info.graph_seconds:.1f} s"]
          if info.graphs else []),
        f"  KV cache         {size(info.kv_bytes):>10}   {info.kv_tokens:,} tokens in pages of {info.page_size}",
        f"  context          {info.max_model_len:>10,}   tokens, prompt and output; {info.max_num_seqs} sequences at once",
        *([f"  kernels          {info.compiled:>10}   compiled in {info.compile_seconds:.1f} s"] if info.compiled else []),
        *(f"  note: {note}" for note in info.notes)])


def size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
