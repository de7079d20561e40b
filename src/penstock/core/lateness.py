"""The lateness of something, fitted as TCP fits round trips (RFC 6298): by a mean and a mean deviation."""


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
        """Learns from one."""
        self._deviation += 2 * self._gain * (abs(seconds - self._mean) - self._deviation)
        self._mean += self._gain * (seconds - self._mean)
