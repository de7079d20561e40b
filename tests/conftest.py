"""Running the tests in several processes at once (`make test`, pytest-xdist): tests marked `serial` run alone, files stay
whole, and those that ask one server (`shared`) follow each other in one process.

Without pytest-xdist, or with `-n 0`, the order is the same, and the processes that tests start keep their bytecode.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# A server that a test starts has bytecode at hand, as an installed one has: compiling its modules takes longer than its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if WORKERS > 1 and "torch" not in sys.modules:
    # PyTorch's threads meet at a barrier after every operation, so more threads than cores cost milliseconds each time.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // WORKERS)))


LONG = ("system", "hostile", "simulate", "models", "ops")
"""Folders whose files take long, the longest first. The short ones come last, so that no process ends long after the others."""


@pytest.hookimpl(optionalhook=True)  # clients of other interpreters have no xdist
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: tests that wait for processes or for a deadline leave a core idle."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under `--dist loadgroup`: a process takes whole files, and all files of an `xdist_group`."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if scope == nodeid else scope

    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; whatever the folder, the tests of a file stay together and in their order."""
    here = Path(__file__).parent
    folders = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: folders.get(item.path.relative_to(here).parts[0], len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collections, which would go again and again through what stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keeps modules and tests out of garbage collections: a full one, with which every `LLM.generate` ends, would go through
    all objects of all modules and tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Iterator[Callable[..., Any]]:
    """Makes (model, flags) a running server (tests/system/served.py), the same one whenever a file of this process asks again:
    for tests that ask and answer, but neither end it, nor fill it, nor read its log or totals. Such files name one
    `xdist_group`, so that one process runs them."""
    from tests.system.served import Served

    found: dict[tuple[str, ...], Served] = {}

    def server(model: Path | str, *flags: str) -> Served:
        asked = (str(model), *flags)
        if asked not in found:
            found[asked] = Served(model, *flags, fresh=True)
        return found[asked]

    try:
        yield server
        for one in found.values():
            one.settle()
            assert "Traceback" not in one.log, one.log
    finally:
        for one in found.values():
            one.stop()


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
