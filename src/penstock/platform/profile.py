"""PyTorch's profiler around work of this process, written as a trace that chrome://tracing and Perfetto open."""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Profile:
    """Records from `start` to `stop`, which are called while no step runs."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        """Begins anew if it records already."""
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        self.stop(None)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        # On a CPU, steps run in a thread of their own.
        self._profiler = profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        self._profiler.start()

    def stop(self, path: Path | None) -> None:
        """Ends, and writes the trace if there is a path. Nothing happens if it does not record."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            if path is not None:
                profiler.export_chrome_trace(str(path))


def traced(work: Callable[[], object], path: Path) -> None:
    profile = Profile()
    profile.start()
    work()
    profile.stop(path)
