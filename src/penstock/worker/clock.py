"""Step times by the device's own clock where it has one, and waiting for the end of a step."""

import time

import torch

_KEPT = 16
"""Number of event sets, used in turn: more than the steps that can be in flight."""


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._intervals: list[Interval] = [DeviceInterval() if device.type == "cuda" else Interval() for _ in range(_KEPT)]
        self._next = 0

    def start(self) -> "Interval":
        interval = self._intervals[self._next]
        self._next = (self._next + 1) % _KEPT
        interval.begin()
        return interval


class Interval:
    """Timestamps of a step: begin, begin and end of the forward pass, end, and the resumption after waiting for masks."""

    def __init__(self) -> None:
        self._moments = [0.0] * 5
        self._resumed = self._whole = False
        self.seconds = 0.0
        self.kernel_seconds = 0.0
        self.draft_seconds = 0.0
        """From the beginning to the forward pass: moving pages and drafting."""

    def mark(self, which: int) -> None:
        """1: the forward pass begins; 2: it has ended."""
        self._moments[which] = time.perf_counter()

    def begin(self) -> None:
        self._resumed = self._whole = False
        self.mark(0)

    def resume(self) -> None:
        """Marks the end of waiting for masks; the wait does not count as step time."""
        self.mark(4)
        self._resumed = True

    def stop(self, whole: bool = False) -> "Interval":
        """Marks the end of the step. `whole`: the step was the forward pass alone, left unmarked; a mark costs 10 us."""
        self._whole = whole
        self.mark(3)
        return self

    def ended(self) -> bool:
        """Whether `wait` would return at once."""
        return True

    def wait(self) -> None:
        """Waits until the step has ended, then sets `seconds`, `kernel_seconds` and `draft_seconds`."""
        self.seconds = self.kernel_seconds = self._between(0, 3)
        self.draft_seconds = 0.0
        if not self._whole:
            self.kernel_seconds, self.draft_seconds = self._between(1, 2), self._between(0, 1)
        if self._resumed:
            self.seconds -= self._between(2, 4)

    def _between(self, first: int, last: int) -> float:
        """Seconds from one mark to another."""
        return self._moments[last] - self._moments[first]


class DeviceInterval(Interval):
    def __init__(self) -> None:
        super().__init__()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]

    def mark(self, which: int) -> None:
        self._events[which].record()

    def ended(self) -> bool:
        return bool(self._events[3].query())

    def wait(self) -> None:
        self._events[3].synchronize()
        super().wait()

    def _between(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) / 1e3
