"""Compiles Triton kernels ahead of their first launch, in parallel processes, into the cache on disk.

A dry run on meta tensors (`recording`) finds the needed kernels; later launches find them in the cache. `Compilation` runs the
compiler processes (ops/compile_worker.py) meanwhile, and while weights load. `tally` tells whether the JIT compiled more."""

import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError
from penstock.ops import gpu
from penstock.ops.registry import Kernels
from penstock.platform.kept import cache_folder

_PROCESSES = 16
"""The most compiler processes; a model has a few dozen kernels."""
_PATIENCE = 300.0
"""Seconds after which a process that still compiles one kernel is killed."""


@dataclass(frozen=True)
class Job:
    """One specialisation of a kernel: types, alignments, constants and options."""

    module: str
    kernel: str
    data: str = ""
    """Triton's own description of the rest."""
    entry: str = ""
    """The file that is there once the kernel is in the cache."""
    caller: str = ""
    """The module that launches it."""


@dataclass
class Tally:
    """Kernels that this process has compiled, or loaded from the cache on disk. Both delay the launch that needs them."""

    compiled: int = 0
    loaded: int = 0
    names: list[str] = field(default_factory=list)
    """Of those compiled, in order."""
    key: Future[str] | None = None
    """Triton's own: a hash of its files."""


tally = Tally()


def _listen(*, src: Any, cache_hit: bool, **_more: Any) -> None:
    if cache_hit:
        tally.loaded += 1
    else:
        tally.compiled += 1
        tally.names.append(src.name)


def watch() -> bool:
    """Points Triton's cache to Penstock's folder, unless the user chose one, and counts compilations. False without Triton.

    Call it early: it starts hashing Triton's sources on a thread, which every cache look-up needs."""
    if importlib.util.find_spec("triton") is None:
        return False
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(cache_folder() / "triton")
    from triton import knobs
    from triton.runtime.cache import triton_key

    knobs.compilation.listener = _listen
    # Hashes Triton's own files for a second, without the interpreter's lock; every look into the cache needs the result.
    tally.key = ThreadPoolExecutor(1).submit(triton_key)
    return True


@contextmanager
def recording(chip: gpu.Chip, found: Callable[[Job], object] = id) -> Iterator[dict[str, Job]]:
    """Dry run: launches in this context reach no device. The kernels that they need on `chip` are entered in the dict, and
    `found` is called with each at once (`id` does nothing with it).

    Tensors must be on torch's meta device. Not for use while another thread launches kernels."""
    from triton import knobs
    from triton.runtime.driver import driver

    from penstock.ops.compile_worker import Target, import_kernels

    jobs: dict[str, Job] = {}
    target = Target(10 * chip.capability[0] + chip.capability[1])

    def note(*, fn: Any, compile: dict[str, Any], **_more: Any) -> bool:  # noqa: A002 (Triton passes it by name)
        data = compile["specialization_data"]
        name = f"{fn.module}.{fn.name} {data}"
        if name not in jobs:
            import_kernels(fn.module)
            entry = _entry(fn.jit_function, compile, json.loads(data)["options"], target.get_current_target())
            jobs[name] = job = Job(fn.module, fn.name, data, entry, _caller())
            found(job)
        return True  # nothing is compiled, nothing is launched

    active, hook = driver._active, knobs.runtime.jit_cache_hook  # noqa: SLF001 (Triton sets a driver, but does not tell it)
    driver.set_active(target)
    knobs.runtime.jit_cache_hook = note
    try:
        with gpu.standing_in(chip):
            yield jobs
    finally:
        knobs.runtime.jit_cache_hook = hook
        driver._active = active  # noqa: SLF001


def _entry(function: Any, described: dict[str, Any], options: dict[str, Any], target: Any) -> str:
    """The cache entry that Triton's `compile` looks for: the file that lists a kernel's other files."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    source = function.ASTSource(function, described["signature"], described["constants"], described["configs"][0])
    options_of = backend.parse_options({name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})
    key = get_cache_key(source, backend, options_of, get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return os.path.join(manager.cache_dir, f"__grp__{source.name[:150]}.json")


def _caller() -> str:
    """The module of penstock.ops that launches the kernel."""
    frame = sys._getframe()  # noqa: SLF001 (inspect.currentframe is the same, and slower)
    while frame.f_back is not None:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("penstock.ops.") and name != __name__:
            return name
    return ""


def kept_folder() -> Path:
    """The folder where Triton keeps compiled kernels, once `watch` was called; other values are kept beside them."""
    return Path(os.environ["TRITON_CACHE_DIR"])


class Compilation:
    """Jobs being compiled in other processes. Kernels in the cache are skipped. Call `add` for further jobs, then `finish`."""

    def __init__(self, jobs: Iterable[Job], capability: tuple[int, int]) -> None:
        self._capability = capability
        self._all: list[Job] = []
        self.compiled = 0
        """Kernels that were not in the cache."""
        self.seconds = 0.0
        """The duration of the compilation, once it is done."""
        self._began = time.perf_counter()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None ends one thread
        self._failed: list[tuple[Job, str]] = []
        self._processes: list[subprocess.Popen[str]] = []
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most = min(_PROCESSES, cores)
        self._threads: list[threading.Thread] = []
        for job in jobs:
            self.add(job)

    def add(self, job: Job) -> None:
        """Has a kernel compiled, by one more process if there may be one."""
        self._all.append(job)
        if os.path.exists(job.entry):
            return
        if not self.compiled:
            self._jobs.put(Job("", "utilities"))
        self.compiled += 1
        self._jobs.put(job)
        if len(self._threads) < self._most:
            self._threads.append(threading.Thread(target=self._serve, daemon=True))
            self._threads[-1].start()

    def wait(self) -> list[tuple[Job, str]]:
        """Waits for all jobs; returns those that failed, each with the reason."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads:
            self.seconds = time.perf_counter() - self._began
        return self._failed

    def finish(self, kernels: Kernels) -> None:
        """Waits for all jobs. ConfigError names the first kernel that failed, why, and which option avoids it."""
        failed = self.wait()
        if failed:
            raise self._refusal(*failed[0], kernels)

    def load(self, kernels: Kernels) -> None:
        """Loads all kernels onto the current device, so that no first launch has to. Raises as `finish`."""
        if not self._all:
            return
        from penstock.ops.compile_worker import import_kernels

        if tally.key is not None:
            tally.key.result()
        for job in self._all:
            try:
                kernel = getattr(import_kernels(job.module), job.kernel).preload(job.data)
                kernel.run  # noqa: B018  (the property loads it)
            except Exception as error:
                raise self._refusal(job, f"{type(error).__name__}: {error}", kernels) from error

    def close(self) -> None:
        """Ends what is still under way, its processes included. Nothing to do after `finish`."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for process in list(self._processes):
            process.kill()
        self.wait()

    def _refusal(self, job: Job, why: str, kernels: Kernels) -> ConfigError:
        what = f"kernel {job.module}.{job.kernel}" if job.module else "what Triton builds to launch kernels"
        launched = [op for op, chosen in kernels.chosen.items()
                    if job.caller and getattr(chosen.call, "__module__", None) == job.caller]
        return ConfigError(_explain(what, why, launched, self._capability))

    def _serve(self) -> None:
        """Runs one compiler process until no jobs are left."""
        key = "" if tally.key is None else tally.key.result()
        major, minor = self._capability
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with subprocess.Popen([sys.executable, "-m", "penstock.ops.compile_worker", str(10 * major + minor), key], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1, env=environment) as process:
            assert process.stdin is not None
            self._processes.append(process)
            while (job := self._jobs.get()) is not None:
                answer = self._ask(process, job)
                if answer is not None:
                    self._failed.append((job, answer))
                    if process.poll() is not None:
                        break
            with suppress(OSError):
                process.stdin.close()

    def _ask(self, process: subprocess.Popen[str], job: Job) -> str | None:
        """Sends one job to a process; returns the error, or None."""
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(_PATIENCE, process.kill)
        watchdog.start()
        try:
            process.stdin.write(json.dumps({"module": job.module, "kernel": job.kernel, "data": job.data}) + "\n")
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            watchdog.cancel()
        if not line:
            return f"the compiler's process ended with status {process.wait()}"
        error: str | None = json.loads(line)["error"]
        return error


def _explain(what: str, why: str, operations: list[str], capability: tuple[int, int]) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    short = " / ".join(lines[:1] + lines[-2:] if len(lines) > 3 else lines)
    instead = " ".join(f"--kernels {op}=reference" for op in operations or ["*"])
    return (f"{what} does not work on compute capability {'.'.join(map(str, capability))}: {short[:600]}. "
            f"Use another version of Triton or of the driver, or do without it, slower: {instead}")


@contextmanager
def explained(capability: tuple[int, int]) -> Iterator[None]:
    """Turns the failure of a kernel's first launch into a ConfigError that names the kernel and the way around it."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("triton."):
            raise
        raise ConfigError(_explain("a Triton kernel", f"{type(error).__name__}: {error}", [], capability)) from error
