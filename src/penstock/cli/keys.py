"""Make, list and revoke API keys in a file for penstock serve --keys-file. A running server notices within a second.
A key is printed once, when it is made; the file holds its hash."""

import argparse
from pathlib import Path

import msgspec

from penstock.cli.cache import age
from penstock.config.flags import at_least
from penstock.core.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, about in (("add", "make a key and print it"), ("ls", "list the keys"), ("revoke", "end a key for good")):
        action = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        action.add_argument("file", metavar="FILE", type=Path, help="what --keys-file names; made if it is missing")
        if name == "add":
            action.add_argument("--tenant", metavar="NAME", help="whose key it is: keys of one tenant share their cache and "
                                                                 "stored objects (default: a tenant of its own)")
            action.add_argument("--class", dest="kind", choices=("user", "admin", "background"), default="user",
                                help="admin: also what concerns all tenants; background: served after all others")
            action.add_argument("--expires", metavar="AGE", type=age, help="for how long it is good: 12h, 30d (default: for "
                                                                          "ever)")
            action.add_argument("--max-tokens", metavar="N", type=int, help="most prompt tokens of the tenant in flight")
            action.add_argument("--requests-per-minute", metavar="N", type=int, help="most requests of this key")
            action.add_argument("--tokens-per-minute", metavar="N", type=int, help="most tokens of its prompts and answers")
            action.add_argument("--tier", metavar="CLASS", help="class of service of requests that name none: interactive, "
                                                                "standard, batch, or one of --classes")
            action.add_argument("--note", default="", help="shown by ls")
        elif name == "revoke":
            action.add_argument("id", metavar="ID", help="as ls shows it")
        else:
            action.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0. ConfigError for a file that is none of keys, or an id that it does not have."""
    from penstock.server import keys

    path: Path = args.file
    found = keys.read(path) if path.exists() or args.action != "add" else []
    if args.action == "add":
        limits = {name: getattr(args, name) for name in ("max_tokens", "requests_per_minute", "tokens_per_minute")}
        at_least(args, 1, *limits)
        secret, key = keys.make(args.tenant or "", args.kind, args.expires, note=args.note, tier=args.tier, **limits)
        key.tenant = key.tenant or key.id
        keys.write(path, [*found, key])
        print(secret)
    elif args.action == "revoke":
        if args.id not in {key.id for key in found}:
            raise ConfigError(f"{path} has no key {args.id!r}; penstock keys ls {path} lists them")
        for key in found:
            key.revoked = key.revoked or key.id == args.id
        keys.write(path, found)
    else:
        for key in found:
            print(msgspec.json.encode(key).decode() if args.json else _line(key))
    return 0


def _line(key: object) -> str:
    said = {name: getattr(key, name) for name in ("id", "tenant", "kind", "created", "expires", "max_tokens",
                                                  "requests_per_minute", "tokens_per_minute", "tier", "note")}
    state = ["revoked"] if getattr(key, "revoked", False) else []
    return "  ".join([str(said["id"]), *(f"{name}={value}" for name, value in said.items() if name != "id" and value), *state])
