"""Messages between GPUs of one machine through memory that all map (CUDA's IPC): short ones by the kernel of peer_kernel.py,
long ones between two ranks by the copy engines, which take no multiprocessor from the kernels beside them."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch

from penstock.ops import gpu
from penstock.ops.messages import LONG, MOST as MOST_RUNS
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


    def view(self, at: int, nbytes: int) -> torch.Tensor:
        """The bytes from `at` on, without a copy."""
        given = {"shape": (nbytes,), "typestr": "|u1", "data": (self.address.value + at, False), "version": 3}
        return torch.as_tensor(type("_", (), {"__cuda_array_interface__": given})(), device=self._stream.device)


@cache
def _driver() -> ctypes.CDLL:
    found, stream, address, word = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
    found.cuMemcpyDtoDAsync_v2.argtypes = address, address, ctypes.c_size_t, stream
    found.cuStreamWriteValue32_v2.argtypes = found.cuStreamWaitValue32_v2.argtypes = stream, address, word, word
    return found


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
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
_PLACES = 2 * MOST_RUNS
"""Places of long messages, used in turn: twice as many as a layer's branch may have. A rank sends those of the next branch when
it has the other's of this one, so the other has read those of the branch before."""
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

        width = RUN if residual is None else x.shape[1]
        block = gpu.covering(width)
        warps = 4 if residual is None else max(1, min(16, block * x.element_size() // 512))
        exchange[(-(-x.numel() // width),)](
            x, residual, weight, out, *self._places[residual is not None], x.numel(), self._rank,
            0 if residual is None else residual.stride(0), float(eps), float(offset), size=self._size, most=MOST,
            room=ROOM // x.element_size(), width=width, block=block, kind=kind, even=x.numel() % 16 == 0,
            shares=x.nbytes >= self.shares, num_warps=warps, **gpu.linked(x.device))
        return out


class Shared(Peers):
    """One rank's memory for messages, mapped by processes of one machine."""

    def __init__(self, rank: int, size: int, device: torch.device, group: Any) -> None:
        """`group`: torch's, of the ranks. RuntimeError on all of them if their GPUs cannot map each other's memory."""
        why, own, addresses = "", None, []
        try:
            own = Memory.of(Peers.nbytes(size) + (_PLACES * (LONG + 4) if size == 2 else 0), device)
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
        self._own, self._peer, self._long, self._sent = addresses[rank], addresses[rank - 1], self.nbytes(size), 0
        self._stream = torch.cuda.Stream(device)
        self._events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(_PLACES)]
        self._arrivals = own.view(self._long, _PLACES * LONG).view(_PLACES, LONG).unbind() if size == 2 else ()
        self._flags_at = tuple(at + 2 * size * ROOM for at in (0, half))
        # Pinned now, as pinning waits for kernels that wait for peers.
        self._late = [torch.full((size * MOST,), epoch, dtype=torch.int32, pin_memory=True) for epoch in _LATE]

    def release(self, turn: int) -> None:
        """Ends the wait of kernels and streams for peers that are lost, in one of several turns in a row."""
        late = self._late[turn % len(_LATE)]
        for at in self._flags_at:
            self._memory.write(at, late)
        if self._size == 2:
            self._memory.write(self._long + _PLACES * LONG, late[:_PLACES])

    @property
    def copies(self) -> bool:
        """Whether long messages are sent by copies: between two ranks, and not in CUDA graphs, which would replay the numbers
        of messages."""
        return self._size == 2 and not torch.cuda.is_current_stream_capturing()

    def sends(self, x: torch.Tensor) -> bool:
        return x.nbytes <= LONG and x.is_contiguous() and self.copies

    def send(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to copy x to the other of two ranks, behind what the stream computes now. A call has the stream wait for the
        other's x, which is returned, and for the end of this copy. At most four are under way."""
        place, epoch = self._sent % _PLACES, self._sent // _PLACES + 1 & 0xFFFFFFFF
        self._sent += 1
        at, flag = self._long + place * LONG, self._long + _PLACES * LONG + 4 * place
        stream, through, (made, copied) = torch.cuda.current_stream(x.device), self._stream.cuda_stream, self._events[place]
        made.record(stream)
        self._stream.wait_event(made)
        _call("cuMemcpyDtoDAsync_v2", self._peer + at, x.data_ptr(), x.nbytes, through)
        _call("cuStreamWriteValue32_v2", through, self._peer + flag, epoch, 0)
        copied.record(self._stream)

        def arrived() -> torch.Tensor:
            stream.wait_event(copied)
            _call("cuStreamWaitValue32_v2", stream.cuda_stream, self._own + flag, epoch, 0)
            return self._arrivals[place][:x.nbytes].view(x.dtype).view_as(x)

        return arrived

    def close(self) -> None:
        self._memory.close()


def _gathered(own: bytes, size: int, device: torch.device, group: Any) -> list[bytes]:
    """Every rank's bytes, of equal number."""
    import torch.distributed as dist

    sent = torch.tensor(list(own), dtype=torch.uint8, device=device)
    found = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(found, sent, group=group)
    return [bytes(one.tolist()) for one in found]
