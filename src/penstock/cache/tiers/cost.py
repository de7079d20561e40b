"""Cost model: whether loading or computing is faster, from measurements of this engine on this machine.

Computing: how long steps of about so many positions took, by powers of two. Loading: the bytes of a tier over the rate at which
it has lately given bytes, behind what it is still to give. What has not been measured yet is assumed to favour loading, since
trying is how it gets measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_WEIGHT = 0.2
"""Of a new measurement, in a running mean."""

_WARM_UP = 2
"""So many loads are done to find out."""

_STALE_SECONDS = 60.0
"""A rate that nobody has measured for so long may have changed: one load tries again."""


class Steps:
    """How long it takes to compute positions, learnt from steps."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        """By the binary logarithm of their positions, rounded down: the mean size and the mean seconds of steps."""

    def learn(self, positions: int, seconds: float) -> None:
        """A step of so many positions took so long."""
        if positions < 1 or seconds <= 0:
            return
        size = positions.bit_length() - 1
        mean = self._means.get(size, (float(positions), seconds))
        self._means[size] = (mean[0] + _WEIGHT * (positions - mean[0]), mean[1] + _WEIGHT * (seconds - mean[1]))

    @property
    def known(self) -> bool:
        """Whether any step has been measured."""
        return bool(self._means)

    def seconds(self, positions: int) -> float | None:
        """Predicted seconds to compute so many positions of one request; None before the first measurement.

        Whole steps of the largest size that was seen, and one for the rest, whose size is the nearest that was seen. That
        attention takes longer behind a long context is left out, so long contexts are loaded a little more rarely than they
        should be.
        """
        if not self._means or positions < 1:
            return None
        largest, longest = self._means[max(self._means)]
        whole = int(positions // largest)
        rest = positions - whole * largest
        if rest < 1:
            return whole * longest
        nearest, seconds = min(self._means.values(), key=lambda mean: abs(mean[0] - rest))
        # A smaller step than any seen takes as long as that one.
        return whole * longest + seconds * max(1.0, rest / nearest)


class Source:
    """How fast a tier gives pages."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes a second; 0 until measured."""
        self._samples = 0
        self._measured = 0.0
        self.owed = 0
        """Bytes of loads that are under way."""

    def learn(self, nbytes: int, seconds: float, now: float, whole: bool = True) -> None:
        """The tier gave so many bytes, and was busy with it for so long. If it has not given the `whole` of them, that can only
        tell that it is slower than was thought."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        if not whole and rate > self.rate > 0:
            return
        # The first is not typical: buffers are made, files are opened, clocks wake up.
        stale = self._samples < _WARM_UP or now - self._measured > _STALE_SECONDS
        self._samples += 1
        # The mean of seconds a byte, since time is what is to be predicted.
        self.rate = rate if stale else 1 / (1 / self.rate + _WEIGHT * (1 / rate - 1 / self.rate))
        self._measured = now

    def seconds(self, nbytes: int, now: float) -> float:
        """Predicted seconds to give so many bytes behind those in flight; 0 where the rate should be measured anew."""
        if self._samples < _WARM_UP or (now - self._measured > _STALE_SECONDS and not self.owed):
            return 0.0
        return (self.owed + nbytes) / self.rate


class Costs:
    """Both sides of the question."""

    def __init__(self, tiers: Mapping[str, Source]) -> None:
        self.steps = Steps()
        self.sources = dict(tiers)

    def worth_loading(self, nbytes: Mapping[str, int], positions: int, now: float, patience: float = math.inf) -> bool:
        """Whether loading so many bytes from each tier is predicted to be faster than computing these positions, and to end
        before the `patience` for it does."""
        compute = self.steps.seconds(positions)
        return compute is None or max(self.sources[tier].seconds(n, now) for tier, n in nbytes.items()) < min(compute, patience)

    def worth_saving(self, tier: str, nbytes: int, positions: int) -> bool:
        """Whether a tier gives bytes faster than they are computed, so that it is worth having more there."""
        source, compute = self.sources[tier], self.steps.seconds(1 << 20)
        return compute is None or not source.rate or nbytes / source.rate < compute * positions / (1 << 20)
