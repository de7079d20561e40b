"""The arguments that name a command's model: MODEL, or --model as in vLLM's start scripts."""

from __future__ import annotations

import argparse
from typing import Any

from penstock import canary

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
    """The model that the arguments name, or None."""
    found: str | None = getattr(args, "model", None)
    return found


def model_or_canary(args: argparse.Namespace) -> str:
    """The model that the arguments name, or the one that comes with Penstock."""
    return model_of(args) or canary.NAME
