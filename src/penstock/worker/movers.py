"""Carries pages between the device, the host's arena and stores while steps run. `cache/tiers` decides which pages move.

Threads do all transfers, so that steps are not delayed, and each place has its own threads, so that a slow store delays only
the loads that read from it. Movers do not interpret pages; `PageReader` verifies that they are the right ones.

A C++ function (`csrc/pages.cpp`) reads several files per call and computes their checksums, because a dozen Python threads that
take the GIL ten times per page wait for it. Where it cannot be built, and for other stores, pages are read singly."""

import ctypes
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from penstock.core.plan import Load, LoadResult, PageName, Piece, Save, StepPlan, Write, WriteResult
from penstock.core.state import StateSpec, layout_behind
from penstock.ops import native
from penstock.ops.pinned import Pinned
from penstock.stores import Store, record
from penstock.stores.disk import DiskStore
from penstock.stores.guarded import GuardedStore
from penstock.stores.opening import Behind
from penstock.worker.ageing import Ageing
from penstock.worker.arena import Arena, own_pages
from penstock.worker.jobs import Copy, Fence, Job, Lane, Reports, moment

LOG = logging.getLogger("penstock")


class PageReader:
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
            lost = str(OSError(-nbytes, os.strerror(-nbytes), path)) if nbytes < 0 else None
            why = lost or self._fault(name, nbytes, head.data, page, mine)
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


class Threads:
    """Starts tasks in the order of submission, several at a time. A task handles its own errors. The threads are daemons: a
    disk or server that never answers does not keep the process alive."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[..., Any], *arguments: Any) -> None:
        self._tasks.put(lambda: task(*arguments))

    def close(self, seconds: float) -> None:
        """Drops tasks that have not begun and waits up to `seconds` for the others. Threads that still hang are abandoned."""
        while not self._tasks.empty():
            self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


_READERS = {"disk": max(2, min(8, (os.cpu_count() or 1) - 2)), "remote": 16}
"""Reader threads per store of each tier. Disk readers are CPU-bound (copies, checksums): eight nearly fill PCIe 5."""
_BUFFER_BYTES = 8 << 20
"""Size of a read buffer, or one page if that is larger. Larger ones save thread switches, smaller ones copy earlier."""
_SPARE_BUFFERS = 8
"""Buffers beyond one per reader, for copies to the device in flight."""
_WRITERS = 2
"""Writer threads per store. Writes are never urgent."""
_WRITES = 8
"""Pages per task of a writer."""
_IDLE_SECONDS = 0.005
"""Maximum wait of a step without segments for a load, in seconds. New requests are delayed by as much."""
_CLOSE_SECONDS = 2.0
"""Maximum wait of `close` for a hanging store, in seconds."""
_HOST = -1
"""Stands for the host in place of a store's index."""


class Movers:
    """The transfers of one worker. One thread calls `start`, `load` and `arrived`."""

    def __init__(self, arena: Arena, behind: Behind, device: torch.device, states: Sequence[StateSpec] = ()) -> None:
        """Allocates the host arena and, for a GPU, pins it, which takes time per GiB. `states` are the arena's; without them
        pages behind the device are as they are on it."""
        self._arena = arena
        self._device = device
        below = layout_behind(arena.layout, states) if states else arena.layout
        self._ageing = Ageing(states, arena.layout, below) if any(state.aged for state in states) else None
        self._host = Arena(replace(below, slabs=behind.host_slabs), torch.device("cpu"))
        self._bytes = self._host.whole.numpy().data
        self._stores = list(behind.stores)
        self._version = behind.version
        self._saves, self._loads = Lane("penstock-saves", device), Lane("penstock-loads", device)
        self._saved = moment(device)
        """Fence behind the latest saves."""
        self._saving: deque[tuple[Fence, set[tuple[int, int]]]] = deque()
        """Fence and pages (group, page) of the saves that may be in flight, plan by plan."""
        self._ends = ThreadPoolExecutor(1, "penstock-loaded")
        self._sources = [PageReader(store, behind.version) for store in self._stores]
        self._readers = [Threads(_READERS[store.tier], f"penstock-read-{store.tier}") for store in self._stores]
        self._writers = [Threads(_WRITERS, f"penstock-write-{store.tier}") for store in self._stores]
        largest = max(group.page_bytes for group in below.groups)
        self._batch = max(1, _BUFFER_BYTES // largest)
        """Maximum pages per buffer."""
        count = sum(_READERS[store.tier] for store in self._stores) + _SPARE_BUFFERS if self._stores else 0
        buffers = own_pages(count * self._batch * largest).view(count, self._batch * largest)
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in buffers:
            self._buffers.put(buffer)
        self._pinned = [Pinned(memory) for memory in (self._host.whole, buffers) if memory.nbytes and device.type == "cuda"]
        self._reports = Reports()
        self._open: dict[int, Job] = {}

    # -- in a step

    def start(self, plan: StepPlan) -> None:
        """Starts the plan's saves, before it changes a page. Its stream waits for saves only if it overwrites their pages."""
        saves = [transfer for transfer in plan.transfers if isinstance(transfer, Save)]
        fresh = {(save.group, save.page) for save in saves}
        while self._saving and self._saving[0][0].passed():
            self._saving.popleft()
        doomed = set[tuple[int, int]]()
        if saves or self._saving:
            doomed = {place for page in _overwritten(plan, self._arena.layout.page) for place in self._overlaps(*page)}
        held = [fence for fence, pages in self._saving if not doomed.isdisjoint(pages)]
        overtaken = not doomed.isdisjoint(fresh)
        self._saves.hurry = bool(held) or overtaken
        if saves:
            self._saved = self._saves.run(self._downwards(saves), [moment(self._device)])
            self._saving.append((self._saved, fresh))
            held += [self._saved] * overtaken
        for fence in held:
            fence.hold()
        self._saves.hurry = False
        writings = [transfer for transfer in plan.transfers if isinstance(transfer, Write)]
        for i, writers in enumerate(self._writers):
            mine = [writing for writing in writings if writing.store == i]
            for at in range(0, len(mine), _WRITES):
                writers.submit(self._write, mine[at:at + _WRITES], self._saved)

    def load(self, plan: StepPlan) -> None:
        """Starts the plan's loads. Must run after the plan's page copies."""
        for load in (transfer for transfer in plan.transfers if isinstance(transfer, Load)):
            # Steps in flight may still read the old contents of these pages.
            ready = moment(self._device)
            slots = [piece for piece in load.pieces if piece.store < 0]
            parts = list(self._divide([piece for piece in load.pieces if piece.store >= 0]))
            places = [*(part[0].store for part in parts), *([_HOST] if slots else [])]
            job = self._open[load.ticket] = Job(load, places, self._reports)
            if slots and job.wanted():
                job.begin(_HOST)
                self._finish(job, _HOST, self._upwards(slots), [ready, self._saved], None)
            for part in parts:
                self._readers[part[0].store].submit(self._read, job, part, ready)

    def _divide(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Splits pages of stores into parts of one store, at most a buffer long, and enough for all readers."""
        for store in sorted({piece.store for piece in pieces}):
            mine = [piece for piece in pieces if piece.store == store]
            most = min(-(-len(mine) // (2 * _READERS[self._stores[store].tier])), self._batch)
            yield from (mine[at:at + most] for at in range(0, len(mine), most))

    def arrived(self, wait: bool = False) -> tuple[list[LoadResult], list[WriteResult]]:
        """Returns results since the last call. With `wait` and loads in flight, waits up to `_IDLE_SECONDS` for one."""
        if wait and self._open:
            self._reports.wait(_IDLE_SECONDS)
        now = time.perf_counter()
        for job in list(self._open.values()):
            if now > job.deadline:
                job.give_up(late=True)
        load_results, write_results = self._reports.take()
        for result in load_results:
            del self._open[result.ticket]
        return load_results, write_results

    def close(self) -> None:
        """Drops loads and writes that have not begun, and frees the host arena."""
        for job in self._open.values():
            job.give_up()
        for threads in (*self._readers, *self._writers):
            threads.close(_CLOSE_SECONDS)
        self._saves.close()
        self._loads.close()
        self._ends.shutdown()
        for store in self._stores:
            store.close()
        for pinned in self._pinned:
            pinned.release()

    # -- in threads

    def _downwards(self, saves: list[Save]) -> Iterator[Copy]:
        for group, page, slot, count in _runs(saves):
            pages = self._arena.stretch(group, page, count)
            yield (self._host.stretch(group, slot, count),
                   pages if self._ageing is None else self._ageing.old(group, pages, count))

    def _upwards(self, pieces: list[Piece]) -> Iterator[Copy]:
        for group, page, slot, count in _runs(Save(piece.name.group, piece.page, piece.slot) for piece in pieces):
            yield self._arena.stretch(group, page, count), self._returned(group, self._host.stretch(group, slot, count), count)

    def _returned(self, group: int, pages: torch.Tensor, count: int) -> torch.Tensor:
        """Pages of the tiers as the device has them."""
        return pages if self._ageing is None else self._ageing.young(group, pages, count, self._device)

    def _write(self, writings: list[Write], saved: Fence) -> None:
        saved.wait()
        for writing in writings:
            store, ok, began = self._stores[writing.store], False, time.perf_counter()
            try:
                page = self._slot(writing.name.group, writing.slot)
                store.write(writing.name, [memoryview(record.header(self._version, writing.name, page)), page])
                ok = True
            except OSError as error:
                self._reports.complain(f"the {store.tier} tier of the cache does not take pages: {error}")
            finally:
                self._reports.write_results.append(WriteResult(writing.id, ok, time.perf_counter() - began))

    def _read(self, job: Job, pieces: list[Piece], ready: Fence) -> None:
        """Reads pages of a load into a buffer first, because they may turn out to be damaged."""
        store = pieces[0].store
        job.begin(store)
        buffer, read, failed = self._buffers.get(), list[tuple[Piece, torch.Tensor]](), True
        try:
            read, failed = self._fill(job, pieces, buffer), False
        except (ConnectionError, TimeoutError) as error:
            self._reports.complain(f"the {self._stores[store].tier} tier of the cache does not answer: {error}")
        except Exception:
            LOG.exception("a page of the cache could not be read")
        if read and job.wanted():
            copies = ((self._arena.stretch(piece.name.group, piece.page, 1), self._returned(piece.name.group, page, 1))
                      for piece, page in read)
            self._finish(job, store, copies, [ready], buffer)
        else:
            self._buffers.put(buffer)
            job.end(store, False, failed)

    def _fill(self, job: Job, pieces: list[Piece], buffer: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
        """Reads pages into the buffer. Returns those that passed the check."""
        source, copies, at = self._sources[pieces[0].store], list[tuple[Piece, torch.Tensor]](), 0
        count = len(pieces) if source.at_once else 1
        for some in (pieces[first:first + count] for first in range(0, len(pieces), count)):
            if job.given_up:
                return []
            sizes = [self._host.layout.groups[piece.name.group].page_bytes for piece in some]
            mine = buffer[at:at + sum(sizes)]
            at += len(mine)
            bad = source.read([piece.name for piece in some], sizes, mine)
            for name, why in bad.items():
                job.lose(name)
                self._reports.complain(f"a page of the {self._stores[some[0].store].tier} tier of the cache is computed again: "
                                       f"{why}")
            copies += [(piece, read) for piece, read in zip(some, mine.split(sizes), strict=True) if piece.name not in bad]
        return copies

    def _finish(self, job: Job, place: int, copies: Iterable[Copy], after: list[Fence], buffer: torch.Tensor | None) -> None:
        """Copies pages to the device; when done, ends the part of the load and frees its buffer."""
        fence = self._loads.run(copies, after)

        def end() -> None:
            failed = False
            try:
                fence.wait()
            except Exception:
                LOG.exception("a page of the cache could not be copied to the device")
                failed = True
            if buffer is not None:
                self._buffers.put(buffer)
            job.end(place, True, failed)

        self._ends.submit(end)

    def _overlaps(self, group: int, page: int) -> Iterator[tuple[int, int]]:
        """Yields the pages (group, page) that share bytes with this one: itself, and other groups' in the same slab."""
        groups = self._arena.layout.groups
        slab = page // groups[group].per_slab
        for g, cut in enumerate(groups):
            first = slab * cut.per_slab
            yield from ((g, other) for other in ((page,) if g == group else range(first, first + cut.per_slab)))

    def _slot(self, group: int, slot: int) -> memoryview:
        cut = self._host.layout.groups[group]
        return self._bytes[slot * cut.stride:slot * cut.stride + cut.page_bytes]


def _overwritten(plan: StepPlan, page: int) -> Iterator[tuple[int, int]]:
    """The pages (group, page) that a plan may write: new ones for positions not yet computed, targets of copies and loads."""
    for g, edits in enumerate(plan.edits):
        if len(edits):
            starts = np.zeros(1 + max(int(edits[:, 0].max()), int(plan.rows.max(initial=0))), np.int32)
            starts[plan.rows] = plan.starts
            fresh = edits[(edits[:, 1] + 1) * page > starts[edits[:, 0]]]
            yield from ((g, target) for target in fresh[:, 2].tolist())
    yield from ((move.group, move.target) for move in plan.moves)
    for transfer in plan.transfers:
        if isinstance(transfer, Load):
            yield from ((piece.name.group, piece.page) for piece in transfer.pieces)


def _runs(pairs: Iterable[Save]) -> Iterator[tuple[int, int, int, int]]:
    """Merges pages that are consecutive on both sides into runs (group, page, slot, count)."""
    places = enumerate(sorted((save.group, save.page, save.slot) for save in pairs))
    # Along a run, pages and slots grow as the place in the order does.
    for _, run in groupby(places, lambda one: (one[1][0], one[1][1] - one[0], one[1][2] - one[0])):
        (_, first), *others = run
        yield *first, 1 + len(others)
