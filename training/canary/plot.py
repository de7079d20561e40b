"""Draws the logs, `logs/ROUND/*.jsonl`, as `curves-ROUND.svg`: loss, and the mean share of right answers (of heads: of tokens
drafted as the member writes them; of adapters: of tokens), over minutes of training.

    python -m training.canary.plot

Owns the picture; no plotting library, since two panels of lines need none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
WIDTH, HEIGHT, MARGIN, GAP = 380, 260, 50, 40

Line = dict[str, Any]
Scale = Callable[[float], float]


def read(folder: Path) -> dict[str, list[Line]]:
    """The measurements of each member, by name, in order."""
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))}


def share(line: Line) -> float:
    """The mean of a measurement's scores, from 0 to 1."""
    return sum(line["scores"].values()) / len(line["scores"])


def panel(left: float, title: str, logs: dict[str, list[Line]], value: Callable[[Line], float], place: Scale,
          marks: Sequence[float]) -> list[str]:
    """SVG elements of one panel. `place` maps values to 0 (bottom) to 1 (top); `marks` are the values with grid lines."""
    longest = max(line["seconds"] for lines in logs.values() for line in lines)

    def x(line: Line) -> float:
        return left + WIDTH * line["seconds"] / longest

    def y(number: float) -> float:
        return MARGIN + HEIGHT * (1 - min(1.0, max(0.0, place(number))))

    parts = [f'<text x="{left}" y="{MARGIN - 12}">{title}</text>',
             f'<text x="{left + WIDTH}" y="{MARGIN + HEIGHT + 18}" text-anchor="end">{longest / 60:.0f} minutes</text>']
    for mark in marks:
        parts += [f'<path d="M{left} {y(mark):.1f}h{WIDTH}" stroke="#ddd"/>',
                  f'<text x="{left - 6}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>']
    for colour, lines in zip(COLOURS, logs.values(), strict=False):
        points = " ".join(f"{x(line):.1f},{y(value(line)):.1f}" for line in lines)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def svg(logs: dict[str, list[Line]]) -> str:
    """The whole picture, of up to eight logs."""
    low, high = math.log(0.02), math.log(5.0)
    second = MARGIN + WIDTH + GAP + MARGIN
    parts = panel(MARGIN, "loss of a batch (logarithmic)", logs, lambda line: line["loss"],
                  lambda loss: (math.log(max(loss, 0.02)) - low) / (high - low), (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5))
    parts += panel(second, "right, mean of what is measured", logs, share, lambda number: number, (0, 0.25, 0.5, 0.75, 1))
    for place, (name, colour) in enumerate(zip(logs, COLOURS, strict=False)):
        parts.append(f'<text x="{MARGIN + 110 * place}" y="{MARGIN + HEIGHT + 45}" fill="{colour}">{name}</text>')
    width, height = second + WIDTH + 20, MARGIN + HEIGHT + 60
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main() -> None:
    """The command."""
    for folder in sorted((HERE / "logs").iterdir()):
        (HERE / f"curves-{folder.name}.svg").write_text(svg(read(folder)))


if __name__ == "__main__":
    main()
