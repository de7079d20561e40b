"""A checkpoint's safetensors files in memory: mapped, and read a tensor at a time. Nothing here knows what a tensor means."""

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.checkpoint.tensors import TORCH_NAMES, Stored, read_headers


class Checkpoint:
    """All tensors of a model folder by name; their data can be read while it is `mapped`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = read_headers(folder)
        self._files = {stored.file for stored in self.tensors.values()}
        self._maps: dict[Path, mmap.mmap] = {}

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Maps the files during the context. Tensors from `read` must be released before its end."""
        try:
            for path in self._files:
                with path.open("rb") as file:
                    # torch warns of memory that is not writable, so the mapping is private; nothing writes to it.
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            yield
        finally:
            for mapping in self._maps.values():
                mapping.close()
            self._maps.clear()

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, without a copy: the system reads its pages from the file on access."""
        return self.view(self.tensors[name])

    def view(self, stored: Stored) -> torch.Tensor:
        """The tensor that lies at a place of a mapped file."""
        dtype = stored_dtype(stored.dtype)
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype)
        flat = torch.frombuffer(self._maps[stored.file], dtype=dtype, count=math.prod(stored.shape), offset=stored.start)
        return flat.view(stored.shape)

    def behind(self, _name: str) -> Iterable[Stored]:
        """The files' tensors that `read` makes a tensor of, if it is not one of them itself."""
        return ()

    def take(self, stored: Stored) -> torch.Tensor:
        """One of those, where tensors are made. A loader may replace it."""
        return self.view(stored)

    def drop(self, name: str) -> None:
        """Releases the memory pages of a tensor that was read; they can be read from the file again."""
        self.release(self.tensors[name])

    def release(self, stored: Stored) -> None:
        """The same for a place of a mapped file."""
        page = mmap.PAGESIZE
        start = stored.start // page * page
        length = min(-(-stored.end // page) * page, os.path.getsize(stored.file)) - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[stored.file].madvise(mmap.MADV_DONTNEED, start, length)


def stored_dtype(name: str) -> torch.dtype:
    """The torch type of a safetensors type."""
    found = getattr(torch, TORCH_NAMES[name])
    assert isinstance(found, torch.dtype)
    return found
