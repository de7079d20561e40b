"""Serves as `penstock serve` does, with another engine class: python -m tests.system.launch MODULE:CLASS MODEL [flags]."""

from __future__ import annotations

import sys

from penstock.cli import serve
from penstock.config.flags import Parser, from_args
from penstock.config.schema import EngineOptions, ServerOptions, Wanted
from penstock.core.errors import PenstockError


def main() -> int:
    parser = Parser(prog="launch")
    serve.add(parser)
    args = parser.parse_args(sys.argv[2:])
    try:
        options = serve.with_key(from_args(args, ServerOptions))
        models = [Wanted(options.served_model_name, from_args(args, EngineOptions, model=args.model))]
        return serve.run_server(models, options, engine=sys.argv[1])
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
