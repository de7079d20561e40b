"""Decides how many tokens are drafted per sequence. `worker/drafting.py` is the drafters' interface."""

from __future__ import annotations

import logging
import math
from array import array

from penstock.config.speculation import Speculation
from penstock.core.plan import Proposal
from penstock.core.sequence import Sequence
from penstock.core.steptime import StepTime
from penstock.scheduler.step import InFlight


class DraftPolicy:
    """Decides at each step how many tokens are drafted after a sequence's last known token; this one always as many."""

    def __init__(self, most: int) -> None:
        self.most = most

    def count(self, sequence: Sequence) -> int:  # noqa: ARG002 (other policies look at it)
        """Returns the maximum number of tokens to draft, possibly 0. The scheduler may ask the drafter for fewer."""
        return self.most

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Reports that `drafted` tokens were verified and `accepted` of them kept."""

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float) -> None:
        """Reports a step of `rows` sequences without prefill: `tokens` positions, of which `kept` gave tokens, in `seconds`,
        drafting included."""


_log = logging.getLogger("penstock")
_ACCEPTED = 0.7
"""Acceptance assumed before anything is known."""
_WEIGHT = 0.1
"""Weight of the newest verified draft in a sequence's acceptance; a tenth of it in the acceptance of all."""
_NEWEST, _FIRST = 0.25, 0.5
"""Weight of the newest step in the throughput of its kind, and if the step before was of the other kind."""
_FEW = 1
"""Further steps with drafts before the first one without them."""
_PLAIN, _SELDOM = 32, 256
"""Steps with drafts after which one without them shows what they cost, and where drafts clearly pay."""
_CLEAR = 1.15
"""Gain from which drafts clearly pay."""
_TRIAL = 64
"""Steps without drafts after which one with a draft for each sequence shows whether they have come to pay."""
_UNKNOWN = (0.0, 0.0)
_TAIL, _AHEAD = 3, 16
"""The tokens by which an answer is found in what its request predicts, and the most that are then expected."""


class Adaptive(DraftPolicy):
    """Drafts where steps with drafts give more tokens a second, and each draft while its probability of being kept exceeds its
    cost.

    For each number of sequences (in half powers of two) it keeps the throughput of steps with drafts and of steps without, and
    takes the better; the other is tried now and then. So drafting ends where steps are bound by compute (many sequences, a CPU)
    and goes on where they are bound by the reading of weights, whatever the drafter costs. Within a step that drafts, with R
    tokens a second and c seconds for each further position, a further draft must be kept with a probability above R * c; the
    j-th is kept with probability a^j, where a is the sequence's acceptance. c is that of the model of step time."""

    def __init__(self, most: int, times: StepTime, whole: bool = False) -> None:
        """`whole`: drafts are trees, which are drafted as a whole or not at all."""
        super().__init__(most)
        self.whole = whole
        self._times = times
        self._accepted = _ACCEPTED
        self._rates: dict[int, list[float]] = {}
        """By size: tokens a second and sequence of steps without drafts, and of those with; 0 where there were none."""
        self._size = 0
        """Of the newest step: half powers of two of its sequences."""
        self._since = 0
        """Steps since the last with drafts, if the newest had none; else since the last without."""
        self._drafted = False
        """Whether the newest step had drafts."""
        self._told: dict[int, bool] = {}
        """By size, whether the log says that drafts pay."""
        self._bar = 0.0

    @property
    def bar(self) -> float:
        """The probability of being kept above which a token is drafted; 0 before anything is known."""
        return self._bar if self._pays else max(1.0, self._bar)

    @property
    def _pays(self) -> bool:
        """By the steps of this size; as long as one kind is missing, of the nearest size that has both."""
        known = [size for size, rates in self._rates.items() if all(rates)]
        near = min(known, key=lambda size: abs(size - self._size), default=None)
        return near is None or self._rates[near][1] >= self._rates[near][0]

    def count(self, sequence: Sequence) -> int:
        without, with_drafts = self._rates.get(self._size, _UNKNOWN)
        if self._drafted and self._since >= (_FEW if not without else _PLAIN if with_drafts < _CLEAR * without else _SELDOM):
            return 0
        accepted, bar = self._accepted if sequence.acceptance is None else sequence.acceptance, self.bar
        if self.whole:
            return self.most if self._pays or (not self._drafted and self._since >= _TRIAL) else 0
        if bar <= 0.0 or accepted >= 1.0 > bar:
            return self.most
        if accepted > bar:
            return min(self.most, int(math.log(bar) / math.log(accepted)))
        return int(not self._drafted and self._since >= _TRIAL)

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        # Drafts behind the first wrong one were never tried.
        tried = min(drafted, accepted + 1)
        old = self._accepted if sequence.acceptance is None else sequence.acceptance
        keep = (1 - _WEIGHT) ** tried
        sequence.acceptance = keep * old + (1 - keep) * accepted / tried
        keep = (1 - _WEIGHT / 10) ** tried
        self._accepted = keep * self._accepted + (1 - keep) * accepted / tried

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float) -> None:
        if seconds <= 0 or not kept:
            return
        drafted, self._size = tokens > rows, int(2 * math.log2(rows))
        rates, rate = self._rates.setdefault(self._size, [0.0, 0.0]), kept / rows / seconds
        same = drafted == self._drafted
        rates[drafted] += (1.0 if not rates[drafted] else _NEWEST if same else _FIRST) * (rate - rates[drafted])
        self._since = self._since + 1 if same else 0
        self._drafted = drafted
        self._bar = self._times.slope(tokens) * max(rates) * rows
        if all(rates) and self._told.get(self._size) != self._pays:
            self._told[self._size] = self._pays
            _log.info("speculation is %s at about %d sequences: %.0f tokens a second with drafts, %.0f without",
                      "on" if self._pays else "off", rows, rates[1] * rows, rates[0] * rows)


class Drafts:
    """Chooses the drafts that a step verifies: the tokens that the host expects, or the number that the draft policy allows."""

    def __init__(self, policy: DraftPolicy | None) -> None:
        """`policy`: None if the worker has no drafter."""
        self.policy = policy
        self._expecting = False

    @property
    def active(self) -> bool:
        """Whether any sequence can have drafts."""
        return self._expecting or self.policy is not None

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

    def count(self, sequence: Sequence, room: int, spare: int, exact: bool) -> int:
        """Returns the number of drafted tokens, at most `room`, that the next segment verifies after the last known token; of
        those that the host expects at most `spare`. The last possible token's position is excluded: it is never fed back.
        `exact`: the model's state cannot be rolled back."""
        if sequence.children:
            # The forks will share the prompt's last page, which must not be written behind the prompt before they exist.
            return 0
        room = min(room, sequence.limit - 2 - sequence.planned)
        expected = _expected(sequence)
        if expected:
            return max(0, min(room, spare, len(expected)))
        # Forced tokens can be verified once their place is certain, which it is not behind drafts.
        if self.policy is None or room <= 0 or exact or (sequence.expected is not None and sequence.slack):
            return 0
        return max(0, min(room, self.policy.count(sequence)))

    def proposals(self, step: InFlight) -> list[Proposal]:
        """The expected tokens of a plan whose segments were not handed out yet."""
        found = [(sequence, drafts, _expected(sequence)) for sequence, drafts in
                 ((step.sequences[segment], drafts) for segment, drafts in step.drafts.items())]
        return [Proposal(sequence.row, sequence.planned + 1, expected[:drafts])
                for sequence, drafts, expected in found if expected]


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
    """The policy that the options ask for."""
    return Adaptive(asked.most, times, asked.tree is not None) if asked.adaptive else DraftPolicy(asked.most)
