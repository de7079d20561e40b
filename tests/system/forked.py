"""Processes of Penstock that begin as forks of one that has imported PyTorch and Penstock, which takes longest of their start.

A process that starts others has a nursery: a process with one thread that has imported everything, runs nothing and
forks on request. The first is started by exec, one for a test process; every forked process gets its own as a fork of it.
`subprocess` asks the nursery in place of fork and exec, so that tests and the product start processes by the same calls, and a
process is its starter's child, with the command line, environment, folder, files and limits that it would have by exec.
All that Python and its modules read while they are loaded stays as the first nursery found it: where an environment asks for
something else (AT_IMPORT), and for all other commands, a process is started by exec."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

STARTERS = ("penstock.cli.main", "tests.system.launch", "penstock.engine.process")
MODULES = (*STARTERS, "penstock.worker.process", "penstock.engine.rendering", "tests.system.blocked_rank")
"""Modules that are forked, by the name after `python -m`; the STARTERS start others."""

IMPORTED = (*MODULES, "penstock.cli.serve", "penstock.server.run", "penstock.engine.engine", "penstock.worker.worker")

AT_IMPORT = ("PYTHON", "LD_", "LC_", "LANG", "TMPDIR", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH",
             "PYTORCH_", "TRITON_", "CUDA_", "HF_", "TOKENIZERS_")
"""Beginnings of the names of variables that are read while modules are loaded."""

BY_EXEC = "PENSTOCK_TEST_EXEC"
"""A variable with which nothing is forked."""

PR_SET_CHILD_SUBREAPER = 36
_LINK, MANY = 3, 1000
"""The descriptor of a nursery's socket to the process that it belongs to, and of the other end."""


def begin() -> None:
    """From now on `subprocess` of this process forks what can be forked. Not beside a GPU: whether the modules leave a driver's
    state behind that a fork cannot use was never looked at."""
    taken = isinstance(subprocess._fork_exec, _ForkExec)  # type: ignore[attr-defined]
    if sys.platform == "linux" and not taken and not Path("/dev/nvidiactl").exists():
        _take_over(_ForkExec())


def _take_over(start: _ForkExec) -> None:
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    subprocess._USE_POSIX_SPAWN = False  # type: ignore[misc]


def _nursery(environment: dict[str, str]) -> socket.socket:
    """A nursery that is started by exec."""
    mine, theirs = socket.socketpair()
    # The last word is room for longer command lines.
    words = [sys.executable, "-m", "tests.system.forked", str(theirs.fileno()), " " * 8192]
    _first.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                   pass_fds=[theirs.fileno()]))
    theirs.close()
    return mine


_first: list[subprocess.Popen[bytes]] = []


class _ForkExec:
    """In place of `subprocess._fork_exec`. `nursery` belongs to this process, and its modules were loaded in `environment`."""

    def __init__(self, nursery: socket.socket | None = None, environment: dict[str, str] | None = None) -> None:
        self._by_exec = subprocess._fork_exec  # type: ignore[attr-defined]
        self._nursery = nursery
        self._environment = environment or os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}/src:{ROOT}"}
        self._cores = os.sched_getaffinity(0)
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl

    def __call__(self, args: Any, programs: Any, close: Any, keep: Any, folder: Any, pairs: Any, stdin: int, _1: int, _2: int,
                 stdout: int, _3: int, stderr: int, *more: Any) -> int:
        words = [os.fsdecode(word) for word in args]
        environment = dict(os.environ) if pairs is None else dict(os.fsdecode(pair).split("=", 1) for pair in pairs)
        # In a session or group of its own, as another user, with more files than the first three (`keep` always has the pipe on
        # which errors come), or after a function of the caller's: by exec.
        plain = close and len(keep) == 1 and not any(one not in (None, False, -1) for one in more[3:10])
        if not plain or self._cores != os.sched_getaffinity(0) or not _can_fork(words, environment, self._environment):
            return int(self._by_exec(args, programs, close, keep, folder, pairs, stdin, _1, _2, stdout, _3, stderr, *more))
        how = {"words": words, "environment": environment, "folder": os.fsdecode(folder or os.getcwd()),
               "files": resource.getrlimit(resource.RLIMIT_NOFILE)}
        message = os.memfd_create("start")
        try:
            os.write(message, json.dumps(how).encode())
            with self._lock:
                self._nursery = self._nursery or _nursery(self._environment)
                files = [given if given >= 0 else place for place, given in enumerate((stdin, stdout, stderr))]
                # The fork's parent ends at once, and so this process becomes its parent.
                self._prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
                socket.send_fds(self._nursery, [b"!"], [*files, message])
                pid = self._nursery.recv(20)
                self._prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        finally:
            os.close(message)
        if not pid:
            raise OSError("the nursery has gone")
        return int(pid)


class _Child:
    """The part of `asyncio.subprocess.Process` that the engine's handle uses: uvloop starts processes without `subprocess`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid, self.kill = process.pid, process.kill
        assert process.stdin is not None
        self.stdin = process.stdin

    @classmethod
    async def start(cls, *words: str, stdin: int, env: dict[str, str]) -> _Child:
        """In place of `asyncio.create_subprocess_exec`."""
        return cls(subprocess.Popen(words, bufsize=0, stdin=stdin, env=env))

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        if self.returncode is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            end = os.pidfd_open(self.pid)
            loop.add_reader(end, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(end)
                os.close(end)
        return self._process.wait()


def _can_fork(words: list[str], environment: dict[str, str], imported: dict[str, str]) -> bool:
    """Whether a fork of the nursery is what this command would be."""
    if words[0] != sys.executable or _module(words) not in MODULES or BY_EXEC in environment:
        return False
    if set(_paths(environment)) - set(_paths(imported)):
        return False
    differ = {name for name in {*environment, *imported} if environment.get(name) != imported.get(name)}
    return not any(name.startswith(AT_IMPORT) for name in differ - {"PYTHONPATH"})


def _module(words: list[str]) -> str:
    """The module that a command line runs, or ''."""
    rest = [word for word in words[1:3] if word != "-P"]
    return words[words.index("-m") + 1] if rest and rest[0] == "-m" else ""


def _paths(environment: dict[str, str]) -> list[str]:
    return [str(Path(path).resolve()) for path in environment.get("PYTHONPATH", "").split(":") if path]


# -- in a nursery


def _nurse(started: dict[str, str]) -> None:
    """Forks a process for each request until the process that asks has ended. Returns in the forked processes alone.
    `started`: the environment in which modules were loaded, which may have added to it."""
    # A terminal's signals reach the whole group, and this process ends with the one that asks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=_LINK)
    while True:
        data, files, _, _ = socket.recv_fds(link, 1, 4)
        if not data:
            os._exit(0)
        came, tell = os.pipe()
        middle = os.fork()
        if not middle:
            middle = os.getpid()
            if pid := os.fork():
                os.write(tell, b"%d" % pid)
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            link.detach()
            return _become(files, started)
        os.waitpid(middle, 0)
        link.send(os.read(came, 20))
        for one in (*files, came, tell):
            os.close(one)


def _become(files: list[int], started: dict[str, str]) -> None:
    """Makes this fork the process that was asked for, and runs it: descriptors 0 to 2 and the rest of `fork_exec`'s message."""
    how = json.loads(os.pread(files[3], os.fstat(files[3]).st_size, 0))
    module = _module(how["words"])
    if module in STARTERS:
        mine, theirs = socket.socketpair()
        if not os.fork():
            os.dup2(theirs.fileno(), _LINK)
            os.closerange(_LINK + 1, MANY)
            return _nurse(started)
        nursery = socket.socket(fileno=os.dup2(mine.detach(), MANY, inheritable=False))
        _take_over(_ForkExec(nursery, started))
        asyncio.create_subprocess_exec = _Child.start  # type: ignore[assignment]
    for place, one in enumerate(files[:3]):
        os.dup2(one, place)
    os.closerange(3, MANY)
    resource.setrlimit(resource.RLIMIT_NOFILE, how["files"])
    os.chdir(how["folder"])
    added = {name: value for name, value in os.environ.items() if name not in started}
    os.environ.clear()
    os.environ.update(added | how["environment"])
    _call(how["words"])
    for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, action)
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__spec__=found, __file__=found.origin, __builtins__=__builtins__)
    sys.argv = [found.origin, *how["words"][how["words"].index(module) + 1:]]
    exec(found.loader.get_code(module), main.__dict__)  # type: ignore[union-attr]


def _call(words: list[str]) -> None:
    """Writes a command line over this process's, where others read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"".join(word.encode() + b"\0" for word in words)
    assert len(line) <= end - start, "a longer command line than the nursery's"
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    os.dup2(int(sys.argv[1]), _LINK)
    os.closerange(_LINK + 1, MANY)
    at_start = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _nurse(at_start)
