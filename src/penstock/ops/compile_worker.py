"""A process that compiles kernels for ops/compile.py: one job a line in, one answer a line out. It never imports torch.

usage: python -m penstock.ops.compile_worker CAPABILITY, such as 90
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import suppress
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.driver import driver


class Target:
    """What Triton asks of a driver, for a GPU of that compute capability that need not be there: compiles, launches nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> str:
        """What compiled kernels are kept under: no number of a real device."""
        return f"sm_{self._capability}"

    def get_current_stream(self, device: str) -> int:
        return 0


UTILITIES = "utilities"
"""The job of building what Triton itself needs beside kernels."""


def compile_one(job: dict[str, Any]) -> None:
    """Into the cache on disk: the kernel, and the function in C by which Python launches it."""
    if job["kernel"] == UTILITIES:
        # Without a driver on this machine there is nothing to link with, and nobody who could launch.
        with suppress(AssertionError):
            CudaUtils()
        return
    kernel = getattr(importlib.import_module(job["module"]), job["kernel"]).preload(job["data"])
    with suppress(AssertionError):
        CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    driver.set_active(Target(int(sys.argv[1])))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    for line in sys.stdin:
        began, error = time.perf_counter(), None
        try:
            compile_one(json.loads(line))
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"error": error, "seconds": time.perf_counter() - began}) + "\n")


if __name__ == "__main__":
    main()
