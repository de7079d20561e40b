"""Transfers parts of files to a device at the speed of the disk: threads read large chunks into pinned memory, and copy them
asynchronously. `models/weights.py` knows what the bytes mean."""

import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.errors import ModelError

_CHUNK = 16 << 20
"""Bytes per read: large enough for full disk bandwidth, small enough that all threads work on a large matrix."""
_THREADS = 16
_READ_AHEAD = 128 << 10
"""The system's default."""
_BUFFERS = 2
"""Pinned buffers per thread: one is read into while the other is copied to the device."""


class Arrival:
    """The chunks of a transfer, each with the event behind its copy, or None if it was copied at once."""

    def __init__(self, chunks: Sequence[Future[torch.cuda.Event | None]]) -> None:
        self._chunks = chunks

    def wait(self) -> None:
        """Waits until all chunks are sent, and makes the current stream wait for the copies. Raises the first error."""
        for event in [chunk.result() for chunk in self._chunks]:
            if event is not None:
                event.wait()


class Bytes(NamedTuple):
    """Where a tensor lies in a file: from `start` on in runs of `run` bytes, whose beginnings are `pitch` bytes apart."""

    start: int
    run: int
    pitch: int

    @classmethod
    def of(cls, start: int, tensor: torch.Tensor) -> "Bytes":
        return cls(start, tensor.nbytes, tensor.nbytes)

    @classmethod
    def cut(cls, start: int, shape: Sequence[int], itemsize: int, axis: int, first: int, count: int) -> "Bytes":
        """`count` places from `first` on along an axis of the tensor of `shape` that lies at `start`."""
        place = math.prod(shape[axis + 1:]) * itemsize
        return cls(start + first * place, count * place, shape[axis] * place)


class Transfer:
    """The reading threads and their buffers. As a context: wait for every transfer before its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own, self._files = threading.local(), list[dict[Path, int]]()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(min(_THREADS, max(2, cores)), "penstock-load", self._begin)

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(give_up=kind is not None)

    def send(self, path: Path, there: Bytes, target: torch.Tensor) -> Arrival:
        """Fills `target`, a contiguous tensor on the device, with the bytes of the file that are `there`. Does not wait."""
        flat = target.view(-1).view(torch.uint8)
        # The target's memory may have been another tensor's, which the current stream has still to read.
        free = torch.cuda.current_stream(self._device).record_event() if flat.is_cuda else None
        # Chunks of whole runs, where there are several.
        size = _CHUNK if there.run >= len(flat) else max(there.run, _CHUNK // there.run * there.run)
        firsts = range(0, len(flat), size)
        begins = (there.start + first // there.run * there.pitch + first % there.run for first in firsts)
        return Arrival([self._pool.submit(self._carry, path, there._replace(start=begin), flat[first:first + size], free)
                        for first, begin in zip(firsts, begins, strict=True)])

    def close(self, give_up: bool) -> None:
        """Ends the threads when all transfers are done, or with `give_up` after each thread's current chunk."""
        self._pool.shutdown(cancel_futures=give_up)
        for files in self._files:
            while files:
                os.close(files.popitem()[1])

    def _begin(self) -> None:
        """Makes what a thread has of its own."""
        own = self._own
        own.stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        own.buffers, own.files = deque[_Buffer](), dict[Path, int]()
        self._files.append(own.files)

    def _carry(self, path: Path, there: Bytes, target: torch.Tensor, free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        own = self._own
        if len(own.buffers) < _BUFFERS:
            own.buffers.appendleft(_Buffer(own.stream is not None))
        else:
            own.buffers.rotate()
        if path not in own.files:
            own.files[path] = os.open(path, os.O_RDONLY)
        with torch.cuda.stream(own.stream), torch.inference_mode(torch.is_inference(target)):
            sent: torch.cuda.Event | None = own.buffers[0].carry(own.files[path], path, there, target, free)
            return sent


class _Buffer:
    """A host buffer that an asynchronous copy to the device may still be reading."""

    def __init__(self, pinned: bool) -> None:
        self._memory = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pinned)
        self._sent: torch.cuda.Event | None = None

    def carry(self, file: int, path: Path, there: Bytes, target: torch.Tensor,
              free: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Reads a chunk and starts its copy; the event is recorded behind the copy."""
        if self._sent is not None:
            self._sent.synchronize()
        size = len(target)
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._memory.is_pinned())
        view = self._memory.numpy().data[:size]
        for run, first in enumerate(range(0, size, there.run)):
            self._read(file, path, there.start + run * there.pitch, view[first:first + there.run])
        if free is None:
            target.copy_(self._memory[:size])
            return None
        free.wait()
        target.copy_(self._memory[:size], non_blocking=True)
        self._sent = torch.cuda.current_stream(target.device).record_event()
        return self._sent

    @staticmethod
    def _read(file: int, path: Path, start: int, view: memoryview) -> None:
        size, done = len(view), 0
        if size > _READ_AHEAD and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)
        while done < size:
            count = os.preadv(file, [view[done:]], start + done)
            if count == 0:
                raise ModelError(f"{path} ends at byte {start + done}, while it is being read; download it again")
            done += count
