"""Memory that threads have freed does not stay with each of them."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys, threading
from pathlib import Path
from penstock.engine.work import LARGE, keep_little

if sys.argv[1] == "limited":
    keep_little(LARGE)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
malloc.argtypes, malloc.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
turns, ends = [threading.Event() for _ in range(9)], threading.Event()

def work(number):
    turns[number].wait()
    blocks = [malloc(100_000) for _ in range(40)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    # A block that stays at the end of a thread's memory keeps all memory before it.
    malloc(3000)
    for block in blocks:
        free(block)
    turns[number + 1].set()
    ends.wait()

before = resident()
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
turns[0].set()
turns[8].wait()
print((resident() - before) >> 20)
ends.set()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_threads_share_what_they_free() -> None:
    grown = {how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True).stdout)
             for how in ("limited", "free")}
    assert grown["limited"] <= 12 < 24 <= grown["free"], grown
