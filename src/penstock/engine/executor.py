"""Executors hand plans to a worker in order, and return a pending result for each.

`submit` returns without waiting where the device allows it; results arrive in order. `mask` brings the masks of the last plan,
once for each with masked segments and for no other; `drafts` comes before where masks depend on the worker's drafts."""

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

from penstock.core.errors import EngineDeadError
from penstock.core.plan import Ints, Masks, StepPlan, StepResult


class Pending(Protocol):
    def result(self) -> StepResult:
        """Waits for the step."""


class Begun(Pending, Protocol):
    """A step whose forward pass was launched."""

    def drafts(self) -> Ints | None:
        """Waits for the written drafts of `StepPlan.drafted`, if `StepPlan.tells_drafts`. None if the launch failed."""

    def choose(self, masks: Masks) -> None:
        """The second launch of a plan with masked segments: samples its tokens."""


class Launches(Protocol):
    """Executes plans: a Worker, or a fake in tests. `launch` need not wait for the device."""

    def launch(self, plan: StepPlan) -> Begun:
        """Begins a step. If segments of the plan are masked, `Begun.choose` must follow before the next plan."""


class Threaded:
    """For CPU devices: runs plans on a thread of this process, so that the next plan is made meanwhile.

    The thread is used at depth 1 too, where nothing overlaps, so that Ctrl-C interrupts the waiting and never the step."""

    def __init__(self, worker: Launches) -> None:
        self._worker = worker
        self._queue: queue.SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = queue.SimpleQueue()
        self._masks: queue.SimpleQueue[tuple[int, Masks] | None] = queue.SimpleQueue()
        self._drafts: queue.SimpleQueue[Ints | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="penstock-worker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            plan, future = item
            asked = plan.tells_drafts
            try:
                launched = self._worker.launch(plan)
                if asked:
                    self._drafts.put(launched.drafts())
                    asked = False
                if len(plan.masked):
                    found = self._masks.get()
                    if found is None:
                        raise RuntimeError(f"the executor was closed while plan {plan.id} waited for its masks")
                    assert found[0] == plan.id, (found[0], plan.id)
                    launched.choose(found[1])
                future.set_result(launched.result())
            except BaseException as error:  # noqa: BLE001 (whoever waits for the step gets it)
                future.set_exception(error)
                if asked:
                    self._drafts.put(None)

    def submit(self, plan: StepPlan) -> Pending:
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        return future

    def drafts(self) -> Ints | None:
        """Waits for the drafts of the last plan, if it `tells_drafts`; None if it has failed."""
        return self._drafts.get()

    def mask(self, plan_id: int, masks: Masks) -> None:
        self._masks.put((plan_id, masks))

    def close(self) -> None:
        """Finishes the submitted plans, then stops the thread. A plan that still waits for masks fails."""
        self._queue.put(None)
        self._masks.put(None)
        self._thread.join()


class Direct:
    """For devices with an asynchronous queue (CUDA streams): the caller's thread enqueues a step and continues."""

    def __init__(self, worker: Launches) -> None:
        self._worker = worker
        self._last: Begun | None = None
        self._unmasked: int | None = None
        """The plan that waits for its masks."""

    def submit(self, plan: StepPlan) -> Pending:
        assert self._unmasked is None, f"plan {self._unmasked} still waits for its masks"
        try:
            with _uninterrupted():
                self._last = self._worker.launch(plan)
        except Exception as error:  # noqa: BLE001 (whoever waits for the step gets it)
            self._last = _Failed(error)
        self._unmasked = plan.id if len(plan.masked) else None
        return self._last

    def drafts(self) -> Ints | None:
        """Waits for the drafts of the last plan, if it `tells_drafts`."""
        assert self._last is not None
        return self._last.drafts()

    def mask(self, plan_id: int, masks: Masks) -> None:
        assert self._last is not None and self._unmasked == plan_id, (self._unmasked, plan_id)
        with _uninterrupted():
            self._last.choose(masks)
        self._unmasked = None

    def close(self) -> None:
        """Waits for the submitted plans."""
        if self._last is not None and self._unmasked is None:
            # Ranks that are lost finish nothing, and a launch that failed was reported already.
            with suppress(EngineDeadError):
                if not isinstance(self._last, _Failed):
                    self._last.result()
        self._last = None


class _Failed:
    """A step whose launch failed. The scheduler counts it as in flight, so the error must come where its result is awaited."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def drafts(self) -> Ints | None:
        return None

    def choose(self, masks: Masks) -> None:
        """Nothing was launched."""

    def result(self) -> StepResult:
        raise self._error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C until the block ends, so that it never leaves a step half enqueued."""
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
