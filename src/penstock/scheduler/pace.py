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
    """Learns from the steps that were done. Without a target, a step may always have `most` tokens."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        """Seconds."""
        self._most = most
        self._alone = 0.0
        """Seconds of a late step without prompts; 0 before there was one."""
        self._rows = 0.0
        """How many sequences it had."""
        self._tokens = 0.0
        self._seconds = 0.0
        """Tokens of prompts in late steps, and what they added to these."""
        self._reading = 0
        """Steps in a row that read prompts."""

    def tokens(self, decoding: int, reading: int, unread: int, waited: float) -> int:
        """The most tokens of the next step, in which `decoding` sequences take their next token, while `reading` ones have
        prompts to read, of `unread` tokens together, and have waited for `waited` seconds together.

        While most are reading, one long step is better than many if that is most of it: it keeps the few waiting only once.
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
        # What is known of shorter steps says little about much longer ones.
        tokens = min(int(added * self._tokens / self._seconds), int(2 * self._tokens))
        return min(self._most, max(decoding + _LEAST, _whole(decoding + tokens)))

    def learn(self, decoding: int, tokens: int, seconds: float) -> None:
        """A step of so many sequences that took one token, and so many tokens of prompts, took so long."""
        if self._target is None or seconds <= 0:
            return
        if tokens >= _LEAST:
            # At least half of what each token took on the average: what is known of steps without prompts may be too much.
            added = max(seconds - self._alone, seconds * tokens / (2 * (decoding + tokens))) if decoding else seconds
            self._tokens += _WEIGHT * (tokens - self._tokens)
            self._seconds += _WEIGHT * (added - self._seconds)
        else:
            self._alone += (_WEIGHT if self._alone else 1.0) * (seconds - self._alone)
            self._rows = decoding


def _whole(tokens: int) -> int:
    """No more than that, and if it is more than a few, a number that fills the tiles of matrix products: a token beyond them
    takes as long as a tile."""
    tile = 1 if tokens < 128 else 64 if tokens < 384 else 128
    return tokens // tile * tile
