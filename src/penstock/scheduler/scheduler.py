"""Which positions run now. `plan` decides a step, `apply` takes in what came of it; nothing else moves a sequence on.

No phases: each running sequence has work left, and gets a segment of it. A decode is a sequence whose work is one position, a
prefill one whose work is more; nobody asks which. Pages that run out are taken from the sequence that is last in the policy's
order; it starts again later from what the cache then still has of it. The first in order can always go on, so there is no
livelock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np

from penstock.cache.manager import Cache, Reuse
from penstock.core.errors import RequestError
from penstock.core.masking import MaskedSegment, Masker
from penstock.core.plan import NOT_FINITE, Enter, Logprobs, Proposal, StepPlan, StepResult, Want
from penstock.core.request import EngineStats, Request, TokenLogprobs, Update
from penstock.core.sequence import Sequence
from penstock.scheduler.admission import Admission, Limits
from penstock.scheduler.drafting import DraftPolicy
from penstock.scheduler.pace import Pace
from penstock.scheduler.policy import Order, Policy, Priority

_SAMPLE, _SCORE, _EACH = int(Want.SAMPLE), int(Want.SCORE), int(Want.EACH)
_NOT_FINITE_ERROR = ("the model gave no usable next-token scores for this request (not a number, infinite, or every token is "
                     "excluded by its parameters)")


@dataclass(slots=True)
class _Flight:
    """An in-flight plan, or the one being made: its segments' sequences, lengths and wants."""

    id: int
    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    wants: list[int] = field(default_factory=list)
    drafts: dict[int, int] = field(default_factory=dict)
    """How many of a segment's positions hold drafted tokens, its last ones; segments without any are left out."""
    lost: set[Sequence] = field(default_factory=set)
    """Sequences preempted since: positions computed for them are void, sampled tokens still count."""


class Scheduler:
    """Owns every sequence from `add` until its last update."""

    def __init__(self, cache: Cache, limits: Limits, policy: Policy | None = None, masker: Masker | None = None,
                 drafting: DraftPolicy | None = None) -> None:
        """`masker`: who constrains tokens; it is asked which requests are. `drafting` decides how many tokens the worker's
        drafter proposes; None if the worker has none."""
        self.cache = cache
        self.limits = limits
        self.policy = Priority() if policy is None else policy
        self.masker = masker
        self.drafting = drafting
        self.admission = Admission(limits, cache.layout)
        self.pace = Pace(limits.step_target, limits.max_num_batched_tokens)
        self.waiting = Order(self.policy)
        self.running = Order(self.policy)
        self.flights: deque[_Flight] = deque()
        self.stats = EngineStats(pages_total=cache.layout.slabs)
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._leave: list[int] = []
        self._enter: list[Enter] = []
        self._news: list[Update] = []
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._plans = 0
        self._proposed = False
        """Whether anybody on the host has ever expected tokens."""
        self._crowded = False
        """Whether somebody who waited found no room when last asked."""
        self._cornered: Sequence | None = None
        """It ran out of pages though it was alone, because those that it shares lie badly. It goes on before all others, and
        alone it shares none."""

    # -- requests in and out

    def add(self, request: Request, now: float) -> None:
        """Takes a request in, or raises RequestError if it can never run or the queue is full."""
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is running already; ids must be unique", param="request_id",
                               code="duplicate_request_id")
        limit = self.limit_of(request)
        request.arrival = request.arrival or now
        seed = request.params.seed or 0
        parent, *children = (Sequence(request, i, (seed + i) & (2**64 - 1), limit) for i in range(request.params.n))
        parent.children = children
        if self.masker is not None and self.masker.wants(request):
            for sequence in (parent, *children):
                sequence.masked = True
        self._requests[request.id] = dict(enumerate([parent, *children]))
        self._wait(parent)

    def limit_of(self, request: Request) -> int:
        """The most tokens that each of the request's sequences may have. RequestError as `Admission.check`."""
        # Free rows are of no use to those who wait for pages.
        return self.admission.check(request, len(self.waiting), 0 if self._crowded else len(self._rows))

    def abort(self, ids: Iterable[str], now: float) -> None:
        """Ends requests ("id") or single sequences ("id/index"); unknown ones are ignored. Their rows and pages are free at
        once."""
        for name in ids:
            request_id, _, index = name.rpartition("/")
            if name in self._requests:
                doomed = list(reversed(self._requests[name].values()))
            else:
                doomed = [s for s in self._requests.get(request_id, {}).values() if str(s.index) == index]
            for sequence in doomed:
                self._finish(sequence, Update(sequence.request.id, sequence.index, [], finish_reason="abort"), now)

    @property
    def busy(self) -> bool:
        """Whether another turn of the loop has anything to do."""
        return bool(self._requests or self.flights or self._news or self.cache.pending)

    @property
    def live(self) -> list[Sequence]:
        """All sequences that are not done."""
        return [sequence for sequences in self._requests.values() for sequence in sequences.values()]

    # -- a step out

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now (perhaps because it depends on what is in flight)."""
        flight = _Flight(self._plans)
        self.cache.evictor.now = now
        budget = self._plan_running(flight, now)
        if budget is None and not (flight.sequences or self.flights):
            # The last one that ran had to give up its pages. Alone it has room, one way or another.
            budget = self.limits.max_num_batched_tokens
        if budget is not None:
            self._admit(flight, budget, now)
        # Only while drafts are being checked is there a sequence that may begin before `planned`.
        unsure = any(flown.drafts for flown in self.flights)
        slack = np.array([sequence.slack for sequence in flight.sequences], np.int32) if unsure else None
        proposals = self._proposals(flight) if flight.drafts else []
        rows, starts = self._hand_out(flight)
        # A plan without segments only moves pages; if nothing else flies, its result says what has come of that.
        if not flight.sequences and (self.flights or not self.cache.writing):
            return None
        self._plans += 1
        enter, self._enter = self._enter, []
        leave, self._leave = self._leave, []
        self.flights.append(flight)
        plan = StepPlan(flight.id, enter, leave, rows=np.array(rows, np.int32), starts=np.array(starts, np.int32),
                        counts=np.array(flight.counts, np.int32), wants=np.array(flight.wants, np.int32),
                        slack=slack if slack is not None and slack.any() else None, proposals=proposals)
        if self.drafting is not None:
            draft = np.array([sequence.drafted for sequence in flight.sequences], np.int32)
            plan.draft = draft if draft.any() else None
        if self.masker is not None:
            plan.masked = np.array([i for i, (sequence, want) in enumerate(zip(flight.sequences, flight.wants, strict=True))
                                    if sequence.masked and want & _SAMPLE], np.int32)
        self.cache.drain(plan)
        return plan

    def masked(self, plan: StepPlan) -> list[MaskedSegment]:
        """Of the plan that was made last, the segments that are masked."""
        flight = self.flights[-1]
        assert flight.id == plan.id, (flight.id, plan.id)
        drafts = {proposal.row: proposal.tokens for proposal in plan.proposals}
        return [MaskedSegment(flight.sequences[segment], drafts.get(int(plan.rows[segment]), []))
                for segment in plan.masked.tolist()]

    def propose(self, sequence: Sequence, at: int, tokens: list[int]) -> None:
        """Somebody on the host expects these tokens from position `at` on, at least len(sequence.tokens). They are checked like
        any drafts, so a wrong one costs time alone."""
        sequence.expected = (at, tokens) if tokens else None
        self._proposed = True

    def _plan_running(self, flight: _Flight, now: float) -> int | None:
        """Segments for the running sequences in order. Returns the token budget left, or None if one had to be preempted.

        Every sequence is owed one position; what the budget has beyond that goes to the first in order.
        """
        running, budget, at, preempted = list(self.running), self._budget(now), 0, False
        charges, hinted = self.policy.charges, self.drafting is not None or self._proposed
        while at < len(running):
            sequence = running[at]
            count = sequence.goal - sequence.planned
            if not count:
                at += 1
                continue
            drafts = 0
            if count > 1:
                count = self._chunk(sequence, max(1, min(count, budget - (len(running) - at - 1))))
            elif hinted and (sequence.drafted or sequence.expected is not None):
                drafts = self._drafts(sequence, budget - (len(running) - at))
                count += drafts
            upto = sequence.planned + count
            while upto > sequence.room and not self.cache.grow(sequence, upto):
                if drafts:
                    # Nobody loses pages for the sake of drafts.
                    upto, count, drafts = upto - drafts, count - drafts, 0
                    continue
                preempted = True
                if self._shed_waiting():
                    continue
                victim = running.pop()
                self._preempt(victim)
                if victim is sequence:
                    self._cornered = None if running else sequence
                    break
            else:
                if drafts:
                    flight.drafts[len(flight.sequences)] = drafts
                flight.sequences.append(sequence)
                flight.counts.append(count)
                if charges:
                    self.policy.charge(sequence, count)
                budget -= count
                at += 1
        return None if preempted else budget

    def _budget(self, now: float) -> int:
        """Tokens of this step: less than the most if running sequences would wait too long for their next one."""
        running, most = len(self.running), self.limits.max_num_batched_tokens
        if not self.limits.step_target:
            return max(running, most)
        reading = [s for s in self.running if s.goal - s.planned > 1]
        decoding = running - len(reading)
        # Who waits for room gains nothing from a longer step.
        reading += [] if self._crowded else list(islice(self.waiting, len(self._rows)))
        if not (decoding and reading):
            return max(running, most)
        waited = sum(now - (s.timings.first_scheduled or s.request.arrival) for s in reading)
        unread = sum(s.goal - s.planned for s in reading)
        return max(running, self.pace.tokens(decoding, len(reading), unread, waited))

    def _admit(self, flight: _Flight, budget: int, now: float) -> None:
        """Waiting sequences take rows in the policy's order; what has no room may be passed (`scheduler/admission.py`)."""
        blocked = list[Sequence]()
        for sequence in self.waiting if self._rows else ():
            if not self._rows or budget <= 0:
                break
            # Preempted with a token still to come: the worker must be told all tokens when it enters again.
            lost = any(sequence in flown.lost for flown in self.flights)
            if lost or self._cornered not in (None, sequence) or self.cache.must_wait(sequence):
                continue
            count = self._find_room(sequence, budget)
            if not count:
                blocked.append(sequence)
                if self.admission.hold(blocked):
                    break
                continue
            self.admission.passed(blocked)
            self.waiting.remove(sequence)
            self._enter_row(sequence, now)
            flight.sequences.append(sequence)
            flight.counts.append(count)
            if self.policy.charges:
                self.policy.charge(sequence, count)
            budget -= count
        self._crowded = bool(blocked)

    def _find_room(self, sequence: Sequence, budget: int) -> int:
        """Allocates pages for the first segment of a waiting sequence beyond its prefix hit, and returns its length; 0 if its
        whole known context does not fit now. A sequence that is alone always fits: everything unused is evicted for it."""
        forked = bool(sequence.pages)
        if self.running:
            count = self._reserve(sequence, budget, Reuse.TOKENS)
            if count or forked:
                return count
        else:
            for reuse in (Reuse.NOTHING,) if sequence is self._cornered else Reuse:
                count = self._reserve(sequence, budget, reuse)
                if count:
                    return count
                while self._shed_waiting():
                    pass
                self.cache.release(sequence)
        self.cache.release(sequence)
        sequence.planned = sequence.computed = 0
        return 0

    def _reserve(self, sequence: Sequence, budget: int, reuse: Reuse) -> int:
        """A row and the pages of the first segment; returns its length, 0 if there is no room."""
        sequence.planned = sequence.computed = self.cache.match(sequence, reuse)
        sequence.row = self._rows[-1]
        count = self._chunk(sequence, min(sequence.goal - sequence.planned, budget))
        room = not self.running or self.cache.has_room(sequence, sequence.goal)
        if room and self.cache.grow(sequence, sequence.planned + count):
            return count
        sequence.row = -1
        return 0

    def _enter_row(self, sequence: Sequence, now: float) -> None:
        """A sequence that has pages takes the row that was reserved for it."""
        self._cornered = None
        self._rows.pop()
        self.cache.enter(sequence)
        self.running.add(sequence)
        params = sequence.request.params
        # A mask sees to it that an answer is not too short, as it knows whether one can go on.
        banned = sorted(sequence.stops) if params.min_tokens and not sequence.masked else []
        self._enter.append(Enter(sequence.row, list(sequence.tokens), sequence.prompt_len, params, sequence.seed, banned))
        if not sequence.timings.first_scheduled:
            sequence.timings.first_scheduled = now
            # A prompt counts once: the other sequences of its request are forked from the first.
            if not sequence.request.part and not sequence.index:
                sequence.cached, sequence.cached_by_tier = sequence.planned, self.cache.count_hit(sequence)
                self.stats.prompt_tokens += sequence.prompt_len
                self.stats.cached_tokens += sequence.cached

    def _chunk(self, sequence: Sequence, count: int) -> int:
        """How many of the next `count` positions make a good segment."""
        return self.cache.border(sequence.planned, sequence.planned + count) - sequence.planned

    def _drafts(self, sequence: Sequence, room: int) -> int:
        """How many drafted tokens the next segment checks, behind the last known one; at most `room`. None may stand where the
        last token of all will, as that is not fed back."""
        if sequence.children:
            # They will share the prompt's last page, which the parent copies before it writes to it behind the prompt.
            return 0
        room = min(room, sequence.limit - 2 - sequence.planned)
        expected = self._expected(sequence)
        return max(0, min(room, len(expected) if expected else sequence.drafted))

    def _expected(self, sequence: Sequence) -> list[int]:
        """Tokens that the host expects behind the sequence's next segment, if it knows where that begins."""
        if sequence.expected is None or sequence.slack:
            return []
        at, tokens = sequence.expected
        return tokens[sequence.planned + 1 - at:] if at <= sequence.planned + 1 else []

    def _proposals(self, flight: _Flight) -> list[Proposal]:
        found = []
        for segment, drafts in flight.drafts.items():
            sequence = flight.sequences[segment]
            expected = self._expected(sequence)
            if expected:
                found.append(Proposal(sequence.row, sequence.planned + 1, expected[:drafts]))
        return found

    def _hand_out(self, flight: _Flight) -> tuple[list[int], list[int]]:
        """Moves the sequences of a plan on by its segments. Returns the segments' rows and starts."""
        sequences, starts, wants, drafts, drafting = flight.sequences, [], flight.wants, flight.drafts, self.drafting
        for i, (sequence, count) in enumerate(zip(sequences, flight.counts, strict=True)):
            start, want = sequence.planned, 0
            sequence.planned = end = start + count
            if end >= sequence.goal:
                want = _SAMPLE
                if end < sequence.limit - 1:
                    sequence.goal = end + 1
                sequence.promised += 1
                if drafts and i in drafts:
                    want = _SAMPLE | _EACH
                    sequence.promised += drafts[i]
                    sequence.slack += drafts[i]
                    sequence.goal = max(end, sequence.goal)
                if drafting is not None:
                    sequence.drafted = self._wanted(sequence, drafting)
            if sequence.scoring and start < sequence.prompt_len:
                want |= _SCORE
            starts.append(start)
            wants.append(want)
            # Forks wait for the next plan: this one is only about to write the pages that they share.
            if sequence.children and end >= sequence.prompt_len:
                self._fork(sequence)
        return [sequence.row for sequence in sequences], starts

    def _wanted(self, sequence: Sequence, drafting: DraftPolicy) -> int:
        """How many tokens to draft behind the segment just handed out. None where they could not be checked: a mask is made for
        tokens that the host knows, and a state that holds one position cannot go back to an earlier one."""
        if sequence.masked or self.cache.exact:
            return 0
        return max(0, min(drafting.count(sequence), sequence.limit - 2 - sequence.planned))

    def _fork(self, parent: Sequence) -> None:
        """The request's other sequences share the pages of its prompt, and compute only the prompt's last position again."""
        upto = parent.prompt_len - 1
        for child in parent.children:
            child.planned = child.computed = self.cache.fork(parent, child, upto)
            self._wait(child)
        parent.children = []

    def _wait(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def _preempt(self, victim: Sequence) -> None:
        for flight in self.flights:
            if victim in flight.sequences:
                flight.lost.add(victim)
        self.running.remove(victim)
        self._give_row(victim)
        self.cache.release(victim)
        victim.restart()
        victim.timings.preemptions += 1
        self.stats.preemptions += 1
        self._wait(victim)

    def _shed_waiting(self) -> bool:
        """Takes the pages of a forked sequence that still waits, the last in order; it will compute its prompt itself."""
        for sequence in reversed(list(self.waiting)):
            if sequence.pages:
                self.cache.release(sequence)
                sequence.planned = sequence.computed = 0
                return True
        return False

    def _give_row(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._rows.append(sequence.row)
            self._leave.append(sequence.row)
            sequence.row = -1

    # -- what came of a step

    def apply(self, result: StepResult, now: float) -> None:
        """Takes in the result of the oldest plan in flight; the news for its sequences wait in `take_updates`."""
        flight = self.flights.popleft()
        assert flight.id == result.id, (flight.id, result.id)
        logprobs = _lines_by_segment(result.logprobs, flight.sequences, "logprobs")
        scores = _lines_by_segment(result.scores, flight.sequences, "prompt_logprobs")
        commit, lost, drafts = self.cache.commit, flight.lost, flight.drafts
        segments = zip(flight.sequences, flight.counts, flight.wants, _tokens_by_segment(result), strict=True)
        for i, (sequence, count, want, own) in enumerate(segments):
            if sequence.done:
                continue
            if drafts and i in drafts:
                count = self._take_drafts(sequence, drafts[i], own, sequence in lost)
            if not lost or sequence not in lost:
                sequence.computed = computed = sequence.computed + count
                # What gave no usable logits must not be found again.
                if computed >= sequence.due and not (own and own[-1] == NOT_FINITE):
                    commit(sequence)
                if want & _SCORE:
                    sequence.scores += scores.get(i, ())
            if want & _SAMPLE:
                sequence.promised -= 1
                self._take_token(sequence, own, logprobs.get(i), now)
        decoded = flight.counts.count(1) + len(drafts)
        checked = sum(drafts.values())
        tokens_done = sum(flight.counts)
        self.cache.report(result.load_results, result.write_results, tokens_done, result.seconds)
        self.pace.learn(decoded, tokens_done - decoded - checked, result.seconds)
        self.stats.steps += 1
        self.stats.worker_seconds += result.seconds
        self.stats.kernel_seconds += result.kernel_seconds

    def _take_drafts(self, sequence: Sequence, drafts: int, own: list[int], gone: bool) -> int:
        """Takes in what came of checked drafts. `own`, the tokens that were kept, is cut at the end of the sequence; all of it
        but the last, which is `_take_token`'s, become known. Returns how many positions are computed. `gone`: it was preempted
        since, and its counts start from 0 again."""
        for j, token in enumerate(own):
            if token in sequence.stops or len(sequence.tokens) + j + 1 >= sequence.limit:
                del own[j + 1:]
                break
        sequence.promised -= drafts
        sequence.tokens += own[:-1]
        if not gone:
            sequence.slack -= drafts
            sequence.planned -= drafts + 1 - len(own)
        # The last of `own` is still promised.
        sequence.goal = min(len(sequence.tokens) + sequence.promised, sequence.limit - 1)
        if len(own) <= drafts:
            sequence.expected = None
        self.stats.drafted_tokens += drafts
        self.stats.accepted_tokens += len(own) - 1
        if self.drafting is not None:
            self.drafting.learn(sequence, drafts, len(own) - 1)
        return len(own)

    def _take_token(self, sequence: Sequence, own: list[int], logprobs: list[TokenLogprobs] | None, now: float) -> None:
        """The tokens that a segment adds; all but the last are known already."""
        request, tokens, token = sequence.request, sequence.tokens, own[-1]
        if token == NOT_FINITE:
            self._finish(sequence, Update(request.id, sequence.index, own[:-1], finish_reason="error", error=_NOT_FINITE_ERROR,
                                          logprobs=logprobs[:len(own) - 1] if logprobs else None), now)
            return
        tokens.append(token)
        self.stats.generation_tokens += len(own)
        update, known = Update(request.id, sequence.index, own, logprobs=logprobs), len(tokens)
        if logprobs is not None and len(own) > 1:
            update.logprobs = logprobs[:len(own)]
        if sequence.scoring and sequence.computed >= sequence.prompt_len:
            update.prompt_logprobs, sequence.scoring = sequence.scores, False
        if known - len(own) == sequence.prompt_len:
            sequence.timings.first_token = now
            update.cached_tokens, update.cached_by_tier = sequence.cached, sequence.cached_by_tier
        if token in sequence.stops:
            update.finish_reason = "stop"
            update.stop_reason = token if token in (request.params.stop_token_ids or ()) else None
            self._finish(sequence, update, now)
        elif known >= sequence.limit:
            update.finish_reason = "length"
            self._finish(sequence, update, now)
        else:
            self._news.append(update)

    def _finish(self, sequence: Sequence, update: Update, now: float) -> None:
        """The end of a sequence, for whatever reason: row and pages are free, its last update is on its way."""
        sequence.done = True
        siblings = self._requests[sequence.request.id]
        del siblings[sequence.index]
        if not siblings:
            del self._requests[sequence.request.id]
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._give_row(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            if sequence is self._cornered:
                self._cornered = None
        elif siblings and 0 in siblings and sequence in siblings[0].children:
            siblings[0].children.remove(sequence)
        self.cache.release(sequence, keep=update.finish_reason != "error")
        for child in sequence.children:
            self._wait(child)
        sequence.children = []
        sequence.timings.finished = now
        update.timings = sequence.timings
        self._news.append(update)

    def take_updates(self) -> list[Update]:
        """The news since the last call."""
        news, self._news = self._news, []
        return news

    def snapshot(self, now: float) -> EngineStats:
        """Current figures; the same object every time."""
        stats = self.stats
        stats.time = now
        stats.running, stats.waiting, stats.flying = len(self.running), len(self.waiting), len(self.flights)
        stats.pages_used, stats.kv_usage = self.cache.pools.slabs_live, self.cache.usage
        stats.tiers = self.cache.stats()
        return stats

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        live = self.live
        self.cache.check(live)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._rows) == list(range(self.limits.max_num_seqs)), "a row is lost or owned twice"
        assert len(self.running) + len(self.waiting) + sum(len(s.children) for s in live) == len(live), "a sequence is lost"
        for sequence in live:
            promised = sum((want & _SAMPLE) + flight.drafts.get(i, 0) for flight in self.flights
                           for i, (owner, want) in enumerate(zip(flight.sequences, flight.wants, strict=True))
                           if owner is sequence)
            assert sequence.promised == promised
            assert sequence.computed <= sequence.planned - sequence.slack <= sequence.planned <= sequence.goal
            assert sequence.goal == min(sequence.known + promised, sequence.limit - 1)
            assert sequence.known <= sequence.limit
            assert (sequence.row >= 0) == (sequence in self.running)


def _tokens_by_segment(result: StepResult) -> list[list[int]]:
    """The tokens that each segment keeps."""
    tokens, kept = result.tokens.tolist(), result.kept.tolist()
    if len(tokens) == len(kept) == kept.count(1):
        return [[token] for token in tokens]
    ends = accumulate(kept)
    return [tokens[end - count:end] for end, count in zip(ends, kept, strict=True)]


def _lines_by_segment(lines: Logprobs | None, sequences: list[Sequence], asked: str) -> dict[int, list[TokenLogprobs]]:
    """A step's log probabilities as lists for each segment, in order of position, with as many alternatives as its parameter
    `asked` says."""
    found: dict[int, list[TokenLogprobs]] = {}
    if lines is None:
        return found
    columns = zip(lines.segments.tolist(), lines.ids.tolist(), lines.values.tolist(), lines.ranks.tolist(), strict=True)
    for segment, ids, values, ranks in columns:
        width = 1 + (getattr(sequences[segment].request.params, asked) or 0)
        found.setdefault(segment, []).append(TokenLogprobs(ids[:width], values[:width], ranks[:width]))
    return found
