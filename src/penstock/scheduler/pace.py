"""How much of a step prompts may take while other sequences wait for their next token."""

from __future__ import annotations

_ADDED = 0.85
"""What prompts may add to a step, in units of what it takes without them: nearly half of the device is then theirs."""
_UNNOTICED = 0.004
"""Seconds that they may always add: nobody notices, and shorter ones are mostly what any prompt costs a step."""
_PATIENCE = 2.0
"""Seconds that prompts wait, all together, before they may add more: in proportion from then on, up to the target."""
_LEAST = 16
"""Tokens of prompts in any step, so that they go on."""
_PAUSE = 32
"""Steps in a row that read prompts, before one that does not: what steps take without them is known only from such."""
_GROWN = 1.5
"""How many times as many sequences as then have the next such step come sooner."""
_WEIGHT = 0.2
"""Of the newest step in what is remembered."""


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
