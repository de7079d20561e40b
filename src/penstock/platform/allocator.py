"""Settings of the C library's allocator for a process that computes steps on the CPU."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""
_KEPT, _MAPPED = 64 << 20, 32 << 20
"""Bytes: free memory that malloc keeps at most at the end of a heap; size from which on memory is mapped alone (the most)."""


def keep_freed_memory() -> None:
    """Tells malloc to keep memory that a step has freed, because the next step needs as much. By default it goes back to the
    system at once, and comes again as pages that must be cleared: with 64 sampled rows of 512 logits that was half of the
    processor's time. At rest `engine/work.py::give_back_memory` returns it. Nothing happens with other C libraries."""
    if (setting := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        setting(_MMAP_THRESHOLD, _MAPPED)
        setting(_TRIM_THRESHOLD, _KEPT)
