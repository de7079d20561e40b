"""The kernel table: which implementation serves which operation. Bound once, at start, by device facts and dtype.

An operation is a name with a reference in `ops/<op>.py`. A faster implementation registers beside it with a `supports`
function that returns None, or the reason why it cannot serve. Nothing else in Penstock asks what hardware there is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.core.errors import ConfigError
from penstock.platform.facts import DeviceFacts

Supports = Callable[[DeviceFacts, torch.dtype], str | None]


@dataclass(frozen=True)
class Implementation:
    """`call` serves `op`; of those whose `supports` gives no reason against, the highest `rank` is bound."""

    op: str
    name: str
    call: Any
    supports: Supports
    rank: int


_TABLE: dict[str, dict[str, Implementation]] = {}

_MODULES = ("linear", "norm", "rope", "attention", "attention_triton", "activation", "step", "sample", "sample_triton",
            "linear_triton", "linear_invariant", "norm_triton", "rope_triton", "activation_triton", "step_triton", "cpu")
"""Where implementations register themselves on import; a new provider is one more name."""


def register(op: str, name: str, *, rank: int, supports: Supports = lambda facts, dtype: None) -> Callable[[Any], Any]:
    """Decorator: enters a function (or an object with the op's functions) into the table. Rank 0 is the reference."""

    def enter(call: Any) -> Any:
        _TABLE.setdefault(op, {})[name] = Implementation(op, name, call, supports, rank)
        return call

    return enter


def implementations(op: str) -> list[Implementation]:
    """All of an operation's implementations, the reference first."""
    load()
    return sorted(_TABLE[op].values(), key=lambda i: (i.name != "reference", i.rank))


def operations() -> list[str]:
    load()
    return sorted(_TABLE)


def load() -> None:
    """Imports every provider."""
    for module in _MODULES:
        importlib.import_module(f"penstock.ops.{module}")


class Kernels:
    """The bound table: one attribute an operation. What each takes and returns is the reference's docstring."""

    linear: Any
    """LinearOps: pack, apply, gated, gather (ops/linear.py)."""
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    layer_norm: Callable[..., torch.Tensor]
    rope_write: Callable[..., torch.Tensor]
    attention: Any
    """AttentionOps: prepare, apply (ops/attention.py)."""
    build_step: Callable[..., Any]
    """Gives StepTensors (ops/step.py)."""
    gated: Callable[..., torch.Tensor]
    activation: Callable[..., torch.Tensor]
    sample: Any
    """SampleOps: choose, threshold, penalize, edit, score (ops/sample.py)."""

    def __init__(self, chosen: dict[str, Implementation], refused: dict[str, list[tuple[str, str]]]) -> None:
        self.chosen = chosen
        self.refused = refused
        for op, implementation in chosen.items():
            setattr(self, op, implementation.call)

    def looking(self) -> list[str]:
        """The operations of a step whose implementation looks into tensors, so that no CUDA graph can hold it."""
        return [op for op in ("attention", "rope_write", "build_step") if self.chosen[op].name == "reference"]

    def table(self) -> list[tuple[str, str]]:
        """(operation, implementation) pairs, for `penstock info` and the log."""
        return [(op, self.chosen[op].name) for op in sorted(self.chosen)]


def bind(facts: DeviceFacts, dtype: torch.dtype, prefer: Mapping[str, str] | None = None) -> Kernels:
    """The best implementation of every operation for this device and dtype.

    `prefer` maps an operation, or "*", to an implementation's name and must be honoured: ConfigError if it cannot serve.
    """
    load()
    prefer = prefer or {}
    unknown = sorted(prefer.keys() - _TABLE.keys() - {"*"})
    if unknown:
        raise ConfigError(f"kernels names {unknown[0]!r}, which is no operation; possible are {', '.join(sorted(_TABLE))}, "
                          "and * for all")
    names = {name for found in _TABLE.values() for name in found}
    if "*" in prefer and prefer["*"] not in names:
        raise ConfigError(f"kernels asks for {prefer['*']!r} everywhere, which no operation has; possible are "
                          f"{', '.join(sorted(names))}")
    chosen: dict[str, Implementation] = {}
    refused: dict[str, list[tuple[str, str]]] = {}
    for op, found in _TABLE.items():
        wanted = prefer.get(op, prefer.get("*"))
        for implementation in sorted(found.values(), key=lambda i: -i.rank):
            if wanted is not None and implementation.name != wanted:
                continue
            reason = implementation.supports(facts, dtype)
            if reason is None:
                chosen[op] = implementation
                break
            refused.setdefault(op, []).append((implementation.name, reason))
        if op not in chosen:
            if wanted is not None and op in prefer:
                why = dict(refused.get(op, [])).get(wanted, f"there are only {', '.join(sorted(found))}")
                raise ConfigError(f"kernel {wanted!r} cannot serve {op}: {why}")
            chosen[op] = found["reference"]
    return Kernels(chosen, refused)


def set_threads(count: int, kernels: Kernels) -> None:
    """How many CPU threads the kernels may use.

    PyTorch's own pool gets them only if it does the products: its threads meet at a barrier after every operation, and with a
    busy neighbour on a core an operation of microseconds then takes milliseconds.
    """
    torch.set_num_threads(count if kernels.chosen["linear"].name == "reference" else 1)
    for module in _MODULES:
        setter = getattr(importlib.import_module(f"penstock.ops.{module}"), "set_threads", None)
        if setter is not None:
            setter(count)
