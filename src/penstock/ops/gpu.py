"""GPU facts that Triton launches depend on: of the device, or during a dry run on meta tensors of the chip that it stands for.

Imports no Triton."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from penstock.platform.facts import DeviceFacts

OLDEST = (8, 0)
"""The lowest compute capability that the kernels support: they need bf16 and asynchronous copies to shared memory."""

MULTIPROCESSORS = 132
"""Of an H200. Work is divided for this number on other GPUs too, which costs a little time and changes no result."""


class Kernels:
    """A module of Triton kernels of this package, imported at the first use of one: Triton is heavy, and not everywhere."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, kernel: str) -> Any:
        return getattr(importlib.import_module(f"penstock.ops.{self._name}"), kernel)


class Chip(NamedTuple):
    """The properties of a GPU that launches depend on."""

    capability: tuple[int, int]
    multiprocessors: int


_NONE = Chip((0, 0), 1)
_meta: list[Chip] = []


@contextmanager
def standing_in(chip: Chip) -> Iterator[None]:
    """Meta tensors stand for tensors on `chip` in this context."""
    _meta.append(chip)
    try:
        yield
    finally:
        _meta.pop()


@cache
def _found(index: int) -> Chip:
    found = torch.cuda.get_device_properties(index)
    return Chip((found.major, found.minor), found.multi_processor_count)


def chip(device: torch.device) -> Chip:
    """The chip of `device`; in a dry run, the one that meta tensors stand for."""
    if device.type == "cuda":
        return _found(torch.cuda.current_device() if device.index is None else device.index)
    return _meta[-1] if device.type == "meta" and _meta else _NONE


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of `device`; (0, 0) if it is no GPU."""
    return chip(device).capability


def multiprocessors(device: torch.device) -> int:
    return chip(device).multiprocessors


def linked(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """A launch's options for programmatic dependent launch, where it is `wanted` and there: a kernel may start before the
    previous one has ended.

    Every program of such a kernel must wait (`gdc_wait`) before it reads or writes memory that other kernels write."""
    there = wanted and capability(device) >= (9, 0)
    return {"linked": there, "launch_pdl": there}


_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


def shared_bytes(device: torch.device) -> int:
    """The most shared memory per program (CUDA C++ programming guide, specifications by compute capability)."""
    return _SHARED.get(capability(device), 99) << 10


def covering(count: int) -> int:
    """The next power of two, at least 1: block sizes of Triton kernels are powers of two."""
    return 1 << max(0, count - 1).bit_length()


def supports(facts: DeviceFacts, _dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot run here; None if they can."""
    if facts.kind != "cuda":
        return "needs an NVIDIA GPU"
    if facts.capability < OLDEST:
        least, found = (".".join(map(str, version)) for version in (OLDEST, facts.capability))
        return f"needs compute capability {least}, {facts.name} has {found}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
