"""Daemon threads for work that may hang: they do not keep the process alive if a disk or server never answers."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Threads:
    """Starts tasks in the order of submission, several at a time. A task handles its own errors."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Enqueues `task(*arguments)`."""
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
