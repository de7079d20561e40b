"""The form of one matrix in a checkpoint: the tensors that other programs write for it, converted to a scheme's parts.

The readers of `dialects/` choose a form for each module of a checkpoint by its `quantization_config`."""

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.core.errors import ModelError
from penstock.quant.scheme import Scheme

Tensors = Mapping[str, torch.Tensor]
FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Given:
    """A tensor of a checkpoint. Of several shapes each is possible; none: any."""

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    optional: bool = False
    unless: str = ""
    """The suffix of another tensor that serves as well."""


@dataclass(frozen=True)
class Form:
    """A matrix [n, k] as a checkpoint has it."""

    scheme: Scheme
    given: tuple[Given, ...]
    """All tensors of the matrix. Others of the module (its bias) are taken as they are."""
    parts: Callable[[Tensors], dict[str, torch.Tensor]]
    """From the given tensors, by suffix, to the scheme's parts that are not among `same`. It may be called on any device."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Parts whose bytes are those of a given tensor, and its suffix."""
    plain: bool = False
    """The given tensor is a plain matrix, which a family may rearrange first."""
    stacked: bool = False
    """The parts are of the experts of a layer, [E, columns, rows], which a family rearranges as it does the plain matrices."""


class Reader(ABC):
    """A `quantization_config`, asked by module. Dialects derive from it."""

    arranged = False
    """Matrices are [outputs, inputs] already: rules of families do not rearrange them."""

    bare = False
    """A module's tensor may have the module's own name, as stacks of experts do; it counts as its weight."""
    methods: tuple[str, ...] = ()
    """Values of `quant_method`."""
    suffixes: tuple[str, ...] = ()
    """Endings of tensor names behind a module's."""

    @abstractmethod
    def form(self, module: str, n: int, k: int) -> Form | None:
        """The form of a module's matrix [n, k], by its name in the checkpoint; None: plain. ModelError: not known."""

    def adjust(self, _name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The inverse of a converter's change of a plain tensor (same shape), if it made one."""
        return None


def whole(suffix: str, n: int, *, optional: bool = False, unless: str = "") -> Given:
    """A scale of a whole tensor, or of each of n rows."""
    return Given(suffix, FLOATS, ((), (1,), (1, 1), (n,), (n, 1)), optional, unless)


def by_row(scale: torch.Tensor, n: int) -> torch.Tensor:
    """A scale of a whole tensor or of its rows, once for each of n rows."""
    return scale.float().reshape(-1).expand(n).contiguous()


def single(scale: torch.Tensor) -> torch.Tensor:
    """A scale of activations, float32 [1]."""
    return scale.float().reshape(-1)[:1]


def named(module: str, patterns: Iterable[Any]) -> bool:
    """Whether a list of modules has this one: itself, a part of its path, a pattern with *, or re:EXPRESSION."""
    return any(_names(given, module) for given in map(str, patterns))


def _names(given: str, module: str) -> bool:
    if given.startswith("re:"):
        return re.match(given[3:], module) is not None
    pattern = given.replace("..", ".").strip(".")
    if "*" in pattern or "?" in pattern:
        return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, pattern + ".*")
    return f".{pattern}." in f".{module}."


def outside_linears(module: str) -> bool:
    """Modules that stay plain where a dialect does not name them: embeddings, the head and routers."""
    last = module.rpartition(".")[2]
    return last in ("lm_head", "embed_out", "gate", "router", "shared_expert_gate") or "embed" in last or last in ("wte", "wpe")


def setting(config: Mapping[str, Any], name: str, possible: Iterable[Any], default: Any = None) -> Any:
    """A value that must be one of a few. ModelError names it."""
    value = default if config.get(name) is None else config[name]
    possible = list(possible)
    if value not in possible:
        raise ModelError(f"quantization_config: {name} is {value!r}; possible are {', '.join(map(repr, possible))}")
    return value
