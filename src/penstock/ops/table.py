"""The implementations of all operations, by operation and name. `ops/registry.py` chooses among them.

An operation is a name with a reference in `ops/<op>.py`; faster ones register beside it, with `supports`: None, or why not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from penstock.platform.facts import DeviceFacts

Supports = Callable[[DeviceFacts, torch.dtype], str | None]


Fits = Callable[[int, int], bool]


def any_shape(_n: int, _k: int) -> bool:
    return True


@dataclass(frozen=True)
class Implementation:
    """`call` serves an operation. Of those that can serve here, the one of highest `rank` is bound.

    The other fields say what it can do: callers read them instead of comparing names."""

    name: str
    call: Any
    supports: Supports
    rank: int
    capturable: bool = True
    """It never reads a tensor's values on the host, so a CUDA graph can hold it and it runs on meta tensors."""
    batch_invariant: bool = True
    """The bits of a row's result depend on that row alone, not on what else is in the step."""
    dtypes: tuple[torch.dtype, ...] | None = None
    """Types of activations that it serves; None: every type of a model."""
    threads: bool = False
    """It runs on PyTorch's own pool of CPU threads."""
    fits: Fits = any_shape
    """Of an operation with a matrix: which shapes it serves."""

    def refusal(self, facts: DeviceFacts, dtype: torch.dtype) -> str | None:
        """Why it cannot serve on this device with activations of this type; None if it can."""
        if self.dtypes is not None and dtype not in self.dtypes:
            return f"it has no {dtype}"
        return self.supports(facts, dtype)


TABLE: dict[str, dict[str, Implementation]] = {}


Call = TypeVar("Call")


def register(op: str, name: str, *, rank: int, supports: Supports = lambda _facts, _dtype: None,
             **abilities: Any) -> Callable[[Call], Call]:
    """Decorator: enters a function (or an object with the op's functions) into the table. Rank 0 is the reference.

    The keywords are the fields of `Implementation`."""

    def enter(call: Call) -> Call:
        TABLE.setdefault(op, {})[name] = Implementation(name, call, supports, rank, **abilities)
        return call

    return enter
