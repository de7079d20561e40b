"""Cost model: predicts whether loading or computing is faster, from measurements of this engine on this machine.

Computing: the mean duration of steps, by size in powers of two. Loading: the bytes requested plus the bytes in flight, divided
by the tier's recent throughput. Anything not measured yet is assumed to favour loading, because that yields a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_WEIGHT = 0.2
"""The weight of a new measurement in an exponential moving average."""

_WARM_UP = 2
"""The number of warm-up loads that are made without a prediction."""

_STALE_SECONDS = 60.0
"""A rate older than this may be outdated: one load is made to measure it again."""


class Steps:
    """Predicts the time to compute positions from measured steps."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        """floor(log2(positions)) of a step -> (mean positions, mean seconds)."""

    def learn(self, positions: int, seconds: float) -> None:
        """Records a measured step."""
        if positions < 1 or seconds <= 0:
            return
        size = positions.bit_length() - 1
        mean = self._means.get(size, (float(positions), seconds))
        self._means[size] = (mean[0] + _WEIGHT * (positions - mean[0]), mean[1] + _WEIGHT * (seconds - mean[1]))

    @property
    def known(self) -> bool:
        """True once a step has been measured."""
        return bool(self._means)

    def seconds(self, positions: int) -> float | None:
        """Predicted seconds to compute `positions` positions of one request; None before the first measurement.

        The prediction is as many steps of the largest measured size as fit, plus one of the nearest measured size for the rest.
        It ignores that attention is slower in a long context, so long contexts are loaded slightly less often than they should.
        """
        if not self._means or positions < 1:
            return None
        largest, longest = self._means[max(self._means)]
        whole = int(positions // largest)
        rest = positions - whole * largest
        if rest < 1:
            return whole * longest
        nearest, seconds = min(self._means.values(), key=lambda mean: abs(mean[0] - rest))
        # A step smaller than every measured one is assumed to take as long as the smallest.
        return whole * longest + seconds * max(1.0, rest / nearest)


class Source:
    """The measured throughput of a tier."""

    def __init__(self) -> None:
        self.rate = 0.0
        """Bytes per second; 0 until measured."""
        self._samples = 0
        self._measured = 0.0
        self.owed = 0
        """Bytes of in-flight loads."""

    def learn(self, nbytes: int, seconds: float, now: float, whole: bool = True) -> None:
        """Records a load of `nbytes` that took `seconds`. A load that was not `whole` is only an upper bound of the rate, so it
        can lower the estimate but not raise it."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        if not whole and rate > self.rate > 0:
            return
        # Warm-up loads are not typical (buffer allocation, opening files, clock ramp-up): replace instead of averaging.
        stale = self._samples < _WARM_UP or now - self._measured > _STALE_SECONDS
        self._samples += 1
        # Average seconds per byte, because the prediction is a time.
        self.rate = rate if stale else 1 / (1 / self.rate + _WEIGHT * (1 / rate - 1 / self.rate))
        self._measured = now

    def seconds(self, nbytes: int, now: float) -> float:
        """Predicted seconds until `nbytes` arrive after the bytes in flight; 0 if the rate should be measured again."""
        if self._samples < _WARM_UP or (now - self._measured > _STALE_SECONDS and not self.owed):
            return 0.0
        return (self.owed + nbytes) / self.rate


class Costs:
    """The cost of computing and of loading from each tier."""

    def __init__(self, tiers: Mapping[str, Source]) -> None:
        self.steps = Steps()
        self.sources = dict(tiers)

    def worth_loading(self, nbytes: Mapping[str, int], positions: int, now: float, patience: float = math.inf) -> bool:
        """True if loading `nbytes` from each tier is predicted to be faster than computing `positions` positions and to finish
        within `patience` seconds."""
        compute = self.steps.seconds(positions)
        return compute is None or max(self.sources[tier].seconds(n, now) for tier, n in nbytes.items()) < min(compute, patience)

    def worth_saving(self, tier: str, nbytes: int, positions: int) -> bool:
        """True if loading `nbytes` from a tier is faster than computing `positions` positions, so that saving them pays."""
        source, compute = self.sources[tier], self.steps.seconds(1 << 20)
        return compute is None or not source.rate or nbytes / source.rate < compute * positions / (1 << 20)
