"""Decides how many tokens are drafted per sequence. `worker/drafting.py` is the drafters' interface."""

from __future__ import annotations

import math

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


_ACCEPTED = 0.7
"""Acceptance assumed before anything is known."""
_WEIGHT = 0.1
"""Weight of the newest verified draft in a sequence's acceptance; a tenth of it in the acceptance of all."""
_NEWEST = 0.25
"""Weight of the newest step in the throughput."""
_PLAIN = 32
"""Steps with drafts after which one without them shows what they cost."""
_TRIAL = 64
"""Steps without drafts after which one with a draft for each sequence shows whether they have come to pay."""


class Adaptive(DraftPolicy):
    """Drafts while a draft's probability of being kept exceeds its cost.

    With a throughput of R tokens a second and a cost of c seconds for each further position of a step, one more position must
    be kept with a probability above R * c to raise the throughput. The j-th draft is kept with probability a^j, where a is the
    sequence's acceptance. R is learned from the steps, and c is that of the model of step time, so that drafting ends where
    steps are bound by compute (many sequences, a CPU) and goes on where they are bound by the reading of weights. Besides, none
    are drafted while steps with drafts give fewer tokens a second than those without.
    """

    def __init__(self, most: int, times: StepTime) -> None:
        super().__init__(most)
        self._times = times
        self._accepted = _ACCEPTED
        self._rate = 0.0
        """Tokens a second of recent steps of the kind of the newest: with drafts, or without."""
        self._gain = 1.0
        """Throughput with drafts in proportion to that without, by the last changes from one to the other."""
        self._since = 0
        """Steps since the last with drafts, if the newest had none; else since the last without."""
        self._drafted = False
        """Whether the newest step had drafts."""
        self._bar = 0.0

    @property
    def bar(self) -> float:
        """The probability of being kept above which a token is drafted; 0 before anything is known."""
        return max(1.0, self._bar) if self._gain < 1 else self._bar

    def count(self, sequence: Sequence) -> int:
        if self._drafted and self._since >= _PLAIN:
            return 0
        accepted, bar = self._accepted if sequence.acceptance is None else sequence.acceptance, self.bar
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
        drafted = tokens > rows
        rate = kept / seconds
        if drafted == self._drafted or not self._rate:
            self._since += 1
            self._rate += (_NEWEST if self._rate else 1.0) * (rate - self._rate)
        else:
            # Neighbouring steps have nearly the same sequences, so that their throughputs can be compared.
            gain = rate / self._rate if drafted else self._rate / rate
            self._gain += 0.5 * (gain - self._gain)
            self._since, self._rate = 0, rate
        self._drafted = drafted
        self._bar = self._times.slope(tokens) * self._rate


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


def _expected(sequence: Sequence) -> list[int]:
    """The tokens that the host expects after the sequence's next position; empty if that position is uncertain."""
    if sequence.expected is None or sequence.slack:
        return []
    at, tokens = sequence.expected
    return tokens[sequence.planned + 1 - at:] if at <= sequence.planned + 1 else []


def draft_policy(asked: Speculation, times: StepTime) -> DraftPolicy:
    """The policy that the options ask for."""
    return Adaptive(asked.tokens, times) if asked.adaptive else DraftPolicy(asked.tokens)
