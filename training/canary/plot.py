"""Draws the logs, `logs/ROUND/*.jsonl`, as `curves-ROUND.svg`: loss, and the mean share of right answers (of heads: of tokens
drafted as the member writes them; of adapters: of tokens), over minutes of training.

    python -m training.canary.plot

Owns what the picture shows; how lines become SVG is in `penstock.cli.bench.drawing`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.cli.bench.drawing import COLOURS, Axis, Box, Line, legend, panel, picture

HERE = Path(__file__).parent
LOSS = Axis((0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5), logarithmic=True)
SHARE = Axis((0, 0.25, 0.5, 0.75, 1))

Entry = dict[str, Any]
"""A line of a log: one measurement."""


def read(folder: Path) -> dict[str, list[Entry]]:
    """The measurements of each member, by name, in order."""
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))}


def share(entry: Entry) -> float:
    """The mean of a measurement's scores, from 0 to 1."""
    return sum(entry["scores"].values()) / len(entry["scores"])


def svg(logs: dict[str, list[Entry]]) -> str:
    """The whole picture, of up to eight logs."""
    def lines(value: Callable[[Entry], float]) -> list[Line]:
        return [Line(name, [(entry["seconds"], value(entry)) for entry in entries], colour)
                for colour, (name, entries) in zip(COLOURS, logs.items(), strict=False)]

    longest = max(entry["seconds"] for entries in logs.values() for entry in entries)
    time = Axis((0, longest), label=lambda seconds: f"{seconds / 60:.0f} minutes" if seconds else "")
    first, second = Box(50, 50, 380, 260), Box(520, 50, 380, 260)
    losses = lines(lambda entry: entry["loss"])
    parts = panel(first, "loss of a batch (logarithmic)", time, LOSS, losses)
    parts += panel(second, "right, mean of what is measured", time, SHARE, lines(share))
    return picture(920, 370, parts + legend(first.left, first.top + first.height + 45, losses, across=110, down=0))


def main() -> None:
    """The command."""
    for folder in sorted((HERE / "logs").iterdir()):
        (HERE / f"curves-{folder.name}.svg").write_text(svg(read(folder)))


if __name__ == "__main__":
    main()
