"""Groups of ranks that exchange tensors over torch.distributed.

Sums are made in the order of the ranks and rounded once, so that every rank has the same bits, whatever else is in the step."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from penstock.observe.log import LOG
from penstock.ops import gpu
from penstock.ops.contracts import AddRmsNorm
from penstock.parallel.axis import Place
from penstock.parallel.peer import Peers, shared
from penstock.platform.facts import detect


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order, rounded once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


class Group(ABC):
    """The ranks of one axis, as one of them sees it. All ranks make the same calls in the same order."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: the x of all ranks."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x, which may be overwritten, in x's dtype."""
        return added(self.gather(x).unbind())

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float,
                 norm: AddRmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm` (ops/norm.py::add_rms_norm) of the sum of the ranks' x and the residual; both [T, W] may be overwritten."""
        return norm(self.reduce(x), residual, weight, eps, offset)

    def reduce_own(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [...]: the sum of the ranks' parts x[rank]."""
        return added(self.gather(x)[:, self.rank].unbind())

    def begin(self, x: torch.Tensor, share: bool) -> Callable[[], torch.Tensor]:
        """Begins the sum of the ranks' x [T, ...], which may be overwritten; a call waits for it. `share`: only of this rank's
        share of the rows, of which there are equally many for each rank."""
        found = self.reduce_own(x.unflatten(0, (self.size, -1))) if share else self.reduce(x)
        return lambda: found

    @abstractmethod
    def begin_exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Callable[[], torch.Tensor]:
        """Begins to send the first `sent[0]` rows x [T, W] to rank 0, the next to rank 1, and so on; a call waits for the rows
        that came, `received[r]` from rank r, in that order."""

    def begin_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to gather the rows x [T, ...] of all ranks; a call waits for them, [size * T, ...]."""
        found = self.gather(x).flatten(0, 1)
        return lambda: found


_JOIN_SECONDS = 120.0
"""The longest that ranks wait for each other at their start."""


def joined(place: Place, device: torch.device) -> None:
    """Meets all other ranks of the engine, in processes: over gloo between CPUs, NCCL between GPUs."""
    import torch.distributed as dist

    cuda, timeout = device.type == "cuda", timedelta(seconds=_JOIN_SECONDS)
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or host == "127.0.0.1":
        # All ranks are on this machine: nothing is bound to another interface.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # Each link of a pipeline is a group of its own, as this warning asks.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    stores: Any = torch._C._distributed_c10d  # noqa: SLF001 (not exported)
    store = stores.TCPStore(host, int(port), place.world, is_master=place.number == 0, timeout=timeout) if host else \
        stores.FileStore(f"{place.rendezvous}/ranks", place.world)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=place.number, world_size=place.world,
                            timeout=timeout, device_id=device if cuda else None)


def subgroup(members: Sequence[Sequence[int]], rank: int) -> Any:
    """Torch's group of the members among whom `rank` is, if any. All ranks call this with the same lists."""
    import torch.distributed as dist

    found = None
    for ranks in members:
        group = dist.new_group(list(ranks))
        found = group if rank in ranks else found
    return found


class Processes(Group):
    """Ranks in processes."""

    def __init__(self, rank: int, size: int, group: Any, device: torch.device, peers: bool = True) -> None:
        """`group`: torch's. `peers`: GPUs that can, exchange short messages by our own kernel."""
        import torch.distributed as dist

        self.rank, self.size, self._group = rank, size, group
        cuda = device.type == "cuda"
        self._reduce = dist.all_reduce
        self._exchange = dist.all_to_all_single
        # Its name in torch 2.13, and before.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._sums = cuda and self.size == 2
        self._peers: Peers | None = None
        self._kept: Any = None
        if cuda and peers and not gpu.supports(detect(str(device)), torch.bfloat16):
            try:
                self._peers, self._kept = shared(self.rank, self.size, device, self._group)
            except RuntimeError as error:
                LOG.warning("GPUs cannot map each other's memory, NCCL exchanges short messages: %s", error)

    def close(self) -> None:
        """Lets go of the connections."""
        self._group = self._peers = self._kept = None

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.reduce(x)
        if self._sums:
            # Of two addends there is only one order.
            self._reduce(x, group=self._group)
            return x
        return super().reduce(x)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float,
                 norm: AddRmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
        if self._peers is not None and self._peers.takes_rows(x, residual):
            return self._peers.add_norm(x, residual, weight, eps, offset), residual
        return super().add_norm(x, residual, weight, eps, offset, norm)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.gather(x)
        return self._gathered(x)()

    def reduce_own(self, x: torch.Tensor) -> torch.Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.reduce(x)[self.rank]
        return added(self._exchanged(x)().unbind())

    def begin(self, x: torch.Tensor, share: bool) -> Callable[[], torch.Tensor]:
        if share:
            arrived = self._exchanged(x.unflatten(0, (self.size, -1)), later=True)
            return lambda: added(arrived().unbind())
        if self._sums:
            work = self._reduce(x, group=self._group, async_op=True)
            return lambda: (work.wait(), x)[1]
        arrived = self._gathered(x, later=True)
        return lambda: added(arrived().unbind())

    def begin_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        arrived = self._gathered(x, later=True)
        return lambda: arrived().flatten(0, 1)

    def begin_exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Callable[[], torch.Tensor]:
        found = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
        size = x.shape[1] * x.element_size()
        work = self._exchange(as_bytes(found), as_bytes(x.contiguous()), [count * size for count in received],
                              [count * size for count in sent], group=self._group, async_op=True)
        return lambda: (work.wait(), found)[1]

    def _gathered(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        """[size, *x.shape], by the library. `later`: a call waits for it."""
        found = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        work = self._gather(as_bytes(found), as_bytes(x.contiguous()), group=self._group, async_op=later)
        return lambda: (work and work.wait(), found)[1]

    def _exchanged(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        """[size, ...] -> [size, ...]: this rank's part of every rank's x, by the library."""
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        work = self._exchange(as_bytes(found), as_bytes(x.contiguous()), group=self._group, async_op=later)
        return lambda: (work and work.wait(), found)[1]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """gloo does not know every type."""
    return x.view(-1).view(torch.uint8)
