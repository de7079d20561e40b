"""A rank's connections along each axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.parallel.axis import Place
from penstock.parallel.group import Group, Processes, joined
from penstock.parallel.pipe import Pipe, ProcessPipe


@dataclass
class Mesh:
    """None along an axis on which the rank is alone."""

    tensor: Group | None = None
    pipe: Pipe | None = None
    end: Callable[[], None] | None = None

    def close(self) -> None:
        if self.end is not None:
            end, self.end = self.end, None
            end()


def join(place: Place, device: torch.device, peers: bool) -> Mesh:
    """Meets the other ranks, if there are any. Waits for them."""
    if place.alone:
        return Mesh()
    import torch.distributed as dist

    joined(place, device)
    return Mesh(Processes(place, device, peers) if place.tensors > 1 else None,
                ProcessPipe(place) if place.stages > 1 else None, dist.destroy_process_group)
