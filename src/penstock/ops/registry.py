"""The kernel table: it binds an implementation to each operation once, at start, by device facts and dtype.

No other code asks which hardware is there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from penstock.core.errors import ConfigError
from penstock.ops.table import TABLE, Implementation, any_shape
from penstock.platform.facts import DeviceFacts

if TYPE_CHECKING:
    from penstock.ops import activation as activations, codec, delta, latent, norm, rope, routing, step
    from penstock.ops.attention import AttentionOps
    from penstock.ops.experts import ExpertsOps
    from penstock.ops.linear import LinearOps
    from penstock.ops.lora import LoraOps
    from penstock.ops.payload import Payload
    from penstock.ops.sample import SampleOps

_MODULES = ("linear", "routing", "experts", "norm", "rope", "codec", "codec_triton", "attention", "attention_triton",
            "activation", "step", "payload", "messages", "sample", "sample_triton", "lora", "lora_triton", "linear_triton",
            "linear_invariant", "coded_triton", "experts_triton", "latent", "rows_triton", "delta", "delta_triton", "cpu")
"""Modules whose import registers implementations; a new provider is one more name."""


def implementations(op: str) -> list[Implementation]:
    """All of an operation's implementations, the reference first."""
    load()
    return sorted(TABLE[op].values(), key=lambda i: (i.name != "reference", i.rank))


def load() -> None:
    """Imports every provider."""
    for module in _MODULES:
        importlib.import_module(f"penstock.ops.{module}")


class Kernels:
    """The bound table, with one attribute per operation. The reference says what each takes and returns."""

    linear: LinearOps
    """For plain matrices; `linear_for` says which serves another scheme."""
    experts: ExpertsOps
    """For stacks of plain matrices; `experts_for` says which serves another scheme."""
    payload: Payload
    messages: Callable[[int, int, bool], int]
    head_linear: latent.HeadLinearOps
    attention: AttentionOps
    lora: LoraOps
    sample: SampleOps
    if TYPE_CHECKING:
        # Of the type of their references.
        rms_norm = staticmethod(norm.rms_norm)
        add_rms_norm = staticmethod(norm.add_rms_norm)
        layer_norm = staticmethod(norm.layer_norm)
        rope_write = staticmethod(rope.rope_write)
        cache_write = staticmethod(codec.cache_write)
        latent_write = staticmethod(latent.latent_write)
        delta_rule = staticmethod(delta.delta_rule)
        route = staticmethod(routing.route)
        build_step = staticmethod(step.build_step)
        bring = staticmethod(step.bring)
        move_step = staticmethod(step.move_step)
        gated = staticmethod(activations.gated)
        activation = staticmethod(activations.activation)

    def __init__(self, chosen: dict[str, Implementation], refused: dict[str, list[tuple[str, str]]],
                 able: dict[str, list[Implementation]] | None = None) -> None:
        """`able`: for each operation those that could serve here, best first."""
        self.chosen = chosen
        self.refused = refused
        self.able = able if able is not None else {op: [one] for op, one in chosen.items()}
        for op, implementation in chosen.items():
            setattr(self, op, implementation.call)

    def linear_for(self, scheme: str, n: int, k: int) -> Any:
        """The kernel of an [n, k] matrix stored by that scheme: the best that is registered as `linear` (plain) or
        `linear.<scheme>` and serves that shape. None if nothing does; a plain matrix of any shape is served.

        One of a scheme has the functions of LinearOps, but its `pack(scheme, parts, shape, dtype)` takes the matrix of `shape`
        as a `quant/scheme.py::Scheme` stores it: its parts on the device, which may be kept, for activations of `dtype`."""
        if scheme == "plain" and self.chosen["linear"].fits(n, k):
            return self.linear
        found = self._linear_for(scheme, n, k)
        return None if found is None else found.call

    def linear_name(self, scheme: str, n: int, k: int) -> str:
        """The result of `linear_for`, in words."""
        found = self._linear_for(scheme, n, k)
        return "decoded in tiles" if found is None else found.name

    def _linear_for(self, scheme: str, n: int, k: int) -> Implementation | None:
        op = "linear" if scheme == "plain" else f"linear.{scheme}"
        return next((one for one in self.able.get(op, []) if one.fits(n, k)), None)

    def experts_for(self, scheme: str) -> ExpertsOps | None:
        """The kernel of stacks stored by that scheme, registered as `experts` (plain) or `experts.<scheme>`, or None."""
        found = self.able.get("experts" if scheme == "plain" else f"experts.{scheme}", [])
        ops: ExpertsOps | None = found[0].call if found else None
        return ops

    def uncapturable(self) -> list[str]:
        """The operations of the forward pass that no CUDA graph can hold. Sampling may run beside one."""
        return [op for op in sorted(self.chosen) if not self.chosen[op].capturable and op != "sample"]

    def table(self) -> list[tuple[str, str]]:
        """(operation, implementation) pairs, for `penstock info` and the log."""
        return [(op, self.chosen[op].name) for op in sorted(self.chosen)]


def bind(facts: DeviceFacts, dtype: torch.dtype, prefer: Mapping[str, str] | None = None, *,
         batch_invariant: bool = False) -> Kernels:
    """The best implementation of every operation for this device and dtype.

    `prefer` maps an operation, or "*", to an implementation's name and must be honoured: ConfigError if it cannot serve.
    Elsewhere `batch_invariant` admits only implementations that are; ConfigError if an operation has none here."""
    load()
    prefer = prefer or {}
    unknown = sorted(prefer.keys() - TABLE.keys() - {"*"})
    if unknown:
        raise ConfigError(f"kernels names {unknown[0]!r}, which is no operation; possible are {', '.join(sorted(TABLE))}, "
                          "and * for all")
    names = {name for found in TABLE.values() for name in found}
    if "*" in prefer and prefer["*"] not in names:
        raise ConfigError(f"kernels asks for {prefer['*']!r} everywhere, which no operation has; possible are "
                          f"{', '.join(sorted(names))}")
    chosen: dict[str, Implementation] = {}
    refused: dict[str, list[tuple[str, str]]] = {}
    able: dict[str, list[Implementation]] = {}
    for op, found in TABLE.items():
        wanted = prefer.get(op, prefer.get("*"))
        for implementation in sorted(found.values(), key=lambda i: -i.rank):
            if wanted is not None and implementation.name != wanted:
                continue
            reason = implementation.refusal(facts, dtype)
            if reason is None and wanted is None and batch_invariant and not implementation.batch_invariant:
                reason = "its results depend on the batch"
            if reason is not None:
                refused.setdefault(op, []).append((implementation.name, reason))
                continue
            able.setdefault(op, []).append(implementation)
            if implementation.fits is any_shape:
                break
        if op in able:
            chosen[op] = able[op][0]
        elif "reference" in found:
            if wanted is not None and op in prefer:
                why = dict(refused.get(op, [])).get(wanted, f"there are only {', '.join(sorted(found))}")
                raise ConfigError(f"kernel {wanted!r} cannot serve {op}: {why}")
            if wanted is None:
                why = "; ".join(f"{name}: {reason}" for name, reason in refused[op])
                raise ConfigError(f"batch_invariant: no kernel for {op} can serve here ({why}). Leave it out, or choose a "
                                  f"kernel with --kernels {op}=NAME")
            chosen[op] = found["reference"]
    return Kernels(chosen, refused, able)


def set_threads(count: int, kernels: Kernels) -> None:
    """Sets the number of CPU threads that kernels may use.

    PyTorch's own pool gets them only if it computes the GEMMs: its threads meet at a barrier after every operation, and with a
    busy neighbour on a core an operation of microseconds then takes milliseconds."""
    torch.set_num_threads(count if kernels.chosen["linear"].threads else 1)
    for module in _MODULES:
        setter = getattr(importlib.import_module(f"penstock.ops.{module}"), "set_threads", None)
        if setter is not None:
            setter(count)
