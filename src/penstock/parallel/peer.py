"""Short messages between GPUs of one machine through memory that all map (CUDA's IPC), by the kernel of peer_kernel.py."""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from penstock.ops import gpu
from penstock.parallel.layout import shares_from

_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("content", ctypes.c_byte * 64),)


class Memory:
    """One process's memory, which is never freed, as others may still map it, and those of others that it maps."""

    _left: ClassVar[dict[tuple[int, torch.device], list["Memory"]]] = {}
    """Closed memory by size and device: for the next that need as much."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """RuntimeError if the GPU shares none."""
        self._unused = self._left.setdefault((nbytes, device), [])
        self._stream, self._mapped = torch.cuda.Stream(device), list[ctypes.c_uint64]()
        self.address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(nbytes))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), self.address)
        self.handle = bytes(handle)

    @classmethod
    def of(cls, nbytes: int, device: torch.device) -> "Memory":
        """Zero bytes. RuntimeError as above."""
        left = cls._left.get((nbytes, device))
        found = left.pop() if left else cls(nbytes, device)
        _call("cuMemsetD8_v2", found.address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
        torch.cuda.synchronize(device)
        return found

    def open(self, rank: int, handles: Sequence[bytes]) -> list[int]:
        """The addresses of all ranks' memory, which is mapped. RuntimeError if a GPU cannot map another's."""
        found = [ctypes.c_uint64() for _ in handles]
        for address, handle in zip(found[:rank] + found[rank + 1:], (*handles[:rank], *handles[rank + 1:]), strict=True):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS))
            self._mapped.append(address)
        found[rank] = self.address
        return [address.value for address in found]

    def write(self, at: int, values: torch.Tensor) -> None:
        """Copies pinned values to byte `at` on, while kernels run."""
        _call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.address.value + at), ctypes.c_void_p(values.data_ptr()),
              ctypes.c_size_t(values.nbytes), ctypes.c_void_p(self._stream.cuda_stream))

    def close(self) -> None:
        """Lets go of the others' memory, which no kernel may use any more."""
        while self._mapped:
            _call("cuIpcCloseMemHandle", self._mapped.pop())
        self._unused.append(self)


def _call(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with CUDA's error {code}")


RUN = 1024
"""Elements of a message that one program exchanges: 8 KiB are four programs of 128 threads."""
MOST = 1024
"""The most programs."""
ROOM = 1 << 21
"""Bytes of a message that fit."""
_SHORT = 1 << 17, 1 << 19
"""The most bytes of a message for two ranks, from which on NCCL is faster (bench/gpu_peers.py), and for more."""
_SUMMED = 1 << 17, ROOM
"""The same of sums. For two ranks one-shot moves no more than any other way; more make long ones in shares."""
_LATE = 0, 1 << 30, -1 << 31, -1 << 30
"""Epochs of which one is later than any that is waited for, by less than half of the circle."""
_TYPES = torch.bfloat16, torch.float16, torch.float32


class Peers:
    """One rank's memory for messages, and the addresses of all ranks'. All ranks make the same calls in the same order."""

    def __init__(self, rank: int, size: int, addresses: Sequence[int], device: torch.device) -> None:
        """`addresses`: of each rank's memory of `nbytes(size)` zero bytes, as this rank maps it."""
        self._rank, self._size = rank, size
        self.shares = shares_from(size)
        """Bytes of a message from which on its sums are made in shares. Equal on all ranks."""
        buffers = torch.tensor(addresses, dtype=torch.int64, device=device)
        # Rows have memory and flags of their own, as a program's row would lie in the places of several programs of runs.
        self._places = [(at, at + 2 * size * ROOM, torch.zeros(MOST, dtype=torch.int32, device=device))
                        for at in (buffers, buffers + self.nbytes(size) // 2)]

    @staticmethod
    def nbytes(size: int) -> int:
        """For runs and for rows: two places of each rank's message, and flags."""
        return 2 * size * (2 * ROOM + 4 * MOST)

    def takes(self, x: torch.Tensor, gather: bool = False) -> bool:
        """Whether a message is short enough to be summed, or gathered, and of a type that the kernel knows."""
        return 0 < x.nbytes <= (_SHORT if gather else _SUMMED)[self._size > 2] and x.numel() <= RUN * MOST and (
            x.is_contiguous() and x.dtype in (*_TYPES, torch.int32))

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' x."""
        return self._exchange("sum", x, torch.empty_like(x))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]"""
        return self._exchange("gather", x, torch.empty((self._size, *x.shape), dtype=x.dtype, device=x.device))

    def takes_rows(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Whether `add_norm` serves x [T, W]."""
        return (0 < x.nbytes <= ROOM and len(x) <= MOST and x.is_contiguous() and x.dtype in _TYPES
                and residual.dtype == x.dtype and residual.stride(1) == 1)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                 offset: float) -> torch.Tensor:
        """The norm of residual plus the sum of the ranks' x, [T, W]; residual then holds that sum."""
        return self._exchange("norm", x, torch.empty_like(x), residual, weight, eps, offset)

    def _exchange(self, kind: str, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None,
                  weight: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0) -> torch.Tensor:
        from penstock.parallel.peer_kernel import exchange  # Triton: heavy, and not everywhere

        width, linked = RUN if residual is None else x.shape[1], gpu.linked(x.device)
        block = gpu.covering(width)
        warps = 4 if residual is None else max(1, min(16, block * x.element_size() // 512))
        exchange[(-(-x.numel() // width),)](
            x, residual, weight, out, *self._places[residual is not None], x.numel(), self._rank,
            0 if residual is None else residual.stride(0), float(eps), float(offset), size=self._size, most=MOST,
            room=ROOM // x.element_size(), width=width, block=block, kind=kind, even=x.numel() % 16 == 0,
            shares=x.nbytes >= self.shares, linked=linked, num_warps=warps, launch_pdl=linked)
        return out


class Shared(Peers):
    """One rank's memory for messages, mapped by processes of one machine."""

    def __init__(self, rank: int, size: int, device: torch.device, group: Any) -> None:
        """`group`: torch's, of the ranks. RuntimeError on all of them if their GPUs cannot map each other's memory."""
        why, own, addresses = "", None, []
        try:
            own = Memory.of(Peers.nbytes(size), device)
        except RuntimeError as error:
            why = str(error)
        handles = _gathered(own.handle if own is not None else bytes(64), size, device, group)
        try:
            addresses = own.open(rank, handles) if own is not None else []
        except RuntimeError as error:
            why = str(error)
        # Nobody writes before all have cleared.
        agreed = all(map(any, _gathered(bytes([not why]), size, device, group)))
        if own is None or not agreed:
            if own is not None:
                own.close()
            raise RuntimeError(why or "another rank's GPU cannot")
        super().__init__(rank, size, addresses, device)
        self._memory, half = own, self.nbytes(size) // 2
        self._flags_at = tuple(at + 2 * size * ROOM for at in (0, half))
        # Pinned now, as pinning waits for kernels that wait for peers.
        self._late = [torch.full((size * MOST,), epoch, dtype=torch.int32, pin_memory=True) for epoch in _LATE]

    def release(self, turn: int) -> None:
        """Ends the wait of kernels for peers that are lost, in one of several turns in a row."""
        for at in self._flags_at:
            self._memory.write(at, self._late[turn % len(_LATE)])

    def close(self) -> None:
        """Lets go of the memory."""
        self._memory.close()


def _gathered(own: bytes, size: int, device: torch.device, group: Any) -> list[bytes]:
    """Every rank's bytes, of equal number."""
    import torch.distributed as dist

    sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
    found = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(found, sent, group=group)
    return [bytes(one.tolist()) for one in found]
