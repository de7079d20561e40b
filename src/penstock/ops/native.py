"""Compiles C++ into shared libraries on first use, and caches them; loads the kernels of ops/csrc, by instruction set.

Owns the compiler command, the cache of built libraries and prototypes of the kernels' C ABI. ops/cpu.py calls the kernels."""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.platform.kept import cache_folder

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread",
          "-Wno-psabi")


@dataclass(frozen=True)
class InstructionSet:
    """A target that the sources are compiled for."""

    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo without which the library must not be run."""
    options: tuple[str, ...]
    rank: int


_AVX512 = InstructionSet(
    "avx512", frozenset(("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c")),
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"), 30)
INSTRUCTION_SETS = (
    InstructionSet("amx", _AVX512.needs | {"amx_tile", "amx_int8"}, (*_AVX512.options, "-mamx-tile", "-mamx-int8"), 40),
    _AVX512,
    InstructionSet("avx2", frozenset(("avx2", "fma", "f16c")), ("-mavx2", "-mfma", "-mf16c"), 20),
    InstructionSet("portable", frozenset(), (), 10))


class BuildError(Exception):
    """The kernels could not be compiled or loaded; the message says why."""


def _prototypes() -> dict[str, tuple[type | None, str]]:
    """Result and argument types of every exported function: p a pointer, i an int64, d a double, b packed bytes."""
    return {
        "penstock_set_threads": (None, "i"), "penstock_threads": (ctypes.c_int64, ""),
        "penstock_packed_size": (ctypes.c_int64, "iii"), "penstock_pack": (None, "ppiiiii"),
        "penstock_linear": (None, "pipppiiiii"), "penstock_coded_pack": (ctypes.c_int64, "piiiiiiip"),
        "penstock_coded": (None, "bi"), "penstock_coded_turn": (None, "piip"), "penstock_gather": (ctypes.c_int64, "pipiipi"),
        "penstock_rms_norm": (None, "pppiiiiiddii"), "penstock_add_rms_norm": (None, "ppppiiiiddii"),
        "penstock_layer_norm": (None, "ppppiiidii"), "penstock_rope_write": (None, "bddi"),
        "penstock_cache_write": (None, "bi"), "penstock_activation": (None, "pipiiiii"),
        "penstock_attention": (None, "bddii"), "penstock_experts": (None, "b"), "penstock_lora": (None, "bii"),
        "penstock_mask": (None, "piipipi")}


_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double, "b": ctypes.c_char_p}

_loaded: dict[str, ctypes.CDLL | BuildError] = {}
_lock = threading.Lock()
_threads = len(os.sched_getaffinity(0))


def library(name: str) -> ctypes.CDLL:
    """The library of an instruction set, built if need be. BuildError, logged once, if that fails; it is not tried again."""
    with _lock:
        if name not in _loaded:
            try:
                options = next(isa.options for isa in INSTRUCTION_SETS if isa.name == name)
                _loaded[name] = _open(compiled(f"kernels-{name}", SOURCES, options))
            except BuildError as error:
                log.warning("CPU kernels for %s are not available, slower ones serve: %s", name, error)
                _loaded[name] = error
        found = _loaded[name]
    if isinstance(found, BuildError):
        raise found
    return found


def loaded() -> ctypes.CDLL | None:
    """A library that serves this process already, if one does."""
    return next((found for found in _loaded.values() if isinstance(found, ctypes.CDLL)), None)


def set_threads(count: int) -> None:
    """Sets the number of threads that kernels may use, the caller's included, in every library, loaded or not."""
    global _threads
    _threads = count
    with _lock:
        for found in _loaded.values():
            if isinstance(found, ctypes.CDLL):
                found.penstock_set_threads(count)


def compiled(name: str, sources: Path, extra: tuple[str, ...] = ()) -> Path:
    """Path of the library made of the C++ files of a folder, with `extra` options for the compiler. In several processes at
    once, the first compiles and the others wait for it. BuildError if it cannot be built."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    options = (*_FLAGS, *extra, *shlex.split(os.environ.get("CXXFLAGS", "")))
    files = sorted(sources.glob("*.cpp"))
    key = hashlib.sha256("\0".join((*options, name, platform.machine(), _version(tuple(compiler)))).encode())
    for file in sorted((*files, *sources.glob("*.h"))):
        key.update(file.name.encode() + b"\0" + file.read_bytes())
    folder = cache_folder()
    target = folder / f"{name}-{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with _locked(folder):
        if not target.exists():
            # A warning, because processes that set up no log show nothing below, and this may take a minute.
            log.warning("compiling %s, which takes up to a minute (once; kept in %s)", name, folder)
            _compile(compiler, options, files, target)
    return target


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock. Where its file system has no locks, several processes compile the same, which is only slower."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: a forked process may have it open as well
        os.close(descriptor)


def _compile(compiler: list[str], options: tuple[str, ...], files: list[Path], target: Path) -> None:
    """Makes `target` of the files. It appears whole, by a rename."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = [Path(work) / (file.stem + ".o") for file in files]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(lambda pair: _run([*compiler, *options, "-c", str(pair[0]), "-o", str(pair[1])]),
                          zip(files, objects, strict=True)))
        made = Path(work) / target.name
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(made)])
        made.replace(target)


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError:
        raise BuildError(f"there is no {command[0]!r}; install g++ 11 or later, or set CXX") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {lines[0].strip() if lines else 'no message'}")
    return done.stdout


def _open(path: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _prototypes().items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = [_TYPES[a] for a in arguments]
    lib.penstock_set_threads(_threads)
    return lib
