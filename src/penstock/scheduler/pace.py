"""How much of a step prompts may take while other sequences wait for their next token."""

from __future__ import annotations

_ADDED = 0.75
"""What prompts may add to a step, in units of what it takes without them: three sevenths of the device are then theirs."""
_PATIENCE = 0.5
"""Seconds that a prompt waits before it may add more: in proportion from then on, up to the target."""
_LEAST = 16
"""Tokens of prompts in any step, so that they go on."""
_WEIGHT = 0.2
"""Of the newest step in what is remembered."""


class Pace:
    """Learns from the steps that were done. Without a target, a step may always have `most` tokens."""

    def __init__(self, target: float | None, most: int) -> None:
        self._target = target
        """Seconds."""
        self._most = most
        self._alone = 0.0
        """Seconds of a step without prompts; 0 before there was one."""
        self._rows = 1.0
        """How many sequences such a step had."""
        self._tokens = 0.0
        self._seconds = 0.0
        """Tokens of prompts in late steps, and what they added to these."""

    def tokens(self, decoding: int, waited: float) -> int:
        """The most tokens of a step in which `decoding` sequences take their next token, while others have prompts to read, the
        first of them for `waited` seconds."""
        if self._target is None or not self._tokens:
            return self._most
        alone = self._without(decoding)
        pushed = self._target - alone
        if alone:
            pushed = min(_ADDED * alone * waited / _PATIENCE, pushed)
        added = max(_ADDED * alone, pushed)
        return min(self._most, decoding + max(_LEAST, int(added * self._tokens / self._seconds)))

    def learn(self, decoding: int, tokens: int, seconds: float) -> None:
        """A step of so many sequences that took one token, and so many tokens of prompts, took so long."""
        if self._target is None or seconds <= 0:
            return
        if not tokens:
            weight = _WEIGHT if self._alone else 1.0
            self._alone += weight * (seconds - self._alone)
            self._rows += weight * (decoding - self._rows)
        elif tokens >= _LEAST:
            # Never as if prompts cost nothing: what is known of the rest may be too much.
            added = max(seconds - self._without(decoding), seconds / 10) if decoding else seconds
            self._tokens += _WEIGHT * (tokens - self._tokens)
            self._seconds += _WEIGHT * (added - self._seconds)

    def _without(self, decoding: int) -> float:
        """Seconds of a step of so many without prompts. More of them take longer, if in doubt in proportion: what is too much
        lets prompts end soon, and then it is measured; what is too little would not."""
        return self._alone * max(1.0, decoding / self._rows)
