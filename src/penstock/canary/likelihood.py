"""A finer score than right or wrong: how probable a model makes the right answers, and whether it differs from a reference.

The log probability of an item's canonical answer, in nats, is a real number, so that every item tells something even where all
answers are right. Compared item by item with recorded scores, faults show that change no answer: a lost norm weight, a slightly
wrong scale, a window off by a few positions. Rounding changes scores, too, so the record holds how much it does."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPTS = 40
"""Items of each skill, always the same ones, so that any two records can be paired."""

FILE = "logprobs.json"
"""The name of the record in a model folder."""

LIMIT = 1.5
"""Changes that are this many times those of rounding come from something else; kernels of one dtype differ by about 1.2."""

NORMAL = 1.959964
"""The normal distribution's quantile for an interval of 95 %."""
_LEAST = 5e-6
"""Nats below which a change says nothing, not even in float32."""

Values = Sequence[float | None]
"""Log probabilities in nats, an item each; None for one that was not asked or did not fit."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, by the normal distribution."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """The interval of independent values; infinite for fewer than two."""
        mean = statistics.fmean(values) if values else 0.0
        half = NORMAL * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(mean, mean - half, mean + half, len(values))


def score(values: Values) -> Interval:
    """The log probability of a right answer."""
    return Interval.of([value for value in values if value is not None])


@dataclass(frozen=True)
class Record:
    exact: Mapping[str, Values]
    """In float32, by the reference kernels."""
    rounded: Mapping[str, Mapping[str, Values]]
    """By dtype, computed in another way: what rounding alone changes. The model's own dtype comes first."""

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Raises OSError or ValueError if the file is no record."""
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not {"exact", "rounded"} <= content.keys() or not content["rounded"]:
            raise ValueError("it has no exact and rounded scores")
        return cls(content["exact"], content["rounded"])

    def dump(self, path: Path) -> None:
        rounded = ",\n".join(f' "{dtype}": {_lines(scores)}' for dtype, scores in self.rounded.items())
        path.write_text(f'{{"exact": {_lines(self.exact)},\n"rounded": {{\n{rounded}\n}}}}\n')


def _lines(scores: Mapping[str, Values]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(skill)}: {json.dumps([None if one is None else round(one, 6) for one in values])}"
                             for skill, values in scores.items()) + "}"


@dataclass(frozen=True)
class Comparison:
    """Scores against a record, item by item."""

    change: Interval
    """Nats by which right answers became more probable."""
    ratio: Interval
    """The size of changes, as a multiple of what rounding changes (geometric mean over items)."""
    by_skill: Mapping[str, Interval]
    """The ratio of each skill."""

    @property
    def differing(self) -> list[str]:
        """The skills whose changes are larger than rounding explains; a fault may concern long contexts alone, for example."""
        return [skill for skill, ratio in self.by_skill.items() if ratio.low > LIMIT]

    @property
    def differs(self) -> bool:
        """Whether something besides rounding has changed the scores."""
        return self.ratio.low > LIMIT or bool(self.differing)


def compare(values: Mapping[str, Values], record: Record, dtype: str = "") -> Comparison:
    """Over all items that both have. `dtype` is what the scores were computed in: the model's own unless the record has it."""
    noise = record.rounded.get(dtype) or next(iter(record.rounded.values()))
    changes: list[float] = []
    ratios: dict[str, list[float]] = {}
    for skill, found in values.items():
        for mine, true, rough in zip(found, record.exact.get(skill, ()), noise.get(skill, ()), strict=False):
            if mine is not None and true is not None and rough is not None:
                changes.append(mine - true)
                ratios.setdefault(skill, []).append(math.log((abs(mine - true) + _LEAST) / (abs(rough - true) + _LEAST)))
    return Comparison(Interval.of(changes), _exponential([one for each in ratios.values() for one in each]),
                      {skill: _exponential(each) for skill, each in ratios.items()})


def _exponential(logs: Sequence[float]) -> Interval:
    """The interval of a geometric mean."""
    found = Interval.of(logs)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(min(found.high, 700.0)), found.count)
