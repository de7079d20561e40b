"""The segments that running sequences get in a step: one position each, and the budget of prompts by the pace and the policy.

If pages run out, the last sequence in the policy's order is preempted; it restarts later from what the cache still holds. The
first in order can always make progress, so there is no livelock."""

from itertools import islice

from penstock.core.request import Sequence
from penstock.core.steptime import Load
from penstock.scheduler.admission import Limits
from penstock.scheduler.drafting import Drafts
from penstock.scheduler.pace import Pace
from penstock.scheduler.policy import victim
from penstock.scheduler.queues import Queues
from penstock.scheduler.shares import Turns
from penstock.scheduler.step import InFlight


class Batch:
    """Fills steps with running sequences."""

    def __init__(self, queues: Queues, limits: Limits, pace: Pace, drafts: Drafts) -> None:
        self._queues = queues
        self._limits = limits
        self._pace = pace
        self._drafts = drafts
        self._turns = Turns(queues, pace)

    def fill(self, step: InFlight, now: float) -> int | None:
        """Plans segments for the running sequences in order. Returns the remaining token budget, or None if one was preempted.

        Every sequence gets a position; the budget's rest goes to the first in order, but for what the policy leaves others."""
        queues, drafting = self._queues, self._drafts
        cache, policy = queues.cache, queues.policy
        running, at, preempted = list(queues.running), 0, False
        resting, held = self._resting(running, now)
        # Segments that other stages compute decode beside this step; rows that take turns do not.
        active = [s for s in running if s not in resting] if resting and self._limits.stages == 1 else running
        budget = self._budget(step, active, now)
        step.held = step.held or held
        reads = step.decode.segments < len(running)
        apart = {s for s in running if s.goal - s.planned > 1 and step.later(s)} if reads else set()
        if apart or resting:
            # The last are the first to give their pages up.
            running.sort(key=lambda s: 2 if s in resting else s in apart)
        # Steps in flight may have sequences that run no more: those do not make room.
        own = len(set(running) - apart - resting) if apart or resting else len(running)
        coming = 0 if queues.crowded else min(len(queues.waiting) + queues.coming, len(queues.rows))
        head = next(iter(queues.waiting), None) if coming else None
        hinted = drafting.begin(-(-(len(running) + coming) // self._limits.stages))
        spare = self.spare() if hinted else 0
        answering: list[Sequence] = []
        sequences, counts = step.sequences, step.counts
        while at < len(running):
            sequence = running[at]
            planned = sequence.planned
            count = sequence.goal - planned
            if count == 1 and not hinted and sequence.prompt_len <= planned < sequence.room and at < own:
                # The usual case, which must cost little: it is met for every row of every step.
                sequences.append(sequence)
                counts.append(1)
                answering.append(sequence)
                budget -= 1
                at += 1
                continue
            later = sequence in apart
            if not count or sequence in resting or (later and not step.part):
                at += 1
                continue
            drafts = 0
            if later:
                count = cache.chunk(sequence, min(count, step.part))
            elif count > 1:
                most = policy.share(sequence, budget - (own - at - 1), step.unread, head)
                if self._pace.long(sequence):
                    most = max(most - max(step.brief, 0), most // 2)
                else:
                    step.brief -= count
                count = cache.chunk(sequence, max(1, min(count, most)))
                if count < sequence.goal - sequence.planned:
                    step.cut.append(len(step.sequences))
            elif hinted:
                drafts = drafting.count(sequence, budget - (own - at), spare, cache.back)
                spare -= drafts
                count += drafts
            upto = sequence.planned + count
            while upto > sequence.room and not cache.grow(sequence, upto):
                if drafts:
                    # Drop the drafts before preempting a sequence for them.
                    upto, count, drafts = upto - drafts, count - drafts, 0
                    continue
                preempted = True
                if queues.shed():
                    continue
                loser = victim(policy, running[at:]) or sequence
                running.remove(loser)
                queues.preempt(loser, now)
                if loser is sequence:
                    queues.cornered = None if running else sequence
                    break
            else:
                if drafts:
                    step.drafts[len(step.sequences)] = drafts
                step.add(sequence, count)
                policy.charge(sequence, count)
                step.part -= count * later
                budget -= count * (not later)
                at += 1
        policy.charge_each(answering)
        return None if preempted else budget

    def extend(self, step: InFlight, budget: int) -> None:
        """Gives what is left of the budget to segments that were cut for others who did not need it."""
        cache, policy = self._queues.cache, self._queues.policy
        for i in step.cut:
            sequence, count = step.sequences[i], step.counts[i]
            more = cache.chunk(sequence, min(sequence.goal - sequence.planned, count + budget)) - count
            if more > 0 and cache.grow(sequence, sequence.planned + count + more):
                step.counts[i] += more
                policy.charge(sequence, more)
                budget -= more

    def spare(self) -> int:
        """Returns how many expected tokens a step can check: devices prepare max_num_seqs logits rows, in CUDA graphs too."""
        return self._limits.max_num_seqs - len(self._queues.running)

    def _budget(self, step: InFlight, running: list[Sequence], now: float) -> int:
        """Returns the token budget of a step, reduced if decoding sequences would otherwise wait too long."""
        queues, limits = self._queues, self._limits
        reading = [s for s in running if s.goal - s.planned > 1]
        decoding = len(running) - len(reading)
        read = sum([s.planned for s in running]) - (sum([s.planned for s in reading]) if reading else 0)
        step.decode = Load(decoding, decoding, read)
        waiting = bool(queues.waiting)
        if waiting and not queues.crowded:
            # A longer step does not help sequences that wait for pages.
            rows = len(queues.rows)
            reading += islice((s for s in queues.waiting if not s.request.follows), rows)
            reading += islice((s for s in queues.waiting if s.request.follows), rows)
        if reading or waiting:
            step.unread = sum([s.goal - s.planned for s in reading])
            step.tightest = queues.policy.tightest(queues.running.groups)
        if not (reading and limits.step_target):
            return max(len(running), limits.max_num_batched_tokens)
        owners = {s.request.owner for s in running if s.goal - s.planned <= 1}
        tokens, step.part, step.later = self._pace.budget(step.decode, reading, now, step.tightest, owners)
        step.held = self._pace.held and limits.stages == 1
        step.brief = sum([s.goal - s.planned for s in reading if not self._pace.long(s)])
        return max(decoding, tokens)

    def _resting(self, running: list[Sequence], now: float) -> tuple[set[Sequence], bool]:
        """Sequences that sit this step out, and whether none is planned behind it: rows that take turns, or of several stages
        all but an equal part of those that decode, and those still computed by steps before it, so every stage has a step;
        and those whose place is uncertain where it must be exact."""
        stages, queues = self._limits.stages, self._queues
        unsure = {sequence for sequence in running if sequence.slack} if self._limits.exact else set[Sequence]()
        if stages == 1:
            resting, held = self._turns.resting(running, now) if self._limits.step_target else (set[Sequence](), False)
            return resting | unsure, held
        recent = unsure.union(*(step.sampling() for step in islice(reversed(queues.in_flight), stages - 1)))
        decoding = [sequence for sequence in queues.running if sequence.goal - sequence.planned == 1]
        ready = [sequence for sequence in decoding if sequence not in recent]
        return recent.union(ready[-(-len(decoding) // stages):]), False
