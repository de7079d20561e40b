"""Draws decode latency and throughput over batch size and context, with the floors: what `bench/gpu.py` calls the curve.

usage: python bench/gpu_curves.py RESULT.json FOLDER, which writes gpu_curve_SHAPE.svg for each shape that has one
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.bench.drawing import COLOURS, Axis, Box, Line, legend, panel, picture, rounded

Point = dict[str, Any]
"""One of `curve`: context, batch, milliseconds, floor_milliseconds, tokens_per_second."""


def draw(shape: str, curve: Sequence[Point]) -> str:
    """Two panels on logarithmic axes, a colour for each context: measured in full lines, the floors dashed."""
    batches = Axis(sorted({point["batch"] for point in curve}), logarithmic=True)
    panels = (("milliseconds a decode step", lambda point, key: point[key]),
              ("tokens per second", lambda point, key: point["batch"] / point[key] * 1e3))
    parts: list[str] = []
    for place, (title, value) in enumerate(panels):
        lines = _lines(curve, value)
        box = Box(60 + place * 470, 40, 390, 300)
        y = rounded([number for line in lines for _, number in line.points], logarithmic=True)
        parts += panel(box, f"{shape}: {title}", batches, y, lines, below="rows of the step")
    parts += legend(60, 400, lines[::2], across=190, down=0)
    parts += legend(60, 420, lines[1::2], across=190, down=0)
    return picture(930, 435, parts)


def _lines(curve: Sequence[Point], value: Callable[[Point, str], float]) -> list[Line]:
    """For each context the measured line, then its floor's."""
    lines = []
    for context, colour in zip(sorted({point["context"] for point in curve}), COLOURS, strict=False):
        mine = sorted((point for point in curve if point["context"] == context), key=lambda point: point["batch"])
        for name, key, dashed in (("", "milliseconds", False), ("floor, ", "floor_milliseconds", True)):
            points = [(point["batch"], value(point, key)) for point in mine]
            lines.append(Line(f"{name}{context:,} tokens", points, colour, dashed))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    shapes = json.loads(arguments.result.read_text())["shapes"]
    drawn = {name: found["curve"] for name, found in shapes.items() if found.get("curve")}
    if not drawn:
        sys.exit(f"{arguments.result} has no curve; bench/gpu.py --tables curve measures one")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, curve in drawn.items():
        (arguments.folder / f"gpu_curve_{name}.svg").write_text(draw(name, curve))


if __name__ == "__main__":
    main()
