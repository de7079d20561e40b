"""Tells from a Chrome trace the GPU's idle time: its share, and the gaps between steps.

usage: python bench/timeline.py TRACE.json [--svg FILE], which prints the figures as JSON

A step is what lies between two starts of the kernel that builds it. A kernel that was launched ahead of time and waits for the
one before counts as running, so gaps of less than its wait are not seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.cli.bench.drawing import COLOURS, Axis, Box, frame, picture, rounded, text_at
from penstock.cli.bench.figures import percentile

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_FIRST, _LAST = "build_step", "settle"
"""The kernels that begin a step and that choose its tokens, its last (ops/rows_kernels.py, ops/sample_kernels.py)."""
_BORDERS = (1, 2, 5, 10, 20, 50, 100, 1000)
"""Microseconds that divide the classes of gaps."""
_KEPT = 0.2, 0.8
"""The part of a trace that counts: a run begins with a prompt, and ends with a pipeline that empties."""

Span = tuple[float, float]
"""Microseconds of begin and end."""


def timeline(path: Path) -> dict[str, Any]:
    """Statistics of the device's idle time in the middle part of a trace.

    * idle_share: of the time, in which nothing ran; 1.0 if nothing ever did.
    * steps, step_us: how many whole steps, and the median from one's start to the next one's.
    * between_us: idle time from the last kernel of a step to the first of the next: median, 99th percentile, most;
      between_share: its part of the time.
    * gaps: how many of all gaps, and what part of the time, are up to so many microseconds; of the last class up_to_us is None.
    """
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in _ON_DEVICE]
    if not events:
        return {"idle_share": 1.0, "steps": 0}
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    low, high = (begin + (end - begin) * part for part in _KEPT)
    gaps = _gaps(spans, low, high)
    found: dict[str, Any] = {"idle_share": sum(b - a for a, b in gaps) / (high - low)}
    firsts = sorted(event["ts"] for event in events if _named(event, _FIRST) and low <= event["ts"] < high)
    found["steps"] = max(0, len(firsts) - 1)
    if found["steps"]:
        found["step_us"] = statistics.median(b - a for a, b in pairwise(firsts))
        between = _between(gaps, sorted(event["ts"] + event["dur"] for event in events if _named(event, _LAST)), firsts)
        ordered = sorted(between)
        found["between_us"] = {"median": percentile(ordered, 50), "p99": percentile(ordered, 99), "most": ordered[-1]}
        found["between_share"] = sum(between) / (firsts[-1] - firsts[0])
    found["gaps"] = _classes([b - a for a, b in gaps], high - low)
    return found


def _named(event: dict[str, Any], kernel: str) -> bool:
    return bool(event["cat"] == "kernel" and event["name"] == kernel)


def _gaps(spans: Sequence[Span], low: float, high: float) -> list[Span]:
    """The times between low and high that no span covers."""
    gaps, reached = [], low
    for start, stop in sorted(spans):
        if start >= high:
            break
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    if reached < high:
        gaps.append((reached, high))
    return gaps


def _between(gaps: Sequence[Span], lasts: Sequence[float], firsts: Sequence[float]) -> list[float]:
    """For each start of a step but the first, the idle time since the last step's last kernel ended."""
    found = []
    for before, start in pairwise(firsts):
        at = bisect_left(lasts, start) - 1
        # A step that samples nothing has no last kernel of its own.
        ended = lasts[at] if at >= 0 and lasts[at] > before else start
        found.append(sum(max(0.0, min(b, start) - max(a, ended)) for a, b in gaps))
    return found


def _classes(lengths: Sequence[float], time: float) -> list[dict[str, Any]]:
    """Gaps by length: how many, and their share of the time."""
    found: list[dict[str, Any]] = []
    for least, most in pairwise((0.0, *_BORDERS, float("inf"))):
        mine = [length for length in lengths if least < length <= most]
        found.append({"up_to_us": None if most == float("inf") else most, "count": len(mine), "share": sum(mine) / time})
    return found


def bars(box: Box, title: str, y: Axis, values: Sequence[tuple[str, float]], below: str = "") -> list[str]:
    """SVG elements of a panel with one bar for each (label, value)."""
    parts, width = frame(box, title, y, below), box.width / len(values)
    for i, (label, value) in enumerate(values):
        left, height = box.left + i * width, box.height * y.place(value)
        parts += [f'<rect x="{left + 2:.1f}" y="{box.top + box.height - height:.1f}" width="{width - 4:.1f}" '
                  f'height="{height:.1f}" fill="{COLOURS[0]}"/>',
                  text_at(left + width / 2, box.top + box.height + 18, label, anchor="middle")]
    return parts


def draw(found: dict[str, Any], title: str) -> str:
    """The classes of gaps as an SVG: the part of the time that the GPU is idle in gaps of each length."""
    values = [(f"> {_BORDERS[-1]}" if kind["up_to_us"] is None else f"{kind['up_to_us']:g}", 100 * kind["share"])
              for kind in found["gaps"]]
    y = rounded([max(0.1, *(value for _, value in values))])
    heading = f"{title}: idle {found['idle_share']:.2%} of the time"
    if found["steps"]:
        heading += f", {found['between_share']:.2%} between {found['steps']} steps of {found['step_us']:,.0f} us"
    return picture(640, 320, bars(Box(60, 40, 550, 220), heading, y, values, below="gaps of up to so many microseconds; "
                                                                                   "percent of the time"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--svg", type=Path, help="also draw the gaps")
    arguments = parser.parse_args()
    found = timeline(arguments.trace)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    if arguments.svg is not None and "gaps" in found:
        arguments.svg.write_text(draw(found, arguments.trace.stem))


if __name__ == "__main__":
    main()
