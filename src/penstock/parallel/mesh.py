"""A rank's connections along each axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.parallel.axis import Place
from penstock.parallel.group import Group, Processes, joined, subgroup
from penstock.parallel.lockstep import Lockstep
from penstock.parallel.pipe import Pipe, ProcessPipe


@dataclass
class Mesh:
    """None along an axis on which the rank is alone."""

    tensor: Group | None = None
    pipe: Pipe | None = None
    data: Lockstep | None = None
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
    world, tensors = dist.group.WORLD, place.tensors
    tensor = data = None
    if tensors > 1:
        stages = [range(stage * tensors, (stage + 1) * tensors) for stage in range(place.stages)]
        group = world if place.stages == 1 else subgroup(stages, place.rank)
        tensor = Processes(place.tensor, tensors, group, device, peers)
    if place.datas > 1:
        # Of its own and on the host, as ranks agree on sizes while the devices compute.
        agreeing = Processes(place.data, place.datas, dist.new_group(backend="gloo"), torch.device("cpu"))
        data = Lockstep(Processes(place.data, place.datas, world, device, peers), agreeing, f"{place.rendezvous}/wave")
    return Mesh(tensor, ProcessPipe(place) if place.stages > 1 else None, data, dist.destroy_process_group)
