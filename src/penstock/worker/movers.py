"""Carries pages between the device, the host's arena and stores while steps run. What moves is decided in `cache/tiers`.

Saves run in a lane of their own, beside the steps. Loads and writes to stores run in threads: those of one place never wait for
those of another, so a slow store delays nobody who does not read from it. Nothing here knows what a page means; that it is the
one that was asked for is checked against its header (`stores/record.py`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from penstock.core.plan import StepPlan
from penstock.core.transfer import Landing, Load, PageName, Piece, Receipt, Save
from penstock.core.transfer import Store as Writing
from penstock.stores import Store, record
from penstock.worker.arena import Arena
from penstock.worker.lanes import Copy, Lane, Mark, StreamLane, StreamMark, ThreadLane, copy_all, pin, unpin

LOG = logging.getLogger("penstock")

_READERS = {"disk": max(2, min(8, (os.cpu_count() or 1) - 2)), "remote": 16}
"""Threads that read from a store of each tier. A disk's are busy with checking what they read, and more than these only contend
(bench/notes.md, "Tiers"); a network's wait."""
_BUFFER_BYTES = 8 << 20
"""A reader's buffer, if a page is not larger. Larger ones save switches between threads, smaller ones begin to copy sooner."""
_WRITERS = 2
"""Writing is never urgent."""
_IDLE_SECONDS = 0.005
"""For how long a step with nothing to compute waits for a load; new requests wait as long."""
_SILENT_SECONDS = 10.0
"""Between two lines of log about failures."""
_HOST = -1
"""In place of a store's number."""


class Behind(NamedTuple):
    """What is behind the device."""

    host_slabs: int
    stores: Sequence[Store]
    version: bytes
    """Of the pages in the stores (`stores/version.py`)."""


class Movers:
    """The transfers of one worker. One thread calls `start`, `load` and `arrived`."""

    def __init__(self, arena: Arena, behind: Behind, device: torch.device) -> None:
        """Allocates the host's arena; on a GPU it is pinned, which takes a while for each GiB."""
        host_slabs, stores, version = behind
        self._arena = arena
        self._device = device
        self._host = Arena(replace(arena.layout, slabs=host_slabs), torch.device("cpu"))
        self._unpin: Callable[[], object] = _nothing
        if device.type == "cuda":
            pin(self._host.whole)
            # Also where nobody calls `close`: the next owner of the address could not pin it otherwise.
            self._unpin = weakref.finalize(self, unpin, self._host.whole.data_ptr())
        self._bytes = memoryview(self._host.whole.numpy())
        self._stores = list(stores)
        self._version = version
        self._lane: Lane = StreamLane(device) if device.type == "cuda" else ThreadLane()
        self._saved: Mark | None = None
        """The end of the saves that were started last."""
        self._saving: deque[tuple[Mark, set[tuple[int, int]]]] = deque()
        """The pages (group, page) of saves that may still be under way, plan by plan."""
        self._readers = {_HOST: ThreadPoolExecutor(1, "penstock-host")}
        self._writers = {}
        for i, store in enumerate(stores):
            self._readers[i] = ThreadPoolExecutor(_READERS[store.tier], f"penstock-read-{store.tier}")
            self._writers[i] = ThreadPoolExecutor(_WRITERS, f"penstock-write-{store.tier}")
        largest = max(group.page_bytes for group in arena.layout.groups)
        self._batch = max(1, _BUFFER_BYTES // largest)
        """How many pages a reader reads before it copies them to the device."""
        self._buffer_bytes = self._batch * largest
        self._own = threading.local()
        self._reports = _Reports()
        self._open: dict[int, _Job] = {}

    # -- in a step

    def start(self, plan: StepPlan) -> None:
        """Before anything of the plan changes a page: saves what it says. The plan waits for saves, these and earlier ones,
        only if it is going to overwrite what they read."""
        saves = [transfer for transfer in plan.transfers if isinstance(transfer, Save)]
        if saves:
            self._saved = self._lane.run([(self._host.stretch(group, slot, count), self._arena.stretch(group, page, count))
                                          for group, page, slot, count in _runs(saves)])
            self._saving.append((self._saved, {(save.group, save.page) for save in saves}))
        while self._saving and self._saving[0][0].passed():
            self._saving.popleft()
        if self._saving:
            doomed = set(_overwritten(plan, self._arena.layout.page))
            for mark, pages in self._saving:
                if not doomed.isdisjoint(pages):
                    mark.hold_steps()
        for transfer in plan.transfers:
            if isinstance(transfer, Writing):
                self._writers[transfer.store].submit(self._write, transfer, self._saved)

    def load(self, plan: StepPlan) -> None:
        """After the plan's page copies: starts its loads."""
        loads = [transfer for transfer in plan.transfers if isinstance(transfer, Load)]
        if not loads:
            return
        # Steps that are under way may still read what was in these pages before.
        ready = StreamMark() if self._device.type == "cuda" else None
        for load in loads:
            job = self._open[load.ticket] = _Job(load, self._reports)
            slots = [piece for piece in load.pieces if piece.store < 0]
            parts = list(self._divide([piece for piece in load.pieces if piece.store >= 0]))
            job.expect(len(parts) + bool(slots))
            if slots:
                self._readers[_HOST].submit(self._from_host, job, slots, ready, self._saved)
            for part in parts:
                self._readers[part[0].store].submit(self._from_store, job, part, ready)

    def _divide(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Pages of stores in parts for the readers: of one store each, no more than a buffer holds, and enough parts that all
        readers have work."""
        for store in sorted({piece.store for piece in pieces}):
            mine = [piece for piece in pieces if piece.store == store]
            most = min(-(-len(mine) // (2 * _READERS[self._stores[store].tier])), self._batch)
            yield from (mine[at:at + most] for at in range(0, len(mine), most))

    def arrived(self, wait: bool = False) -> tuple[list[Landing], list[Receipt]]:
        """What has ended since the last call. With `wait`, and loads under way, it may wait a moment for one."""
        if wait and self._open:
            self._reports.wait(_IDLE_SECONDS)
        now = time.perf_counter()
        for job in list(self._open.values()):
            if now > job.deadline:
                job.give_up()
        landings, receipts = self._reports.take()
        for landing in landings:
            del self._open[landing.ticket]
        return landings, receipts

    def close(self) -> None:
        """Drops loads that have not begun, finishes writes, and frees the host's memory."""
        for job in self._open.values():
            job.give_up()
        for threads in (*self._readers.values(), *self._writers.values()):
            threads.shutdown()
        self._lane.close()
        for store in self._stores:
            store.close()
        self._unpin()

    # -- in threads

    def _write(self, writing: Writing, saved: Mark | None) -> None:
        """One page from the host to a store."""
        store, ok, began = self._stores[writing.store], False, time.perf_counter()
        try:
            if saved is not None:
                saved.wait()
            began = time.perf_counter()
            page = self._slot(writing.name.group, writing.slot)
            store.write(writing.name, [memoryview(record.header(self._version, writing.name, page)), page])
            ok = True
        except OSError as error:
            self._reports.complain(f"the {store.tier} tier of the cache does not take pages: {error}")
        finally:
            self._reports.receipts.append(Receipt(writing.id, ok, time.perf_counter() - began))

    def _from_host(self, job: _Job, pieces: list[Piece], ready: StreamMark | None, saved: Mark | None) -> None:
        """The part of a load that comes from the host's arena."""
        with job.part(_HOST) as wanted:
            if wanted():
                if saved is not None:
                    saved.wait()
                runs = _runs(Save(piece.name.group, piece.page, piece.slot) for piece in pieces)
                self._to_device([(self._arena.stretch(group, page, count), self._host.stretch(group, slot, count))
                                 for group, page, slot, count in runs], ready)

    def _from_store(self, job: _Job, pieces: list[Piece], ready: StreamMark | None) -> None:
        """Some pages of a load, by way of a buffer, because they are not certain to be the right ones."""
        store, copies, at = self._stores[pieces[0].store], list[Copy](), 0
        with job.part(pieces[0].store) as wanted:
            for piece in pieces:
                if job.given_up:
                    return
                page = self._arena.stretch(piece.name.group, piece.page, 1)
                buffer = self._buffer()[at:at + page.nbytes]
                why = self._fetch(store, piece.name, memoryview(buffer.numpy()))
                if why is not None:
                    job.lose(piece.name)
                    self._reports.complain(f"a page of the {store.tier} tier of the cache is computed again: {why}")
                    return
                copies.append((page, buffer))
                at += page.nbytes
            if wanted():
                self._to_device(copies, ready)

    def _fetch(self, store: Store, name: PageName, page: memoryview) -> str | None:
        """Reads a page and checks it; what is wrong with it, None if nothing is. What is broken is deleted."""
        head = memoryview(bytearray(record.HEADER_BYTES))
        try:
            nbytes = store.read(name, [head, page])
            if nbytes < len(head) + len(page):
                why = f"it ends after {nbytes} bytes of {len(head) + len(page)}"
            else:
                fault = record.fault(self._version, name, head, page)
                if fault is None:
                    return None
                why = fault
            store.delete(name)
        except OSError as error:
            return str(error) or type(error).__name__
        return why

    def _to_device(self, copies: list[Copy], ready: StreamMark | None) -> None:
        """Copies to the device and returns when they are there."""
        if ready is None:
            copy_all(copies)
            return
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._own.stream):
            ready.hold_steps()
            copy_all(copies)
            StreamMark().wait()

    def _buffer(self) -> torch.Tensor:
        """This thread's own memory, for `_batch` pages of any group."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        buffer: torch.Tensor = self._own.buffer
        return buffer

    def _slot(self, group: int, slot: int) -> memoryview:
        cut = self._host.layout.groups[group]
        return self._bytes[slot * cut.stride:slot * cut.stride + cut.page_bytes]


class _Job:
    """A load under way, in parts that threads do. It lands when all are done, or when it is given up and no thread is between
    `wanted` and the end of its part, as only there pages of the device are written."""

    def __init__(self, load: Load, reports: _Reports) -> None:
        self.ticket = load.ticket
        self.deadline = time.perf_counter() + load.patience
        self.given_up = False
        self._reports = reports
        self._left = 0
        self._writing = 0
        self._landed = False
        self._lost: list[PageName] = []
        self._began = 0.0
        self._furthest = _HOST
        self._lock = threading.Lock()

    def expect(self, parts: int) -> None:
        """So many parts will be done. Said before the first begins."""
        self._left = parts

    def lose(self, name: PageName) -> None:
        """A page is not to be had, so there is no use in the others."""
        self._lost.append(name)
        self.given_up = True

    @contextmanager
    def part(self, place: int) -> Iterator[Callable[[], bool]]:
        """Around a part that comes from `place`. Gives a function to be called before pages are written: whether to do so."""
        writing = False
        with self._lock:
            self._began = self._began or time.perf_counter()
            self._furthest = max(self._furthest, place)

        def wanted() -> bool:
            nonlocal writing
            with self._lock:
                if not self.given_up:
                    writing = True
                    self._writing += 1
            return writing

        try:
            yield wanted
        except Exception:
            LOG.exception("a page of the cache could not be moved")
            self.given_up = True
        finally:
            with self._lock:
                self._left -= 1
                self._writing -= writing
                self._land_if_over()

    def give_up(self) -> None:
        """It is no longer wanted, or takes too long."""
        with self._lock:
            self.given_up = True
            self._land_if_over()

    def _land_if_over(self) -> None:
        if not self._landed and not self._writing and (self.given_up or not self._left):
            self._landed = True
            self._reports.land(self.ticket, not self.given_up, self._began, self._furthest, tuple(self._lost))


class _Reports:
    """What threads have to tell."""

    def __init__(self) -> None:
        self.receipts: deque[Receipt] = deque()
        self._landings: list[Landing] = []
        self._ends: dict[int, float] = {}
        """When the last load from each place ended."""
        self._some = threading.Condition()
        self._complained = -_SILENT_SECONDS

    def land(self, ticket: int, ok: bool, began: float, furthest: int, lost: tuple[PageName, ...]) -> None:
        now = time.perf_counter()
        with self._some:
            since = max(began or now, self._ends.get(furthest, 0.0))
            self._ends[furthest] = now
            self._landings.append(Landing(ticket, ok, now - since, lost))
            self._some.notify_all()

    def wait(self, seconds: float) -> None:
        """Returns when there is a landing, or after so long."""
        with self._some:
            self._some.wait_for(lambda: bool(self._landings), seconds)

    def take(self) -> tuple[list[Landing], list[Receipt]]:
        with self._some:
            landings, self._landings = self._landings, []
        return landings, [self.receipts.popleft() for _ in range(len(self.receipts))]

    def complain(self, what: str) -> None:
        """Logs a failure, at most one in a while: a disk that fails does so often."""
        now = time.monotonic()
        if now - self._complained >= _SILENT_SECONDS:
            self._complained = now
            LOG.warning("%s (others like this in the next %.0f s are not told)", what, _SILENT_SECONDS)


def _nothing() -> None:
    """Where nothing was pinned."""


def _overwritten(plan: StepPlan, page: int) -> Iterator[tuple[int, int]]:
    """The pages (group, page) that a plan may write to: those that its rows get for positions that are not computed yet, and
    the targets of its copies and loads."""
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
    """(group, page, slot, count): pages that follow each other on both sides are copied in one piece."""
    first: Save | None = None
    count = 0
    for pair in sorted(pairs):
        if first is not None and pair == (first.group, first.page + count, first.slot + count):
            count += 1
            continue
        if first is not None:
            yield *first, count
        first, count = pair, 1
    if first is not None:
        yield *first, count
