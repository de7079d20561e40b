"""The scheduler: `plan` makes the next step, and `apply` processes its result. Only these two advance a sequence.

There are no phases: each running sequence has positions left to compute and gets a segment of them. Decode is the case of one
position, prefill of more; the code does not distinguish them. If pages run out, the last sequence in the policy's order is
preempted; it restarts later from what the cache still holds. The first in order can always make progress, so there is no
livelock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import islice

import numpy as np

from penstock.cache.manager import Cache, Reuse
from penstock.core.errors import RequestError
from penstock.core.masking import MaskedSegment, Masker
from penstock.core.plan import NOT_FINITE, Enter, StepPlan, StepResult, Want
from penstock.core.request import PHASES, EngineStats, Request, Update
from penstock.core.sequence import Sequence
from penstock.core.steptime import Load, StepTime
from penstock.scheduler import pooling, results
from penstock.scheduler.adapters import Slots
from penstock.scheduler.admission import Admission, Limits
from penstock.scheduler.drafting import DraftPolicy, Drafts
from penstock.scheduler.forecast import Forecast
from penstock.scheduler.pace import Pace
from penstock.scheduler.policy import Order, Policy, Priority, victim
from penstock.scheduler.promises import Promises, whole
from penstock.scheduler.results import Taker
from penstock.scheduler.step import LIMITS, InFlight, binding, load_of

_SAMPLE, _SCORE, _EACH = int(Want.SAMPLE), int(Want.SCORE), int(Want.EACH)
_CACHE = PHASES.index("cache")
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
        self.policy = Priority() if policy is None else policy
        self.promises = self.policy if isinstance(self.policy, Promises) else None
        self.masker = masker
        self.drafts = Drafts(drafting)
        self.admission = Admission(limits, cache.layout)
        self.times = StepTime() if times is None else times
        self.pace = Pace(limits.step_target, limits.max_num_batched_tokens, self.times)
        self.forecast = Forecast(self.promises, self.times) if self.promises is not None else None
        self.waiting = Order(self.policy)
        self.running = Order(self.policy)
        self.in_flight: deque[InFlight] = deque()
        self.stats = EngineStats(pages_total=cache.layout.slabs, limits=[0.0] * len(LIMITS))
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.adapters = Slots(limits.max_adapters)
        self._leave: list[int] = []
        self._fill: list[tuple[int, str]] = []
        self._enter: list[Enter] = []
        self._news: list[Update] = []
        self.taker = Taker(self.stats, self.drafts, self._finish, self._news.append)
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._plans = 0
        self._crowded = False
        """Whether a waiting sequence found no room in the last admission."""
        self._decode = Load(0, 0)
        self._tightest: float | None = None
        """Of the plan being made: what decodes, and the tightest promise of the running sequences between tokens."""
        self._cut: list[tuple[int, Sequence]] = []
        self._refused = False
        """Whether a request was refused since the last plan."""
        self._unread = 0
        """Prompt tokens of those who read or could start to."""
        self._deadlines: list[tuple[float, str]] = []
        """A heap of (deadline, request)."""
        self._cornered: Sequence | None = None
        """A sequence that ran out of pages although it ran alone, because its shared pages occupy too many slabs. It runs
        before all others, and without sharing while it is alone."""

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
            # Until now its grammar was compiled.
            parent.phase = PHASES.index("grammar")
            parent.enter("queued", now)
        self._promise(request, [parent, *children], now)
        self._requests[request.id] = dict(enumerate([parent, *children]))
        self._wait(parent)

    def _promise(self, request: Request, sequences: list[Sequence], now: float) -> None:
        """Has the policy take sequences in. RequestError if their promise cannot be kept."""
        self.policy.arrive(sequences[0])
        if self.forecast is not None and not (request.part or request.follows):
            free = bool(self._rows) and not self.waiting and not self._crowded
            mine = sequences[0].promise
            readers = () if free else [s for s in self.running if s.goal > s.planned + 1 and s.promise <= mine]
            reading = sum(s.goal - s.planned for s in readers)
            try:
                self.forecast.check(request, sequences[0], now, reading, free)
            except RequestError:
                self.policy.end(sequences[0])
                self._refused = True
                raise
        for sequence in sequences[1:]:
            self.policy.arrive(sequence)
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.id))

    def limit_of(self, request: Request) -> int:
        """Returns the maximum tokens of each of the request's sequences. RequestError as in `Admission.check`."""
        # Free rows do not help sequences that wait for pages.
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
        return bool(self._requests or self.in_flight or self._news or self.cache.pending)

    @property
    def live(self) -> list[Sequence]:
        """All sequences that are not done."""
        return [sequence for sequences in self._requests.values() for sequence in sequences.values()]

    # -- planning

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if nothing can be computed now, possibly because it depends on plans in flight."""
        step = InFlight(self._plans)
        self.cache.evictor.now = now
        self._expire(now)
        self.policy.begin()
        if self.promises is not None:
            self._make_way(self.promises, now)
        budget = self._plan_running(step, now)
        if budget is None and not (step.sequences or self.in_flight):
            # The only running sequence was preempted. Alone, it always finds room.
            budget = self.limits.max_num_batched_tokens
        if budget is not None:
            self._extend(step, self._admit(step, budget, now))
        if self.forecast is not None:
            self.forecast.planned(now, step, len(self._enter), bool(self.waiting))
        # A sequence's true start is uncertain only while drafts are in flight.
        unsure = any(step.drafts for step in self.in_flight)
        slack = np.array([sequence.slack for sequence in step.sequences], np.int32) if unsure else None
        proposals = self.drafts.proposals(step) if step.drafts else []
        rows = self._hand_out(step)
        # A plan without segments only moves pages; it is made only if no other plan is in flight to report the transfers.
        if not step.sequences and (self.in_flight or not self.cache.writing):
            return None
        self._plans += 1
        enter, self._enter = self._enter, []
        leave, self._leave = self._leave, []
        fill, self._fill = self._fill, []
        self.in_flight.append(step)
        starts, counts = np.array(step.starts, np.int32), np.array(step.counts, np.int32)
        step.load = load_of(starts, counts)
        step.limit = binding(step.load, self.times, waiting=bool(self.waiting), rows=bool(self._rows), room=not self._crowded,
                             refused=self._refused)
        self._refused = False
        plan = StepPlan(step.id, enter, leave, fill, rows=np.array(rows, np.int32), starts=starts, counts=counts,
                        wants=np.array(step.wants, np.int32), proposals=proposals,
                        slack=slack if slack is not None and slack.any() else None)
        if self.masker is not None:
            plan.masked = np.array([i for i, (sequence, want) in enumerate(zip(step.sequences, step.wants, strict=True))
                                    if sequence.masked and want & _SAMPLE], np.int32)
        self.cache.drain(plan)
        return plan

    def masked(self, plan: StepPlan) -> list[MaskedSegment]:
        """Returns the masked segments of the plan made last."""
        step = self.in_flight[-1]
        assert step.id == plan.id, (step.id, plan.id)
        drafts = {proposal.row: proposal.tokens for proposal in plan.proposals}
        return [MaskedSegment(step.sequences[segment], drafts.get(int(plan.rows[segment]), []))
                for segment in plan.masked.tolist()]

    def propose(self, sequence: Sequence, at: int, tokens: list[int]) -> None:
        """As `Drafts.expect`."""
        self.drafts.expect(sequence, at, tokens)

    def _expire(self, now: float) -> None:
        """Ends requests whose deadline has passed, wherever they are."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            for sequence in reversed((self._requests.get(name) or {}).copy().values()):
                self._finish(sequence, Update(name, sequence.index, [], finish_reason="error", status=_EXPIRED,
                                              error="its deadline has passed"), now)

    def _make_way(self, policy: Promises, now: float) -> None:
        """Renews broken promises of those who wait, and preempts a sequence of a lower class for one that must start now."""
        for first in self.waiting.heads():
            if policy.late(first, now):
                self.waiting.changed(first)
        head = next(iter(self.waiting), None)
        if head is None or (self._rows and not self._crowded) or not policy.urgent(head, now, self.times.seconds(self._decode)):
            return
        lower = victim(policy, list(self.running), head)
        if lower is not None:
            self._preempt(lower, now)

    def spare(self) -> int:
        """Returns how many expected tokens a step can check: devices prepare max_num_seqs logits rows, in CUDA graphs too."""
        return self.limits.max_num_seqs - len(self.running)

    def _plan_running(self, step: InFlight, now: float) -> int | None:
        """Plans segments for the running sequences in order. Returns the remaining token budget, or None if one was preempted.

        Every sequence gets at least one position; the rest of the budget goes to the first in order, but for what `share`
        leaves to others.
        """
        running, budget, at, preempted = list(self.running), self._budget(now), 0, False
        head = next(iter(self.waiting), None) if self._rows and not self._crowded else None
        share = whole if self.promises is None else self.promises.share
        cut: list[tuple[int, Sequence]] = []
        charges, hinted, spare = self.policy.charges, self.drafts.active, self.spare()
        resting = self._resting()
        while at < len(running):
            sequence = running[at]
            count = sequence.goal - sequence.planned
            if not count or sequence in resting:
                at += 1
                continue
            drafts = 0
            if count > 1:
                most = share(sequence, budget - (len(running) - at - 1), self._unread, head)
                count = self._chunk(sequence, max(1, min(count, most)))
                if count < sequence.goal - sequence.planned:
                    cut.append((len(step.sequences), sequence))
            elif hinted:
                drafts = self.drafts.count(sequence, budget - (len(running) - at), spare, self.cache.exact)
                spare -= drafts
                count += drafts
            upto = sequence.planned + count
            while upto > sequence.room and not self.cache.grow(sequence, upto):
                if drafts:
                    # Drop the drafts before preempting a sequence for them.
                    upto, count, drafts = upto - drafts, count - drafts, 0
                    continue
                preempted = True
                if self._shed_waiting():
                    continue
                loser = victim(self.policy, running[at:]) or sequence
                running.remove(loser)
                self._preempt(loser, now)
                if loser is sequence:
                    self._cornered = None if running else sequence
                    break
            else:
                if drafts:
                    step.drafts[len(step.sequences)] = drafts
                step.sequences.append(sequence)
                step.counts.append(count)
                if charges:
                    self.policy.charge(sequence, count)
                budget -= count
                at += 1
        self._cut = cut
        return None if preempted else budget

    def _resting(self) -> set[Sequence]:
        """The sequences that sit this step out. With several pipeline stages, each step takes an equal part of those that
        decode, and none that the steps before it still compute, so that every stage has a step to compute."""
        stages = self.limits.stages
        if stages == 1:
            return set()
        recent = {sequence for step in islice(reversed(self.in_flight), stages - 1)
                  for sequence, want in zip(step.sequences, step.wants, strict=True) if want & _SAMPLE}
        decoding = [sequence for sequence in self.running if sequence.goal - sequence.planned == 1]
        ready = [sequence for sequence in decoding if sequence not in recent]
        return recent.union(ready[-(-len(decoding) // stages):])

    def _extend(self, step: InFlight, budget: int) -> None:
        """Gives what is left of the budget to segments that were cut for others who did not need it."""
        for i, sequence in self._cut:
            if budget <= 0:
                break
            count = self._chunk(sequence, min(sequence.goal - sequence.planned, step.counts[i] + budget))
            if count > step.counts[i] and self.cache.grow(sequence, sequence.planned + count):
                budget -= count - step.counts[i]
                step.counts[i] = count

    def _budget(self, now: float) -> int:
        """Returns the token budget of this step, reduced if decoding sequences would otherwise wait too long."""
        running, most = len(self.running), self.limits.max_num_batched_tokens
        reading = [s for s in self.running if s.goal - s.planned > 1]
        decoding = running - len(reading)
        read = sum(s.planned for s in self.running) - sum(s.planned for s in reading)
        # A longer step does not help sequences that wait for pages.
        reading += [] if self._crowded else list(islice(self.waiting, len(self._rows)))
        self._unread = sum(s.goal - s.planned for s in reading)
        self._decode = Load(decoding, decoding, read)
        if self.promises is not None:
            self._tightest = self.promises.tightest(self.running.groups)
        if not (decoding and reading and self.limits.step_target):
            return max(running, most)
        return max(running, self.pace.budget(self._decode, reading, now, self._tightest))

    def _admit(self, step: InFlight, budget: int, now: float) -> int:
        """Admits waiting sequences in the policy's order; others may overtake one without room (`scheduler/admission.py`).
        Returns what is left of the budget."""
        blocked, load, full = list[Sequence](), self._decode, False
        for sequence in self.waiting if self._rows else ():
            if not self._rows or budget <= 0:
                break
            # Preempted with a token still in flight: it re-enters only when all of its tokens are known.
            lost = any(sequence in step.lost for step in self.in_flight)
            if lost or self._cornered not in (None, sequence):
                continue
            waits = self.cache.must_wait(sequence)
            if waits != (sequence.phase == _CACHE) and not sequence.timings.preemptions:
                sequence.enter("cache" if waits else "queued", now)
            if waits:
                continue
            load = Load(load.segments + 1, load.tokens + 1, load.read + sequence.prompt_len)
            full = self.promises is not None and not self.promises.bearable(load, self._tightest)
            if full:
                break
            count = self._find_room(sequence, budget) if self.adapters.has_room(sequence.request.adapter) else 0
            if not count:
                blocked.append(sequence)
                if self.admission.hold(blocked):
                    break
                continue
            self.admission.passed(blocked)
            self.waiting.remove(sequence)
            self.policy.waits(sequence, -1)
            self._enter_row(sequence, now)
            step.sequences.append(sequence)
            step.counts.append(count)
            if self.policy.charges:
                self.policy.charge(sequence, count)
            budget -= count
        self._crowded = bool(blocked) or full
        return budget

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
        """Reserves a row and the pages of the first segment. Returns the segment's length, 0 if there is no room."""
        sequence.planned = sequence.computed = self.cache.match(sequence, reuse)
        sequence.row = self._rows[-1]
        count = self._chunk(sequence, min(sequence.goal - sequence.planned, budget))
        room = not self.running or self.cache.has_room(sequence, sequence.goal)
        if room and self.cache.grow(sequence, sequence.planned + count):
            return count
        sequence.row = -1
        return 0

    def _enter_row(self, sequence: Sequence, now: float) -> None:
        """Gives a sequence with pages the row that was reserved for it."""
        self._cornered = None
        self._rows.pop()
        self.cache.enter(sequence)
        self.running.add(sequence)
        params = sequence.request.params
        # For constrained sequences the mask enforces min_tokens, because it knows whether the answer can continue.
        banned = sorted(sequence.stops) if params.min_tokens and not sequence.masked else []
        labels = sequence.request.pool.labels if sequence.request.pool is not None else []
        slot, empty = self.adapters.take(sequence.request.adapter)
        if empty:
            self._fill.append((slot, sequence.request.adapter))
        self._enter.append(Enter(sequence.row, list(sequence.tokens), sequence.prompt_len, params, sequence.seed, banned,
                                 labels, slot))
        sequence.enter("decode" if sequence.timings.first_token else "prefill", now)
        if not sequence.timings.first_scheduled:
            sequence.timings.first_scheduled = now
            # Count a prompt once: the request's other sequences are forked from the first.
            if not sequence.request.part and not sequence.index:
                sequence.cached, sequence.cached_by_tier = sequence.planned, self.cache.count_hit(sequence)
                self.stats.prompt_tokens += sequence.prompt_len
                self.stats.cached_tokens += sequence.cached

    def _chunk(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` positions to put in a segment, so that it ends at a suitable page border."""
        return self.cache.border(sequence.planned, sequence.planned + count) - sequence.planned

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
            starts.append(start)
            wants.append(want)
            # Forks wait for the next plan, because this one still writes the pages that they share.
            if sequence.children and end >= sequence.prompt_len:
                self._fork(sequence)
        return [sequence.row for sequence in sequences]

    def _fork(self, parent: Sequence) -> None:
        """Forks the request's other sequences: they share the prompt's pages and recompute only its last position."""
        upto = parent.prompt_len - 1
        for child in parent.children:
            child.planned = child.computed = self.cache.fork(parent, child, upto)
            self._wait(child)
        parent.children = []

    def _wait(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)
        self.policy.waits(sequence, 1)

    def _preempt(self, loser: Sequence, now: float) -> None:
        for step in self.in_flight:
            if loser in step.sequences:
                step.lost.add(loser)
        self.running.remove(loser)
        self._give_row(loser)
        self.cache.release(loser)
        loser.restart()
        loser.timings.preemptions += 1
        loser.enter("preempted", now)
        self.stats.preemptions += 1
        self._wait(loser)

    def _shed_waiting(self) -> bool:
        """Takes the pages of the last forked sequence that still waits; it will recompute its prompt. False if there is
        none."""
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
            self.adapters.give(sequence.request.adapter)
            sequence.row = -1

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
        decoded = step.counts.count(1) + len(drafts)
        checked = sum(drafts.values())
        tokens_done = sum(step.counts)
        if result.picks is not None:
            self.stats.expert_picks, self.stats.expert_hits = result.picks.tolist(), result.expert_hits
        self.cache.report(result.load_results, result.write_results, tokens_done, result.seconds)
        if self.drafts.policy is not None and decoded + checked == tokens_done:
            self.drafts.policy.stepped(len(step.counts), tokens_done, int(result.kept.sum()), result.seconds)
        self.pace.learn(step.load, decoded + checked, result.seconds)
        self.stats.steps += 1
        self.stats.worker_seconds += result.seconds
        self.stats.limits[LIMITS.index(step.limit)] += result.seconds
        self.stats.kernel_seconds += result.kernel_seconds

    def _finish(self, sequence: Sequence, update: Update, now: float) -> None:
        """Ends a sequence: frees its row and pages, and queues its last update."""
        sequence.done = True
        self.policy.end(sequence)
        siblings = self._requests[sequence.request.id]
        del siblings[sequence.index]
        if not siblings:
            del self._requests[sequence.request.id]
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._give_row(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.policy.waits(sequence, -1)
            if sequence is self._cornered:
                self._cornered = None
        elif siblings and 0 in siblings and sequence in siblings[0].children:
            siblings[0].children.remove(sequence)
        self.cache.release(sequence, keep=update.finish_reason != "error" or update.status == _EXPIRED)
        for child in sequence.children:
            self._wait(child)
        sequence.children = []
        sequence.enter("queued", now)
        sequence.timings.finished = now
        update.timings = sequence.timings
        self._news.append(update)

    def take_updates(self) -> list[Update]:
        """Returns the updates since the last call."""
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
        stats.step_time, stats.step_time_error = self.times.weights, self.times.error
        return stats

    def check(self) -> None:
        """Asserts every invariant; for tests."""
        live = self.live
        self.cache.check(live)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._rows) == list(range(self.limits.max_num_seqs)), "a row is lost or owned twice"
        assert len(self.running) + len(self.waiting) + sum(len(s.children) for s in live) == len(live), "a sequence is lost"
        for sequence in live:
            promised = sum((want & _SAMPLE) + step.drafts.get(i, 0) for step in self.in_flight
                           for i, (owner, want) in enumerate(zip(step.sequences, step.wants, strict=True))
                           if owner is sequence)
            assert sequence.promised == promised
            assert sequence.computed <= sequence.planned - sequence.slack <= sequence.planned <= sequence.goal
            assert sequence.goal == min(sequence.known + promised, sequence.limit - 1)
            assert sequence.known <= sequence.limit
            assert (sequence.row >= 0) == (sequence in self.running)
