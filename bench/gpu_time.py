"""How the GPU benchmarks take times: within CUDA graphs, by the device's own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


def graph_us(calls: Sequence[Callable[[], Any]], repeats: int = 12) -> float:
    """Microseconds a call, median over replays of a graph of all calls in order."""
    torch.cuda.synchronize()  # the inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        events = _events(repeats + 1)
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        stream.synchronize()
    return _median_us(events) / len(calls)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy: what floors are reckoned with."""
    a = torch.randn(1 << 30, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    events = _events(11)
    for event in events:
        b.copy_(a)
        event.record()
    torch.cuda.synchronize()
    return 2 * a.nbytes / _median_us(events) * 1e6


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _median_us(events: Sequence[torch.cuda.Event]) -> float:
    """Of the times between one event and the next."""
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) * 1e3
