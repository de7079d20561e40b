"""Running the tests in several processes at once (`make test`, pytest-xdist): tests marked `serial` run alone.

Without pytest-xdist, or with `-n 0`, nothing here does anything but let the processes that tests start keep their bytecode.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# A server that a test starts has bytecode at hand, as an installed one has: compiling its modules takes longer than its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if WORKERS > 1 and "torch" not in sys.modules:
    # PyTorch's threads meet at a barrier after every operation, so more threads than cores cost milliseconds each time.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // WORKERS)))


@contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    """Holds the file's lock, shared (fcntl.LOCK_SH) or exclusive (fcntl.LOCK_EX)."""
    with path.open("a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked process may have the file open as well


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests share a lock; a serial test holds it alone. All pass a gate first, which a waiting serial test keeps closed:
    otherwise it would wait for as long as the other workers find tests."""
    if WORKERS == 1:
        return (yield)
    shared = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # the workers' common folder
    kind = fcntl.LOCK_EX if item.get_closest_marker("serial") else fcntl.LOCK_SH
    with ExitStack() as held:
        with locked(shared / "gate", fcntl.LOCK_EX):
            held.enter_context(locked(shared / "running", kind))
        return (yield)
