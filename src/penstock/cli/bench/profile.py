"""Chrome traces of a run, and what they say about the GPU's idle time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(work: Callable[[], object], path: Path) -> None:
    """Runs `work` under PyTorch's profiler and writes the trace, which chrome://tracing and Perfetto open."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    profiler.export_chrome_trace(str(path))


def idle_share(path: Path) -> float:
    """The part of the time between the first and the last kernel of a trace in which nothing ran on the device.

    The first and the last fifth are left out: a run begins with a prompt and ends with a pipeline that empties.
    """
    events = json.loads(path.read_text())["traceEvents"]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _ON_DEVICE)
    if not spans:
        return 1.0
    begin, end = spans[0][0], max(stop for _, stop in spans)
    low, high = begin + (end - begin) * 0.2, begin + (end - begin) * 0.8
    busy, reached = 0.0, low
    for start, stop in spans:
        start, stop = max(start, reached), min(stop, high)
        if stop > start:
            busy += stop - start
            reached = stop
    return 1 - busy / (high - low)
