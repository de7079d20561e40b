"""A compiler process for ops/compile.py: it reads one job per line and writes one answer per line. It never imports torch.

usage: python -m penstock.ops.compile_worker CAPABILITY KEY, such as 90 and Triton's hash of its own files; empty: not known"""

import importlib
import json
import os
import sys
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable


class Target:
    """A Triton driver for a GPU that need not be present: it can compile, but not launch."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> str:
        """The key of compiled kernels in Triton's caches: not the index of a real device."""
        return f"sm_{self._capability}"

    def get_current_stream(self, _device: str) -> int:
        return 0


@cache
def import_kernels(name: str) -> ModuleType:
    """Imports a module of kernels, and has Triton compute the cache keys of all its functions in the order of their definition.

    Otherwise a kernel's key depends on which kernel was launched first: Triton 3.6 merges the constants that a function uses
    into its caller's key, but only once the function has a key itself."""
    module = importlib.import_module(name)
    for found in list(vars(module).values()):
        if isinstance(found, JITCallable):
            if found.fn.__module__ != name:
                import_kernels(found.fn.__module__)
            found.cache_key  # noqa: B018  (computed when it is read)
    return module


UTILITIES = "utilities"
"""The job of building Triton's own launcher utilities."""


def compile_one(job: dict[str, Any]) -> None:
    """Compiles a kernel and its C launcher into the cache on disk."""
    if job["kernel"] == UTILITIES:
        # Without a driver on this machine there is nothing to link with, and no kernel can be launched.
        with suppress(AssertionError):
            CudaUtils()
        return
    kernel = getattr(import_kernels(job["module"]), job["kernel"]).preload(job["data"])
    with suppress(AssertionError):
        CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    driver.set_active(Target(int(sys.argv[1])))
    if sys.argv[2]:  # what takes each process most of a second otherwise
        triton_cache.triton_key = lambda: sys.argv[2]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    for line in sys.stdin:
        error = None
        try:
            compile_one(json.loads(line))
        except Exception as failed:  # noqa: BLE001 (the compiler may fail in any way; the answer says how)
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"error": error}) + "\n")


if __name__ == "__main__":
    main()
