"""What Triton's launches ask about a GPU, answered for a dry run on meta tensors as for the device. Imports no Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from penstock.platform.facts import DeviceFacts

OLDEST = (8, 0)
"""The least compute capability that the kernels are written for: bf16, and copies that do not go through registers."""

MULTIPROCESSORS = 132
"""An H200's. On another GPU work is divided as for this one, which costs a little and changes nothing else."""


class Chip(NamedTuple):
    """One kind of GPU, as far as a launch depends on it."""

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
    """What `device` is, or in a dry run stands for."""
    if device.type == "cuda":
        return _found(torch.cuda.current_device() if device.index is None else device.index)
    return _meta[-1] if device.type == "meta" and _meta else _NONE


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability that a launch on `device` can count on; (0, 0) if it is no GPU."""
    return chip(device).capability


def multiprocessors(device: torch.device) -> int:
    """How many programs can run at once at least."""
    return chip(device).multiprocessors


def linked(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one ahead of it has ended (programmatic dependent launch).

    A kernel launched so must wait (`gdc_wait`) in every program before it reads or writes anything that others write.
    """
    return capability(device) >= (9, 0)


_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have (CUDA C++ programming guide, specifications by compute capability)."""
    return _SHARED.get(capability(device), 99) << 10


def covering(count: int) -> int:
    """The least power of two, at least 1, that is not below: blocks of Triton's kernels have such sizes."""
    return 1 << max(0, count - 1).bit_length()


def supports(facts: DeviceFacts, _dtype: torch.dtype) -> str | None:
    """The reason why Triton's kernels cannot serve here, if there is one."""
    if facts.kind != "cuda":
        return "needs an NVIDIA GPU"
    if facts.capability < OLDEST:
        least, found = (".".join(map(str, version)) for version in (OLDEST, facts.capability))
        return f"needs compute capability {least}, {facts.name} has {found}"
    return None if importlib.util.find_spec("triton") else "Triton is not installed"
