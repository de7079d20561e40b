"""Line charts as SVG text: axes, lines, bars, legends. The records need no more, so there is no plotting library."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1b6ca8", "#c0392b", "#1e8449", "#8e44ad", "#b9770e", "#555555", "#17a2b8", "#7f7f00")


@dataclass(frozen=True)
class Axis:
    """From the least to the greatest of its marks, which get grid lines and labels."""

    marks: Sequence[float]
    logarithmic: bool = False
    label: Callable[[float], str] = "{:g}".format

    def place(self, value: float) -> float:
        """0 at the least mark, 1 at the greatest; what lies beyond is moved to the border."""
        low, high = min(self.marks), max(self.marks)
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low * 1e-9))
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))


def rounded(values: Sequence[float], logarithmic: bool = False) -> Axis:
    """An axis of round numbers that holds the values: equal steps from 0, or, logarithmic, 1, 2 and 5 of each power of ten."""
    high = max(values)
    if logarithmic:
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(high)) + 1)
        marks = [digit * 10.0 ** power for power in powers for digit in (1, 2, 5)]
        first = max(i for i, mark in enumerate(marks) if mark <= min(values) * 1.0001)
        last = min((i for i, mark in enumerate(marks) if mark >= high * 0.9999), default=len(marks) - 1)
        return Axis(marks[first:max(last, first + 1) + 1], True)
    size = 10.0 ** math.floor(math.log10(high / 5)) if high > 0 else 0.2
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit * 5 >= high * 0.9999)
    return Axis([step * i for i in range(6)])


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """The place of a panel's axes, in pixels."""

    left: float
    top: float
    width: float
    height: float


def panel(box: Box, title: str, x: Axis, y: Axis, lines: Sequence[Line], below: str = "") -> list[str]:
    """SVG elements of one panel; `below` is written under the x axis."""
    def across(value: float) -> float:
        return box.left + box.width * x.place(value)

    def down(value: float) -> float:
        return box.top + box.height * (1 - y.place(value))

    parts = frame(box, title, y, below)
    parts += [text_at(across(mark), box.top + box.height + 18, x.label(mark), anchor="middle") for mark in x.marks]
    for line in lines:
        points = " ".join(f"{across(a):.1f},{down(b):.1f}" for a, b in line.points)
        dashes = ' stroke-dasharray="4 3"' if line.dashed else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>')
    return parts


def legend(left: float, top: float, lines: Sequence[Line], across: float = 0, down: float = 18) -> list[str]:
    """The lines' names in their colours, each so far from the one before."""
    return [text_at(left + i * across, top + i * down, line.name + (" (dashed)" if line.dashed else ""), colour=line.colour)
            for i, line in enumerate(lines)]


def picture(width: float, height: float, parts: Sequence[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" '
            'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def frame(box: Box, title: str, y: Axis, below: str) -> list[str]:
    """The title, the grid of the y axis and what is written below."""
    parts = [text_at(box.left, box.top - 12, title)]
    if below:
        parts.append(text_at(box.left, box.top + box.height + 38, below))
    for mark in y.marks:
        at = box.top + box.height * (1 - y.place(mark))
        parts += [f'<path d="M{box.left:g} {at:.1f}h{box.width:g}" stroke="#ddd"/>',
                  text_at(box.left - 6, at + 4, y.label(mark), anchor="end")]
    return parts


def text_at(x: float, y: float, text: str, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
