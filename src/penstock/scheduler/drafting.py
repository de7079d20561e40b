"""Decides how many tokens are drafted per sequence. `worker/drafting.py` is the drafters' interface."""

import logging
import math
from array import array
from collections import defaultdict

from penstock.config.speculation import Speculation
from penstock.core.plan import Proposal
from penstock.core.sequence import Sequence
from penstock.core.steptime import StepTime
from penstock.scheduler.step import InFlight


class DraftPolicy:
    """Decides at each step how many tokens are drafted after a sequence's last known token; this one always as many."""

    reads_prompts = True
    """Whether the drafter reads steps with prompts though it rests otherwise: it cannot draft from what it has not read."""

    def __init__(self, most: int) -> None:
        self.most = most

    def begin(self) -> bool:
        """Called before a step is planned. Returns whether the drafter takes part; if not, no count is asked for."""
        return True

    def count(self, sequence: Sequence) -> int:  # noqa: ARG002 (other policies look at it)
        """Returns the maximum number of tokens to draft, possibly 0. The scheduler may ask the drafter for fewer."""
        return self.most

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Reports that `drafted` tokens were verified and `accepted` of them kept."""

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: bool) -> None:
        """Reports a step of `rows` sequences without prefill: `tokens` positions, of which `kept` gave tokens, in `seconds`,
        drafting included. `drafting`: what `begin` said of it."""


_log = logging.getLogger("penstock")
_ACCEPTED = 0.7
"""Acceptance assumed before anything is known."""
_WEIGHT = 0.1
"""Weight of the newest verified draft in a sequence's acceptance; a tenth of it in the acceptance of all."""
_SAMPLES, _FEW, _REST = 64, 16, 4
"""Drafted segments over whose steps a throughput is averaged: of one sequence, what a step keeps says little; those of a trial
of drafts; steps without drafts in a rest that shows what they cost."""
_PLAIN, _SELDOM = 64, 256
"""Steps with drafts between such rests, and where drafts clearly pay."""
_CLEAR, _HOPELESS = 1.15, 0.85
"""Gain from which drafts clearly pay, and below which the drafter does not even read prompts."""
_TRIAL, _RARE = 128, 1024
"""Steps without drafts between two trials of one draft for each sequence: at first, and after trials that failed."""
_TAIL, _AHEAD = 3, 16
"""The tokens by which an answer is found in what its request predicts, and the most that are then expected."""


class Adaptive(DraftPolicy):
    """Drafts where steps with drafts give more tokens a second, and each draft while its probability of being kept exceeds its
    cost.

    For each number of sequences (in half powers of two) it keeps the throughput of steps with drafts and of steps in which
    the drafter rests, and takes the better; the other is tried now and then. So drafting ends where steps are bound by compute
    (many sequences, a CPU) and goes on where they are bound by the reading of weights, whatever the drafter costs. Within a
    step that drafts, with R tokens a second and c seconds for each further position, a further draft must be kept with a
    probability above R * c; the j-th is kept with probability a^j, where a is the sequence's acceptance. c is that of the model
    of step time."""

    def __init__(self, most: int, times: StepTime, whole: bool = False) -> None:
        """`whole`: drafts are trees, which are drafted as a whole or not at all."""
        super().__init__(most)
        self.whole = whole
        self._times = times
        self._accepted = _ACCEPTED
        self._rates = defaultdict[int, list[float]](lambda: [0.0, 0.0])
        """By size: tokens a second and sequence of steps without drafts, and of those with; 0 where there were none."""
        self._seen = defaultdict[int, list[int]](lambda: [0, 0])
        """By size: the steps of which these are averages."""
        self._size = 0
        """Of the newest step: half powers of two of its sequences."""
        self._rests, self._steps = False, 1
        """Whether the drafter rests in the step planned last, and in how many up to it that is so. In the first step behind a
        rest it only reads: drafts follow from what was read last."""
        self._trial, self._patience = False, _TRIAL
        """Whether drafts are tried although they have not paid; steps until they are tried."""
        self._drafted, self._same = True, True
        """Whether the drafter took part in the step that ended last, and whether that was so in the one before, too."""
        self._told: dict[int, bool] = {}
        """By size, whether the log says that drafts pay."""
        self._bar = 0.0
        """The probability of being kept above which a token is drafted; 0 before anything is known."""

    @property
    def _gain(self) -> float:
        """The throughput with drafts, of that without: by the steps of this size; as long as one kind is missing, of the
        nearest size that has both."""
        known = [size for size, rates in self._rates.items() if all(rates)]
        near = min(known, key=lambda size: abs(size - self._size), default=None)
        return _CLEAR if near is None else self._rates[near][1] / self._rates[near][0]

    def begin(self) -> bool:
        gain, few = self._gain, self._some(_FEW)
        self.reads_prompts = gain >= _HOPELESS
        if self._rests:
            turns = self._steps >= (_REST if gain >= 1 else self._patience)
        elif gain < 1 or not self._rates[self._size][0]:
            turns = self._steps > few
        else:
            turns = self._steps > (_PLAIN if gain < _CLEAR else _SELDOM)
        if turns:
            if self._rests:
                self._patience = _TRIAL if gain >= 1 else min(2 * self._patience, _RARE)
                self._seen[self._size][1] = min(self._seen[self._size][1], few if gain < 1 else _SAMPLES)
            self._rests, self._steps, self._trial = not self._rests, 0, gain < 1
        self._steps += 1
        return not self._rests

    def _some(self, segments: int) -> int:
        """The steps of this size that have so many segments, but one."""
        return max(1, segments >> self._size // 2)

    def count(self, sequence: Sequence) -> int:
        if self._steps == 1:
            return 0
        accepted, bar = self._accepted if sequence.acceptance is None else sequence.acceptance, self._bar
        if self._trial and not self.whole:
            return 1
        if self.whole or bar <= 0.0 or accepted >= 1.0 > bar:
            return self.most
        return min(self.most, int(math.log(bar) / math.log(accepted))) if accepted > bar else 0

    def learn(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        # Drafts behind the first wrong one were never tried.
        tried = min(drafted, accepted + 1)
        old = self._accepted if sequence.acceptance is None else sequence.acceptance
        own, shared = (1 - _WEIGHT) ** tried, (1 - _WEIGHT / 10) ** tried
        sequence.acceptance = own * old + (1 - own) * accepted / tried
        self._accepted = shared * self._accepted + (1 - shared) * accepted / tried

    def stepped(self, rows: int, tokens: int, kept: int, seconds: float, drafting: bool) -> None:
        self._same = drafting == self._drafted
        self._drafted, self._size = drafting, int(2 * math.log2(rows))
        # The first step of a kind is neither: it reads behind a rest, or begins where drafts are still being verified.
        if seconds <= 0 or not kept or not self._same:
            return
        rates, seen = self._rates[self._size], self._seen[self._size]
        seen[drafting] = min(seen[drafting] + 1, max(4, self._some(_SAMPLES)))
        rates[drafting] += (kept / rows / seconds - rates[drafting]) / seen[drafting]
        self._bar = self._times.slope(tokens) * max(rates) * rows
        if all(rates) and self._told.get(self._size) != (pays := self._gain >= 1):
            self._told[self._size] = pays
            _log.info("speculation is %s at about %d sequences: %.0f tokens a second with drafts, %.0f without",
                      "on" if pays else "off", rows, rates[1] * rows, rates[0] * rows)


class Drafts:
    """Chooses the drafts that a step verifies: the tokens that the host expects, or the number that the draft policy allows."""

    def __init__(self, policy: DraftPolicy | None) -> None:
        """`policy`: None if the worker has no drafter."""
        self.policy = policy
        self._expecting = self._drafting = False
        self._used = True
        """Whether the step for which the policy was asked last has been made."""

    def begin(self) -> bool:
        """Called before a step is planned. Returns whether any sequence can have drafts in it."""
        if self._used:
            self._drafting, self._used = self.policy is not None and self.policy.begin(), False
        return self._expecting or self._drafting

    def end(self, step: InFlight) -> None:
        """Called when the segments of a step are known: decides whether the drafter rests."""
        step.drafting, self._used = self._drafting, bool(step.counts)
        prompts = sum(step.counts) > len(step.counts) + sum(step.drafts.values())
        step.rests = self.policy is not None and not self._drafting and not (prompts and self.policy.reads_prompts)

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
        if self.policy is None or not self._drafting or room <= 0 or exact or (sequence.expected and sequence.slack):
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
