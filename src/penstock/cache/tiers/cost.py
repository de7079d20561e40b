"""Cost model: predicts whether loading or computing is faster, from measurements of this engine on this machine.

Computing is predicted by `core/steptime.py`, loading by the bytes requested plus the bytes in flight, divided by the tier's
recent throughput. Anything not measured yet is assumed to favour loading, because that yields a measurement."""

import math
from collections.abc import Mapping

from penstock.core.steptime import StepTime

_WEIGHT = 0.2
"""The weight of a new measurement in an exponential moving average."""

_WARM_UP = 2
"""The number of warm-up loads that are made without a prediction."""

_STALE_SECONDS = 60.0
"""A rate older than this may be outdated: one load is made to measure it again."""


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

    def __init__(self, tiers: Mapping[str, Source], times: StepTime) -> None:
        self.times = times
        self.sources = dict(tiers)

    def worth_loading(self, nbytes: Mapping[str, int], positions: int, now: float, patience: float = math.inf) -> bool:
        """True if loading `nbytes` from each tier is predicted to be faster than computing `positions` positions and to finish
        within `patience` seconds."""
        slowest = max(self.sources[tier].seconds(n, now) for tier, n in nbytes.items())
        return not self.times.known or slowest < min(self.times.prompt(positions), patience)

    def worth_saving(self, tier: str, nbytes: int, positions: int) -> bool:
        """True if loading `nbytes` from a tier is faster than computing `positions` positions, so that saving them pays."""
        source, times = self.sources[tier], self.times
        return not times.known or not source.rate or nbytes / source.rate < times.prompt(times.chunk) * positions / times.chunk
