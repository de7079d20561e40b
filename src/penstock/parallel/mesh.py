"""A rank's connections along each axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from penstock.parallel.axis import Place, places
from penstock.parallel.group import Group, Processes, joined, subgroup
from penstock.parallel.lockstep import Lockstep
from penstock.parallel.pipe import Pipe


@dataclass
class Mesh:
    """None along an axis on which the rank is alone."""

    tensor: Group | None = None
    pipe: Pipe | None = None
    data: Lockstep | None = None
    context: Group | None = None
    end: Callable[[], None] | None = None

    def take(self, new: Mesh) -> None:
        """Has the connections of a new one. Groups stay the objects that a model's layers hold."""
        for name, own in vars(self).items():
            if isinstance(own, Processes):
                vars(own).update(vars(getattr(new, name)))
                setattr(new, name, own)
        vars(self).update(vars(new))

    def close(self) -> None:
        if self.end is not None:
            end, self.end = self.end, None
            end()
        self.pipe = None
        for group in (self.tensor, self.context):
            if isinstance(group, Processes):
                group.close()


def join(place: Place, device: torch.device, peers: bool) -> Mesh:
    """Meets the other ranks, if there are any. Waits for them."""
    if place.alone:
        return Mesh()
    import torch.distributed as dist

    joined(place, device)
    world, every = dist.group.WORLD, list(places(place))
    tensor = context = data = None
    if place.tensors > 1:
        own = [[one.rank for one in every if (one.stage, one.context) == key]
               for key in product(range(place.stages), range(place.contexts))]
        tensor = Processes(place.tensor, place.tensors, world if len(own) == 1 else subgroup(own, place.rank), device, peers)
    if place.contexts > 1:
        own = [[one.rank for one in every if (one.stage, one.tensor) == key]
               for key in product(range(place.stages), range(place.tensors))]
        context = Processes(place.context, place.contexts, subgroup(own, place.rank), device, peers)
    if place.datas > 1:
        # Of its own and on the host, as ranks agree on sizes while the devices compute.
        agreeing = Processes(place.data, place.datas, dist.new_group(backend="gloo"), torch.device("cpu"))
        data = Lockstep(Processes(place.data, place.datas, world, device, peers), agreeing, f"{place.rendezvous}/wave")
    return Mesh(tensor, Pipe(place, device) if place.stages > 1 else None, data, context, dist.destroy_process_group)
