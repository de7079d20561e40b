"""The command `penstock`: finds the subcommand and hands over to its module. Owns exit codes, no option.

A subcommand is a module of this package, or a part of `models.py`, with `add(parser)`, which declares its arguments, and
`run(args) -> int`, which returns the exit code. Only the chosen one is imported, so that `penstock --help` costs nothing."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from penstock import __version__
from penstock.config.flags import Parser, nearest, with_flags
from penstock.config.schema import OPTIONS
from penstock.core.errors import PenstockError

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "chat": "talk to a model in the terminal",
    "pull": "download a model from the hub, or go on with a download",
    "run": "chat with a model, which is downloaded first if it is missing",
    "ls": "list the models that are on this machine",
    "show": "the same as info",
    "rm": "delete a model's files, or forget an alias",
    "ps": "list the models of a running server",
    "stop": "unload a model of a running server",
    "generate": "answer a file of requests (OpenAI batch format)",
    "info": "show what would be loaded, the memory plan and the kernels",
    "eval": "ask graded questions and show how many answers are right",
    "quantize": "write a model's folder quantized, and tell what was lost",
    "train-draft": "train a head that drafts for a model, from its own hidden states",
    "bench": "measure latency, throughput or a running server",
    "simulate": "serve a recorded trace on simulated replicas",
    "plan": "find how many replicas keep a promise on a recorded trace",
    "cache": "list, measure, clean and check a folder of cached pages",
    "keys": "make, list and revoke API keys",
    "completion": "print a script that completes commands and flags in a shell",
    "version": "print the version"}

HOME = {"show": "info", "train-draft": "train_draft", **dict.fromkeys(("pull", "run", "ls", "rm", "ps", "stop"), "models")}
"""The modules of commands that have none of their own name."""

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the returned number is the process's exit code.

    An error that is meant for the user is one line on stderr, without a trace."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except PenstockError as error:
        print(f"penstock: {with_flags(str(error), *OPTIONS)}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Point stdout elsewhere, or the exit's flush fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), flush=True)
        return 0 if words else EXIT_USAGE
    name, rest = words[0], words[1:]
    if name in ("version", "--version", "-V"):
        print(f"penstock {__version__}", flush=True)
        return 0
    if name not in COMMANDS:
        print(f"penstock: there is no command {name!r}{nearest(name, COMMANDS)}\n  see penstock --help", file=sys.stderr)
        return EXIT_USAGE
    status = int(_command(name).run(parser_of(name).parse_args(rest)))
    sys.stdout.flush()
    return status


def parser_of(name: str) -> Parser:
    command = _command(name)
    about = getattr(command, "about", None) or (command.__doc__ or "").split("\n\n")[0]
    parser = Parser(prog=f"penstock {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add(parser)
    return parser


def _command(name: str) -> Any:
    """A command's module, or its part of one that has several commands."""
    module = importlib.import_module(f"penstock.cli.{HOME.get(name, name)}")
    return getattr(module, name) if HOME.get(name) == "models" else module


def overview() -> str:
    """The text of `penstock --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, about in COMMANDS.items()]
    return "\n".join(["usage: penstock COMMAND ...", "", "A large language model inference engine.", "", *lines, "",
                      "penstock COMMAND --help shows the options of a command."])


if __name__ == "__main__":
    sys.exit(main())
