"""The arguments that name a command's model: MODEL, or --model as in vLLM's start scripts."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock import canary
from penstock.config.schema import EngineOptions
from penstock.core.errors import ConfigError
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
    """The model that the arguments name, or None."""
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
        if inside:
            found += [([one.name], str(one), share) for one in inside]
        else:
            found.append(([name] if name else [], model, share))
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
