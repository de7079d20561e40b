"""Matrices of blocks for which a device has no room: in pinned host memory or in a file, and on the device while they are used.

On a GPU such blocks take turns in a few places. As soon as one has run, the copy of the one that comes next into its place
begins on a stream of its own. Every step begins and ends with the first blocks in their places, so a CUDA graph can hold its
copies. On a CPU the file is mapped: the system reads what is used of it, and keeps as much as there is memory for."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.core.errors import ConfigError
from penstock.models.transfer import Arrival, Bytes, Transfer
from penstock.ops.experts import Stack
from penstock.ops.linear import Weight
from penstock.ops.pinned import Pinned
from penstock.platform.kept import cache_folder

PLACES = 2
"""Of blocks on a GPU: one computes while the next one comes."""
_ALIGNED = 256
"""Bytes; tensors in a place begin at multiples of it."""


class _Part(NamedTuple):
    kept: torch.Tensor
    memory: mmap.mmap
    start: int
    """Its place in the file."""
    random: bool
    """Of experts: only some of it is read."""


class Away:
    """The matrices of one rank's model that are away. Call `keep` for each, `ready`, then `enter` and `leave` around blocks."""

    def __init__(self, device: torch.device, folder: str | None, turns: bool) -> None:
        """`folder`: matrices are in a file there, which has no name and ends with the process; None: in host memory. `turns`:
        blocks take turns on the device; else they are used where they are."""
        self._device, self._turns = device, turns
        self._file: int | None = None
        self._transfer: Transfer | None = None
        self._end = 0
        if folder is not None:
            self._file = _opened(folder)
            weakref.finalize(self, os.close, self._file)
            if turns:
                self._transfer = Transfer(device)
                weakref.finalize(self, self._transfer.close, True)
        self._weights: dict[int, list[Weight]] = {}
        self._parts: dict[int, list[_Part]] = {}
        self._pinned: list[Pinned] = []
        self._order: list[int] = []
        self._views: list[list[torch.Tensor]] = []
        """By turn, the bytes of a block's tensors in its place."""
        self._stream = torch.cuda.Stream(device) if turns and device.type == "cuda" else None
        self._arrived: list[list[Arrival] | torch.cuda.Event | None] = []
        """By turn, what tells that a block has come."""
        self.saved = 0
        """Bytes of matrices less those of the places."""

    def keep(self, block: int, weight: Weight) -> None:
        """Takes over a matrix's memory."""
        known: dict[tuple[int, torch.Size], torch.Tensor] = {}

        def change(x: torch.Tensor) -> torch.Tensor:
            key = x.data_ptr(), x.shape
            if x.numel() and key not in known:
                part = self._put(x, isinstance(weight, Stack))
                self._parts.setdefault(block, []).append(part)
                known[key] = part.kept
            return known.get(key, x)

        weight.move(change)
        self._weights.setdefault(block, []).append(weight)

    def _put(self, x: torch.Tensor, random: bool) -> _Part:
        size, start = x.nbytes, self._end
        if self._file is None:
            memory = mmap.mmap(-1, size)
        else:
            self._end = -(-(start + size) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.truncate(self._file, self._end)
            _write(self._file, start, _flat(x).cpu())
            memory = mmap.mmap(self._file, size, access=mmap.ACCESS_COPY, offset=start)
        kept = torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype).as_strided(x.shape, x.stride())
        if self._file is None:
            _flat(kept).copy_(_flat(x))
            if self._device.type == "cuda":
                self._pinned.append(Pinned(_flat(kept)))
        elif random:
            memory.madvise(mmap.MADV_RANDOM)
        return _Part(kept, memory, start, random)

    def ready(self) -> None:
        """Makes places on the device, and brings the first blocks there."""
        self._order = sorted(self._parts)
        sizes = [sum(_room(part.kept) for part in self._parts[block]) for block in self._order]
        self.saved = sum(sizes)
        if not self._turns or not sizes:
            return
        places = [torch.empty(max(sizes), dtype=torch.uint8, device=self._device) for _ in range(PLACES)]
        self.saved -= PLACES * max(sizes)
        self._arrived = [None] * len(sizes)
        for turn, block in enumerate(self._order):
            at, views = 0, dict[tuple[int, torch.Size], torch.Tensor]()
            self._views.append([])
            for part in self._parts[block]:
                kept, memory = part.kept, places[turn % PLACES][at:at + part.kept.nbytes]
                self._views[-1].append(memory)
                views[kept.data_ptr(), kept.shape] = memory.view(kept.dtype).as_strided(kept.shape, kept.stride())
                at += _room(kept)
            for weight in self._weights[block]:
                weight.move(lambda x, views=views: views.get((x.data_ptr(), x.shape), x))  # type: ignore[misc]
        for turn in range(min(PLACES, len(sizes))):
            self._start(turn)
            self._wait(turn)
        if self._stream is not None:
            torch.cuda.synchronize(self._device)

    def enter(self, block: int) -> None:
        """The current stream waits for a block's matrices."""
        if self._turns and (turn := self._order.index(block)) >= PLACES:
            self._wait(turn)

    def leave(self, block: int) -> None:
        """The block has run, as far as the current stream knows: its place is the next one's."""
        turn, count = self._order.index(block), len(self._order)
        after = turn + PLACES if turn + PLACES < count else turn % PLACES
        if not self._turns:
            for part in self._parts[self._order[(turn + 1) % count]]:
                if not part.random:
                    part.memory.madvise(mmap.MADV_WILLNEED)
        elif after != turn:
            self._start(after)
        if self._turns and turn == count - 1:
            # The first blocks are in their places when the step ends.
            for first in range(min(PLACES, count)):
                self._wait(first)

    @contextmanager
    def there(self, block: int) -> Iterator[None]:
        """A block's matrices are in their place meanwhile, out of turn."""
        turn = self._order.index(block) if self._turns and block in self._parts else 0
        if turn >= PLACES:
            self._start(turn)
            self._wait(turn)
        yield
        if turn >= PLACES:
            self._start(turn % PLACES)
            self._wait(turn % PLACES)

    def _start(self, turn: int) -> None:
        parts, views = self._parts[self._order[turn]], self._views[turn]
        if self._transfer is not None:
            path = Path(f"/proc/self/fd/{self._file}")
            self._arrived[turn] = [self._transfer.send(path, Bytes.of(part.start, view), view)
                                   for part, view in zip(parts, views, strict=True)]
        elif self._stream is None:
            _copy(parts, views)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                _copy(parts, views)
                self._arrived[turn] = self._stream.record_event()

    def _wait(self, turn: int) -> None:
        arrived, self._arrived[turn] = self._arrived[turn], None
        for one in arrived if isinstance(arrived, list) else [] if arrived is None else [arrived]:
            one.wait()


def _opened(folder: str) -> int:
    """A new file without a name."""
    try:
        where = Path(folder) if folder else cache_folder()
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise ConfigError(f"offload_folder {folder!r} cannot hold a file: {error.strerror}") from None


def _write(file: int, start: int, x: torch.Tensor) -> None:
    view, done = x.numpy().data, 0
    try:
        while done < len(view):
            done += os.pwrite(file, view[done:done + (1 << 30)], start + done)
    except OSError as error:
        raise ConfigError(f"offload_folder has no room for the weights: {error.strerror} after {start + done:,} bytes; name "
                          "another folder") from None


def _copy(parts: Sequence[_Part], views: Sequence[torch.Tensor]) -> None:
    for part, view in zip(parts, views, strict=True):
        view.copy_(_flat(part.kept), non_blocking=True)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, in the order of its memory."""
    flat = x.as_strided((x.numel(),), (1,))
    assert 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) == x.numel(), x.shape
    return flat.view(torch.uint8)


def _room(x: torch.Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED
