"""Short messages between the GPUs of one machine through memory that all of them map (CUDA's peer access, by torch's symmetric
memory). The kernel is in peer_kernel.py."""

import os
from typing import Any

import torch

from penstock.ops import gpu

RUN = 1024
"""Elements of a message that one program exchanges: 8 KiB are four programs of 128 threads."""
MOST = 1024
"""The most programs."""
_ROOM = 4 * RUN
"""Bytes of a program's place."""
_ROWS = 1 << 21
"""Bytes of a rank's rows that are summed and normed at once."""
_SHORT = 1 << 17, 1 << 19
"""The most bytes of a message for two ranks, from which on NCCL is faster (bench/gpu_peers.py), and for more."""
_SHORT_ROWS = _ROWS, 1 << 19
"""The same of rows. For two ranks one-shot moves no more than any other way."""


class Peers:
    """One rank's memory for messages, and the addresses of all ranks'. All ranks make the same calls in the same order."""

    def __init__(self, rank: int, size: int, addresses: list[int], device: torch.device) -> None:
        """`addresses`: of each rank's memory of `nbytes(size)` zero bytes, as this rank maps it."""
        self._rank, self._size = rank, size
        self._short = _SHORT[size > 2]
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._flags = self._buffers + 2 * size * MOST * _ROOM
        self._epochs = torch.zeros(MOST, dtype=torch.int32, device=device)
        # Rows have memory and flags of their own, as one program's row would lie in several programs' places.
        self._rows = self._flags + 4 * size * MOST
        self._row_flags = self._rows + 2 * size * _ROWS
        self._row_epochs = torch.zeros(MOST, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        return 2 * size * (MOST * _ROOM + _ROWS) + 2 * 4 * size * MOST

    def takes(self, x: torch.Tensor) -> bool:
        """Whether a message is short enough, and of a type that the kernel knows."""
        return 0 < x.nbytes <= self._short and x.numel() <= RUN * MOST and x.is_contiguous() and x.dtype in (
            torch.bfloat16, torch.float16, torch.float32, torch.int32)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x."""
        return self._exchange(x, torch.empty_like(x), False)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]"""
        return self._exchange(x, torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device), True)

    def takes_rows(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Whether `add_norm` serves x [T, W]."""
        return (0 < x.nbytes <= _SHORT_ROWS[self._size > 2] and len(x) <= MOST and x.is_contiguous()
                and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and residual.dtype == x.dtype
                and residual.stride(1) == 1)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float) -> torch.Tensor:
        """The norm of residual plus the sum of the ranks' x, [T, W]; residual then holds that sum."""
        from penstock.parallel.peer_kernel import add_norm  # as below

        (rows, width), out, linked = x.shape, torch.empty_like(x), gpu.linked(x.device)
        block = gpu.covering(width)
        add_norm[(rows,)](x, residual, weight, out, self._rows, self._row_flags, self._row_epochs, self._rank,
                          residual.stride(0), float(eps), float(offset), size=self._size, most=MOST,
                          room=_ROWS // x.element_size(), width=width, block=block, linked=linked,
                          num_warps=max(1, min(16, block * x.element_size() // 512)), launch_pdl=linked)
        return out

    def _exchange(self, x: torch.Tensor, out: torch.Tensor, gather: bool) -> torch.Tensor:
        from penstock.parallel.peer_kernel import exchange  # Triton: heavy, and not everywhere

        linked = gpu.linked(x.device)
        exchange[(-(-x.numel() // RUN),)](x, out, self._buffers, self._flags, self._epochs, x.numel(), self._rank,
                                          size=self._size, most=MOST, run=RUN, room=_ROOM // x.element_size(), gather=gather,
                                          linked=linked, num_warps=4, launch_pdl=linked)
        return out


def shared(rank: int, size: int, device: torch.device, group: Any) -> tuple[Peers, Any]:
    """Memory that the ranks of torch's group share, and its handle, which keeps it. RuntimeError if GPUs cannot share any."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(Peers.nbytes(size), dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symmetric.rendezvous(memory, group.group_name)
    peers = Peers(rank, size, [int(address) for address in handle.buffer_ptrs], device)
    torch.cuda.synchronize(device)
    # Nobody writes before all have cleared.
    dist.barrier(group)
    return peers, (memory, handle)
