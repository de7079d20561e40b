"""Readers of `quantization_config`, one for each program that writes checkpoints; those whose tensors are alike share a file. A
file is found by being here. Its Readers have the `methods` that they read, and are made of the config, or raise a ModelError
that names what is not known."""

import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from penstock.core.errors import ModelError
from penstock.quant.form import Reader

_INSIDE = re.compile(r"\blanguage_model(?:(?:\\\\)?\.(?![*+?]))?")
"""The part of a module's name, or of an expression for names, in a JSON text: before what repeats a dot, the dot stays."""


@cache
def dialects() -> dict[str, type[Reader]]:
    """Readers of this package by the methods that they read."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    readers = [one for module in modules for one in vars(module).values() if isinstance(one, type) and issubclass(one, Reader)]
    return {method: one for one in readers for method in one.methods}


def reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a config's `quantization_config`; ModelError if it is not known."""
    # A language model beside towers is asked for by the names that it has alone.
    config = json.loads(_INSIDE.sub("", json.dumps(config)))
    method = str(config.get("quant_method") or _unnamed(config)).lower()
    known = dialects()
    if method not in known:
        possible = ", ".join(sorted(known.keys() - {"at-load"}))
        raise ModelError(f"quantization_config: quant_method is {method or None!r}; possible are {possible}. "
                         "Take a folder of another format, or the model's unquantized folder")

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            try:
                return call(*given)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, re.error) as error:
                raise ModelError(f"quantization_config: a value is not what {method} has in its place: {error!r}") from None
        return run

    found: Reader = checked(known[method])(config)
    found.form = checked(found.form)  # type: ignore[method-assign]
    return found


def _unnamed(config: Mapping[str, Any]) -> str:
    """The method of a config that does not name it."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in config or "quantization" in config else ""
