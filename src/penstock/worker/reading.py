"""Reads pages from a store and verifies them. Thread-safe.

A C++ function (`csrc/pages.cpp`) reads several files per call and computes their checksums, because a dozen Python threads that
take the GIL ten times per page wait for it. Where it cannot be built, and for other stores, pages are read singly."""

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import cast

import numpy as np
import torch

from penstock.core.transfer import PageName
from penstock.ops import native
from penstock.stores import Store, record
from penstock.stores.disk import DiskStore
from penstock.stores.guarded import GuardedStore

LOG = logging.getLogger("penstock")


class PageReader:
    """Reads pages of one version from one store."""

    def __init__(self, store: Store, version: bytes) -> None:
        self._store = store
        self._version = version
        self._files = store if isinstance(store, GuardedStore | DiskStore) and store.tier == "disk" else None
        self._function = _function() if self._files is not None else None
        self.at_once = self._function is not None
        """Whether one call for many pages is faster than several calls."""

    def read(self, names: Sequence[PageName], sizes: Sequence[int], memory: torch.Tensor) -> dict[PageName, str]:
        """Fills `memory` (bytes) with pages of these sizes, one after another. Returns the reason for each page that is
        missing or damaged. ConnectionError or TimeoutError if the store does not answer."""
        whole, ends = memory.numpy().data, list(accumulate(sizes))
        pages = [whole[end - size:end] for size, end in zip(sizes, ends, strict=True)]
        if self._files is not None and self._function is not None:
            paths = self._files.files(names)
            if paths is not None:
                return self._read_files(paths, self._function, names, pages, memory)
        found = {name: self._read_one(name, page) for name, page in zip(names, pages, strict=True)}
        return {name: why for name, why in found.items() if why is not None}

    def _read_one(self, name: PageName, page: memoryview) -> str | None:
        head = memoryview(bytearray(record.HEADER_BYTES))
        try:
            nbytes = self._store.read(name, [head, page])
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            return str(error) or type(error).__name__
        return self._fault(name, nbytes, head, page, None)

    def _read_files(self, paths: list[str], function: Callable[..., None], names: Sequence[PageName],
                    pages: list[memoryview], memory: torch.Tensor) -> dict[PageName, str]:
        count = len(names)
        sizes = np.array([page.nbytes for page in pages], np.int64)
        heads, found = np.empty((count, record.HEADER_BYTES), np.uint8), np.empty(count, np.int64)
        sums = np.empty(sum(map(record.sums_of, sizes.tolist())), np.uint64)
        texts = (ctypes.c_char_p * count)(*map(os.fsencode, paths))
        function(count, texts, record.HEADER_BYTES, heads.ctypes.data, sizes.ctypes.data, memory.data_ptr(), sums.ctypes.data,
                 found.ctypes.data)
        bad, at = dict[PageName, str](), 0
        for name, path, page, head, nbytes in zip(names, paths, pages, heads, found.tolist(), strict=True):
            mine = sums[at:at + record.sums_of(page.nbytes)]
            at += len(mine)
            if nbytes < 0:
                why: str | None = str(OSError(-nbytes, os.strerror(-nbytes), path))
            else:
                why = self._fault(name, nbytes, head.data, page, mine)
            if why is not None:
                bad[name] = why
        return bad

    def _fault(self, name: PageName, nbytes: int, head: memoryview, page: memoryview, sums: record.Sums | None) -> str | None:
        if nbytes < len(head) + len(page):
            return f"it ends after {nbytes} bytes of {len(head) + len(page)}"
        return record.fault(self._version, name, head, page, sums)


@cache
def _function() -> Callable[..., None] | None:
    """Returns penstock_read_pages, building it if needed; None if it cannot be built, which is logged once."""
    if sys.byteorder != "little":
        # The checksums are defined on little-endian words.
        return None
    try:
        function = ctypes.CDLL(str(native.compiled("pages", Path(__file__).parent / "csrc"))).penstock_read_pages
    except (native.BuildError, OSError) as error:
        LOG.warning("pages of the disk tier are read by a slower way: %s", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [number, ctypes.POINTER(ctypes.c_char_p), number, *[pointer] * 5]
    function.restype = None
    return cast(Callable[..., None], function)
