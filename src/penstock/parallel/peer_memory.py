"""Memory of a GPU that other processes of its machine map, by CUDA's IPC."""

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

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
