"""How plans reach a worker. An executor takes plans in order and gives something to wait on for each result, in order."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from penstock.core.plan import StepPlan, StepResult


class Pending(Protocol):
    """A step that was handed over."""

    def result(self) -> StepResult:
        """Waits for the step."""
        ...


class Launches(Protocol):
    """Whatever executes plans: a Worker, or a fake in tests. `launch` need not wait for the device."""

    def launch(self, plan: StepPlan) -> Pending: ...


class Executor(Protocol):
    """`submit` returns at once if it can; results come in the order of submission."""

    def submit(self, plan: StepPlan) -> Pending: ...

    def close(self) -> None: ...


class Threaded:
    """For a device whose work is the host's: runs plans on a thread of this process, so that the next is made meanwhile.

    At depth 1 too, where there is nothing to overlap with: a Ctrl-C then interrupts the waiting, never the work.
    """

    def __init__(self, worker: Launches) -> None:
        self._worker = worker
        self._queue: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="penstock-worker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, future = item
            try:
                future.set_result(self._worker.launch(plan).result())
            except BaseException as error:
                future.set_exception(error)

    def submit(self, plan: StepPlan) -> Pending:
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        return future

    def close(self) -> None:
        """Finishes what was submitted, then stops the thread."""
        self._queue.put(None)
        self._thread.join()


class Direct:
    """For a device with a queue of its own: the caller's thread enqueues a step and goes on; no thread changes hands."""

    def __init__(self, worker: Launches) -> None:
        self._worker = worker
        self._last: Pending | None = None

    def submit(self, plan: StepPlan) -> Pending:
        with _uninterrupted():
            self._last = self._worker.launch(plan)
        return self._last

    def close(self) -> None:
        """Waits for what was submitted."""
        if self._last is not None:
            self._last.result()
            self._last = None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds a Ctrl-C back until the end, so that it never leaves half a step behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held and callable(before):
        before(*held[0])
