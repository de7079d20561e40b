"""Groups of ranks that exchange tensors over torch.distributed.

Sums are made in the order of the ranks and rounded once, so that every rank has the same bits, whatever else is in the step."""

import fcntl
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from penstock.observe.log import LOG
from penstock.ops import gpu
from penstock.parallel.axis import Place
from penstock.parallel.peer import Shared
from penstock.platform.facts import detect


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order, rounded once."""
    if len(parts) == 2:
        return parts[0] + parts[1]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


_JOIN_SECONDS = 120.0
"""The longest that ranks wait for each other at their start."""
_LONG = 1 << 20
"""Bytes of a message of more than two ranks from which on each adds up a share for all."""


def interface(host: str) -> str | None:
    """The network interface of this machine whose address others see when it connects to `host`; None if none has it."""
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as asking:
        asking.connect((host, 1))  # sends nothing
        own = socket.inet_aton(asking.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                # SIOCGIFADDR
                if fcntl.ioctl(asking, 0x8915, name.encode().ljust(40, b"\0"))[20:24] == own:
                    return name
    return None


def joined(place: Place, device: torch.device) -> None:
    """Meets all other ranks of the engine, in processes: over gloo between CPUs, NCCL between GPUs."""
    import torch.distributed as dist

    cuda, timeout = device.type == "cuda", timedelta(seconds=_JOIN_SECONDS)
    host, _, port = place.rendezvous.removeprefix("tcp://").rpartition(":")
    if not host or host == "127.0.0.1":
        # All ranks are on this machine: nothing is bound to another interface.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    elif (found := interface(host)) is not None:
        # Of several, gloo would take the one of the machine's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    # The engine decides what becomes of a rank whose peers are lost, not a thread of torch that ends its process.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # Each link of a pipeline is a group of its own, as this warning asks.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    stores: Any = torch._C._distributed_c10d  # noqa: SLF001 (not exported)
    # Torch's own socket would listen on every interface.
    at = socket.create_server((host, int(port))).detach() if host and place.number == 0 else None
    store = stores.TCPStore(host, int(port), place.world, place.number == 0, timeout, master_listen_fd=at) if host else \
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


class Group:
    """The ranks of one axis, in processes, as one of them sees it. All ranks make the same calls in the same order."""

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
        self._peers: Shared | None = None
        if cuda and peers and not gpu.supports(detect(str(device)), torch.bfloat16):
            try:
                self._peers = Shared(self.rank, self.size, device, self._group)
            except RuntimeError as error:
                LOG.warning("GPUs cannot map each other's memory, NCCL exchanges short messages: %s", error)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()
        self._group = self._peers = None

    def release(self, turn: int) -> None:
        """`Shared.release`."""
        if self._peers is not None:
            self._peers.release(turn)

    @property
    def copies(self) -> bool:
        """Whether copy engines carry long messages now."""
        return self._peers is not None and self._peers.copies

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x, which may be overwritten, in x's dtype."""
        if self._peers is not None and self._peers.takes(x):
            return self._peers.reduce(x)
        if self._sums:
            # Of two addends there is only one order.
            self._reduce(x, group=self._group)
            return x
        if self.size > 2 and x.nbytes >= _LONG and x.numel() % self.size == 0:
            return self.gather(self.reduce_own(x.view(self.size, -1))).view_as(x)
        return added(self.gather(x).unbind())

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float,
                 norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """`norm` (ops/norm.py::add_rms_norm) of the sum of the ranks' x and the residual; both [T, W] may be overwritten."""
        if self._peers is not None and self._peers.takes_rows(x, residual):
            return self._peers.add_norm(x, residual, weight, eps, offset), residual
        return norm(self.reduce(x), residual, weight, eps, offset)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: the x of all ranks."""
        if self._peers is not None and self._peers.takes(x, gather=True):
            return self._peers.gather(x)
        return self._gathered(x)()

    def reduce_own(self, x: torch.Tensor) -> torch.Tensor:
        """[size, ...] -> [...]: the sum of the ranks' parts x[rank]."""
        if self._peers is not None and self._peers.takes(x):
            return self._peers.reduce(x)[self.rank]
        return added(self._exchanged(x)().unbind())

    def exchange(self, x: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Begins to send x [size, ...], each rank its part; a call waits for the parts x[rank] of every rank's x."""
        other = 1 - self.rank
        if self._peers is not None and self._peers.sends(x[other]):
            came = self._peers.send(x[other])
            return lambda: [came(), x[1]] if self.rank else [x[0], came()]
        arrived = self._exchanged(x, True)
        return lambda: arrived().unbind()

    def begin(self, x: torch.Tensor, share: bool) -> Callable[[], torch.Tensor]:
        """Begins the sum of the ranks' x [T, ...], which may be overwritten; a call waits for it. `share`: only of this rank's
        share of the rows, of which there are equally many for each rank."""
        if self._peers is not None and not share and self._peers.sends(x):
            other = self._peers.send(x)
            return lambda: x.add_(other())
        if self._sums and not share:
            work = self._reduce(x, group=self._group, async_op=True)
            return lambda: (work.wait(), x)[1]
        arrived = self._exchanged(x.unflatten(0, (self.size, -1)), True) if share else self._gathered(x, True)
        return lambda: added(arrived().unbind())

    def begin_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to gather the rows x [T, ...] of all ranks; a call waits for them, [size * T, ...]."""
        arrived = self._gathered(x, True)
        return lambda: arrived().flatten(0, 1)

    def begin_exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> Callable[[], torch.Tensor]:
        """Begins to send the first `sent[0]` rows x [T, W] to rank 0, the next to rank 1, and so on; a call waits for the rows
        that came, `received[r]` from rank r, in that order."""
        found = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
        size = x.shape[1] * x.element_size()
        sizes = [[count * size for count in counts] for counts in (received, sent)]
        return self._travels(self._exchange, found, x, True, *sizes)

    def _gathered(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        """[size, *x.shape], by the library. `later`: a call waits for it."""
        return self._travels(self._gather, torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device), x, later)

    def _exchanged(self, x: torch.Tensor, later: bool = False) -> Callable[[], torch.Tensor]:
        """[size, ...] -> [size, ...]: this rank's part of every rank's x, by the library."""
        return self._travels(self._exchange, torch.empty_like(x, memory_format=torch.contiguous_format), x, later)

    def _travels(self, call: Any, found: torch.Tensor, x: torch.Tensor, later: bool,
                 *sizes: list[int]) -> Callable[[], torch.Tensor]:
        """Calls the library, which sends x and fills `found`."""
        work = call(as_bytes(found), as_bytes(x.contiguous()), *sizes, group=self._group, async_op=later)
        return lambda: (work and work.wait(), found)[1]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """gloo does not know every type."""
    return x.view(-1).view(torch.uint8)


AddNorm = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(norm(x + residual), x + residual) of rows; the second may be `residual`, overwritten."""


class Runs:
    """One step's runs of rows, and the sums under way of a branch's parts: while those of one run travel, the next is computed.

    Of two ranks each has all sums, and norms them. Of more, each has the sums of its share of every run, adds them to its share
    of the stream, norms them, and the ranks gather what is normed (Korthikanti et al. 2022, "sequence parallelism")."""

    def __init__(self, ranks: Group, tokens: int, count: int) -> None:
        """`tokens` rows in `count` runs."""
        self._ranks = ranks
        self.shares = ranks.size > 2 and tokens % ranks.size == 0
        unit = ranks.size if self.shares else 1
        each = -(-tokens // (count * unit)) * unit
        self.borders: Sequence[tuple[int, int]] = [(at, min(tokens, at + each)) for at in range(0, tokens, each)]
        self._sums: list[Callable[[], torch.Tensor]] = []
        self._sign: torch.Tensor | None = None
        self._apart = False
        """Whether the stream's rows are up to date in each rank's shares alone."""

    def leave(self, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Computes this rank's parts of each run [rows, W], and begins their sums. Returns a tensor that stands for them."""
        self._sums = []
        for number in range(len(self.borders)):
            self._sign = compute(number)
            self._sums.append(self._ranks.begin(self._sign, self.shares))
        assert self._sign is not None
        return self._sign

    def holds(self, x: torch.Tensor | None) -> bool:
        """Whether `x` stands for sums under way."""
        return x is not None and x is self._sign

    def enter(self, residual: torch.Tensor, norm: AddNorm) -> list[Callable[[], torch.Tensor]]:
        """The rows of each run, normed with the sums added to the stream `residual` [T, W], which changes. A call waits."""
        self._sign = None
        if not self.shares:
            return [partial(self._normed, total, residual[first:last], norm)
                    for total, (first, last) in zip(self._sums, self.borders, strict=True)]
        self._apart = True
        return [self._ranks.begin_gather(self._normed(total, own, norm))
                for total, own in zip(self._sums, self._owned(residual), strict=True)]

    def whole(self, residual: torch.Tensor) -> torch.Tensor:
        """The stream with the rows of all ranks."""
        if not self._apart:
            return residual
        self._apart = False
        return torch.cat([self._ranks.gather(own.contiguous()).flatten(0, 1) for own in self._owned(residual)])

    def _owned(self, x: torch.Tensor) -> list[torch.Tensor]:
        """This rank's shares of each run of rows."""
        return [x[first:last].chunk(self._ranks.size)[self._ranks.rank] for first, last in self.borders]

    @staticmethod
    def _normed(total: Callable[[], torch.Tensor], residual: torch.Tensor, norm: AddNorm) -> torch.Tensor:
        normed, stream = norm(total(), residual)
        if stream.data_ptr() != residual.data_ptr():
            residual.copy_(stream)
        return normed
