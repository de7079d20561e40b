"""A rank's connections along each axis."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from threading import Thread

import torch

from penstock.parallel.axis import Place, places
from penstock.parallel.group import Group, joined, subgroup
from penstock.parallel.lockstep import Lockstep
from penstock.parallel.pipe import Pipe

_TURN_SECONDS = 0.01
"""Between two attempts to end kernels' waiting."""


@dataclass
class Mesh:
    """None along an axis on which the rank is alone."""

    tensor: Group | None = None
    pipe: Pipe | None = None
    data: Lockstep | None = None
    context: Group | None = None
    end: Callable[[], None] | None = None

    def take(self, new: "Mesh") -> None:
        """Has the connections of a new one. Groups stay the objects that a model's layers hold."""
        for name, own in vars(self).items():
            if isinstance(own, Group):
                vars(own).update(vars(getattr(new, name)))
                setattr(new, name, own)
        vars(self).update(vars(new))

    def leave(self, stream: torch.cuda.Stream, drop: Callable[[], None]) -> None:
        """Closes connections to ranks that are lost, for which kernels on the stream may wait; their results are worth nothing.
        Calls `drop` when they have ended, which has to let go of CUDA graphs: NCCL waits for the end of all that use it."""
        import torch.distributed.distributed_c10d as groups

        ending, self.end = Thread(target=groups._abort_process_group), None  # noqa: SLF001 (not exported)
        ending.start()
        for turn in count():
            if stream.query():
                break
            for group in self._groups():
                group.release(turn)
            time.sleep(_TURN_SECONDS)
        drop()
        ending.join()
        self.close()

    def close(self) -> None:
        if self.end is not None:
            end, self.end = self.end, None
            end()
        self.pipe = None
        for group in self._groups():
            group.close()

    def _groups(self) -> list[Group]:
        return [group for group in (self.tensor, self.context) if group is not None]


def join(place: Place, device: torch.device, peers: bool) -> Mesh:
    """Meets the other ranks, if there are any. Waits for them."""
    if place.alone:
        return Mesh()
    import torch.distributed as dist

    joined(place, device)
    world, every = dist.group.WORLD, [one for number in range(place.datas) for one in places(replace(place, data=number))]
    data: Lockstep | None = None

    def group(rank: int, size: int, line: Callable[[Place], tuple[int, ...]]) -> Group | None:
        """The ranks that are in one `line` with this one."""
        lines = [[one.number for one in every if line(one) == key] for key in dict.fromkeys(map(line, every))]
        if size == 1:
            return None
        return Group(rank, size, world if len(lines) == 1 else subgroup(lines, place.number), device, peers)

    tensor = group(place.tensor, place.tensors, lambda one: (one.data, one.stage, one.context))
    context = group(place.context, place.contexts, lambda one: (one.data, one.stage, one.tensor))
    if place.datas > 1:
        # Of its own and on the host, as ranks agree on sizes while the devices compute.
        agreeing = Group(place.number, place.world, dist.new_group(backend="gloo"), torch.device("cpu"))
        data = Lockstep(Group(place.number, place.world, world, device, peers), agreeing, f"{place.rendezvous}/wave",
                        place.tensors)
    return Mesh(tensor, Pipe(place, device) if place.stages > 1 else None, data, context, dist.destroy_process_group)
