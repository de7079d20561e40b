"""Decides how many tokens are drafted per sequence. `worker/drafting.py` is the drafters' interface."""

import logging
import math
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import accumulate
from operator import mul

import numpy as np

from penstock.config.speculation import Speculation
from penstock.core.plan import Proposal
from penstock.core.request import Floats, Sequence
from penstock.core.steptime import StepTime
from penstock.scheduler.step import InFlight


class DraftPolicy:
    """Decides at each step how many tokens are drafted after a sequence's last known token; this one always as many."""

    reads_prompts = True
    """Whether the drafter reads steps with prompts though it rests otherwise: it cannot draft from what it has not read."""

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self, rows: int) -> int:  # noqa: ARG002
        """Called before a step of about so many sequences is planned. Returns the number of drafts that they have on average;
        0: the drafter rests, and no count is asked for."""
        return self.most

    def count(self, sequence: Sequence) -> int:  # noqa: ARG002 (other policies look at it)
        """Returns the maximum number of tokens to draft, possibly 0. The scheduler may ask the drafter for fewer."""
        return self.most

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Reports that `drafted` tokens were verified and `accepted` of them kept."""

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: int) -> None:
        """Reports a step of `rows` sequences without prefill: `tokens` positions, of which `kept` gave tokens, in `seconds`,
        drafting included. `drafting`: what `begin` said of it."""


_log = logging.getLogger("penstock")
_ACCEPTED = 0.7
"""Acceptance assumed before anything is known."""
_WEIGHT, _SAMPLES = 0.1, 64
"""Weight of the newest verified draft in a sequence's acceptance, and the most that a step has in averages over all, which go
over so many drafts, or sequences of steps."""
_NEWEST = 7
"""Steps of a kind whose median is what such a step takes."""
_HOLD, _FIRST = 3, 2
"""Steps until the number of drafts may change, and while none with that number has been measured."""
_BETTER, _CLEAR, _MANY = 1.01, 0.064, 256
"""Gain for which it does, and the further gain over none that so many sequences must have: the last of them to end needs more
steps than the mean, and the drafter reads their prompts, neither of which a step of decoding shows."""
_AGE, _UNKNOWN, _TRIALS = 1 / 5000, 32, 0.0025
"""The growth of a number's rate for each step in which it was not tried, how many times as much that is for the largest number
before its first time, and the part of the time at a number of sequences that trials may lose."""
_NEAR, _RETRY = 2, 400
"""A known number of sequences speaks for so many times as many, or as few; steps until an unmeasured trial is repeated."""
_BELOW = 0.7
"""Part of the acceptance of all below which a sequence may have fewer drafts than others."""
_TAIL, _AHEAD = 3, 16
"""The tokens by which an answer is found in what its request predicts, and the most that are then expected."""


class _Size:
    """Measurements of steps of about one number of sequences, by their number of drafts."""

    def __init__(self, most: int) -> None:
        self.rows = self.steps = 0
        """Sequences of the step measured last; steps planned."""
        self.newest = [deque[float]((), _NEWEST) for _ in range(most + 1)]
        """Seconds of steps."""
        self.seconds = [0.0] * (most + 1)
        """The medians of these; 0: never measured."""
        self.share = [1.0] * (most + 1)
        """Tokens that a step gave, of those expected by the acceptance."""
        self.tried = [0] * (most + 1)
        """The value of `steps` when they were last planned; 0: never."""
        self.trials = [0] * (most + 1)
        """Steps in which they were planned only to be measured."""
        self.passed = 0.0
        """Seconds of all steps."""
        self.told: bool | None = None
        """Whether the log says that drafts pay."""


def _size(rows: int) -> int:
    """Half powers of two of the sequences."""
    return int(2 * math.log2(max(1, rows)))


class Adaptive(DraftPolicy):
    """Drafts as many tokens as give the most tokens a second, none where steps without drafts do.

    For each number of sequences (in half powers of two) the median time of steps with 0, 1, ... drafts is kept, and the tokens
    that they gave: with an acceptance of a, k drafts give 1 + a + ... + a^k, times a measured share. Times of other numbers lie
    on a line, and one that would be best is thereby tried. The rates of numbers that are not tried grow slowly, so that each is
    tried again, the seldomer the worse it was, and only if what trials lose stays a small part of the time: a new number's loss
    is foreseen by the model of step time. A number of sequences far from all known ones begins without drafts.

    Where no drafts pay the drafter rests (many sequences, a CPU). That number for each sequence is the common budget of a step,
    which is divided by how likely drafts are kept. With R tokens a second and c seconds for each further position, a sequence
    whose drafts are kept far less often than others' has a j-th one only if a^j is above R * c, where a is its own acceptance;
    c is that of the model of step time. Where the drafter itself says how likely its drafts are kept, that of a sequence's
    newest drafts takes the place of a, and decides for every sequence."""

    def __init__(self, most: int, times: StepTime, whole: bool = False) -> None:
        """`whole`: drafts are trees, which are drafted as a whole or not at all."""
        super().__init__(most)
        self.whole, self._times = whole, times
        self._numbers = [0, most] if whole else list(range(most + 1))
        self._accepted, self._verified, self._right = _ACCEPTED, 0, 0
        """The acceptance of all sequences; drafts verified since it was computed, and those kept."""
        self._sizes = defaultdict[int, _Size](lambda: _Size(most))
        self._size = self._last = 0
        """Of the step planned last; what `begin` said of the one that ended last."""
        self._drafts, self._left, self._reads = 0, 0, False
        """The number of drafts, in how many steps behind the one planned last, and whether that one follows a rest."""
        self._bar = 0.0
        """The probability of being kept above which a token is drafted; 0 before anything is known."""
        self._told: list[float] = []
        """The acceptances of the sequences that were asked for in the newest step."""
        self._trust, self._least, self._longest = 0.0, 0.0, 0
        """The part of a sequence's distance from the average that is its own, not chance; the probability that the budget's
        last draft is kept; and the most drafts of a sequence."""
        self._pass = 0.0
        """Seconds of the drafter's part in one draft more of every sequence."""

    def _expected(self, drafts: int) -> float:
        """Tokens that a step with so many drafts gives a sequence."""
        return sum(self._accepted ** place for place in range(drafts + 1))

    def begin(self, rows: int) -> int:
        rows = max(1, rows)
        moved, self._size = _size(rows) != self._size, _size(rows)
        one, before = self._sizes[self._size], self._drafts
        one.steps += 1
        if moved or not self._left:
            self._drafts = self._choice(rows)
            self._left = _HOLD if one.seconds[self._drafts] else _FIRST
        self._reads = before == 0 < self._drafts
        self._allot(one.seconds[self._drafts])
        one.tried[self._drafts] = one.steps
        self._left -= 1
        return self._drafts

    def _choice(self, rows: int) -> int:
        """The number of drafts of the next steps."""
        one, numbers = self._sizes[self._size], self._numbers
        known, shares = self._known(rows)
        if not known:
            return 0
        position = rows * self._times.slope(rows * (1 + self.most))
        places, seconds = list(known), list(known.values())
        rise = max(position, (seconds[-1] - seconds[-2]) / (places[-1] - places[-2])) if len(known) > 1 else position
        every = np.arange(self.most + 1)
        within, beyond = np.interp(every, places, seconds), np.maximum(0, every - places[-1])
        tokens = np.array([share * self._expected(drafts) for drafts, share in enumerate(shares)])
        # Tokens a second of one sequence.
        rates = tokens / (within + rise * beyond)
        pays, favour = max(numbers[1:], key=rates.__getitem__), np.ones(self.most + 1)
        favour[self._drafts] = _BETTER
        favour[0] = _BETTER + _CLEAR * min(1.0, rows / _MANY)
        if len(known) == 1:
            # One number is tried, as soon as that may not lose too much.
            best, numbers = 0, numbers[:1 + (not one.tried[numbers[1]] or one.steps - one.tried[numbers[1]] >= _RETRY)]
            favour[1:] = math.inf
        else:
            best = max(numbers, key=(rates * favour).__getitem__)
            if one.told is not (best > 0) and (one.seconds[pays] or one.told is None):
                one.told = best > 0
                _log.info("speculation is %s at about %d sequences: %.0f tokens a second with drafts (%d), %.0f without",
                          "on" if best else "off", rows, rates[pays] * rows, pays, rates[0] * rows)
        self.reads_prompts = best > 0 or len(known) == 1
        self._bar = self._times.slope(rows * (1 + best)) * float(rates[best]) * rows
        self._pass = max(0.0, (float(within[best]) - seconds[0]) / max(1, best) - position)
        ages = np.array([one.steps - tried for tried in one.tried])
        ages[-1] *= 1 if one.tried[-1] else _UNKNOWN
        # Seconds that a step loses against the best number: as far as measured times tell, and at the least, beyond them.
        lost, hoped = (np.maximum(0, within + more * beyond - tokens / rates[best]) for more in (rise, position))
        left = _TRIALS * one.passed - float(lost @ one.trials)
        found = max((number for number in numbers if number == best or _HOLD * hoped[number] <= left),
                    key=(rates * favour * (1 + _AGE * ages)).__getitem__)
        one.trials[found] += _HOLD * (found != best)
        return found

    def _allot(self, seconds: float) -> None:
        """Divides the drafts that all sequences have together, as many as if each had `_drafts`, by how likely they are kept:
        greedily, which is best where each costs as much as another. Longer chains take further passes of the drafter, of which
        there are as many as pay. `seconds`: of a step with `_drafts` for each; 0: never measured."""
        own, self._told, drafts = np.array(self._told), [], self._drafts
        self._trust, self._least, self._longest = 0.0, 0.0, drafts
        if not drafts or len(own) < 2 or not seconds or self.whole:
            return
        # The variance of a moving average of outcomes that are all equally likely, and what it may seem among so many.
        chance = self._accepted * (1 - self._accepted) * _WEIGHT / (2 - _WEIGHT) * (1 + math.sqrt(2 / len(own)))
        self._trust = max(0.0, 1 - chance / max(float(own.var()), 1e-9))
        kept = (self._accepted + self._trust * (own - self._accepted))[:, None] ** np.arange(1, self.most + 1)
        best = 0.0
        for longest in range(drafts, self.most + 1):
            chosen = np.sort(kept[:, :longest], axis=None)[-drafts * len(own):]
            rate = (len(own) + chosen.sum()) / (seconds + (longest - drafts) * self._pass)
            if rate > best * (_BETTER if longest > drafts else 1):
                best, self._least, self._longest = rate, (1 - 1e-6) * float(chosen[0]) * (longest > drafts), longest

    def _known(self, rows: int) -> tuple[dict[int, float], list[float]]:
        """Seconds of steps of so many sequences by drafts, ascending: on a line over the numbers of sequences at which they
        were measured, if these lie on both sides, or are at most twice as many or half. Empty: steps without drafts were not.
        And the share of tokens of every number of drafts."""
        sizes = sorted((one for one in self._sizes.values() if one.rows), key=lambda one: one.rows)
        known, shares = dict[int, float](), [1.0] * (self.most + 1)
        plain: tuple[list[int], Floats] = [rows], np.zeros(1, np.float32)
        for number in range(self.most + 1):
            found = [one for one in sizes if one.seconds[number]]
            if found and found[0].rows <= _NEAR * rows and rows <= _NEAR * found[-1].rows:
                at, seconds = [one.rows for one in found], np.array([one.seconds[number] for one in found])
                # The time that drafts add: beyond the measured sequences it grows at most in proportion to them.
                added = float(np.interp(rows, at, seconds - np.interp(at, *plain)))
                known[number] = known[0] + max(1.0, rows / at[-1]) * added if number else added
                shares[number] = min(found, key=lambda one: abs(one.rows - rows)).share[number]
                plain = plain if number else (at, seconds)
            elif not number:
                break
        return known, shares

    def count(self, sequence: Sequence) -> int:
        accepted, chances = sequence.acceptance, sequence.chances
        # Behind a rest the drafter first reads: drafts follow from what was read last.
        if self._reads:
            return 0
        bar, own = self._bar, self._accepted if accepted is None else accepted
        if not chances:
            self._told.append(own)
            if own >= _BELOW * self._accepted:
                bar, own = self._least, self._accepted + self._trust * (own - self._accepted)
        if self.whole:
            return self._drafts
        each = chances or [own]
        survival: Iterable[float] = accumulate((each[min(place, len(each) - 1)] for place in range(self._longest)), mul)
        # Nothing would be heard of a sequence without drafts: now and then it has one.
        return max(not self._left, sum(chance > max(bar, self._least) for chance in survival))

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        # Drafts behind the first wrong one were never tried.
        tried = min(drafted, accepted + 1)
        old = self._accepted if sequence.acceptance is None else sequence.acceptance
        own = (1 - _WEIGHT) ** tried
        sequence.acceptance = own * old + (1 - own) * accepted / tried
        self._verified, self._right = self._verified + tried, self._right + accepted

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: int) -> None:  # noqa: ARG002
        if self._verified:
            self._accepted += min(_WEIGHT, self._verified / _SAMPLES) * (self._right / self._verified - self._accepted)
            self._verified = self._right = 0
        same, self._last, one = drafting == self._last, drafting, self._sizes[_size(rows)]
        one.passed += seconds
        # The first step of a kind is none: it reads behind a rest, or begins where drafts are still being verified.
        if seconds <= 0 or not kept or not same:
            return
        one.rows = rows
        one.newest[drafting].append(seconds)
        one.seconds[drafting] = sorted(one.newest[drafting])[(len(one.newest[drafting]) - 1) // 2]
        one.share[drafting] += min(_WEIGHT, rows / _SAMPLES) * (kept / rows / self._expected(drafting) - one.share[drafting])


class Drafts:
    """Chooses the drafts that a step verifies: the tokens that the host expects, or the number that the draft policy allows."""

    def __init__(self, policy: DraftPolicy | None) -> None:
        """`policy`: None if the worker has no drafter."""
        self.policy = policy
        self._expecting, self._drafting = False, 0
        self._used, self._rows = True, 0
        """Whether the step for which the policy was asked last has been made, and its sequences."""

    def begin(self, rows: int) -> bool:
        """Called before a step of about so many sequences is planned. Returns whether any can have drafts in it."""
        if rows and (self._used or rows != self._rows):
            self._drafting, self._used, self._rows = 0 if self.policy is None else self.policy.begin(rows), False, rows
        return self._expecting or self._drafting > 0

    def end(self, step: InFlight) -> None:
        """Called when the segments of a step are known: decides whether the drafter rests."""
        step.drafting, self._used = self._drafting, bool(step.counts)
        prompts = sum(step.counts) > len(step.counts) + sum(step.drafts.values())
        step.rests = self.policy is not None and not self._drafting and not (prompts and self.policy.reads_prompts)

    def foresee(self, step: InFlight, chances: list[float]) -> None:
        """Takes in what the drafter said of its drafts in a step (`StepResult.chances`)."""
        for segment, count in step.drafts.items():
            if segment not in step.proposed:
                step.sequences[segment].chances, chances = chances[:count], chances[count:]

    def expect(self, sequence: Sequence, at: int, tokens: list[int]) -> None:
        """Sets tokens expected from position `at` >= len(sequence.tokens) on, as drafts: a wrong one costs only time."""
        sequence.expected = (at, tokens) if tokens else None
        self._expecting = True

    def follow(self, sequence: Sequence) -> None:
        """Expects what the request predicts, from where the end of the answer next occurs in it."""
        predicted, known = sequence.request.predicted, len(sequence.tokens)
        tail = array("I", sequence.tokens[max(sequence.prompt_len, known - _TAIL):]).tobytes()
        at = _find(predicted, tail, max(0, sequence.predicted - len(tail)))
        if at < 0:
            at = _find(predicted, tail, 0)
        if at >= 0:
            sequence.predicted = at = at + len(tail)
        self.expect(sequence, known, array("I", predicted[at:at + 4 * _AHEAD]).tolist() if at >= 0 else [])

    def count(self, sequence: Sequence, room: int, spare: int, back: int) -> int:
        """Returns the number of drafted tokens, at most `room`, that the next segment verifies after the last known token; of
        those that the host expects at most `spare`. The last possible token's position is excluded: it is never fed back.
        `back`: how many the model's states can take back; tokens that a grammar forces are never rejected."""
        if sequence.children:
            # The forks will share the prompt's last page, which must not be written behind the prompt before they exist.
            return 0
        room = min(room, sequence.limit - 2 - sequence.planned)
        expected = _expected(sequence)
        if expected:
            return max(0, min(room, spare, len(expected), back or len(expected)))
        # Forced tokens can be verified once their place is certain, which it is not behind drafts.
        if self.policy is None or not self._drafting or room <= 0 or not back or (sequence.expected and sequence.slack):
            return 0
        return max(0, min(room, back, self.policy.count(sequence)))

    def proposals(self, step: InFlight) -> list[Proposal]:
        """The expected tokens of a plan whose segments were not handed out yet."""
        pairs = ((step.sequences[segment], drafts) for segment, drafts in step.drafts.items())
        return [Proposal(sequence.row, sequence.planned + 1, expected[:drafts]) for sequence, drafts in pairs
                if (expected := _expected(sequence))]


def _find(tokens: bytes, tail: bytes, start: int) -> int:
    """The place of some tokens in others, from `start` on, in bytes; -1 if there is none."""
    found = tokens.find(tail, start)
    while found > 0 and found % 4:
        found = tokens.find(tail, found + 1)
    return found


def _expected(sequence: Sequence) -> list[int]:
    """The tokens that the host expects after the sequence's next position; empty if that position is uncertain."""
    if sequence.expected is None or sequence.slack:
        return []
    at, tokens = sequence.expected
    return tokens[sequence.planned + 1 - at:] if at <= sequence.planned + 1 else []


def draft_policy(asked: Speculation, times: StepTime) -> DraftPolicy:
    return Adaptive(asked.most, times, asked.tree is not None) if asked.adaptive else DraftPolicy(asked.most)
