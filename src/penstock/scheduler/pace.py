"""The prefill budget of a step while other sequences decode."""

import math
from collections.abc import Callable

from penstock.core.request import Sequence
from penstock.core.steptime import Load, StepTime

_ADDED = 0.85
"""Time that prefill may add to a decode step, as a fraction of that step: nearly half of the device is then prefill's."""
_UNNOTICED = 0.004
"""Seconds that prefill may always add: too short to be noticed, and about the fixed cost of mixing prefill in."""
_PATIENCE = 2.0
"""Summed waiting time of prompts, in seconds, after which they may add more: in proportion, up to the target."""
_MARGIN, _ERROR = 0.9, 0.5
"""Part of a promise that a step is planned to take: 1 / (1 + the error of predictions), of which at most so much counts."""
SOON = 0.25
"""Part of its promise for which a prompt waits before steps become as long as the answers beside it were promised, and before
others make room for it."""
_CALM = 0.45
"""Part of a decode step that prompts may add which were promised four times their own time."""
_SLOW = 0.1
"""Part of a decode step that prefill may add although that breaks a promise: the device is too slow for it."""
_LEAST = 16
"""Fewest prefill tokens of a step, so that prompts make progress."""
_WORTH = 64
"""Tokens for which such prompts save up their part of several steps: fewer cost much more each."""
_PAUSE = 32
"""Mixed steps in a row before one pure decode step, which measures what decoding alone takes."""
_PIECE, _WHOLE = 1 / 16, 2.5
"""Pieces of others' work that short requests wait for: part of the target, at least so many times the shortest step."""
HAD = 10
"""Pieces of their own that count as others' part of later steps, at most."""
LIVELY = 1.0
"""Seconds after a small request in which another one is expected."""
_GROWN = 1.5
"""Growth of the decoding batch that brings the next pure decode step forward."""


Room = tuple[int, int, Callable[[Sequence], bool]]
"""The tokens of a step: of those who decode or read in order, and of the part of those who read later; who these are."""


class Pace:
    """Sizes chunks by the model of step time. Without a target, every step may have `most` tokens."""

    def __init__(self, target: float | None, most: int, times: StepTime) -> None:
        self._target = target
        """Target step time in seconds."""
        self._most = most
        self.times = times
        self._rows = 0
        """Sequences of the latest pure decode step."""
        self._reading = 0
        """Number of mixed steps in a row."""
        self.lively = 0.0
        """Until when small requests are expected."""
        self.held = False
        """Whether the latest budget was held back for short prompts that are expected."""
        self._saved = 0.0
        """Seconds that long and further prompts have left unused of their part; below 0: that they had while nobody waited."""
        self._owing = True
        """Whether pieces that they had count: not for long prompts alone, which need their part of every step to be in time."""
        self._weights: list[float] = []
        """Of the model of step time, by which `_long` was found."""
        self._long = 1 << 40
        """Prompts of more tokens take longer than the target alone."""

    @property
    def piece(self) -> float:
        """Seconds of a step that short requests may have to wait for, where they are expected; needs a target."""
        target = self._target or 0.0
        return min(target / 2, max(target * _PIECE, _WHOLE * self.times.seconds(Load(1, 1))))

    def had(self, saved: float, pieces: int = 1) -> float:
        """Returns the rest of the seconds that requests have `saved`, after pieces in which no other waited."""
        return max(saved - pieces * self.piece, -HAD * self.piece)

    def long(self, sequence: Sequence) -> bool:
        """Whether short prompts pass this one: a further one of its request, one with scores, or longer than the target."""
        return bool(sequence.request.follows) or sequence.stretched or sequence.scoring or sequence.prompt_len > self._long

    def budget(self, decode: Load, reading: list[Sequence], now: float, promised: float | None, owners: set[str]) -> Room:
        """Returns the tokens of a step beside which these sequences read, or could begin to; `owners` of requests decode.
        Prompts that were promised four times their own time, further ones beside another's answers, and long ones while small
        requests are expected, until they have waited for a part of their promise, read later."""
        times, decoding = self.times, decode.segments
        if self._weights is not times.weights:
            self._weights = times.weights
            if self._target and times.longest:
                self._long = times.within(Load(0, 0), self._target)
        short = [s for s in reading if not self.long(s)]
        self._owing = all(s.request.follows or s.scoring for s in reading if self.long(s))
        if not self._owing:
            self._saved = max(self._saved, 0.0)
        followed = {s.request.follows for s in reading} - {""}
        if any(s.request.params.n == 1 and s.request.id not in followed for s in short):
            self.lively = now + LIVELY
        self.held = False
        if not decoding or (now < self.lively and not owners - {s.request.follows for s in reading}):
            return self._without_others(decode, reading, short, now)

        def due(sequence: Sequence) -> bool:
            return now - sequence.request.arrival > SOON * (sequence.promise - sequence.request.arrival)

        def later(sequence: Sequence) -> bool:
            if sequence.stretched or (sequence.request.owner in followed and owners - {sequence.request.owner}):
                return True
            return promised is not None and now < self.lively and self.long(sequence) and not due(sequence)

        long = list(filter(later, reading))
        first = [s for s in reading if not later(s)] if long else reading
        apart = bool(first) and promised is not None
        # Prompts of several requests that have waited long enough go on as each would alone.
        part = self._calm(decode, long, max(1, sum(s.stretched and due(s) for s in long)), promised, apart) if long else 0
        if not first or (apart and part):
            return decoding, part, later
        waited = sum(now - (s.timings.first_scheduled or s.request.arrival) for s in first)
        if promised is not None and any(map(due, first)):
            waited = math.inf
        unread = sum(s.goal - s.planned for s in first)
        at = sum(s.planned for s in first) / len(first) + self._most / 8
        tokens = self.tokens(decode, len(first), unread, waited, promised, at, _scored(first))
        if long:
            tokens = min(tokens, decoding + unread)
        return tokens, min(part, self._most - tokens), later

    def _bound(self, promised: float) -> float:
        """Seconds that a step may take beside answers which were promised a token in so many."""
        return promised * min(_MARGIN, 1 / (1 + min(_ERROR, self.times.error)))

    def _calm(self, decode: Load, later: list[Sequence], parts: int, promised: float | None, apart: bool) -> int:
        """Tokens of long and further prompts in a step that decodes; so many of them have a part of it. Where their parts are
        too small, they save them up for a later step, which stays within the target and, if it can, what was promised. `apart`:
        others read, so they save up for a step in which these do not: both together would break the promise."""
        alone, target = self.times.seconds(decode), self._target or 0.0
        if promised is not None:
            target = max((1 + _SLOW) * alone, min(target, self._bound(promised)))
        self._saved += parts * _CALM * alone
        if self._saved <= 0:
            return 0
        tokens = self.times.within(decode, min(target, alone + self._saved), max(s.planned for s in later), _scored(later))
        if (apart or tokens < _WORTH) and alone + self._saved < target:
            return 0
        self._saved = 0.0
        return max(_LEAST, min(tokens, 2 * self.times.longest, self._most - decode.segments))

    def _without_others(self, decode: Load, reading: list[Sequence], short: list[Sequence], now: float) -> Room:
        """The tokens of a step in which none decodes but of the request that reads. Where short prompts come, the others make
        short steps until the next one comes, and add little to the step that reads one, nothing if they had enough before."""
        times = self.times
        if self._target is None or not times.longest or len(short) == len(reading) or now >= self.lively:
            if len(short) < len(reading) and self._owing:
                self._saved = self.had(self._saved, HAD)
            return self._most, 0, lambda _: False
        later = list(filter(self.long, reading))
        at, scored = max(s.planned for s in later), _scored(later)
        load = Load(decode.segments + len(short), decode.tokens + sum(s.goal - s.planned for s in short), decode.read)
        alone = times.seconds(load)
        if short:
            self._saved += _CALM * alone
        elif self._owing:
            self._saved = self.had(self._saved)
        tokens, self.held = min(load.tokens, self._most), True
        if short and self._saved <= 0:
            return tokens, 0, self.long
        seconds = (1 + _CALM) * alone if short else self.piece
        self._saved = min(self._saved, 0.0) if self._owing else self._saved - _CALM * alone * bool(short)
        # Short ones that fill the step may be waiting for just these: for what they compute, or one that is cornered.
        least = max(1, min(_LEAST, self._most // 2))
        part = max(least, min(_whole(times.within(load, seconds, at, scored)), self._most - tokens))
        return min(tokens, self._most - part), part, self.long

    def tokens(self, decode: Load, reading: int, unread: int, waited: float, promised: float | None = None,
               at: float = 0.0, scored: float = 0.0) -> int:
        """Returns the token budget of the next step. `decode` is the part of it that decodes; `reading` sequences have `unread`
        prompt tokens in total and have waited `waited` seconds in total. `promised`, in seconds, is the tightest promise of
        those who decode, between tokens: the target is never above it; infinity where none was made, which lifts the target.
        `at` is the position that prompts are at, on average; the part `scored` of them is scored.

        If most sequences are in prefill and one step can take most of it, one long step is better than several, because it
        delays the few decoding sequences only once; unless that breaks a promise."""
        times, decoding, target = self.times, decode.segments, self._target
        if target is None or not times.longest or promised == math.inf:
            return self._most
        once = decoding <= reading and 2 * unread <= 3 * self._most
        if promised is not None:
            bound = self._bound(promised)
            target = min(target, bound)
            once = once and times.seconds(Load(decoding + 1, self._most, decode.read, self._most * at)) <= promised
        if once:
            return self._most
        self._reading += 1
        if self._reading > _PAUSE or decoding > _GROWN * self._rows > 0:
            self._reading, self._rows = 0, decoding
            return decoding
        alone = times.seconds(decode) if self._rows else 0.0
        added = target - alone
        if decoding > reading and alone:
            added = min(_ADDED * alone * waited / _PATIENCE, added)
        added = max(_ADDED * alone, min(_UNNOTICED, target), added)
        if promised is not None and alone:
            added = min(added, max(bound - alone, _SLOW * alone))
        # Do not extrapolate to steps more than twice as long as the measured ones.
        tokens = min(times.within(decode, alone + added, at, scored), 2 * (times.longest - decoding))
        return min(self._most, max(decoding + _LEAST, _whole(decoding + tokens)))

    def learn(self, load: Load, decoding: int, seconds: float) -> None:
        """Reports that a step, `decoding` of whose segments had one token, took `seconds`."""
        self.times.learn(load, seconds)
        if load.tokens - decoding < _LEAST:
            self._rows = decoding


def _whole(tokens: int) -> int:
    """Rounds down to full GEMM tiles if there are at least 128 tokens, because one token more costs a whole tile."""
    tile = 1 if tokens < 128 else 64 if tokens < 384 else 128
    return tokens // tile * tile


def _scored(sequences: list[Sequence]) -> float:
    """The part of them whose prompts are scored."""
    return sum(sequence.scoring for sequence in sequences) / len(sequences)
