"""Transfers parts of files to a device at the speed of the disk: threads read large chunks into pinned memory, and copy them
asynchronously. `models/weights.py` knows what the bytes mean."""

import math
import os
import queue
import threading
from collections.abc import Sequence
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
    def __init__(self, chunks: int) -> None:
        self._missing = chunks
        self._sent: list[torch.cuda.Event] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def arrived(self, sent: torch.cuda.Event | None, error: BaseException | None) -> None:
        """Marks one chunk as sent (the event tells when it is there) or failed."""
        with self._changed:
            self._missing -= 1
            self._error = self._error or error
            if sent is not None:
                self._sent.append(sent)
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all chunks are sent, and makes the current stream wait for the copies. Raises the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)
        if self._error is not None:
            raise self._error
        for event in self._sent:
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
        self._given_up = False
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = [threading.Thread(target=self._serve, name="penstock-load", daemon=True)
                         for _ in range(min(_THREADS, max(2, cores)))]
        for thread in self._threads:
            thread.start()

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
        arrival = Arrival(len(firsts))
        for first in firsts:
            begin = there.start + first // there.run * there.pitch + first % there.run
            self._chunks.put(_Chunk(path, there._replace(start=begin), flat[first:first + size], free, arrival))
        return arrival

    def close(self, give_up: bool) -> None:
        """Ends the threads when all transfers are done, or with `give_up` after each thread's current chunk."""
        self._given_up = give_up
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        cuda = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if cuda else None
        buffers: list[_Buffer] = []
        files: dict[Path, int] = {}
        try:
            while (chunk := self._chunks.get()) is not None:
                if self._given_up:
                    continue
                if len(buffers) < _BUFFERS:
                    buffers.insert(0, _Buffer(cuda))
                buffers.append(buffers.pop(0))
                try:
                    if chunk.path not in files:
                        files[chunk.path] = os.open(chunk.path, os.O_RDONLY)
                    with torch.cuda.stream(stream), torch.inference_mode(torch.is_inference(chunk.target)):
                        sent = buffers[-1].carry(files[chunk.path], chunk)
                    chunk.arrival.arrived(sent, None)
                except BaseException as error:  # noqa: BLE001 (whoever waits for the bytes gets it)
                    chunk.arrival.arrived(None, error)
        finally:
            for file in files.values():
                os.close(file)


class _Chunk(NamedTuple):
    path: Path
    there: Bytes
    target: torch.Tensor
    free: torch.cuda.Event | None
    arrival: Arrival


class _Buffer:
    """A host buffer that an asynchronous copy to the device may still be reading."""

    def __init__(self, pinned: bool) -> None:
        self._memory = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pinned)
        self._sent: torch.cuda.Event | None = None

    def carry(self, file: int, chunk: _Chunk) -> torch.cuda.Event | None:
        """Reads the chunk and starts its copy; the event is recorded behind the copy."""
        if self._sent is not None:
            self._sent.synchronize()
        size, there = len(chunk.target), chunk.there
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._memory.is_pinned())
        view = self._memory.numpy().data[:size]
        for run, first in enumerate(range(0, size, there.run)):
            self._read(file, chunk.path, there.start + run * there.pitch, view[first:first + there.run])
        if chunk.free is None:
            chunk.target.copy_(self._memory[:size])
            return None
        chunk.free.wait()
        chunk.target.copy_(self._memory[:size], non_blocking=True)
        self._sent = torch.cuda.current_stream(chunk.target.device).record_event()
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
