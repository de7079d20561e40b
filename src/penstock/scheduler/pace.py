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
        self._known = False
        """Whether that is of mixed steps, whose tokens take longer than those of prompts alone."""

    def tokens(self, decoding: int, reading: int) -> int:
        """The most tokens of a step in which `decoding` sequences take their next token, while `reading` ones, those that wait
        included, have their prompts to read.

        As long as most are reading, the step is whole: a long step keeps only the few waiting, and saves the many a turn.
        """
        if self._target is None or not self._each or decoding <= reading:
            return self._most
        return max(min(_LEAST, self._most), min(self._most, int(self._target / self._each)))

    def learn(self, tokens: int, seconds: float, mixed: bool) -> None:
        """A step of so many tokens took so long. Small ones say nothing: their time is that of reading the weights."""
        if self._target is None or tokens < _LEAST or seconds <= 0 or (self._known and not mixed):
            return
        each = seconds / tokens
        fresh = not self._each or (mixed and not self._known)
        self._each = each if fresh else self._each + _WEIGHT * (each - self._each)
        self._known = mixed
