"""How plans reach a worker. An executor takes plans in order and returns a future for each result, in order."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Protocol

from penstock.core.plan import StepPlan, StepResult


class Runs(Protocol):
    """Whatever executes plans: a Worker, or a fake in tests."""

    def run(self, plan: StepPlan) -> StepResult: ...


class Executor(Protocol):
    """`submit` returns at once if it can; results come in the order of submission."""

    def submit(self, plan: StepPlan) -> Future[StepResult]: ...

    def close(self) -> None: ...


class Threaded:
    """Runs plans on a thread of this process, so that the next plan is made while one runs.

    At depth 1 too, where there is nothing to overlap with: a Ctrl-C then interrupts the waiting, never the work.
    """

    def __init__(self, worker: Runs) -> None:
        self._worker = worker
        self._queue: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="penstock-worker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, future = item
            try:
                future.set_result(self._worker.run(plan))
            except BaseException as error:
                future.set_exception(error)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        return future

    def close(self) -> None:
        """Finishes what was submitted, then stops the thread."""
        self._queue.put(None)
        self._thread.join()
