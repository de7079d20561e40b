"""The scheduler: `plan` makes the next step, and `apply` processes its result. Only these two advance a sequence.

There are no phases: each running sequence has positions left to compute and gets a segment of them. Decode is the case of one
position, prefill of more. `batch.py` and `admission.py` decide which sequences run, `queues.py` keeps each one's place."""

import heapq
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from penstock.cache.manager import Cache
from penstock.core.errors import RequestError
from penstock.core.masking import MaskedSegment, Masker
from penstock.core.plan import NOT_FINITE, Ints, StepPlan, StepResult, Want
from penstock.core.request import PHASES, EngineStats, Request, Sequence, Update
from penstock.core.steptime import StepTime
from penstock.scheduler import pooling, results
from penstock.scheduler.admission import Admission, Limits
from penstock.scheduler.batch import Batch
from penstock.scheduler.drafting import DraftPolicy, Drafts
from penstock.scheduler.pace import Pace
from penstock.scheduler.policy import Policy
from penstock.scheduler.queues import Queues
from penstock.scheduler.step import LIMITS, InFlight, binding, load_of

_SAMPLE, _SCORE, _EACH = int(Want.SAMPLE), int(Want.SCORE), int(Want.EACH)
_EXPIRED = 504
"""Status of a request whose deadline has passed."""


class Scheduler:
    """Owns every sequence from `add` until its last update."""

    def __init__(self, cache: Cache, limits: Limits, policy: Policy | None = None, masker: Masker | None = None,
                 drafting: DraftPolicy | None = None, times: StepTime | None = None) -> None:
        """`masker` says which requests are constrained and makes their token masks. `drafting` decides how many tokens the
        worker's drafter proposes; None if the worker has no drafter. `times` may know steps already."""
        self.cache = cache
        self.limits = limits
        self.policy = Policy() if policy is None else policy
        self.masker = masker
        self.drafts = Drafts(drafting)
        self.times = StepTime() if times is None else times
        self.pace = Pace(limits.step_target, limits.max_num_batched_tokens, self.times)
        self.stats = EngineStats(pages_total=cache.layout.slabs, limits=[0.0] * len(LIMITS))
        self.queues = Queues(cache, self.policy, limits.max_num_seqs, limits.max_adapters, self.stats)
        self.waiting, self.running, self.in_flight = self.queues.waiting, self.queues.running, self.queues.in_flight
        self.admission = Admission(limits, self.queues)
        self.batch = Batch(self.queues, limits, self.pace, self.drafts)
        self._news: list[Update] = []
        self.taker = results.Taker(self.stats, self.drafts, self.policy.begun, self._finish, self._news.append)
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._made = InFlight(-1)
        """The plan made last."""
        self._refused = False
        """Whether a request was refused since then."""
        self._counted = 0.0
        """The time up to which `busy_seconds` were counted."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap of (deadline, request)."""

    # -- requests in and out

    def add(self, request: Request, now: float) -> None:
        """Takes a request in, or raises RequestError if it can never run or the queue is full."""
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is running already; ids must be unique", param="request_id",
                               code="duplicate_request_id")
        limit = self.admission.check(request)
        request.arrival = request.arrival or now
        seed = request.params.seed or 0
        parent, *children = (Sequence(request, i, (seed + i) & (2**64 - 1), limit) for i in range(request.params.n))
        parent.children = children
        if self.masker is not None and self.masker.wants(request):
            for sequence in (parent, *children):
                sequence.masked = True
            # Until now its grammar was compiled.
            parent.phase = PHASES.index("grammar")
            parent.enter("queued", now)
        self._promise(request, [parent, *children], now)
        self._requests[request.id] = dict(enumerate([parent, *children]))
        self.queues.wait(parent)

    def _promise(self, request: Request, sequences: list[Sequence], now: float) -> None:
        """Has the policy take sequences in. RequestError if their promise cannot be kept."""
        self.policy.arrive(sequences[0])
        if not (request.part or request.follows):
            free = bool(self.queues.rows) and not self.waiting and not self.queues.crowded
            try:
                self.policy.admit(sequences[0], now, self.running, self.waiting, not free and self.admission.taken(), free)
            except RequestError:
                self.policy.end(sequences[0])
                self._refused = True
                raise
        for sequence in sequences[1:]:
            self.policy.arrive(sequence)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.id))

    def end(self, request: Request, reason: str, error: RequestError | None = None) -> None:
        """Ends a request that was held elsewhere and does not come here: queues its final updates."""
        message, status = (None, 500) if error is None else (error.message, error.status)
        self._news += [Update(request.id, index, [], finish_reason=reason, error=message, status=status)
                       for index in range(request.params.n)]

    def abort(self, ids: Iterable[str], now: float) -> None:
        """Ends requests ("id") or sequences ("id/index"), whose rows and pages are free at once. Unknown ones are ignored."""
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
        return bool(self._requests or self.in_flight or self._news or self.cache.pending)

    @property
    def live(self) -> list[Sequence]:
        """All sequences that are not done."""
        return [sequence for sequences in self._requests.values() for sequence in sequences.values()]

    # -- planning

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if nothing can be computed now, possibly because it depends on plans in flight."""
        if self.in_flight and self._made.held:
            return None
        step = InFlight(self._made.id + 1)
        self.cache.evictor.now = now
        self._expire(now)
        self.policy.begin()
        self.admission.make_way(now, self._made.decode)
        budget = self.batch.fill(step, now)
        if budget is None and not (step.sequences or self.in_flight):
            # The only running sequence was preempted. Alone, it always finds room.
            budget = self.limits.max_num_batched_tokens
        if budget is not None:
            self.batch.extend(step, self.admission.admit(step, budget, now))
        self.policy.planned(step, now, len(self.queues.entered), waiting := bool(self.waiting))
        # A sequence's true start is uncertain only while drafts are in flight.
        unsure = any(map(attrgetter("drafts"), self.in_flight))
        slack = np.array([sequence.slack for sequence in step.sequences], np.int32) if unsure else None
        self.drafts.end(step)
        proposals = self.drafts.proposals(step) if step.drafts else []
        step.proposed = {segment for segment, sequence in enumerate(step.sequences)
                         if any(sequence.row == proposal.row for proposal in proposals)} if proposals else set()
        rows = self._hand_out(step)
        # A plan without segments only moves pages; it is made only if no other plan is in flight to report the transfers.
        if not step.sequences and (self.in_flight or not self.cache.writing):
            return None
        self._made = step
        self._counted = self._counted if self.in_flight else now
        self.in_flight.append(step)
        step.load = load_of(step.starts, step.counts, step.scored)
        step.limit = binding(waiting=waiting, rows=bool(self.queues.rows), room=not self.queues.crowded, refused=self._refused)
        self._refused = False
        flat = np.array([rows, step.starts, step.counts, step.wants], np.int32)
        plan = StepPlan(step.id, rows=flat[0], starts=flat[1], counts=flat[2], wants=flat[3], proposals=proposals,
                        slack=slack if slack is not None and slack.any() else None, rests=step.rests)
        self.queues.drain(plan)
        if self.masker is not None:
            plan.masked = np.array([i for i, (sequence, want) in enumerate(zip(step.sequences, step.wants, strict=True))
                                    if sequence.masked and want & _SAMPLE], np.int32)
        self.cache.drain(plan)
        return plan

    def masked(self, plan: StepPlan, drafted: Ints | None = None) -> list[MaskedSegment]:
        """Returns the masked segments of the plan made last. `drafted`: the drafts that the worker has written."""
        step = self.in_flight[-1]
        assert step.id == plan.id, (step.id, plan.id)
        drafts = {proposal.row: proposal.tokens for proposal in plan.proposals}
        if plan.tells_drafts:
            # A plan that has failed has told none; its error follows.
            told = (np.zeros(int((plan.counts[plan.drafted] - 1).sum()), np.int32) if drafted is None else drafted).tolist()
            for segment in plan.drafted.tolist():
                count = int(plan.counts[segment]) - 1
                drafts[int(plan.rows[segment])], told = told[:count], told[count:]
        return [MaskedSegment(step.sequences[segment], drafts.get(int(plan.rows[segment]), []))
                for segment in plan.masked.tolist()]

    def _expire(self, now: float) -> None:
        """Ends requests whose deadline has passed, wherever they are."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            for sequence in reversed((self._requests.get(name) or {}).copy().values()):
                self._finish(sequence, Update(name, sequence.index, [], finish_reason="error", status=_EXPIRED,
                                              error="its deadline has passed"), now)

    def _hand_out(self, step: InFlight) -> list[int]:
        """Advances the plan's sequences by their segments. Returns the segments' rows."""
        sequences, starts, wants, drafts = step.sequences, step.starts, step.wants, step.drafts
        for i, (sequence, count) in enumerate(zip(sequences, step.counts, strict=True)):
            start, want = sequence.planned, 0
            sequence.planned = end = start + count
            if sequence.request.pool is not None:
                want = pooling.want(sequence.request.pool, start, end, sequence.prompt_len)
            elif end >= sequence.goal:
                want = _SAMPLE
                if end < sequence.limit - 1:
                    sequence.goal = end + 1
                sequence.promised += 1
                if drafts and i in drafts:
                    want = _SAMPLE | _EACH
                    sequence.promised += drafts[i]
                    sequence.slack += drafts[i]
                    sequence.goal = max(end, sequence.goal)
            if sequence.scoring and start < sequence.prompt_len:
                want |= _SCORE
                step.scored += min(end, sequence.prompt_len - 1) - start
            starts.append(start)
            wants.append(want)
            # Forks wait for the next plan, because this one still writes the pages that they share.
            if sequence.children and end >= sequence.prompt_len:
                self.queues.fork(sequence)
        return [sequence.row for sequence in sequences]

    # -- results

    def apply(self, result: StepResult, now: float) -> None:
        """Processes the result of the oldest plan in flight. `take_updates` returns the resulting updates."""
        step = self.in_flight.popleft()
        assert step.id == result.id, (step.id, result.id)
        logprobs = results.lines(result.logprobs, step.sequences, "logprobs")
        scores = results.lines(result.scores, step.sequences, "prompt_logprobs")
        vectors = pooling.lines(result)
        commit, lost, drafts = self.cache.commit, step.lost, step.drafts
        segments = zip(step.sequences, step.counts, step.wants, results.tokens(result), strict=True)
        for i, (sequence, count, want, own) in enumerate(segments):
            if sequence.done:
                continue
            if drafts and i in drafts:
                count = self.taker.drafts(sequence, drafts[i], own, sequence in lost)
                if i not in step.proposed:
                    sequence.timings.draft_seconds += result.draft_seconds
            if not lost or sequence not in lost:
                sequence.computed = computed = sequence.computed + count
                # Do not index positions whose logits were not finite.
                if computed >= sequence.due and not (own and own[-1] == NOT_FINITE):
                    commit(sequence)
                if want & _SCORE:
                    sequence.scores += scores.get(i, ())
                if sequence.request.pool is not None:
                    self.taker.vectors(sequence, vectors.get(i), now)
            if want & _SAMPLE:
                sequence.promised -= 1
                self.taker.token(sequence, own, logprobs.get(i), now)
                if sequence.request.predicted and self.cache.back and not (sequence.done or sequence.masked):
                    self.drafts.follow(sequence)
        if result.chances is not None:
            self.drafts.foresee(step, result.chances.tolist())
        decoded = step.counts.count(1) + len(drafts)
        checked = sum(drafts.values())
        self.stats.ahead_hits, self.stats.ahead_tries = result.ahead
        if result.picks is not None:
            self.stats.expert_picks, self.stats.expert_hits = result.picks.tolist(), result.expert_hits
        self.cache.report(result.load_results, result.write_results)
        policy, tokens = self.drafts.policy, step.load.tokens
        if policy is not None and tokens and decoded + checked == tokens and not (step.rests and drafts):
            policy.stepped(len(step.counts), tokens, int(result.kept.sum()), result.seconds, step.drafting)
        self.pace.learn(step.load, decoded + checked, result.seconds)
        self.stats.steps += 1
        self.stats.worker_seconds += result.seconds
        self.stats.busy_seconds += max(0.0, now - self._counted)
        self._counted = now
        busy = 2 * self.times.slope(step.load.tokens) * step.load.tokens > result.seconds
        self.stats.limits[LIMITS.index(step.limit or ("compute" if busy else "memory"))] += result.seconds
        self.stats.kernel_seconds += result.kernel_seconds

    def _finish(self, sequence: Sequence, update: Update, now: float) -> None:
        """Ends a sequence: frees its row and pages, and queues its last update."""
        sequence.done = True
        sequence.timings.finished = now
        self.policy.end(sequence)
        siblings = self._requests[sequence.request.id]
        del siblings[sequence.index]
        if not siblings:
            del self._requests[sequence.request.id]
        if sequence.row >= 0 or sequence in self.waiting:
            self.queues.leave(sequence)
        elif siblings and 0 in siblings and sequence in siblings[0].children:
            siblings[0].children.remove(sequence)
        self.cache.release(sequence, keep=update.finish_reason != "error" or update.status == _EXPIRED)
        for child in sequence.children:
            self.queues.wait(child)
        sequence.children = []
        sequence.enter("queued", now)
        update.timings = sequence.timings
        self._news.append(update)

    def take_updates(self) -> list[Update]:
        news = self._news.copy()
        self._news.clear()
        return news

    def snapshot(self, now: float) -> EngineStats:
        """Returns current statistics, always in the same object."""
        stats = self.stats
        stats.time = now
        stats.running, stats.waiting, stats.in_flight = len(self.running), len(self.waiting), len(self.in_flight)
        stats.pages_used, stats.kv_usage = self.cache.pools.slabs_live, self.cache.usage
        stats.tiers = self.cache.stats()
        stats.step_time, stats.step_time_error = self.times.usual.tolist(), self.times.error
        return stats

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        live = self.live
        self.cache.check(live)
        self.queues.check(live, self.limits.max_num_seqs)
        for sequence in live:
            promised = sum((want & _SAMPLE) + step.drafts.get(i, 0) for step in self.in_flight
                           for i, (owner, want) in enumerate(zip(step.sequences, step.wants, strict=True)) if owner is sequence)
            assert sequence.promised == promised
            assert sequence.computed <= sequence.planned - sequence.slack <= sequence.planned <= sequence.goal
            assert sequence.goal == min(sequence.known + promised, sequence.limit - 1)
            assert sequence.known <= sequence.limit
