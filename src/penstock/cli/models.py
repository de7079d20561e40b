"""The commands for models at hand: pull, ls, rm, run, ps, stop. `show` is `info`.

Models lie in the hub's own cache (HF_HOME), which other tools share. `ps` and `stop` ask a running server."""

import asyncio
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from penstock.checkpoint import resolve_folder
from penstock.checkpoint.hub import aliases_file, read_aliases, write_aliases
from penstock.cli import chat
from penstock.cli.api import complaint
from penstock.cli.client import Wire
from penstock.cli.serve import KEY_VARIABLE, size
from penstock.core.errors import ConfigError, PenstockError


class Command(NamedTuple):
    """A subcommand, as `cli/main.py` knows them."""

    about: str
    add: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def _add_pull(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="REPO[:FILE]", help="a hub id, or one GGUF file of it")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--alias", metavar="NAME", help="a short name by which every command knows it afterwards")


def _pull(args: Namespace) -> int:
    """Downloads what is missing, going on where an earlier download stopped."""
    name = hub_name(args.model)
    folder = resolve_folder(name, args.revision, resume=True)
    if args.alias:
        write_aliases({**read_aliases(), args.alias: name})
    print(f"{args.alias or args.model} is at {folder}")
    return 0


def hub_name(model: str) -> str:
    """REPO:FILE.gguf as `resolve_folder` writes it, any other name as it is."""
    return f"hf:{model}" if ":" in model and not model.startswith("hf:") and not Path(model).exists() else model


def _add_ls(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _cached() -> tuple[Any, dict[str, Any]]:
    """The hub's cache, and its models by their ids; (None, {}) if there is no cache."""
    # Late: an HTTP client.
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return None, {}
    return cache, {one.repo_id: one for one in cache.repos if one.repo_type == "model"}


def _ls(args: Namespace) -> int:
    models: list[dict[str, Any]] = [
        {"id": name, "bytes": one.size_on_disk, "used": one.last_accessed, "path": str(one.repo_path)}
        for name, one in sorted(_cached()[1].items())]
    aliases = read_aliases()
    if args.json:
        print(json.dumps({"models": models, "aliases": aliases}, indent=2))
        return 0
    lines = [(str(one["id"]), size(one["bytes"]), time.strftime("%Y-%m-%d", time.localtime(one["used"]))) for one in models]
    _table(("model", "size", "last used"), lines)
    _table(("alias", "model"), sorted(aliases.items()))
    if not lines and not aliases:
        print("no models yet; penstock pull OWNER/REPOSITORY downloads one", file=sys.stderr)
    return 0


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    if not lines:
        return
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _add_rm(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an alias, which is forgotten, or a hub id, whose files are deleted")


def _rm(args: Namespace) -> int:
    """Forgets an alias, or deletes a repository from the hub's cache. ConfigError if there is neither."""
    aliases = read_aliases()
    if args.model in aliases:
        target = aliases.pop(args.model)
        write_aliases(aliases)
        print(f"{args.model} is forgotten; its files stay (penstock rm {target})")
        return 0
    cache, models = _cached()
    if args.model not in models:
        raise ConfigError(f"there is no model {args.model!r} in the hub's cache and no such alias in {aliases_file()}; "
                          "penstock ls lists both")
    plan = cache.delete_revisions(*(revision.commit_hash for revision in models[args.model].revisions))
    plan.execute()
    print(f"deleted {args.model}, {size(plan.expected_freed_size)}")
    return 0


def _run(args: Namespace) -> int:
    """Chats; what is missing is downloaded first."""
    if getattr(args, "model", None):
        args.model = hub_name(args.model)
    return chat.run(args)


def _add_server(parser: ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--api-key", default=os.environ.get(KEY_VARIABLE, ""), help=f"its key; also read from {KEY_VARIABLE}")


def _add_stop(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a served name")
    _add_server(parser)


def _ask(args: Namespace, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """A server's answer. PenstockError in its own words."""
    async def ask() -> Any:
        async with aclosing(Wire(args.url, args.api_key)) as wire:
            reply = await wire.send(method, path, json.dumps(body).encode() if body else b"")
            content = await reply.read()
        if reply.status != 200:
            raise PenstockError(f"{args.url}: {complaint(reply.status, content)}")
        return json.loads(content)

    return asyncio.run(ask())


def _ps(args: Namespace) -> int:
    lines = [(one["id"], one["state"], size(one["bytes"]) if one["bytes"] else "", str(one["requests"]),
              f"{one['idle_seconds']:.0f} s" if one["idle_seconds"] else "") for one in _ask(args, "GET", "/models")["data"]]
    _table(("model", "state", "memory", "requests", "idle"), lines)
    return 0


def _stop(args: Namespace) -> int:
    """Unloads a server's model once its requests have ended."""
    _ask(args, "POST", "/models/unload", {"model": args.model})
    print(f"{args.model} is unloaded")
    return 0


pull = Command("Download a model from the hub, or go on with a download.", _add_pull, _pull)
ls = Command("List the models that are on this machine.", _add_ls, _ls)
rm = Command("Delete a model's files, or forget an alias.", _add_rm, _rm)
run = Command("Chat with MODEL, which is downloaded first if it is missing.", chat.add, _run)
ps = Command("List the models of a running server.", _add_server, _ps)
stop = Command("Unload a model of a running server.", _add_stop, _stop)
