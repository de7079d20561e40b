"""The materials of layers: loaded parameters, kernels, and work that layers share."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.layers.rope import RopeSpec
from penstock.ops.experts import Stack
from penstock.ops.experts_hosted import Stages
from penstock.ops.linear import Weight
from penstock.ops.registry import Kernels
from penstock.parallel.group import Group
from penstock.parallel.lockstep import Lockstep

RopeTable = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [max_model_len, rotated dimensions / 2]."""


class Coming(Protocol):
    """Matrices of blocks that are on the device only while their block runs (`models/away.py::Away`)."""

    saved: int

    def enter(self, block: int) -> None: ...

    def leave(self, block: int) -> None: ...

    def there(self, block: int) -> AbstractContextManager[None]: ...


class Values(dict[str, Weight | torch.Tensor]):
    """Loaded parameters by path: packed matrices and plain tensors."""

    away: Coming | None = None
    """If some blocks' matrices are not on the device."""

    def matrix(self, path: str) -> Weight:
        found = self[path]
        assert isinstance(found, Weight), path
        return found

    def stack(self, path: str) -> Stack:
        found = self[path]
        assert isinstance(found, Stack), path
        return found

    def tensor(self, path: str) -> torch.Tensor:
        found = self[path]
        assert isinstance(found, torch.Tensor), path
        return found


@dataclass
class Build:
    """One model's building. Layers take from it what they keep."""

    values: Values
    kernels: Kernels
    device: torch.device
    max_model_len: int
    group: Group | None = None
    """The ranks of tensor parallelism, whose shares of a projection's inputs add up to the result; None on a single rank."""
    data: Lockstep | None = None
    """The engines with which this one steps together, each with some of the experts."""
    context: Group | None = None
    """The ranks that divide the positions of every context."""
    tables: dict[RopeSpec, RopeTable] = field(default_factory=dict)
    stages: Stages = field(default_factory=Stages)
    """Of experts in host memory."""

    def rope(self, spec: RopeSpec) -> RopeTable:
        """The table of a rotation, one for all layers of an equal spec."""
        if spec not in self.tables:
            self.tables[spec] = spec.table(self.max_model_len, self.device)
        return self.tables[spec]
