"""How the seconds of short decodes are distributed over processes: each start may meet another core, clock or neighbour.

A decode step of a small model is short, so the host must enqueue the next one quickly; where it cannot, the whole process is
slower. Each process (bench/gpu_processes_child.py) is started anew and measures the decode workloads of 1, 8 and 32 sequences.
A third of them run beside busy neighbours, one for each core.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fixed import SHAPES, write
from penstock.cli.bench.drawing import Box, picture, rounded
from penstock.core.errors import ConfigError
from timeline import bars

_CHILD = Path(__file__).with_name("gpu_processes_child.py")
_AHEAD = 3
"""Processes that import while another one measures."""
_BINS = 20
_SPIN = "while True: pass"


def processes(shape: str, count: int, draw: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """The seconds of each process, and a histogram for each workload as SVG if asked for."""
    alone, beside = count - count // 3, count // 3
    with tempfile.TemporaryDirectory() as folder:
        model = write(SHAPES[shape], Path(folder) / shape)
        found = {"alone": list(_runs(model, alone, say))}
        with _neighbours():
            found["beside busy neighbours"] = list(_runs(model, beside, say))
    names = list(found["alone"][0]) if found["alone"] else []
    for where, runs in found.items():
        for name in names if runs else ():
            seconds = sorted(run[name] for run in runs)
            say(f"  {shape} {name} in {len(runs)} processes {where}: {seconds[0]:.3f} least, "
                f"{statistics.median(seconds):.3f} median, {seconds[-1]:.3f} most")
    if draw is not None:
        draw.mkdir(parents=True, exist_ok=True)
        for name in names:
            every = [run[name] for runs in found.values() for run in runs]
            (draw / f"gpu_processes_{shape}_{name}.svg").write_text(_histogram(f"{shape} {name}, {count} processes", every))
    return {"shape": shape, "runs": found}


def _runs(model: Path, count: int, say: Callable[[str], None]) -> Iterator[dict[str, float]]:
    """Yields the seconds that each process measured, and says them. One process at a time is told to begin; the next ones have
    imported all modules by then, and sleep."""
    waiting = deque(_started(model) for _ in range(min(count, _AHEAD)))
    for number in range(count):
        if number + _AHEAD < count:
            waiting.append(_started(model))
        process = waiting.popleft()
        said, failed = process.communicate("begin\n")
        if process.returncode:
            for other in waiting:
                other.kill()
            raise ConfigError(f"a process failed: {failed[-2000:].strip()}")
        found = json.loads(said.splitlines()[-1])
        say(f"  process {number + 1} of {count}: " + ", ".join(f"{name} {seconds:.4f}" for name, seconds in found.items()))
        yield found


def _started(model: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(_CHILD), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@contextmanager
def _neighbours() -> Iterator[None]:
    """A process that computes all the time for each core."""
    busy = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _histogram(title: str, seconds: list[float]) -> str:
    least, most = min(seconds), max(seconds)
    width = max(most - least, 1e-3) / _BINS
    counts = [0] * _BINS
    for value in seconds:
        counts[min(_BINS - 1, int((value - least) / width))] += 1
    values = [(f"{least + place * width:.3f}" if place % 5 == 0 else "", float(number)) for place, number in enumerate(counts)]
    box = Box(60, 40, 560, 260)
    return picture(660, 340, bars(box, title, rounded([0.0, float(max(counts))]), values, "seconds"))
