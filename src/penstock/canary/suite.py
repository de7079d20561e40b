"""The graded suite: the skills by name, the prompts that score them, and scores with intervals. Owns no prompt's text.

Prompts follow from the skill's name and the number asked for, and are of the held-out side only (`Item.held_out`), from easy to
long in equal steps. `penstock eval` and the tests ask the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from penstock.canary import calling, skills
from penstock.canary.item import Item
from penstock.canary.likelihood import NORMAL, Interval

SKILLS: dict[str, skills.Generator] = {
    "repeat": skills.repeat, "reverse": skills.reverse, "retrieve": skills.retrieve, "retrieve-4k": skills.retrieve_long,
    "add": skills.add, "compare": skills.compare, "count": skills.count, "sort": skills.sort, "system": skills.system,
    "recall": skills.recall, "json": skills.extract, "tool-call": calling.call, "tool-answer": calling.answer,
    "think": skills.think, "stop": skills.stop}

ALL: dict[str, skills.Generator] = {**SKILLS, "edge": skills.edge}
"""The skills, and what one member alone was trained for: asked for only by name."""


def held_out(generator: skills.Generator, rng: Random, span: float) -> Item:
    """A prompt that is for grading."""
    while not (item := generator(rng, span)).held_out:
        pass
    return item


def prompts(skill: str, count: int) -> list[Item]:
    """`count` prompts of a skill, the same ones every time."""
    rng = Random(f"graded {skill}")
    return [held_out(ALL[skill], rng, number / count) for number in range(count)]


@dataclass(frozen=True)
class Score:
    """The number of right answers of a skill. `left_out` prompts did not fit the model's context and are not in `asked`."""

    skill: str
    right: int
    asked: int
    left_out: int = 0

    @property
    def share(self) -> float:
        """From 0 to 1; 0 if nothing was asked."""
        return self.right / self.asked if self.asked else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the share (Wilson 1927), which is sound near 0 and 1 too."""
        if not self.asked:
            return 0.0, 1.0
        n, z = self.asked, NORMAL
        middle = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


def graded(items: Sequence[Item], answers: Sequence[tuple[str, Sequence[Mapping[str, object]], bool] | None]) -> Score:
    """The score of one skill. An answer is (text, tool calls, whether it stopped by itself), or None for what did not fit."""
    asked = [(item, answer) for item, answer in zip(items, answers, strict=True) if answer is not None]
    right = sum(item.right(text, calls, stopped=stopped) for item, (text, calls, stopped) in asked)
    return Score(items[0].skill, right, len(asked), len(items) - len(asked))


def table(scores: Sequence[Score], fine: Mapping[str, Interval] | None = None) -> str:
    """The scores for people, one skill a line; `fine`, the log probabilities of right answers, where they are known."""
    more = "     log probability of the right answer" if fine else ""
    lines = [f"{'skill':<12} {'right':>11}   share   95 % interval{more}"]
    for score in scores:
        low, high = score.interval
        note = f"   ({score.left_out} did not fit)" if score.left_out else ""
        right = f"{score.right:>5} of {score.asked:<4}"
        line = f"{score.skill:<12} {right} {score.share:6.1%}   {f'{low:.1%} to {high:.1%}':<16}"
        if (own := (fine or {}).get(score.skill)) is not None:
            line += f"  {own.mean:9.4f}   {own.low:.4f} to {own.high:.4f}"
        lines.append(line.rstrip() + note)
    return "\n".join(lines)
