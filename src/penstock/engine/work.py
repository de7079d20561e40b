"""A small thread pool for work that would block the event loop. Short jobs go first, and jobs of disconnected clients stop.

Jobs release the GIL where they can (tokenizers, pipes); others call `checkpoint` between pieces, where a cancelled job ends."""

import asyncio
import ctypes
import gc
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from penstock.core.errors import RequestError

Result = TypeVar("Result")

INLINE = 4096
"""Jobs up to this size run on the event loop: they take less than about a millisecond. A size is in characters to tokenize."""

SHORT = 128 << 10
"""Jobs up to this size have a thread of their own."""

SIZE_PER_SECOND = 2 << 20
"""A job's size delays it by size / SIZE_PER_SECOND seconds: shorter jobs that arrive within that time overtake it."""

THREADS = 2 + (len(os.sched_getaffinity(0)) > 2)
"""Threads: one for short jobs only, two for all jobs, or one where two would leave the event loop and the engine none."""

MOST_JOBS = 2048
MOST_SIZE = 512 << 20
"""Limits of the queue: the number of jobs, and their total size. Jobs beyond them are refused (backpressure)."""

_YOUNG = 5_000
"""New objects per collection of the youngest generation, which takes a fraction of a millisecond for as many."""

SWITCH_SECONDS = 0.00005
"""Switch interval of the GIL while workers run: how long the event loop waits for it at most."""


class CancelledWork(Exception):  # noqa: N818 (it is no error)
    """Raised inside a job that was cancelled."""


class _Job:
    __slots__ = ("cancelled", "future", "size", "work")

    def __init__(self, size: int, work: Callable[[], Any]) -> None:
        self.size = size
        self.work = work
        self.future: Future[Any] = Future()
        self.cancelled = False


_current = threading.local()


def abandoned() -> bool:
    """True if this thread runs a job that was cancelled."""
    job: _Job | None = getattr(_current, "job", None)
    return job is not None and job.cancelled


def checkpoint() -> None:
    """Ends the job that this thread runs, if it was cancelled. Does nothing outside of jobs."""
    if abandoned():
        raise CancelledWork


class Workers:
    """Threads that run jobs in the order of arrival plus size. They are daemons and start with the first job."""

    def __init__(self, threads: int = THREADS) -> None:
        """The first thread takes short jobs only. At least 2."""
        assert threads >= 2
        self._count = threads
        self._changed = threading.Condition()
        self._short: list[tuple[float, int, _Job]] = []
        self._long: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._started = False
        self.waiting_size = 0

    async def run(self, size: int, work: Callable[[], Result], *, always: bool = False) -> Result:
        """Runs `work()`, on a thread if large or `always`; cancelled with the caller. RequestError 503: the queue is full."""
        if size <= INLINE and not always:
            return work()
        job = _Job(size, work)
        self._submit(job)
        try:
            result: Result = await asyncio.wrap_future(job.future)
            return result
        finally:
            job.cancelled = True

    def _submit(self, job: _Job) -> None:
        with self._changed:
            if not self._started:
                self._start()
            if len(self._short) + len(self._long) >= MOST_JOBS or self.waiting_size + job.size > MOST_SIZE:
                raise RequestError("too many requests wait to be read; try again in a moment", code="queue_full", status=503)
            queue = self._short if job.size <= SHORT else self._long
            heapq.heappush(queue, (time.monotonic() + job.size / SIZE_PER_SECOND, next(self._numbers), job))
            self.waiting_size += job.size
            self._changed.notify_all() if queue is self._long else self._changed.notify()

    def _start(self) -> None:
        self._started = True
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        for number in range(self._count):
            threading.Thread(target=self._run, args=(number == 0,), name=f"penstock-work-{number}", daemon=True).start()

    def _run(self, short_only: bool) -> None:
        while True:
            job = self._next(short_only)
            if not job.future.set_running_or_notify_cancel():
                continue
            _current.job = job
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # noqa: BLE001 (it is raised where the job is awaited)
                job.future.set_exception(error)
            _current.job = None
            if job.size > SHORT:
                # Tokenizing a text takes about a hundred times its size in memory.
                give_back_memory()
            del job

    def _next(self, short_only: bool) -> _Job:
        with self._changed:
            while True:
                queues = [queue for queue in (self._short, *(() if short_only else (self._long,))) if queue]
                if queues:
                    job: _Job = heapq.heappop(min(queues))[2]
                    self.waiting_size -= job.size
                    return job
                self._changed.wait()


def give_back_memory(at_rest: bool = False) -> None:
    """Returns freed memory to the system, which the allocator would keep. Takes some milliseconds. `at_rest`: frees what only
    cycles hold as well, such as the body of a request whose error refers to it; that stops every thread for so long."""
    if at_rest:
        gc.collect()
    if _trim is not None:
        _trim(0)


def collect_rarely() -> None:
    """Excludes all present objects from garbage collection, and makes collections rarer: one that visits a large request's
    objects stops every thread for milliseconds, and finds little. Call when everything that stays is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


def keep_little(large: int | None = None) -> None:
    """Limits glibc's allocator to few arenas: by default each thread gets its own, and each keeps the most that its thread has
    ever used. Blocks of `large` bytes or more go back to the system as soon as they are freed. Call before threads start."""
    if _mallopt is not None:
        _mallopt(_ARENA_MAX, _ARENAS)
        if large is not None:
            _mallopt(_MMAP_THRESHOLD, large)


_trim, _mallopt = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallopt"))
"""glibc's; None with other C libraries."""
_ARENA_MAX, _MMAP_THRESHOLD = -8, -3
"""M_ARENA_MAX and M_MMAP_THRESHOLD of malloc.h."""
_ARENAS = 2
LARGE = 1 << 20
"""Bytes of a block that a frontend does not keep: long bodies, and what is made of them."""
