"""The API that `chat`, `generate` and `eval` send requests to: a running server by --url, or a model loaded here behind the
server's own application. Both are the OpenAI API, so commands and server cannot disagree about a request or an answer.

Of every command, also the arguments that name its model: MODEL, or --model as in vLLM's start scripts."""

import argparse
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock import canary
from penstock.cli.client import Local, Transport, Wire
from penstock.config.flags import add_flags, from_args
from penstock.config.schema import EngineOptions, ServerOptions
from penstock.core.errors import ConfigError, PenstockError
from penstock.engine import layout

_ABOUT = "a Hugging Face folder or a hub id; without one, canary, which comes with Penstock"


class _Model(argparse.Action):
    """Both ways of naming the model set `model`; two different names are a mistake."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 _option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        if earlier not in (None, values):
            parser.error(f"two models are named, {earlier} and {values}; name one")
        setattr(namespace, self.dest, values)


def add_model(parser: argparse.ArgumentParser, about: str = _ABOUT) -> None:
    """Declares MODEL and --model. Use `model_of` to read them."""
    parser.add_argument("model", metavar="MODEL", nargs="?", action=_Model, default=argparse.SUPPRESS, help=about)
    parser.add_argument("--model", metavar="MODEL", action=_Model, default=argparse.SUPPRESS, help="the same as MODEL")


def model_of(args: argparse.Namespace) -> str | None:
    found: str | None = getattr(args, "model", None)
    return found


def model_or_canary(args: argparse.Namespace) -> str:
    """The model that the arguments name, or the one that comes with Penstock."""
    return model_of(args) or canary.NAME


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declares MODEL ... and --model for a command that takes several. `model` is the first; use `models_of` to read all."""
    parser.add_argument("models", metavar="MODEL", nargs="*", action=_Models, default=argparse.SUPPRESS,
                        help=f"{_ABOUT}; several, or a folder of models, are loaded as they are asked for. NAME=MODEL gives a "
                             "name, NAME=MODEL%%SHARE one of several versions its share of the requests")
    parser.add_argument("--model", metavar="MODEL", action=_Model, default=argparse.SUPPRESS, help="the same as MODEL")


class _Models(argparse.Action):
    """Collects the models, and names the first one as `model` too."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 _option: str | None = None) -> None:
        if values:
            namespace.models = list(values)
            _Model([], "model")(parser, namespace, _parsed(values[0])[1])


def models_of(args: argparse.Namespace) -> list[tuple[list[str], str, float]]:
    """(names, model, share) of each model that the arguments name; names are empty where none was given and there is only
    one. A folder without config.json whose folders have one stands for all of these."""
    given: list[str] = getattr(args, "models", []) or [model_or_canary(args)]
    found: list[tuple[list[str], str, float]] = []
    for name, model, share in map(_parsed, given):
        folder = Path(model).expanduser()
        inside = sorted(one.parent for one in folder.glob("*/config.json")) if not (folder / "config.json").exists() else []
        if inside and name:
            raise ConfigError(f"{name}={model}: this folder has several models in it, each named as its own folder; leave out "
                              f"{name}=, or name one of them, as {inside[0]}")
        found += [([one.name], str(one), share) for one in inside] or [([name] if name else [], model, share)]
    if len(found) == 1:
        return found
    return [(names or [model if not Path(model).is_dir() else Path(model).name], model, share) for names, model, share in found]


def _parsed(given: str) -> tuple[str, str, float]:
    """NAME=MODEL%SHARE as its parts; "" and 1 for those that are missing."""
    name, equals, model = given.partition("=")
    if not equals or Path(given).exists():
        return "", given, 1.0
    model, percent, share = model.rpartition("%") if "%" in model else (model, "", "")
    try:
        return name, model, float(share) if percent else 1.0
    except ValueError:
        raise ConfigError(f"{given!r}: the share {share!r} is not a number") from None


def add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", choices=("auto",), help="auto: ranks, stages and replicas by the model's size, "
                                                            "GPUs and links; by default those that other flags name")


def laid_out(args: argparse.Namespace, options: EngineOptions) -> tuple[EngineOptions, str]:
    """The options with the layout filled in, and why; "" if it is not asked for."""
    if args.layout is None:
        return options, ""
    found, why = layout.auto(asdict(options))
    return replace(options, **found), why


BAR_DELAY = 1.0
"""Seconds before a progress bar that will be taken away again is shown: what is quicker would only flash."""


@dataclass(frozen=True)
class Api:
    transport: Transport
    model: str
    own: bool = False
    """This program owns the engine behind it: if the engine dies, no other is started."""

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """(status, content) of the whole answer to a request."""
        reply = await self.transport.send("POST", path, msgspec.json.encode(body))
        return reply.status, await reply.read()


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declares MODEL or --url, and the engine's options."""
    add_model(parser, "a Hugging Face folder or hub id, loaded by this command")
    parser.add_argument("--url", metavar="URL", help="talk to the server there instead, such as http://127.0.0.1:8000")
    key = os.environ.get("PENSTOCK_API_KEY") or os.environ.get("OPENAI_API_KEY")
    parser.add_argument("--api-key", metavar="KEY", default=key,
                        help="the server's key (default: PENSTOCK_API_KEY or OPENAI_API_KEY from the environment)")
    parser.add_argument("--served-model", metavar="NAME",
                        help="which of the server's models (default: its first), or the name that requests use for MODEL")
    add_flags(parser, EngineOptions, skip=("model", "seed"))


@asynccontextmanager
async def open_api(args: argparse.Namespace) -> AsyncIterator[Api]:
    """The API that `add_target`'s arguments name. Raises ConfigError if they name none or two."""
    model = model_of(args)
    if bool(model) == bool(args.url):
        raise ConfigError("give either a MODEL to load or the --url of a running server")
    if args.url:
        async with aclosing(Wire(args.url, args.api_key, waits=True)) as wire:
            yield Api(wire, args.served_model or await first_model(wire))
        return
    options = from_args(args, EngineOptions, model=model)
    async with _loaded(options, [args.served_model] if args.served_model else []) as api:
        yield api


@asynccontextmanager
async def _loaded(options: EngineOptions, names: list[str]) -> AsyncIterator[Api]:
    """The server's application over an engine of this program's own."""
    # Late: neither the web framework nor the metadata that tqdm reads may slow the commands that need none of them.
    from tqdm import tqdm

    from penstock.engine.async_llm import AsyncLLM
    from penstock.engine.loading import shown
    from penstock.server.app import Application

    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, delay=BAR_DELAY, file=sys.stderr,
              disable=not sys.stderr.isatty()) as bar:
        llm = AsyncLLM(options, on_loading=shown(bar))
        await llm.start()
    local = Local(Application(llm, ServerOptions(served_model_name=names, log_requests=False)).asgi)
    try:
        yield Api(local, names[0] if names else options.model, own=True)
    finally:
        await local.aclose()
        await llm.shutdown()


async def first_model(transport: Transport) -> str:
    """The first name that /v1/models lists."""
    reply = await transport.send("GET", "/v1/models")
    body = await reply.read()
    if reply.status != 200:
        raise PenstockError(f"the server does not list its models: {complaint(reply.status, body)}")
    models = json.loads(body).get("data") or []
    if not models:
        raise PenstockError("the server lists no model; name one with --served-model")
    return str(models[0]["id"])


def complaint(status: int, body: bytes) -> str:
    """The message of an error answer, in one line."""
    with suppress(ValueError, AttributeError, TypeError):
        content = json.loads(body)
        error = content.get("error", content)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        if message:
            return f"{message} (HTTP status {status})"
    text = body.decode("utf-8", "replace").strip()
    return f"HTTP status {status}" + (f": {text[:300]}" if text else "")
