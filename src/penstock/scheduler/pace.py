"""How long a step may be while sequences wait for their next token: so many tokens as the device computes in a set time."""

from __future__ import annotations

_LEAST = 256
"""Tokens: a smaller step takes hardly less time on any device, and prompts must go on."""
_WEIGHT = 0.2
"""Of the newest step in the running mean."""


class Pace:
    """Learns from the steps that were done. Without a target, a step may always have `most` tokens."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        """Seconds."""
        self._most = most
        self._each = 0.0
        """Seconds a token, as a running mean; 0 before anything is known."""

    def tokens(self) -> int:
        """The most tokens of a step in which some sequences take their next token and others read their prompts."""
        if self._target is None or not self._each:
            return self._most
        return max(min(_LEAST, self._most), min(self._most, int(self._target / self._each)))

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. Small ones say nothing: their time is that of reading the weights."""
        if self._target is None or tokens < _LEAST or seconds <= 0:
            return
        each = seconds / tokens
        self._each = each if not self._each else self._each + _WEIGHT * (each - self._each)
