"""The prefill budget of a step while other sequences decode."""

from __future__ import annotations

_ADDED = 0.85
"""Time that prefill may add to a decode step, as a fraction of that step: nearly half of the device is then prefill's."""
_UNNOTICED = 0.004
"""Seconds that prefill may always add: too short to be noticed, and about the fixed cost of mixing prefill in."""
_PATIENCE = 2.0
"""Summed waiting time of prompts, in seconds, after which they may add more: in proportion, up to the target."""
_LEAST = 16
"""Fewest prefill tokens of a step, so that prompts make progress."""
_PAUSE = 32
"""Mixed steps in a row before one pure decode step, which measures what decoding alone takes."""
_GROWN = 1.5
"""Growth of the decoding batch that brings the next pure decode step forward."""
_WEIGHT = 0.2
"""Weight of the newest step in the moving averages."""


class Pace:
    """Learns step times from finished steps. Without a target, every step may have `most` tokens."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        """Target step time in seconds."""
        self._most = most
        self._alone = 0.0
        """Moving average of the time of pure decode steps in seconds; 0 before the first one."""
        self._rows = 0.0
        """Sequences of the latest pure decode step."""
        self._tokens = 0.0
        self._seconds = 0.0
        """Moving averages, over mixed steps, of prefill tokens and of the seconds that they added."""
        self._reading = 0
        """Number of mixed steps in a row."""

    def tokens(self, decoding: int, reading: int, unread: int, waited: float) -> int:
        """Returns the token budget of the next step. `decoding` sequences decode; `reading` sequences have `unread` prompt
        tokens in total and have waited `waited` seconds in total.

        If most sequences are in prefill and one step can take most of it, one long step is better than several, because it
        delays the few decoding sequences only once.
        """
        if self._target is None or not self._tokens or (decoding <= reading and 2 * unread <= 3 * self._most):
            return self._most
        self._reading += 1
        if self._reading > _PAUSE or decoding > _GROWN * self._rows > 0:
            self._reading, self._rows = 0, decoding
            return decoding
        added = self._target - self._alone
        if decoding > reading and self._alone:
            added = min(_ADDED * self._alone * waited / _PATIENCE, added)
        added = max(_ADDED * self._alone, min(_UNNOTICED, self._target), added)
        # Do not extrapolate to steps more than twice as long as the measured ones.
        tokens = min(int(added * self._tokens / self._seconds), int(2 * self._tokens))
        return min(self._most, max(decoding + _LEAST, _whole(decoding + tokens)))

    def learn(self, decoding: int, tokens: int, seconds: float) -> None:
        """Reports that a step of `decoding` decode tokens and `tokens` prefill tokens took `seconds`."""
        if self._target is None or seconds <= 0:
            return
        if tokens >= _LEAST:
            # At least half of the average time per token, because the estimate of pure decode steps may be too high.
            added = max(seconds - self._alone, seconds * tokens / (2 * (decoding + tokens))) if decoding else seconds
            self._tokens += _WEIGHT * (tokens - self._tokens)
            self._seconds += _WEIGHT * (added - self._seconds)
        else:
            self._alone += (_WEIGHT if self._alone else 1.0) * (seconds - self._alone)
            self._rows = decoding


def _whole(tokens: int) -> int:
    """Rounds down to full GEMM tiles if there are at least 128 tokens, because one token more costs a whole tile."""
    tile = 1 if tokens < 128 else 64 if tokens < 384 else 128
    return tokens // tile * tile
