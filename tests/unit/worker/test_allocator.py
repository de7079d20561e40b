"""Memory that a step frees stays with the process: the next step must not fault it in again, page by page."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource
from penstock.platform.allocator import keep_freed_memory
if {kept}:
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def step():
    blocks = [ctypes.c_void_p(libc.malloc(1 << 20)) for _ in range(16)]
    for block in blocks:
        libc.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
for _ in range(5): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_steps_do_not_fault_their_memory_in_again() -> None:
    faults = {kept: int(subprocess.run([sys.executable, "-c", CODE.format(kept=kept)], capture_output=True, text=True,
                                       check=True, timeout=120).stdout) for kept in (False, True)}
    assert faults[True] < 200, faults
    assert faults[False] > 10 * faults[True], faults
