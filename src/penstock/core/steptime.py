"""The model of step time: fitted online from finished steps, read by the pace, admission and the simulator.

A step's seconds are a sum of non-negative terms: a constant, one for each segment, a piecewise linear function of the tokens (a
step is bound by reading weights first, by compute later), the entries that single tokens read, and the work of prefills."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Lateness:
    """A moving mean of seconds, and a number of mean deviations above it."""

    def __init__(self, gain: float = 0.125, deviation: float = 0.0) -> None:
        """`gain`: weight of the newest in the mean, twice that in the deviation, which begins with `deviation` seconds."""
        self._gain = gain
        self._mean, self._deviation, self.deviations = 0.0, deviation, 4.0

    @property
    def late(self) -> float:
        """Seconds that hardly any takes longer than."""
        return self._mean + self.deviations * self._deviation

    def took(self, seconds: float) -> None:
        self._deviation += 2 * self._gain * (abs(seconds - self._mean) - self._deviation)
        self._mean += self._gain * (seconds - self._mean)


KNOTS = (0, 4, 16, 64, 256, 1024, 4096)
"""Tokens at which the slope may change."""
_PIECES = tuple((float(knot), float(upto) - knot) for knot, upto in zip(KNOTS, (*KNOTS[1:], math.inf), strict=True))
"""(first, length) in tokens of the pieces with one slope."""
TERMS = ("step", "prefill", "segment", "read", "work", "scored", *(f"tokens_from_{knot}" for knot in KNOTS))
"""`prefill` is counted once for a step with a segment of several tokens."""
_KEEP = 0.97
"""Weight of the past among steps of one size: about 30 of them are remembered."""
_NEWEST, _RECENT = 0.02, 0.1
"""Weight of the newest step in the reported error, and in the recent one."""
_SMOOTH, _SMALL = 1e-3, 1e-8
"""Regularization, relative to what a term explains: slopes that nothing tells apart are alike, and terms small."""
_LAST = (1e3, 1e6, 1e5, 1e4, 1e4, 1e3)
"""Terms before the tokens, in multiples of `_SMALL`: where steps do not tell them apart, tokens explain the time."""
_AGE = 1.002
"""Growth of the newest step's weight with every step: what was seen some 500 steps ago counts a third."""
_STARTLED = 0.2
"""Further growth, times the square of the recent error: a device that has changed its speed is learned anew."""
_STARTLING = 2.0
"""A step with a prompt that took so many times its prediction is learned from at once."""
_RESCALED = 1e6
_UNUSUAL = 3.0
"""A step that took more than so many times its prediction weighs by its own time, a shorter one by at most as many times it."""
_USUAL = 2000
"""Steps over which `usual` is averaged."""
_SOLVE, _SOLVE_MOST, _SOLVE_SECONDS = 8, 64, 0.05
"""Steps that are learned from together, once there have been some: as many as take 50 ms, so that fitting costs little."""


class Load(NamedTuple):
    segments: int
    tokens: int
    read: float = 0.0
    """Entries of the cache that segments of one token read together."""
    work: float = 0.0
    """Pairs of query and key of the longer segments: count * (start + count / 2) each."""
    scored: int = 0
    """Prompt positions with `Want.SCORE`: each has logits of its own."""


@lru_cache(1 << 12)
def _pieces(tokens: int) -> tuple[float, ...]:
    """The part of so many tokens that lies in each piece."""
    return tuple(min(max(tokens - first, 0.0), length) for first, length in _PIECES)


class StepTime:
    """Least squares of the relative error. Steps of each size are forgotten by newer ones of that size alone."""

    def __init__(self, weights: Sequence[float] = (), buckets: Sequence[int] = (), chunk: int = 2048) -> None:
        """`weights`: of TERMS, from an earlier fit. `buckets`: tokens to which steps are padded, ascending; empty: none are.
        `chunk`: the most tokens of a prompt that a step computes."""
        size = len(TERMS)
        self.weights = list(weights) or [0.0] * size
        self.usual = np.array(self.weights)
        """Their mean: `weights` follow the newest steps, of which there are too few to predict hours."""
        self.buckets = list(buckets)
        self.chunk = min(2048, chunk)
        self.error = 0.0
        """Moving average of |predicted - measured| / measured, each predicted before it was learned from."""
        self.steps = 0
        self.longest = 0
        """The most tokens of a step so far."""
        self._sums: dict[tuple[int, bool, bool], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}
        self._weight, self._recent = 1.0, 0.0
        self._unread: list[tuple[Load, float]] = []
        self._matrix, self._vector = np.zeros((size, size)), np.zeros(size)

    @property
    def known(self) -> bool:
        """Whether `seconds` can be asked."""
        return any(self.weights)

    def seconds(self, load: Load) -> float:
        """Predicted seconds of a step; 0 before anything is known."""
        found: float = sum(map(mul, self._terms(load), self.weights))
        return found

    def prompt(self, tokens: int, start: int = 0) -> float:
        """Predicted seconds to compute `tokens` of a prompt from `start` on, alone; 0 before anything is known."""
        whole, rest = divmod(tokens, self.chunk)
        found = whole * self.seconds(Load(1, self.chunk)) + (self.seconds(Load(1, rest)) if rest else 0.0)
        return found + self.weights[4] * tokens * (start + tokens / 2)

    def slope(self, tokens: int) -> float:
        """Seconds of one token more in a step of so many."""
        return self.weights[len(TERMS) - len(KNOTS) - 1 + bisect_left(KNOTS, tokens)]

    def within(self, load: Load, seconds: float, start: float = 0.0, scored: float = 0.0) -> int:
        """Prefill tokens, at position `start` on average, that make a step take `seconds`; `scored`: the scored part."""
        weights = self.weights
        further = weights[4] * start + weights[5] * scored
        left, at, added = seconds - self.seconds(load) - weights[1] - weights[2], self._padded(load.tokens), 0.0
        for i, knot in enumerate(KNOTS):
            upto = KNOTS[i + 1] if i + 1 < len(KNOTS) else 1 << 40
            if upto <= at or left <= 0:
                continue
            slope, room = weights[6 + i] + further, upto - max(at, knot)
            fits = min(float(room), left / slope) if slope > 0 else float(room)
            added, left = added + fits, left - fits * slope if fits == room else 0.0  # not what rounding leaves
        return int(min(added, 1 << 40))

    def learn(self, load: Load, seconds: float) -> None:
        """Reports that a step took `seconds`. Steps are learned from a few at a time, once there have been some."""
        if seconds <= 0 or not load.tokens:
            return
        self.steps += 1
        self.longest = max(self.longest, load.tokens)
        self._unread.append((load, seconds))
        unread = len(self._unread)
        # One long prompt is computed before a few such steps have come.
        surprised = load.work > 0 and seconds > _STARTLING * self.seconds(load)
        if surprised or self.steps < 4 * _SOLVE or unread == _SOLVE_MOST or (
                unread >= _SOLVE and sum([took for _, took in self._unread]) >= _SOLVE_SECONDS):
            loads, measured = zip(*self._unread, strict=True)
            self._unread.clear()
            self._fit(loads, np.array(measured))

    def _fit(self, loads: Sequence[Load], seconds: npt.NDArray[np.float64]) -> None:
        terms = np.array([self._terms(load) for load in loads])
        predicted = terms @ self.weights
        if self.known:
            off = abs(predicted - seconds) / seconds
            self.error += min(1.0, max(_NEWEST * len(loads), 1 / self.steps)) * (float(off.mean()) - self.error)
            self._recent += min(1.0, _RECENT * len(loads)) * (float(np.minimum(off, 1.0).mean()) - self._recent)
        growth = _AGE + _STARTLED * self._recent ** 2
        weights = self._weight * growth ** np.arange(len(loads))
        self._weight *= growth ** len(loads)
        # Errors relative to the prediction: those relative to the measured times are least below their mean.
        unit = np.where(seconds > _UNUSUAL * predicted, seconds, np.minimum(predicted, _UNUSUAL * seconds))
        sizes = [(load.tokens.bit_length(), load.tokens > load.segments, load.scored > 0) for load in loads]
        for size in set(sizes):
            own = [i for i, other in enumerate(sizes) if other == size]
            # The newest of a size counts most.
            kept = weights[own] * _KEEP ** (np.arange(len(own))[::-1] / 2)
            scaled = terms[own] * (kept / unit[own])[:, None]
            sums = scaled.T @ scaled, scaled.T @ (kept * seconds[own] / unit[own])
            old = self._sums.get(size, (np.zeros_like(self._matrix), np.zeros_like(self._vector)))
            keep = _KEEP ** len(own)
            self._sums[size] = keep * old[0] + sums[0], keep * old[1] + sums[1]
            self._matrix += self._sums[size][0] - old[0]
            self._vector += self._sums[size][1] - old[1]
        if self._weight > _RESCALED:
            for arrays in (*self._sums.values(), (self._matrix, self._vector)):
                for array in arrays:
                    array /= self._weight ** 2
            self._weight = 1.0
        self.weights = self._solved()
        self.usual += min(1.0, max(2 * len(loads) / self.steps, len(loads) / _USUAL)) * (self.weights - self.usual)

    def _terms(self, load: Load) -> list[float]:
        """Without NumPy, because a single load is asked for several times for each request that arrives."""
        return [1.0, load.tokens > load.segments, load.segments, load.read, load.work, load.scored,
                *_pieces(self._padded(load.tokens))]

    def _padded(self, tokens: int) -> int:
        at = bisect_left(self.buckets, tokens)
        return self.buckets[at] if at < len(self.buckets) else tokens

    def _solved(self) -> list[float]:
        """The non-negative solution: terms with a negative weight are left out, one after another."""
        matrix, vector = self._matrix.copy(), self._vector
        diagonal = np.diag(self._matrix)
        for i in range(len(TERMS) - len(KNOTS), len(TERMS) - 1):
            # Where one of two slopes was not seen, it is the other.
            pull = _SMOOTH * (diagonal[i] + diagonal[i + 1])
            matrix[i, i] += pull
            matrix[i + 1, i + 1] += pull
            matrix[i, i + 1] -= pull
            matrix[i + 1, i] -= pull
        scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
        small = _SMALL * np.array([*_LAST, *(1.0 for _ in KNOTS)])
        used = [i for i in range(len(TERMS)) if matrix[i, i] > 0]
        while used:
            scaled = matrix[np.ix_(used, used)] / np.outer(scale[used], scale[used]) + np.diag(small[used])
            found = np.linalg.solve(scaled, vector[used] / scale[used]) / scale[used]
            if (found >= 0).all():
                weights = [0.0] * len(TERMS)
                for i, weight in zip(used, found.tolist(), strict=True):
                    weights[i] = weight
                return self._extended(weights)
            del used[int(np.argmin(found * scale[used]))]
        return self.weights

    def _extended(self, weights: list[float]) -> list[float]:
        """Slopes beyond the longest step: the last one seen, or the mean of all if that is more."""
        first = len(TERMS) - len(KNOTS)
        for i in range(first + 1, len(TERMS)):
            if not self._matrix[i, i]:
                knots = KNOTS[:i - first + 1]
                rise = sum(weights[first + k] * (knots[k + 1] - knots[k]) for k in range(len(knots) - 1))
                weights[i] = max(weights[i - 1], rise / knots[-1])
        return weights
